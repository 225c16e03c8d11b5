// The vectors of AVX-512 with VNNI. Included by vec.h alone.
#pragma once

namespace ff::FF_NS {

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

}  // namespace ff::FF_NS
