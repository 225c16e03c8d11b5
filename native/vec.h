// Sixteen-lane vectors, the same interface on every instruction set.
//
// A kernel is written once over F (16 floats), I (16 int32) and B (64 bytes) and compiled once per
// instruction set: isa/<name>.cpp defines FF_NS, one FF_ISA_* macro and, for instructions beyond it, FF_BF16
// (AVX-512 BF16 and VBMI) or FF_AVXVNNI (AVX2), and includes the kernel headers. Every function here
// gives the same bits on every instruction set (explicit fma, fixed reduction order), except dot_bf16 and
// store_bf16_sum, whose hardware forms have their own rounding.
//
// Nothing in these headers may instantiate code from the C++ standard library: an inline function compiled
// with AVX-512 flags could be the copy that the linker keeps for everyone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(FF_ISA_AVX512) || defined(FF_ISA_AVX2)
#include <immintrin.h>
#endif

#ifndef FF_NS
#error "define FF_NS and FF_ISA_* before including vec.h"
#endif

// The scalar build exists to be right: left to the compiler, it is small and compiles in seconds.
#if defined(FF_ISA_AVX512) || defined(FF_ISA_AVX2)
#define FF_INLINE inline __attribute__((always_inline))
#define FF_PRAGMA(x) _Pragma(#x)
#define FF_UNROLL(n) FF_PRAGMA(GCC unroll n)
#else
#define FF_INLINE inline
#define FF_UNROLL(n)
#endif

namespace ff::FF_NS {

constexpr int kLanes = 16;

static FF_INLINE float bf16_to_f32(uint16_t h) {
  uint32_t u = uint32_t(h) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even; NaN stays NaN.
static FF_INLINE uint16_t f32_to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

static FF_INLINE float f16_to_f32(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 0x3ff, u;
  if (exp == 31) {
    u = sign | 0x7f800000u | (man << 13);
  } else if (exp != 0) {
    u = sign | ((exp + 112) << 23) | (man << 13);
  } else {
    float f = float(man) * 5.9604644775390625e-08f;  // 2^-24
    memcpy(&u, &f, 4);
    u |= sign;
  }
  float r;
  memcpy(&r, &u, 4);
  return r;
}

}  // namespace ff::FF_NS

#if defined(FF_ISA_AVX512)
#include "vec/avx512.h"
#elif defined(FF_ISA_AVX2)
#include "vec/avx2.h"
#else
#include "vec/scalar.h"
#endif

namespace ff::FF_NS {

#if !defined(FF_ISA_AVX512)
static FF_INLINE void transpose16(const uint32_t* from, size_t stride, uint32_t* to, size_t to_stride) {
  for (size_t i = 0; i < 16; i++)
    for (size_t j = 0; j < 16; j++) to[j * to_stride + i] = from[i * stride + j];
}
#endif

// dot_bf16: acc[i] + w[2i]*a[0] + w[2i+1]*a[1], 32 bf16 at w, a pair of bf16 broadcast.
// store_bf16_cut: as store_bf16_pairs, but cut off instead of rounded.
// store_bf16_sum: stores low and high as 32 bf16 (ties to even; denormals may become zero) and returns sum[i]
// + p[2i] + p[2i+1].
#if defined(FF_BF16)
static FF_INLINE F dot_bf16(F acc, const uint16_t* w, uint32_t pair) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(int(pair)))};
}
static FF_INLINE void store_bf16_cut(uint16_t* p, F a, F b) {
  const __m512i even = _mm512_srli_epi32(_mm512_castps_si512(a.v), 16);
  const __m512i high = _mm512_set1_epi32(int(0xffff0000u));
  _mm512_storeu_si512(p, _mm512_ternarylogic_epi32(even, high, _mm512_castps_si512(b.v), 0xf8));
}
static FF_INLINE F store_bf16_sum(uint16_t* p, F low, F high, F sum) {
  const __m512bh h = _mm512_cvtne2ps_pbh(high.v, low.v);
  _mm512_storeu_si512(p, (__m512i)h);
  return {_mm512_dpbf16_ps(sum.v, h, (__m512bh)_mm512_set1_epi32(0x3f803f80))};
}
#else
static FF_INLINE void store_bf16_cut(uint16_t* p, F a, F b) {
  uint32_t even[16], odd[16];
  store(reinterpret_cast<float*>(even), a), store(reinterpret_cast<float*>(odd), b);
  for (int i = 0; i < 16; i++) p[2 * i] = uint16_t(even[i] >> 16), p[2 * i + 1] = uint16_t(odd[i] >> 16);
}
static FF_INLINE F dot_bf16(F acc, const uint16_t* w, uint32_t pair) {
  acc = fma(bf16_odd(w), set1(bf16_to_f32(uint16_t(pair >> 16))), acc);
  return fma(bf16_even(w), set1(bf16_to_f32(uint16_t(pair))), acc);
}
static FF_INLINE F store_bf16_sum(uint16_t* p, F low, F high, F sum) {
  store_bf16(p, low), store_bf16(p + 16, high);
  return dot_bf16(sum, p, 0x3f803f80u);
}
#endif

// exp(x): Cody-Waite reduction and a degree-6 polynomial (Taylor coefficients are within 2 ulp on |r| <=
// ln2/2). x below -87.3 and NaN give 0, above 88.3 saturates at exp(88.3): check inputs for NaN.
static FF_INLINE F exp(F x) {
  const F lowest = set1(-87.33f), highest = set1(88.37f);
  const uint32_t alive = ge_mask(x, lowest);
  F c = min(max(x, lowest), highest);
  const F n = round_even(mul(c, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), c);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  p = shift_exponent(p, to_int(n));
  return alive == 0xffffu ? p : blend(alive, p, zero());
}

static FF_INLINE F sigmoid(F x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }
static FF_INLINE F tanh(F x) {  // 1 - 2 / (exp(2x) + 1), odd in x; NaN stays NaN
  const F y = sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f))));
  return blend(ge_mask(x, x), y, x);
}

}  // namespace ff::FF_NS
