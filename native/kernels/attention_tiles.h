// Attention's inner loops: scores of a block of keys and weighted sums of its values, in register tiles.
#pragma once

#include "../attention.h"
#include "../vec.h"
#include "attention_math.h"
#include "kv_reader.h"

namespace ff::FF_NS {
namespace attention {

// How scores and weighted sums are computed from a cache of any type.
// - dot (not from fp32): q and weights rounded to bf16, products of pairs with fp32 sums, as vdpbf16ps orders
//   them. With a bf16 cache the softmax denominator sums the rounded weights: then they add up to one, and a
//   row's error is relative to the spread of V instead of its size. With codes the weights are multiplied by
//   V's scales before they are rounded, an error far below that of the codes.
// - exact: fp32 arithmetic.
enum class Mode { dot, exact };

// Without an instruction for pairs the rounded numbers are held as floats, which multiply as they are loaded.
#if defined(FF_BF16)
template <Mode mode>
constexpr bool kPaired = mode == Mode::dot;
#else
template <Mode mode>
constexpr bool kPaired = false;
#endif

constexpr int kTileRows = 12;  // rows whose scores are in cache at once
#if defined(FF_ISA_AVX512)
// 24 accumulators of 32 registers
constexpr int kScoreRows = 12, kSumRows = 6;
template <int R>
constexpr int kScoreColumns = 2;
template <int R>
constexpr int kSumColumns = 4;
#else
// 6 accumulators of two registers each, of 16
constexpr int kScoreRows = 6, kSumRows = 6;
template <int R>
constexpr int kScoreColumns = R > 3 ? 1 : 2;
template <int R>
constexpr int kSumColumns = R > 3   ? 1
                            : R > 1 ? 2
                                    : 4;
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

// acc[r][c] += the products of a pair of K's dimensions or V's tokens; of row r, a[r * stride] is the even
// number's factor and a[r * stride + odd_at] the odd one's.
template <Mode mode, int R, int C>
static FF_INLINE void add_pair(F (&acc)[R][C], const Pairs (&w)[C], const float* a, int stride, int odd_at) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const bool high = (mode == Mode::dot) == (half == 0);  // vdpbf16ps begins with the odd ones
    F x[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) x[c] = high ? odd(w[c]) : even(w[c]);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const F f = set1(a[r * stride + (high ? odd_at : 0)]);
#pragma GCC unroll 16
      for (int c = 0; c < C; c++) acc[r][c] = fma(x[c], f, acc[r][c]);
    }
  }
}

template <class Read, int C>
static FF_INLINE void read_pairs(const Read& reader, const uint8_t* p, Pairs (&w)[C]) {
  if constexpr (C == 1) {
    w[0] = reader.one(p);
  } else {
#pragma GCC unroll 16
    for (int c = 0; c < C; c += 2) reader.two(p + c * Read::kBytes, w[c], w[c + 1]);
  }
}

// ---- Scores: s[row][32 tokens] = q[row] . K[:, token]

// C times 16 tokens, the first of which k, k_scale, next and s point to.
// q: [head_dim / 2][kTileRows] pairs of bf16 (if paired) or [head_dim][kTileRows] floats.
template <Mode mode, class Read, int R, int C>
static void score_tile(const float* q, const uint8_t* k, const float* k_scale, const uint8_t* next,
                       int head_dim, float* s) {
  F acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) acc[r][c] = zero();
  if constexpr (Read::kFloats) {
    const float* w = reinterpret_cast<const float*>(k);
    for (int d = 0; d < head_dim; d++, w += kBlockTokens, q += kTileRows, next += 4 * kBlockTokens) {
      F x[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; c++) {
        if constexpr (R <= kAheadRows) prefetch_l2(next + 64 * c);
        x[c] = load(w + 16 * c);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const F a = set1(q[r]);
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) acc[r][c] = fma(x[c], a, acc[r][c]);
      }
    }
  } else {
    const Read reader;
    constexpr int kBytes = kBlockTokens / 16 * Read::kBytes;  // of a pair of dimensions
    for (int d = 0; d < head_dim; d += 2, k += kBytes, next += kBytes) {
      if constexpr (R <= kAheadRows) {
        prefetch_l2(next);
        if constexpr (C * Read::kBytes > 64) prefetch_l2(next + 64);
      }
      Pairs w[C];
      read_pairs(reader, k, w);
      if constexpr (kPaired<mode>) {
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(q) + d / 2 * kTileRows;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const uint32_t pair = load_pair(pairs + r);
#pragma GCC unroll 16
          for (int c = 0; c < C; c++) acc[r][c] = dot(acc[r][c], w[c], pair);
        }
      } else {
        add_pair<mode>(acc, w, q + d * kTileRows, 1, kTileRows);
      }
    }
    if (k_scale) {
      if constexpr (R <= kAheadRows) prefetch_l2(next), prefetch_l2(next + 64);
#pragma GCC unroll 16
      for (int c = 0; c < C; c++) {
        const F scale = load(k_scale + 16 * c);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) acc[r][c] = mul(acc[r][c], scale);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) store(s + r * kBlockTokens + 16 * c, acc[r][c]);
}

template <Mode mode, class Read>
static void scores(int rows, const float* q, const uint8_t* k, const float* k_scale, const uint8_t* next,
                   int head_dim, float* s) {
  in_tiles<kScoreRows>(rows, [&](auto size, int r) {
    constexpr int R = decltype(size)::rows, C = kScoreColumns<R>;
    for (int c = 0; c < kBlockTokens / 16; c += C)
      score_tile<mode, Read, R, C>(q + r, k + c * Read::kBytes, k_scale ? k_scale + 16 * c : nullptr,
                                   next + c * Read::kBytes, head_dim, s + r * kBlockTokens + 16 * c);
  });
}

// ---- Weighted sums: o[row] += sum over tokens of p[row][token] * V[token]

// p: [kTileRows][16] pairs of bf16 (if paired) or [kTileRows][32] floats; V's scales are in them. Only the
// first `tokens` of the block are read, but for the odd slot beside the last one in the pair layouts, which
// is finite: a token of the sequence, or zeroed by the prologue.
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
      read_pairs(reader, v, w);
      if constexpr (kPaired<mode>) {
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(p) + t / 2;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const uint32_t pair = load_pair(pairs + r * (kBlockTokens / 2));
#pragma GCC unroll 16
          for (int c = 0; c < C; c++) acc[r][c] = dot(acc[r][c], w[c], pair);
        }
      } else {
        add_pair<mode>(acc, w, p + t, kBlockTokens, 1);
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
  if constexpr (kSumColumns<R> >= 4)
    for (; column + 64 <= head_dim; column += 64)
      sum_tile<mode, Read, R, 4>(p, v, next, head_dim, column, tokens, o);
  if constexpr (kSumColumns<R> >= 2)
    for (; column + 32 <= head_dim; column += 32)
      sum_tile<mode, Read, R, 2>(p, v, next, head_dim, column, tokens, o);
  for (; column < head_dim; column += 16) sum_tile<mode, Read, R, 1>(p, v, next, head_dim, column, tokens, o);
}

template <Mode mode, class Read>
static void weighted_sums(int rows, const float* p, const uint8_t* v, const uint8_t* next, int head_dim,
                          int tokens, float* o) {
  constexpr int kRowFloats = kPaired<mode> ? kBlockTokens / 2 : kBlockTokens;
  in_tiles<kSumRows>(rows, [&](auto size, int r) {
    sum_columns<mode, Read, decltype(size)::rows>(p + r * kRowFloats, v, next, head_dim, tokens,
                                                  o + size_t(r) * size_t(head_dim));
  });
}

}  // namespace attention
}  // namespace ff::FF_NS
