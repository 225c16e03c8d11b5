// Attention's inner loops: scores of a block of keys and weighted sums of its values, in register tiles.
#pragma once

#include "../attention.h"
#include "../vec.h"
#include "attention_math.h"
#include "kv_reader.h"

namespace ff::FF_NS {
namespace attention {

// How scores and weighted sums are computed from a cache of any type.
// - dot (not from fp32): q and weights rounded to bf16, bf16 dot products with fp32 sums. With a bf16 cache
// the
//   softmax denominator sums the rounded weights: then they add up to one, and a row's error is relative to
//   the spread of V instead of its size. With codes the weights are multiplied by V's scales before they are
//   rounded, an error far below that of the codes.
// - exact: fp32 arithmetic.
enum class Mode { dot, exact };

constexpr int kTileRows = 12;  // rows whose scores are in cache at once
#if defined(FF_ISA_AVX512)
constexpr int kScoreRows = 12, kSumRows = 6, kSumColumns = 4;  // 24 accumulators of 32 registers
#else
constexpr int kScoreRows = 3, kSumRows = 3, kSumColumns = 2;  // 6 accumulators of two registers each, of 16
#endif
// With few rows memory is the limit, and the hardware's prefetchers do not know where the next block lies:
// tiles of up to this many rows fetch it (`next`) while they read theirs.
constexpr int kAheadRows = 8, kAheadSums = 4;
static FF_INLINE uint32_t load_pair(const uint32_t* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

template <int n>
struct TileSize {
  static constexpr int rows = n;
};

// tile(TileSize<R>, first row) for register tiles that cover `rows`; one may reach past them into the
// padding.
template <int most, class Tile>
static FF_INLINE void in_tiles(int rows, Tile tile) {
  for (int r = 0; r < rows;) {
    const int left = rows - r;
    if constexpr (most >= 12)
      if (left > 8) {
        tile(TileSize<12>{}, r), r += 12;
        continue;
      }
    if constexpr (most >= 8)
      if (left > 6) {
        tile(TileSize<8>{}, r), r += 8;
        continue;
      }
    if constexpr (most >= 6)
      if (left > 4) {
        tile(TileSize<6>{}, r), r += 6;
        continue;
      }
    if constexpr (most >= 4)
      if (left > 3) {
        tile(TileSize<4>{}, r), r += 4;
        continue;
      }
    if (left > 2) {
      tile(TileSize<3>{}, r), r += 3;
    } else if (left > 1) {
      tile(TileSize<2>{}, r), r += 2;
    } else {
      tile(TileSize<1>{}, r), r += 1;
    }
  }
}

// ---- Scores: s[row][32 tokens] = q[row] . K[:, token]

// q: [head_dim / 2][kTileRows] pairs of bf16 (dot) or [head_dim][kTileRows] floats.
template <Mode mode, class Read, int R>
static void score_tile(const float* q, const uint8_t* k, const float* k_scale, const uint8_t* next,
                       int head_dim, float* s) {
  F acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = zero();
  if constexpr (Read::kFloats) {
    const float* w = reinterpret_cast<const float*>(k);
    for (int d = 0; d < head_dim; d += 2, w += 2 * kBlockTokens, q += 2 * kTileRows, next += 128) {
      if constexpr (R <= kAheadRows) prefetch_l2(next), prefetch_l2(next + 64);
      const F even[2] = {load(w), load(w + 16)}, odd[2] = {load(w + 32), load(w + 48)};
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const F a = set1(q[r]);
        acc[r][0] = fma(even[0], a, acc[r][0]), acc[r][1] = fma(even[1], a, acc[r][1]);
        const F b = set1(q[kTileRows + r]);
        acc[r][0] = fma(odd[0], b, acc[r][0]), acc[r][1] = fma(odd[1], b, acc[r][1]);
      }
    }
  } else {
    const Read reader;
    constexpr int kBytes = 2 * Read::kBytes;
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(q);
    for (int d = 0; d < head_dim; d += 2, k += kBytes, next += kBytes) {
      if constexpr (R <= kAheadRows) {
        prefetch_l2(next);
        if constexpr (kBytes > 64) prefetch_l2(next + 64);
      }
      Pairs w[2];
      reader.two(k, w[0], w[1]);
      if constexpr (mode == Mode::dot) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const uint32_t pair = load_pair(pairs + r);
          acc[r][0] = dot(acc[r][0], w[0], pair), acc[r][1] = dot(acc[r][1], w[1], pair);
        }
        pairs += kTileRows;
      } else {
        const F low[2] = {even(w[0]), even(w[1])}, high[2] = {odd(w[0]), odd(w[1])};
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const F a = set1(q[r]);
          acc[r][0] = fma(low[0], a, acc[r][0]), acc[r][1] = fma(low[1], a, acc[r][1]);
          const F b = set1(q[kTileRows + r]);
          acc[r][0] = fma(high[0], b, acc[r][0]), acc[r][1] = fma(high[1], b, acc[r][1]);
        }
        q += 2 * kTileRows;
      }
    }
    if (k_scale) {
      if constexpr (R <= kAheadRows) prefetch_l2(next), prefetch_l2(next + 64);
      const F scales[2] = {load(k_scale), load(k_scale + 16)};
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
        acc[r][0] = mul(acc[r][0], scales[0]), acc[r][1] = mul(acc[r][1], scales[1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    store(s + r * kBlockTokens, acc[r][0]);
    store(s + r * kBlockTokens + 16, acc[r][1]);
  }
}

template <Mode mode, class Read>
static void scores(int rows, const float* q, const uint8_t* k, const float* k_scale, const uint8_t* next,
                   int head_dim, float* s) {
  in_tiles<kScoreRows>(rows, [&](auto size, int r) {
    score_tile<mode, Read, decltype(size)::rows>(q + r, k, k_scale, next, head_dim, s + r * kBlockTokens);
  });
}

// ---- Weighted sums: o[row] += sum over tokens of p[row][token] * V[token]

// p: [kTileRows][16] pairs of bf16 (dot) or [kTileRows][32] floats; V's scales are in them. Only the first
// `tokens` of the block are read, but for the odd slot beside the last one in the pair layouts, which is
// finite: a token of the sequence, or zeroed by the prologue.
template <Mode mode, class Read, int R, int C>
static void sum_tile(const float* p, const uint8_t* v, const uint8_t* next, int head_dim, int column,
                     int tokens, float* o) {
  F acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) acc[r][c] = load(o + r * head_dim + column + 16 * c);
  if constexpr (Read::kFloats) {
    const float* w = reinterpret_cast<const float*>(v) + column;
    for (int t = 0; t < tokens; t++, w += head_dim) {
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const F a = set1(p[r * kBlockTokens + t]);
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) acc[r][c] = fma(load(w + 16 * c), a, acc[r][c]);
      }
    }
  } else {
    const Read reader;
    constexpr int kBytes = Read::kBytes;  // of 16 columns
    const size_t stride = size_t(head_dim / 16 * kBytes), begin = size_t(column / 16 * kBytes);
    v += begin, next += begin;
    for (int t = 0; t < tokens; t += 2, v += stride, next += stride) {
      if constexpr (R <= kAheadSums) {
#pragma GCC unroll 16
        for (int line = 0; line < C * kBytes; line += 64) prefetch_l2(next + line);
      }
      Pairs w[C];
      if constexpr (C == 1) {
        w[0] = reader.one(v);
      } else {
#pragma GCC unroll 16
        for (int c = 0; c < C; c += 2) reader.two(v + c * kBytes, w[c], w[c + 1]);
      }
      if constexpr (mode == Mode::dot) {
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(p) + t / 2;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const uint32_t pair = load_pair(pairs + r * (kBlockTokens / 2));
#pragma GCC unroll 16
          for (int c = 0; c < C; c++) acc[r][c] = dot(acc[r][c], w[c], pair);
        }
      } else {
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) {
          const F low = even(w[c]), high = odd(w[c]);
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) {
            acc[r][c] = fma(low, set1(p[r * kBlockTokens + t]), acc[r][c]);
            acc[r][c] = fma(high, set1(p[r * kBlockTokens + t + 1]), acc[r][c]);
          }
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) store(o + r * head_dim + column + 16 * c, acc[r][c]);
}

template <Mode mode, class Read, int R>
static void sum_columns(const float* p, const uint8_t* v, const uint8_t* next, int head_dim, int tokens,
                        float* o) {
  int column = 0;
  if constexpr (kSumColumns >= 4)
    for (; column + 64 <= head_dim; column += 64)
      sum_tile<mode, Read, R, 4>(p, v, next, head_dim, column, tokens, o);
  for (; column + 32 <= head_dim; column += 32)
    sum_tile<mode, Read, R, 2>(p, v, next, head_dim, column, tokens, o);
  for (; column < head_dim; column += 16) sum_tile<mode, Read, R, 1>(p, v, next, head_dim, column, tokens, o);
}

template <Mode mode, class Read>
static void weighted_sums(int rows, const float* p, const uint8_t* v, const uint8_t* next, int head_dim,
                          int tokens, float* o) {
  constexpr int kRowFloats = mode == Mode::dot ? kBlockTokens / 2 : kBlockTokens;
  in_tiles<kSumRows>(rows, [&](auto size, int r) {
    sum_columns<mode, Read, decltype(size)::rows>(p + r * kRowFloats, v, next, head_dim, tokens,
                                                  o + size_t(r) * size_t(head_dim));
  });
}

}  // namespace attention
}  // namespace ff::FF_NS
