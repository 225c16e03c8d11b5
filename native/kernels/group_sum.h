// Sums of products of one weight group, exact in int32, added up the way the instruction set does it fastest.
#pragma once

#include "vec.h"

namespace ff::FF_NS {

#if defined(FF_ISA_AVX2) && !defined(FF_AVXVNNI)

// vpmaddubsw adds two products in 16 bits and saturates. Weights of few bits leave room for some steps before
// the sum must be widened: 8 of 4 bits (8 * 2 * 15 * 128 = 30,720), 4 of 5, 2 of 6. Whole bytes do not fit
// even once; less kCentre they do (2 * 128 * 127 = 32,512).
template <int BITS>
constexpr int kRun = BITS == 4   ? 8
                     : BITS == 5 ? 4
                     : BITS == 6 ? 2
                                 : 1;
template <int BITS>
constexpr int kCentre = BITS == 8 ? 128 : 0;
template <int BITS>
constexpr int kSumBits = BITS;  // which weights need code of their own here

// GCC would make a tree of a chain of sums, which keeps every product alive and spills them all.
static FF_INLINE __m256i in_order(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

static FF_INLINE void add_pairs(I& sum, I pairs) {
  const __m256i ones = _mm256_set1_epi16(1);
  sum = {in_order(_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs.a, ones))),
         in_order(_mm256_add_epi32(sum.b, _mm256_madd_epi16(pairs.b, ones)))};
}

static FF_INLINE __m256i broadcast4(const int8_t* a) {
  int32_t x;
  memcpy(&x, a, 4);
  return _mm256_set1_epi32(x);
}

// sums[r][t] += sum over s, j of (weights(s, t)[column][j] - kCentre) * q[r * stride + 4 s + j].
template <int BITS, int STEPS, int ROWS, int TILES, class Weights>
static FF_INLINE void add_products(I (&sums)[ROWS][TILES], Weights&& weights, const int8_t* q,
                                   size_t stride) {
  constexpr int run = kRun<BITS> < STEPS ? kRun<BITS> : STEPS;
  if constexpr (BITS == 8) {
    const __m256i centre = _mm256_set1_epi8(char(0x80));
    FF_UNROLL(8)
    for (int s = 0; s < STEPS; s++) FF_UNROLL(4)
    for (int t = 0; t < TILES; t++) {
      const B w = weights(s, t);
      const __m256i wa = _mm256_xor_si256(w.a, centre), wb = _mm256_xor_si256(w.b, centre);
      const __m256i sa = _mm256_abs_epi8(wa), sb = _mm256_abs_epi8(wb);
      FF_UNROLL(4)
      for (int r = 0; r < ROWS; r++) {
        const __m256i x = broadcast4(q + size_t(r) * stride + 4 * s);
        const __m256i pa = _mm256_maddubs_epi16(sa, _mm256_sign_epi8(x, wa));
        const __m256i pb = _mm256_maddubs_epi16(sb, _mm256_sign_epi8(x, wb));
        add_pairs(sums[r][t], {pa, pb});
      }
    }
  } else {
    FF_UNROLL(4)
    for (int s0 = 0; s0 < STEPS; s0 += run) {
      I pairs[ROWS][TILES];
      FF_UNROLL(8)
      for (int s = 0; s < run; s++) FF_UNROLL(4)
      for (int t = 0; t < TILES; t++) {
        const B w = weights(s0 + s, t);
        FF_UNROLL(4)
        for (int r = 0; r < ROWS; r++) {
          const __m256i x = broadcast4(q + size_t(r) * stride + 4 * (s0 + s));
          const __m256i pa = _mm256_maddubs_epi16(w.a, x), pb = _mm256_maddubs_epi16(w.b, x);
          I& p = pairs[r][t];
          if (s == 0) {
            p = {pa, pb};
          } else {
            p = {in_order(_mm256_add_epi16(p.a, pa)), in_order(_mm256_add_epi16(p.b, pb))};
          }
        }
      }
      FF_UNROLL(4)
      for (int r = 0; r < ROWS; r++) FF_UNROLL(4)
      for (int t = 0; t < TILES; t++) add_pairs(sums[r][t], pairs[r][t]);
    }
  }
}

#else

template <int BITS>
constexpr int kCentre = 0;
template <int BITS>
constexpr int kSumBits = 8;

template <int BITS, int STEPS, int ROWS, int TILES, class Weights>
static FF_INLINE void add_products(I (&sums)[ROWS][TILES], Weights&& weights, const int8_t* q,
                                   size_t stride) {
  I odd[ROWS][TILES];  // a chain of its own for every other step hides the latency of few sums
  constexpr bool two = TILES == 1;
  if (two)
    for (int r = 0; r < ROWS; r++) odd[r][0] = izero();
  FF_UNROLL(8)
  for (int s = 0; s < STEPS; s++) {
    B w[TILES];
    FF_UNROLL(4)
    for (int t = 0; t < TILES; t++) w[t] = weights(s, t);
    FF_UNROLL(4)
    for (int r = 0; r < ROWS; r++) FF_UNROLL(4)
    for (int t = 0; t < TILES; t++) {
      I& sum = two && s % 2 ? odd[r][t] : sums[r][t];
      sum = dot_u8s8(sum, w[t], q + size_t(r) * stride + 4 * s);
    }
  }
  if (two)
    for (int r = 0; r < ROWS; r++) sums[r][0] = iadd(sums[r][0], odd[r][0]);
}

#endif

// What a group's sum starts with, so that it comes to sum (q - zero) * a; with offsets, to sum q * a.
template <int BITS, bool OFFSET>
static FF_INLINE I group_start(int zero, int32_t activations) {
  if constexpr (OFFSET && kCentre<BITS> == 0) return izero();
  return iset1((kCentre<BITS> - (OFFSET ? 0 : zero)) * activations);
}

}  // namespace ff::FF_NS
