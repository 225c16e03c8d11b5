// The vectors of AVX2, in two halves. Included by vec.h alone.
#pragma once

namespace ff::FF_NS {

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

}  // namespace ff::FF_NS
