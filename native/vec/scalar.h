// The vectors in plain C++: the oracle. Included by vec.h alone.
#pragma once

namespace ff::FF_NS {
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

}  // namespace ff::FF_NS
