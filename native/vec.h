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

#if defined(FF_ISA_AVX512)

// clang-format off
struct F { __m512 v; };
struct I { __m512i v; };
struct B { __m512i v; };
// clang-format on

static FF_INLINE F zero() { return {_mm512_setzero_ps()}; }
static FF_INLINE F set1(float x) { return {_mm512_set1_ps(x)}; }
static FF_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
static FF_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
// First n lanes (0..16); the others are zero / untouched.
static FF_INLINE F load_n(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)};
}
static FF_INLINE void store_n(float* p, F a, int n) {
  _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), a.v);
}
static FF_INLINE F load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
static FF_INLINE __m512i bf16_bits(__m512 x) {  // of each rounded float, in the low half of its lane
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
}
// The nearest bf16, as store_bf16 stores it.
static FF_INLINE F bf16_nearest(F a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(a.v), 16))}; }
static FF_INLINE void store_bf16(uint16_t* p, F a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(bf16_bits(a.v)));
}
// Sixteen pairs p[2i], p[2i + 1] of bf16 from a[i], b[i].
static FF_INLINE void store_bf16_pairs(uint16_t* p, F a, F b) {
  _mm512_storeu_si512(p, _mm512_or_si512(bf16_bits(a.v), _mm512_slli_epi32(bf16_bits(b.v), 16)));
}
static FF_INLINE F load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
static FF_INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
static FF_INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
static FF_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
static FF_INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
static FF_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// As the x86 instruction: the second operand when either is NaN.
static FF_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
static FF_INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
static FF_INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
static FF_INLINE F round_even(F a) { return {_mm512_roundscale_ps(a.v, 0)}; }
// The bf16 next to zero.
static FF_INLINE F bf16_cut(F a) {
  return {
      _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(int(0xffff0000u))))};
}
// Lanes < n come from a, the others from b.
static FF_INLINE F first_n(F a, F b, int n) {
  return {_mm512_mask_blend_ps(__mmask16((1u << n) - 1), b.v, a.v)};
}
// Bit i set where a[i] > b[i] (false on NaN).
static FF_INLINE uint32_t gt_mask(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
static FF_INLINE uint32_t ge_mask(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
// Lanes where x > y come from a, the others (also on NaN) from b.
static FF_INLINE F select_gt(F x, F y, F a, F b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_GT_OQ), b.v, a.v)};
}
// Lanes whose bit is set come from a, the others from b.
static FF_INLINE F blend(uint32_t bits, F a, F b) {
  return {_mm512_mask_blend_ps(__mmask16(bits), b.v, a.v)};
}
static FF_INLINE F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
static FF_INLINE I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // round to nearest even
static FF_INLINE F shift_exponent(F a, I n) {  // a * 2^n, n in [-126, 127], result normal
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))};
}

static FF_INLINE I izero() { return {_mm512_setzero_si512()}; }
static FF_INLINE I iset1(int x) { return {_mm512_set1_epi32(x)}; }
static FF_INLINE I iload(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static FF_INLINE void istore(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
static FF_INLINE I iadd(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
static FF_INLINE void store_i8(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }

static FF_INLINE B bload(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
static FF_INLINE void bstore(uint8_t* p, B a) { _mm512_storeu_si512(p, a.v); }
static FF_INLINE B low_nibbles(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
static FF_INLINE B high_nibbles(B a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// a + 16 where the bit of the 64-bit mask at p is set.
static FF_INLINE B or_bit4(B a, const uint8_t* p) {
  uint64_t m;
  memcpy(&m, p, 8);
  return {_mm512_mask_add_epi8(a.v, m, a.v, _mm512_set1_epi8(16))};
}
// a + 16 * (bits 2s, 2s+1 of each byte of h).
template <int s>
static FF_INLINE B or_bits45(B a, B h) {
  __m512i t = s >= 2 ? _mm512_srli_epi16(h.v, 2 * s - 4 < 0 ? 0 : 2 * s - 4)
                     : _mm512_slli_epi16(h.v, 4 - 2 * s < 0 ? 0 : 4 - 2 * s);
  return {_mm512_or_si512(a.v, _mm512_and_si512(t, _mm512_set1_epi8(0x30)))};
}
// Byte j of every four, unsigned.
template <int j>
static FF_INLINE I byte(B a) {
  const __m512i x = j ? _mm512_srli_epi32(a.v, 8 * j) : a.v;
  return {j == 3 ? x : _mm512_and_si512(x, _mm512_set1_epi32(255))};
}
// Nibble j of every eight: the permutation looks at the low four bits of its indices.
template <int j>
static FF_INLINE F nibble(B a) {
  const __m512 whole = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_permutexvar_ps(j ? _mm512_srli_epi32(a.v, 4 * j) : a.v, whole)};
}
// acc[i] + sum_j w[4i+j] * a[j]: w unsigned, a four signed bytes broadcast. Exact.
static FF_INLINE I dot_u8s8(I acc, B w, const int8_t* a) {
  int32_t x;
  memcpy(&x, a, 4);
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(x))};
}
// The even / odd elements of 32 bf16 at w as floats.
static FF_INLINE F bf16_even(const uint16_t* w) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(w), 16))};
}
static FF_INLINE F bf16_odd(const uint16_t* w) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(w), _mm512_set1_epi32(int(0xffff0000u))))};
}
static FF_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
static FF_INLINE void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

static FF_INLINE float hsum(F a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static FF_INLINE float hmax(F a) {
  __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static FF_INLINE int32_t ihsum(I a) { return _mm512_reduce_add_epi32(a.v); }
// 16 x 16 numbers of 32 bits: row j of `to` is column j of `from`; strides in numbers.
static FF_INLINE void transpose16(const uint32_t* from, size_t stride, uint32_t* to, size_t to_stride) {
  __m512i a[16], b[16];
  FF_UNROLL(16)
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + size_t(i) * stride);
  FF_UNROLL(8)
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  FF_UNROLL(4)
  for (int i = 0; i < 16; i += 4) {  // a[i + j]: column j of each lane, of rows i .. i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  FF_UNROLL(4)
  for (int j = 0; j < 4; j++) {
    const __m512i even0 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
    const __m512i odd0 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    const __m512i even1 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    const __m512i odd1 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_storeu_si512(to + size_t(j) * to_stride, _mm512_shuffle_i32x4(even0, even1, 0x88));
    _mm512_storeu_si512(to + size_t(4 + j) * to_stride, _mm512_shuffle_i32x4(odd0, odd1, 0x88));
    _mm512_storeu_si512(to + size_t(8 + j) * to_stride, _mm512_shuffle_i32x4(even0, even1, 0xdd));
    _mm512_storeu_si512(to + size_t(12 + j) * to_stride, _mm512_shuffle_i32x4(odd0, odd1, 0xdd));
  }
}

#elif defined(FF_ISA_AVX2)

// clang-format off
struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct B { __m256i a, b; };
// clang-format on

static FF_INLINE __m256i lane_mask(int n) {  // lanes < n of eight
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static FF_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static FF_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static FF_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static FF_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
static FF_INLINE F load_n(const float* p, int n) {
  return {_mm256_maskload_ps(p, lane_mask(n)),
          n > 8 ? _mm256_maskload_ps(p + 8, lane_mask(n - 8)) : _mm256_setzero_ps()};
}
static FF_INLINE void store_n(float* p, F x, int n) {
  _mm256_maskstore_ps(p, lane_mask(n), x.a);
  if (n > 8) _mm256_maskstore_ps(p + 8, lane_mask(n - 8), x.b);
}
static FF_INLINE __m256 bf16x8(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static FF_INLINE F load_bf16(const uint16_t* p) { return {bf16x8(p), bf16x8(p + 8)}; }
static FF_INLINE __m256i
bf16_bits(__m256 x) {  // the 16 bits of each rounded float, in the low half of its lane
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r =
      _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
static FF_INLINE F bf16_nearest(F x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x.a), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x.b), 16))};
}
static FF_INLINE void store_bf16(uint16_t* p, F x) {
  const __m256i h = _mm256_packus_epi32(bf16_bits(x.a), bf16_bits(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(h, 0xd8));
}
static FF_INLINE void store_bf16_pairs(uint16_t* p, F x, F y) {
  _mm256_storeu_si256((__m256i*)p, _mm256_or_si256(bf16_bits(x.a), _mm256_slli_epi32(bf16_bits(y.a), 16)));
  _mm256_storeu_si256((__m256i*)(p + 16),
                      _mm256_or_si256(bf16_bits(x.b), _mm256_slli_epi32(bf16_bits(y.b), 16)));
}
static FF_INLINE F load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
#define FF_BINARY(name, intrin) \
  static FF_INLINE F name(F x, F y) { return {intrin(x.a, y.a), intrin(x.b, y.b)}; }
FF_BINARY(add, _mm256_add_ps)
FF_BINARY(sub, _mm256_sub_ps)
FF_BINARY(mul, _mm256_mul_ps)
FF_BINARY(div, _mm256_div_ps)
FF_BINARY(max, _mm256_max_ps)
FF_BINARY(min, _mm256_min_ps)
#undef FF_BINARY
static FF_INLINE F fma(F x, F y, F z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static FF_INLINE F abs(F x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
static FF_INLINE F bf16_cut(F x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000u)));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
static FF_INLINE F round_even(F x) { return {_mm256_round_ps(x.a, 0), _mm256_round_ps(x.b, 0)}; }
static FF_INLINE F first_n(F x, F y, int n) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(lane_mask(n))),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(lane_mask(n - 8)))};
}
static FF_INLINE uint32_t gt_mask(F x, F y) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ))) |
         uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))) << 8;
}
static FF_INLINE uint32_t ge_mask(F x, F y) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ))) |
         uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ))) << 8;
}
static FF_INLINE F select_gt(F x, F y, F u, F v) {
  return {_mm256_blendv_ps(v.a, u.a, _mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)),
          _mm256_blendv_ps(v.b, u.b, _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))};
}
static FF_INLINE F blend(uint32_t bits, F u, F v) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), all = _mm256_set1_epi32(int(bits));
  const __m256i low = _mm256_cmpeq_epi32(_mm256_and_si256(all, bit), bit);
  const __m256i high = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_srli_epi32(all, 8), bit), bit);
  return {_mm256_blendv_ps(v.a, u.a, _mm256_castsi256_ps(low)),
          _mm256_blendv_ps(v.b, u.b, _mm256_castsi256_ps(high))};
}
static FF_INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static FF_INLINE I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static FF_INLINE F shift_exponent(F x, I n) {
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.a), _mm256_slli_epi32(n.a, 23))),
          _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.b), _mm256_slli_epi32(n.b, 23)))};
}

static FF_INLINE I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static FF_INLINE I iset1(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static FF_INLINE I iload(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
static FF_INLINE void istore(int32_t* p, I x) {
  _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
static FF_INLINE I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static FF_INLINE void store_i8(int8_t* p, I x) {  // the low byte of each
  const __m256i m = _mm256_set1_epi32(255);
  const __m256i h =
      _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1)));
}

static FF_INLINE B bload(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
static FF_INLINE void bstore(uint8_t* p, B x) {
  _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)(p + 32), x.b);
}
static FF_INLINE B low_nibbles(B x) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
static FF_INLINE B high_nibbles(B x) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
static FF_INLINE __m256i bits_to_16(const uint8_t* p) {  // 32 bits -> 32 bytes of 0 or 16
  int32_t x;
  memcpy(&x, p, 4);
  const __m256i spread = _mm256_shuffle_epi8(
      _mm256_set1_epi32(x), _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2,
                                             2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201ull));
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit), _mm256_set1_epi8(16));
}
static FF_INLINE B or_bit4(B x, const uint8_t* p) {
  return {_mm256_or_si256(x.a, bits_to_16(p)), _mm256_or_si256(x.b, bits_to_16(p + 4))};
}
template <int s>
static FF_INLINE __m256i bits45(__m256i h) {
  const __m256i t =
      s >= 2 ? _mm256_srli_epi16(h, s >= 2 ? 2 * s - 4 : 0) : _mm256_slli_epi16(h, s < 2 ? 4 - 2 * s : 0);
  return _mm256_and_si256(t, _mm256_set1_epi8(0x30));
}
template <int s>
static FF_INLINE B or_bits45(B x, B h) {
  return {_mm256_or_si256(x.a, bits45<s>(h.a)), _mm256_or_si256(x.b, bits45<s>(h.b))};
}
template <int j>
static FF_INLINE I byte(B x) {
  const __m256i m = _mm256_set1_epi32(255);
  return {_mm256_and_si256(_mm256_srli_epi32(x.a, 8 * j), m),
          _mm256_and_si256(_mm256_srli_epi32(x.b, 8 * j), m)};
}
template <int j>
static FF_INLINE F nibble(B x) {
  const __m256i m = _mm256_set1_epi32(15);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.a, 4 * j), m)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.b, 4 * j), m))};
}
#if defined(FF_AVXVNNI)
static FF_INLINE I dot_u8s8(I acc, B w, const int8_t* a) {
  int32_t x;
  memcpy(&x, a, 4);
  const __m256i v = _mm256_set1_epi32(x);
  return {_mm256_dpbusd_avx_epi32(acc.a, w.a, v), _mm256_dpbusd_avx_epi32(acc.b, w.b, v)};
}
#endif
static FF_INLINE F bf16_even(const uint16_t* w) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)w), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)(w + 16)), 16))};
}
static FF_INLINE F bf16_odd(const uint16_t* w) {
  const __m256i m = _mm256_set1_epi32(int(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)w), m)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)(w + 16)), m))};
}
static FF_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
static FF_INLINE void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
static FF_INLINE float hsum8(__m256 h) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static FF_INLINE float hsum(F x) { return hsum8(_mm256_add_ps(x.a, x.b)); }
static FF_INLINE float hmax(F x) {
  __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static FF_INLINE int32_t ihsum(I x) {
  const __m256i h = _mm256_add_epi32(x.a, x.b);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}

#else  // scalar: the oracle
// clang-format off

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct B { uint8_t v[64]; };

#define FF_EACH for (int i = 0; i < 16; i++)
static FF_INLINE F zero() { return F{}; }
static FF_INLINE F set1(float x) { F r; FF_EACH r.v[i] = x; return r; }
static FF_INLINE F load(const float* p) { F r; FF_EACH r.v[i] = p[i]; return r; }
static FF_INLINE void store(float* p, F a) { FF_EACH p[i] = a.v[i]; }
static FF_INLINE F load_n(const float* p, int n) { F r; FF_EACH r.v[i] = i < n ? p[i] : 0.0f; return r; }
static FF_INLINE void store_n(float* p, F a, int n) { for (int i = 0; i < n; i++) p[i] = a.v[i]; }
static FF_INLINE F load_bf16(const uint16_t* p) { F r; FF_EACH r.v[i] = bf16_to_f32(p[i]); return r; }
static FF_INLINE F bf16_nearest(F a) { FF_EACH a.v[i] = bf16_to_f32(f32_to_bf16(a.v[i])); return a; }
static FF_INLINE void store_bf16(uint16_t* p, F a) { FF_EACH p[i] = f32_to_bf16(a.v[i]); }
static FF_INLINE void store_bf16_pairs(uint16_t* p, F a, F b) {
  FF_EACH p[2 * i] = f32_to_bf16(a.v[i]), p[2 * i + 1] = f32_to_bf16(b.v[i]);
}
static FF_INLINE F load_f16(const uint16_t* p) { F r; FF_EACH r.v[i] = f16_to_f32(p[i]); return r; }
static FF_INLINE F add(F a, F b) { FF_EACH a.v[i] += b.v[i]; return a; }
static FF_INLINE F sub(F a, F b) { FF_EACH a.v[i] -= b.v[i]; return a; }
static FF_INLINE F mul(F a, F b) { FF_EACH a.v[i] *= b.v[i]; return a; }
static FF_INLINE F div(F a, F b) { FF_EACH a.v[i] /= b.v[i]; return a; }
static FF_INLINE F fma(F a, F b, F c) { FF_EACH c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); return c; }
static FF_INLINE F max(F a, F b) { FF_EACH b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return b; }
static FF_INLINE F min(F a, F b) { FF_EACH b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return b; }
static FF_INLINE F abs(F a) { FF_EACH a.v[i] = __builtin_fabsf(a.v[i]); return a; }
static FF_INLINE F bf16_cut(F a) {
  FF_EACH {
    uint32_t u;
    memcpy(&u, &a.v[i], 4);
    u &= 0xffff0000u;
    memcpy(&a.v[i], &u, 4);
  }
  return a;
}
static FF_INLINE F round_even(F a) { FF_EACH a.v[i] = __builtin_rintf(a.v[i]); return a; }
static FF_INLINE F first_n(F a, F b, int n) { FF_EACH b.v[i] = i < n ? a.v[i] : b.v[i]; return b; }
static FF_INLINE uint32_t gt_mask(F a, F b) { uint32_t m = 0; FF_EACH m |= uint32_t(a.v[i] > b.v[i]) << i; return m; }
static FF_INLINE uint32_t ge_mask(F a, F b) { uint32_t m = 0; FF_EACH m |= uint32_t(a.v[i] >= b.v[i]) << i; return m; }
static FF_INLINE F select_gt(F x, F y, F a, F b) { FF_EACH b.v[i] = x.v[i] > y.v[i] ? a.v[i] : b.v[i]; return b; }
static FF_INLINE F blend(uint32_t bits, F a, F b) { FF_EACH b.v[i] = bits >> i & 1 ? a.v[i] : b.v[i]; return b; }
static FF_INLINE F to_float(I a) { F r; FF_EACH r.v[i] = float(a.v[i]); return r; }
static FF_INLINE I to_int(F a) {  // out of range or NaN: INT32_MIN, as x86 does
  I r;
  FF_EACH r.v[i] = a.v[i] >= -2147483648.0f && a.v[i] < 2147483648.0f ? int32_t(__builtin_rintf(a.v[i])) : INT32_MIN;
  return r;
}
static FF_INLINE F shift_exponent(F a, I n) {
  FF_EACH {
    uint32_t u;
    memcpy(&u, &a.v[i], 4);
    u += uint32_t(n.v[i]) << 23;
    memcpy(&a.v[i], &u, 4);
  }
  return a;
}
static FF_INLINE I izero() { return I{}; }
static FF_INLINE I iset1(int x) { I r; FF_EACH r.v[i] = x; return r; }
static FF_INLINE I iload(const int32_t* p) { I r; FF_EACH r.v[i] = p[i]; return r; }
static FF_INLINE void istore(int32_t* p, I a) { FF_EACH p[i] = a.v[i]; }
static FF_INLINE I iadd(I a, I b) { FF_EACH a.v[i] = int32_t(uint32_t(a.v[i]) + uint32_t(b.v[i])); return a; }
static FF_INLINE void store_i8(int8_t* p, I a) { FF_EACH p[i] = int8_t(a.v[i]); }
static FF_INLINE B bload(const uint8_t* p) { B r; memcpy(r.v, p, 64); return r; }
static FF_INLINE void bstore(uint8_t* p, B a) { memcpy(p, a.v, 64); }
static FF_INLINE B low_nibbles(B a) { for (auto& x : a.v) x &= 15; return a; }
static FF_INLINE B high_nibbles(B a) { for (auto& x : a.v) x >>= 4; return a; }
static FF_INLINE B or_bit4(B a, const uint8_t* p) {
  for (int i = 0; i < 64; i++) a.v[i] = uint8_t(a.v[i] | ((p[i >> 3] >> (i & 7) & 1) << 4));
  return a;
}
template <int s>
static FF_INLINE B or_bits45(B a, B h) {
  for (int i = 0; i < 64; i++) a.v[i] = uint8_t(a.v[i] | ((h.v[i] >> (2 * s) & 3) << 4));
  return a;
}
template <int j>
static FF_INLINE F nibble(B a) { F r; FF_EACH r.v[i] = float(a.v[4 * i + j / 2] >> (4 * (j & 1)) & 15); return r; }
template <int j>
static FF_INLINE I byte(B a) { I r; FF_EACH r.v[i] = a.v[4 * i + j]; return r; }
static FF_INLINE I dot_u8s8(I acc, B w, const int8_t* a) {
  FF_EACH for (int j = 0; j < 4; j++) acc.v[i] += int32_t(w.v[4 * i + j]) * a[j];
  return acc;
}
static FF_INLINE F bf16_even(const uint16_t* w) { F r; FF_EACH r.v[i] = bf16_to_f32(w[2 * i]); return r; }
static FF_INLINE F bf16_odd(const uint16_t* w) { F r; FF_EACH r.v[i] = bf16_to_f32(w[2 * i + 1]); return r; }
static FF_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
static FF_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
static FF_INLINE float hsum(F a) {
  for (int h = 8; h; h >>= 1)
    for (int i = 0; i < h; i++) a.v[i] += a.v[i + h];
  return a.v[0];
}
static FF_INLINE float hmax(F a) {
  for (int h = 8; h; h >>= 1)
    for (int i = 0; i < h; i++) a.v[i] = a.v[i] > a.v[i + h] ? a.v[i] : a.v[i + h];
  return a.v[0];
}
static FF_INLINE int32_t ihsum(I a) { int32_t s = 0; FF_EACH s += a.v[i]; return s; }
#undef FF_EACH
// clang-format on

#endif

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
