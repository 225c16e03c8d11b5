// Attention over a paged KV cache: templates, compiled once per instruction set.
//
// The result of a query row is a function of its own q, its position and the cache, never of its neighbours (design
// rule 1): splits of 512 positions, in each of them blocks of 32 in order with an online softmax (Milakov & Gimelshein
// 2018), the splits' sums merged in order. A block that a row does not see leaves its sums bit for bit as they were
// (weight zero, maximum unchanged), so it does not matter whether the block was skipped or met in a tile with other rows.
#pragma once

#include "../attention.h"
#include "../attention_plan.h"
#include "../vec.h"

namespace ff::FF_NS {
namespace attention {

// How scores and weighted sums are computed.
//   dot:   q and weights rounded to bf16, bf16 dot products with fp32 sums. The softmax denominator sums the rounded
//          weights: then they add up to one, and a row's error is relative to the spread of V instead of its size.
//   exact: bf16 cache, fp32 arithmetic.
//   f32:   fp32 cache and arithmetic.
enum class Mode { dot, exact, f32 };

constexpr int kTileRows = 12;  // rows whose scores are in cache at once
constexpr int kSplitTokens = kSplitBlocks * kBlockTokens;
#if defined(FF_ISA_AVX512)
constexpr int kScoreRows = 12, kSumRows = 6, kSumColumns = 4;  // 24 accumulators of 32 registers
#else
constexpr int kScoreRows = 3, kSumRows = 3, kSumColumns = 2;  // 6 accumulators of two registers each, of 16
#endif
// With few rows memory is the limit, and the hardware's prefetchers do not know where the next block lies: tiles of up to
// this many rows fetch it (`next`) while they read theirs.
constexpr int kAheadRows = 8, kAheadSums = 4;
constexpr float kLog2e = 1.44269504088896341f;

static FF_INLINE float minus_infinity() { return -__builtin_inff(); }

// 2^x for x <= 127; below -125 zero, NaN stays NaN. Relative error 7e-6 (fast, ample for bf16) or 1e-7.
template <bool fast>
static FF_INLINE F exp2(F x) {
  const F lowest = set1(-125.0f);
  const F c = max(lowest, x);
  const F n = round_even(c), r = sub(c, n);
  F g;
  if constexpr (fast) {
    g = fma(set1(9.666373693e-03f), r, set1(5.583834273e-02f));
    g = fma(g, r, set1(2.402234894e-01f));
    g = fma(g, r, set1(6.931367264e-01f));
  } else {
    g = fma(set1(1.546144746e-04f), r, set1(1.339086735e-03f));
    g = fma(g, r, set1(9.618056670e-03f));
    g = fma(g, r, set1(5.550357104e-02f));
    g = fma(g, r, set1(2.402265092e-01f));
    g = fma(g, r, set1(6.931471880e-01f));
  }
  return select_gt(lowest, x, zero(), shift_exponent(fma(g, r, set1(1.0f)), to_int(n)));
}

static FF_INLINE float exp2_scalar(float x) {
  float t[16];
  store(t, exp2<false>(set1(x)));
  return t[0];
}

// cap * tanh(s / cap), with factor = scale / cap already in it; NaN stays NaN.
static FF_INLINE F soft_cap(F s, F factor, F cap) {
  const F e = exp2<false>(min(set1(28.0f), mul(mul(s, factor), set1(2.0f * kLog2e))));
  return mul(cap, sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))));
}

static FF_INLINE uint32_t load_pair(const uint32_t* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

// ---- Scores: s[row][32 tokens] = q[row] . K[:, token] -----------------------------------------------------------------

// q: [head_dim / 2][kTileRows] pairs of bf16 (dot) or [head_dim][kTileRows] floats.
template <Mode mode, int R>
static void score_tile(const float* q, const uint8_t* k, const uint8_t* next, int head_dim, float* s) {
  F acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = zero();
  if constexpr (mode == Mode::dot) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(k);
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(q);
    for (int d = 0; d < head_dim; d += 2, w += 2 * kBlockTokens, pairs += kTileRows, next += 128) {
      if constexpr (R <= kAheadRows) prefetch_l2(next), prefetch_l2(next + 64);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const uint32_t pair = load_pair(pairs + r);
        acc[r][0] = dot_bf16(acc[r][0], w, pair);
        acc[r][1] = dot_bf16(acc[r][1], w + kBlockTokens, pair);
      }
    }
  } else {
    for (int d = 0; d < head_dim; d += 2, q += 2 * kTileRows, next += 128) {
      if constexpr (R <= kAheadRows) prefetch_l2(next), prefetch_l2(next + 64);
      F even[2], odd[2];
      if constexpr (mode == Mode::exact) {
        const uint16_t* w = reinterpret_cast<const uint16_t*>(k) + d * kBlockTokens;
        even[0] = bf16_even(w), even[1] = bf16_even(w + kBlockTokens);
        odd[0] = bf16_odd(w), odd[1] = bf16_odd(w + kBlockTokens);
      } else {
        const float* w = reinterpret_cast<const float*>(k) + d * kBlockTokens;
        even[0] = load(w), even[1] = load(w + 16), odd[0] = load(w + 32), odd[1] = load(w + 48);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const F a = set1(q[r]);
        acc[r][0] = fma(even[0], a, acc[r][0]), acc[r][1] = fma(even[1], a, acc[r][1]);
        const F b = set1(q[kTileRows + r]);
        acc[r][0] = fma(odd[0], b, acc[r][0]), acc[r][1] = fma(odd[1], b, acc[r][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    store(s + r * kBlockTokens, acc[r][0]);
    store(s + r * kBlockTokens + 16, acc[r][1]);
  }
}

// Rows are computed in register tiles; a tile may reach past `rows` into the padding up to kTile.
template <Mode mode>
static void scores(int rows, const float* q, const uint8_t* k, const uint8_t* next, int head_dim, float* s) {
  for (int r = 0; r < rows;) {
    const int left = rows - r;
    const float* qr = q + r;
    float* sr = s + r * kBlockTokens;
    if constexpr (kScoreRows == 12) {
      if (left > 8) { score_tile<mode, 12>(qr, k, next, head_dim, sr), r += 12; continue; }
      if (left > 6) { score_tile<mode, 8>(qr, k, next, head_dim, sr), r += 8; continue; }
      if (left > 4) { score_tile<mode, 6>(qr, k, next, head_dim, sr), r += 6; continue; }
      if (left > 3) { score_tile<mode, 4>(qr, k, next, head_dim, sr), r += 4; continue; }
    }
    if (left > 2) score_tile<mode, 3>(qr, k, next, head_dim, sr), r += 3;
    else if (left > 1) score_tile<mode, 2>(qr, k, next, head_dim, sr), r += 2;
    else score_tile<mode, 1>(qr, k, next, head_dim, sr), r += 1;
  }
}

// ---- Weighted sums: o[row] += sum over tokens of p[row][token] * V[token] ----------------------------------------------

// p: [kTileRows][16] pairs of bf16 (dot) or [kTileRows][32] floats. Only the first `tokens` of the block are read, but for the odd
// slot beside the last one in the pair layouts, which is finite: a token of the sequence, or zeroed by the prologue.
template <Mode mode, int R, int C>
static void sum_tile(const float* p, const uint8_t* v, const uint8_t* next, int head_dim, int column, int tokens, float* o) {
  F acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) acc[r][c] = load(o + r * head_dim + column + 16 * c);
  if constexpr (mode == Mode::f32) {
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
    const uint16_t* w = reinterpret_cast<const uint16_t*>(v) + 2 * column;
    next += 4 * column;
    for (int t = 0; t < tokens; t += 2, w += 2 * head_dim, next += 4 * head_dim) {
      if constexpr (R <= kAheadSums) {
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) prefetch_l2(next + 64 * c);
      }
      if constexpr (mode == Mode::dot) {
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(p) + t / 2;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const uint32_t pair = load_pair(pairs + r * (kBlockTokens / 2));
#pragma GCC unroll 16
          for (int c = 0; c < C; c++) acc[r][c] = dot_bf16(acc[r][c], w + 32 * c, pair);
        }
      } else {
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) {
          const F even = bf16_even(w + 32 * c), odd = bf16_odd(w + 32 * c);
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) {
            acc[r][c] = fma(even, set1(p[r * kBlockTokens + t]), acc[r][c]);
            acc[r][c] = fma(odd, set1(p[r * kBlockTokens + t + 1]), acc[r][c]);
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

template <Mode mode, int R>
static void sum_columns(const float* p, const uint8_t* v, const uint8_t* next, int head_dim, int tokens, float* o) {
  int column = 0;
  if constexpr (kSumColumns >= 4)
    for (; column + 64 <= head_dim; column += 64) sum_tile<mode, R, 4>(p, v, next, head_dim, column, tokens, o);
  for (; column + 32 <= head_dim; column += 32) sum_tile<mode, R, 2>(p, v, next, head_dim, column, tokens, o);
  for (; column < head_dim; column += 16) sum_tile<mode, R, 1>(p, v, next, head_dim, column, tokens, o);
}

template <Mode mode>
static void weighted_sums(int rows, const float* p, const uint8_t* v, const uint8_t* next, int head_dim, int tokens, float* o) {
  constexpr int kRowFloats = mode == Mode::dot ? kBlockTokens / 2 : kBlockTokens;
  for (int r = 0; r < rows;) {
    const int left = rows - r;
    const float* pr = p + r * kRowFloats;
    float* out = o + size_t(r) * size_t(head_dim);
    if constexpr (kSumRows == 6) {
      if (left > 4) { sum_columns<mode, 6>(pr, v, next, head_dim, tokens, out), r += 6; continue; }
      if (left > 3) { sum_columns<mode, 4>(pr, v, next, head_dim, tokens, out), r += 4; continue; }
    }
    if (left > 2) sum_columns<mode, 3>(pr, v, next, head_dim, tokens, out), r += 3;
    else if (left > 1) sum_columns<mode, 2>(pr, v, next, head_dim, tokens, out), r += 2;
    else sum_columns<mode, 1>(pr, v, next, head_dim, tokens, out), r += 1;
  }
}

// ---- Softmax of a block --------------------------------------------------------------------------------------------------

// The sums of up to kTileRows rows over one split.
struct alignas(64) TileSums {
  float total[kTileRows][16];  // of the weights so far, by lane
  float max[kTileRows];         // of the scores so far, before the factor to powers of two
  float* o;                 // [kTileRows][head_dim]
};

struct ScoreFactors {
  float to_log2;   // score -> exponent of two
  float cap;       // 0: none
  float over_cap;  // scale / cap
};

// Lanes [begin, end) of 16 keep their score, the others get -inf.
static FF_INLINE F visible(F s, int begin, int end) {
  const F hidden = set1(minus_infinity());
  begin = begin < 0 ? 0 : begin > 16 ? 16 : begin;
  end = end < 0 ? 0 : end > 16 ? 16 : end;
  return first_n(hidden, first_n(s, hidden, end), begin);
}

// A row's maximum rose: its sums so far count less.
static inline void rescale_row(TileSums& t, int r, int head_dim, float factor) {
  const F f = set1(factor);
  store(t.total[r], mul(load(t.total[r]), f));
  float* o = t.o + size_t(r) * size_t(head_dim);
  for (int d = 0; d < head_dim; d += 16) store(o + d, mul(load(o + d), f));
}

// Scores of one row -> weights; the row sees tokens [begin, end) of the block.
template <Mode mode, bool masked>
static FF_INLINE void softmax_row(const ScoreFactors& f, const float* s, float* p, int r, int begin, int end, int head_dim,
                                  TileSums& t) {
  constexpr bool fast = mode == Mode::dot;
  F s0 = load(s + r * kBlockTokens), s1 = load(s + r * kBlockTokens + 16);
  if (f.cap != 0) {
    s0 = soft_cap(s0, set1(f.over_cap), set1(f.cap));
    s1 = soft_cap(s1, set1(f.over_cap), set1(f.cap));
  }
  if constexpr (masked) s0 = visible(s0, begin, end), s1 = visible(s1, begin - 16, end - 16);
  const F block_max = max(s0, s1);
  if (gt_mask(block_max, set1(t.max[r]))) {
    const float before = t.max[r], now = hmax(block_max);
    if (before > minus_infinity()) rescale_row(t, r, head_dim, exp2_scalar(before * f.to_log2 - now * f.to_log2));
    t.max[r] = now;
  }
  // No token seen yet: any finite reference gives the weights exp(-inf) = 0.
  const float reference = t.max[r] == minus_infinity() ? 0.0f : t.max[r] * f.to_log2;
  const F factor = set1(f.to_log2), minus = set1(-reference);
  const F p0 = exp2<fast>(fma(s0, factor, minus)), p1 = exp2<fast>(fma(s1, factor, minus));
  if constexpr (mode == Mode::dot) {
    uint16_t* row = reinterpret_cast<uint16_t*>(p) + r * kBlockTokens;
    store(t.total[r], store_bf16_sum(row, p0, p1, load(t.total[r])));
  } else {
    store(p + r * kBlockTokens, p0), store(p + r * kBlockTokens + 16, p1);
    store(t.total[r], add(load(t.total[r]), add(p0, p1)));
  }
}

// ---- An item -------------------------------------------------------------------------------------------------------------

// Where an item's numbers are: tile row i is head i % group of query row i / group.
struct ItemView {
  int head_dim, group, rows, first_position, window, head0;
  ScoreFactors factors;
  int position(int i) const { return first_position + i / group; }
  int first_visible(int i) const {
    const int p = position(i) - window + 1;
    return window > 0 && p > 0 ? p : 0;
  }
};

struct Scratch {
  float *q, *o, *split_o, *s, *p;
  float *log_max, *total;  // [kMaxTileRows], of the splits so far
};

static inline Scratch carve(float* base, int head_dim) {
  const size_t hd = size_t(head_dim);
  Scratch s;
  s.q = base;
  s.o = s.q + kMaxTileRows * hd;
  s.split_o = s.o + kMaxTileRows * hd;
  s.s = s.split_o + kTileRows * hd;
  s.p = s.s + kTileRows * kBlockTokens;
  s.log_max = s.p + kTileRows * kBlockTokens;
  s.total = s.log_max + kMaxTileRows;
  return s;
}

// q rows -> tiles of kTileRows rows, [head_dim][kTileRows] or [head_dim / 2][kTileRows] pairs; missing rows are zero.
template <Mode mode>
static void pack_queries(const AttentionArgs& a, const AttentionItem& item, const ItemView& view, float* to) {
  const int hd = view.head_dim;
  for (int base = 0; base < view.rows; base += kTileRows) {
    float* tile = to + size_t(base) * size_t(hd);
    for (int r = 0; r < kTileRows; r++) {
      const int i = base + r;
      const float* q = nullptr;
      if (i < view.rows) q = a.q + size_t(item.row + i / view.group) * a.q_stride + (view.head0 + i % view.group) * hd;
      for (int d = 0; d < hd; d += 16) {
        const F x = q ? load(q + d) : zero();
        if constexpr (mode == Mode::dot) {
          uint16_t h[16];
          store_bf16(h, x);
          uint32_t* pairs = reinterpret_cast<uint32_t*>(tile) + d / 2 * kTileRows + r;
          for (int j = 0; j < 8; j++) memcpy(pairs + j * kTileRows, h + 2 * j, 4);
        } else {
          float f[16];
          store(f, x);
          for (int j = 0; j < 16; j++) tile[(d + j) * kTileRows + r] = f[j];
        }
      }
    }
  }
}

// The sums of tile rows base .. base + n - 1 over the part of one split they see.
template <Mode mode>
static void attend_split(const AttentionArgs& a, const ItemView& view, const int32_t* blocks, int kv_head, int split,
                         int base, int n, const float* q, Scratch& scratch, TileSums& t) {
  const int hd = view.head_dim, last = base + n - 1;
  for (int r = 0; r < kTileRows; r++) {
    t.max[r] = minus_infinity();
    store(t.total[r], zero());
  }
  memset(t.o, 0, sizeof(float) * kTileRows * size_t(hd));
  int block = view.first_visible(base) / kBlockTokens, end = view.position(last) / kBlockTokens + 1;
  if (block < split * kSplitBlocks) block = split * kSplitBlocks;
  if (end > (split + 1) * kSplitBlocks) end = (split + 1) * kSplitBlocks;
  const uint8_t* k0 = a.kv.base + size_t(kv_head) * a.kv.head_bytes;
  for (; block < end; block++) {
    const uint8_t* k = k0 + size_t(blocks[block]) * a.kv.block_bytes;
    const uint8_t* next = block + 1 < end ? k0 + size_t(blocks[block + 1]) * a.kv.block_bytes : k;
    const uint8_t* v = k + a.kv.v_offset;
    const int token0 = block * kBlockTokens;
    scores<mode>(n, q, k, next, hd, scratch.s);
    if (token0 + kBlockTokens - 1 > view.position(base) || token0 < view.first_visible(last)) {
      for (int r = 0; r < n; r++)
        softmax_row<mode, true>(view.factors, scratch.s, scratch.p, r, view.first_visible(base + r) - token0,
                                view.position(base + r) + 1 - token0, hd, t);
    } else {
      for (int r = 0; r < n; r++) softmax_row<mode, false>(view.factors, scratch.s, scratch.p, r, 0, 0, hd, t);
    }
    const int tokens = view.position(last) + 1 - token0;
    weighted_sums<mode>(n, scratch.p, v, next + a.kv.v_offset, hd, tokens < kBlockTokens ? tokens : kBlockTokens, t.o);
  }
}

// (log_max, total, o) += (m, l, x): two disjoint sets of tokens of one row; -inf as m leaves everything as it is.
static inline void merge_row(float& log_max, float& total, float* o, float m, float l, const float* x, int head_dim) {
  if (m == minus_infinity()) return;
  const float now = m > log_max || m != m ? m : log_max;
  const float a = exp2_scalar(log_max - now), b = exp2_scalar(m - now);
  log_max = now;
  total = total * a + l * b;
  const F fa = set1(a), fb = set1(b);
  for (int d = 0; d < head_dim; d += 16) store(o + d, fma(load(x + d), fb, mul(load(o + d), fa)));
}

// A row's sums -> its output. A sink is one more token with weight but without a value.
static inline void finish_row(const AttentionArgs& a, const ItemView& view, const AttentionItem& item, int i, float log_max,
                              float total, const float* o) {
  const int head = view.head0 + i % view.group;
  float* out = a.out + size_t(item.row + i / view.group) * a.out_stride + size_t(head) * size_t(view.head_dim);
  float factor = 1.0f;
  if (a.sinks) {
    const float sink = a.sinks[head] * kLog2e, now = sink > log_max ? sink : log_max;
    factor = exp2_scalar(log_max - now);
    total = total * factor + exp2_scalar(sink - now);
  }
  const F f = set1(factor / total);
  for (int d = 0; d < view.head_dim; d += 16) store(out + d, mul(load(o + d), f));
}

// The last of a group's items to finish adds up all splits, in order.
static inline void merge_parts(const AttentionArgs& a, const AttentionItem& item, const ItemView& view, Scratch& scratch) {
  const size_t slot = attention_partial_floats(view.head_dim);
  const int splits = item.all_end - item.all_begin;
  for (int i = 0; i < view.rows; i++) {
    float log_max = minus_infinity(), total = 0;
    memset(scratch.o, 0, sizeof(float) * size_t(view.head_dim));
    for (int s = 0; s < splits; s++) {
      const float* x = a.partials + (size_t(item.partial) + size_t(s) * size_t(view.rows) + size_t(i)) * slot;
      merge_row(log_max, total, scratch.o, x[view.head_dim], x[view.head_dim + 1], x, view.head_dim);
    }
    finish_row(a, view, item, i, log_max, total, scratch.o);
  }
}

template <Mode mode>
static void attend_item(const AttentionArgs& a, const AttentionItem& item, float* memory) {
  const int hd = a.head_dim, group = a.heads / a.kv_heads;
  ItemView view;
  view.head_dim = hd;
  view.group = group;
  view.rows = item.rows * group;
  view.first_position = a.seqs.context[item.seq] + item.row - a.seqs.row_start[item.seq];
  view.window = a.window;
  view.head0 = item.kv_head * group;
  view.factors.cap = a.softcap;
  view.factors.to_log2 = a.softcap != 0 ? kLog2e : a.scale * kLog2e;
  view.factors.over_cap = a.softcap != 0 ? a.scale / a.softcap : 0;
  const int32_t* blocks = a.seqs.blocks + a.seqs.block_start[item.seq];

  Scratch scratch = carve(memory, hd);
  pack_queries<mode>(a, item, view, scratch.q);
  memset(scratch.p, 0, sizeof(float) * kTileRows * kBlockTokens);  // padding rows weigh nothing
  for (int i = 0; i < view.rows; i++) scratch.log_max[i] = minus_infinity(), scratch.total[i] = 0;

  int begin = view.first_visible(0) / kSplitTokens, end = view.position(view.rows - 1) / kSplitTokens + 1;
  if (item.split_begin > begin) begin = item.split_begin;
  if (item.split_end < end) end = item.split_end;
  const bool parted = item.parts > 1;
  const size_t slot = attention_partial_floats(hd);
  for (int split = begin; split < end; split++) {
    for (int base = 0; base < view.rows; base += kTileRows) {
      const int n = view.rows - base < kTileRows ? view.rows - base : kTileRows;
      float* o = scratch.o + size_t(base) * size_t(hd);
      const bool direct = split == begin && !parted;  // nothing to merge with yet
      TileSums t;
      t.o = direct ? o : scratch.split_o;
      attend_split<mode>(a, view, blocks, item.kv_head, split, base, n, scratch.q + size_t(base) * size_t(hd), scratch, t);
      for (int r = 0; r < n; r++) {
        const int i = base + r;
        const float m = t.max[r] == minus_infinity() ? t.max[r] : t.max[r] * view.factors.to_log2;
        const float l = hsum(load(t.total[r]));
        const float* x = t.o + size_t(r) * size_t(hd);
        if (direct) {
          scratch.log_max[i] = m, scratch.total[i] = l;
        } else if (parted) {
          const size_t index = size_t(split - item.all_begin) * size_t(view.rows) + size_t(i);
          float* to = a.partials + (size_t(item.partial) + index) * slot;
          memcpy(to, x, sizeof(float) * size_t(hd));
          to[hd] = m, to[hd + 1] = l;
        } else {
          merge_row(scratch.log_max[i], scratch.total[i], o + size_t(r) * size_t(hd), m, l, x, hd);
        }
      }
    }
  }
  if (!parted) {
    for (int i = 0; i < view.rows; i++)
      finish_row(a, view, item, i, scratch.log_max[i], scratch.total[i], scratch.o + size_t(i) * size_t(hd));
  } else if (__atomic_add_fetch(&a.part_counts[item.group], 1, __ATOMIC_ACQ_REL) == item.parts) {
    __atomic_store_n(&a.part_counts[item.group], 0, __ATOMIC_RELAXED);
    merge_parts(a, item, view, scratch);
  }
}

// ---- Prologue ------------------------------------------------------------------------------------------------------------

static inline void norm_head(float* x, int n, const HeadNorm& norm) {
  F sum = zero();
  for (int i = 0; i < n; i += 16) sum = fma(load(x + i), load(x + i), sum);
  const F factor = set1(1.0f / __builtin_sqrtf(hsum(sum) / float(n) + norm.eps)), offset = set1(norm.offset);
  for (int i = 0; i < n; i += 16) store(x + i, mul(mul(load(x + i), factor), add(load(norm.weight + i), offset)));
}

// Rotates column i with column i + dim / 2; the columns from dim on pass through.
static inline void rotate_head(float* x, int dim, const float* cos, const float* sin) {
  const int half = dim / 2;
  for (int i = 0; i < half; i += 16) {
    const int n = half - i < 16 ? half - i : 16;
    const F a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
    store_n(x + i, sub(mul(a, c), mul(b, s)), n);
    store_n(x + half + i, add(mul(b, c), mul(a, s)), n);
  }
}

static inline void prepare_heads(float* x, int heads, const AttentionArgs& a, const HeadNorm& norm, int row) {
  const size_t half = size_t(a.rope_dim / 2);
  for (int h = 0; h < heads; h++, x += a.head_dim) {
    if (norm.weight) norm_head(x, a.head_dim, norm);
    if (a.cos) rotate_head(x, a.rope_dim, a.cos + size_t(row) * half, a.sin + size_t(row) * half);
  }
}

// k and v of one token and KV head -> slot `token` of the head's place in a block.
static inline void write_token(uint8_t* head, const KvLayer& kv, int token, const float* k, const float* v) {
  const int hd = kv.head_dim;
  if (kv.type == KvType::f32) {
    float* to = reinterpret_cast<float*>(head) + token;
    for (int d = 0; d < hd; d++) to[d * kBlockTokens] = k[d];
    memcpy(head + kv.v_offset + sizeof(float) * size_t(token) * size_t(hd), v, sizeof(float) * size_t(hd));
    return;
  }
  uint16_t* to_k = reinterpret_cast<uint16_t*>(head) + 2 * token;
  uint16_t* to_v = reinterpret_cast<uint16_t*>(head + kv.v_offset) + token / 2 * 2 * hd + token % 2;
  for (int d = 0; d < hd; d += 16) {
    uint16_t h[16];
    store_bf16(h, load(k + d));
    for (int j = 0; j < 16; j += 2) memcpy(to_k + (d + j) * kBlockTokens, h + j, 4);
    store_bf16(h, load(v + d));
    for (int j = 0; j < 16; j++) to_v[2 * (d + j)] = h[j];
  }
}

}  // namespace attention

// For batch rows [row0, row1): per-head norm and rotation of q and k in place, then k and v into the cache. Threads may
// share the rows in any way.
static void attention_prologue(const AttentionArgs& a, int row0, int row1) {
  int s = 0;
  for (int row = row0; row < row1; row++) {
    while (a.seqs.row_start[s + 1] <= row) s++;
    float* q = a.q + size_t(row) * a.q_stride;
    float* k = a.k + size_t(row) * a.k_stride;
    const float* v = a.v + size_t(row) * a.v_stride;
    attention::prepare_heads(q, a.heads, a, a.q_norm, row);
    attention::prepare_heads(k, a.kv_heads, a, a.k_norm, row);
    const int position = a.seqs.context[s] + row - a.seqs.row_start[s], token = position % kBlockTokens;
    const int32_t block = a.seqs.blocks[a.seqs.block_start[s] + position / kBlockTokens];
    // Only the sequence's last row may touch the slot after its own: for the others it is the next row's.
    const bool pad = a.kv.type == KvType::bf16 && row + 1 == a.seqs.row_start[s + 1] && token % 2 == 0;
    for (int h = 0; h < a.kv_heads; h++) {
      uint8_t* head = a.kv.base + size_t(block) * a.kv.block_bytes + size_t(h) * a.kv.head_bytes;
      attention::write_token(head, a.kv, token, k + h * a.head_dim, v + h * a.head_dim);
      if (pad) {
        uint16_t* v16 = reinterpret_cast<uint16_t*>(head + a.kv.v_offset) + token * a.head_dim + 1;
        for (int d = 0; d < a.head_dim; d++) v16[2 * d] = 0;
      }
    }
  }
}

// Output rows of one item (or, with parts, one part of the way there). Needs the prologue of every row of the batch.
// scratch: attention_scratch_floats(head_dim) floats, 64-byte aligned, of the calling thread.
static void attention_item(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  if (a.kv.type == KvType::f32) attention::attend_item<attention::Mode::f32>(a, item, scratch);
  else if (a.exact) attention::attend_item<attention::Mode::exact>(a, item, scratch);
  else attention::attend_item<attention::Mode::dot>(a, item, scratch);
}

}  // namespace ff::FF_NS
