// Attention over a paged KV cache: templates, compiled once per instruction set.
//
// The result of a query row is a function of its own q, its position and the cache, never of its neighbours
// (design rule 1): splits of 512 positions, in each of them blocks of 32 in order with an online softmax
// (Milakov & Gimelshein 2018), the splits' sums merged in order. A block that a row does not see leaves its
// sums bit for bit as they were (weight zero, maximum unchanged), so it does not matter whether the block was
// skipped or met in a tile with other rows.
#pragma once

#include "../attention.h"
#include "../attention_plan.h"
#include "../vec.h"
#include "attention_tiles.h"

namespace ff::FF_NS {
namespace attention {

// ---- Softmax of a block

// The sums of up to kTileRows rows over one split.
struct alignas(64) TileSums {
  float total[kTileRows][16];  // of the weights so far, by lane
  float max[kTileRows];        // of the scores so far, before the factor to powers of two
  float* o;                    // [kTileRows][head_dim]
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

// Scores of one row -> weights, times V's scales if it has them; the row sees tokens [begin, end) of the
// block.
template <Mode mode, KvType type, bool masked>
static FF_INLINE void softmax_row(const ScoreFactors& f, const float* s, const float* v_scale, float* p,
                                  int r, int begin, int end, int head_dim, TileSums& t) {
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
    if (before > minus_infinity())
      rescale_row(t, r, head_dim, exp2_scalar(before * f.to_log2 - now * f.to_log2));
    t.max[r] = now;
  }
  // No token seen yet: any finite reference gives the weights exp(-inf) = 0.
  const float reference = t.max[r] == minus_infinity() ? 0.0f : t.max[r] * f.to_log2;
  const F factor = set1(f.to_log2), minus = set1(-reference);
  F p0 = exp2<fast>(fma(s0, factor, minus)), p1 = exp2<fast>(fma(s1, factor, minus));
  uint16_t* rounded = reinterpret_cast<uint16_t*>(p) + r * kBlockTokens;
  if constexpr (mode == Mode::dot && type == KvType::bf16) {
    store(t.total[r], store_bf16_sum(rounded, p0, p1, load(t.total[r])));
    return;
  }
  store(t.total[r], add(load(t.total[r]), add(p0, p1)));
  if constexpr (kv_is_coded(type)) p0 = mul(p0, load(v_scale)), p1 = mul(p1, load(v_scale + 16));
  if constexpr (mode == Mode::dot) {
    store_bf16_sum(rounded, p0, p1, zero());
  } else {
    store(p + r * kBlockTokens, p0), store(p + r * kBlockTokens + 16, p1);
  }
}

// ---- An item

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

// q rows -> tiles of kTileRows rows, [head_dim][kTileRows] or [head_dim / 2][kTileRows] pairs; missing rows
// are zero.
template <Mode mode>
static void pack_queries(const AttentionArgs& a, const AttentionItem& item, const ItemView& view, float* to) {
  const int hd = view.head_dim;
  for (int base = 0; base < view.rows; base += kTileRows) {
    float* tile = to + size_t(base) * size_t(hd);
    for (int r = 0; r < kTileRows; r++) {
      const int i = base + r;
      const float* q = nullptr;
      if (i < view.rows)
        q = a.q + size_t(item.row + i / view.group) * a.q_stride + (view.head0 + i % view.group) * hd;
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
template <Mode mode, KvType type>
static void attend_split(const AttentionArgs& a, const ItemView& view, const int32_t* blocks, int kv_head,
                         int split, int base, int n, const float* q, Scratch& scratch, TileSums& t) {
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
    const uint8_t *v = k + a.kv.v_offset, *next_v = next + a.kv.v_offset;
    const float* v_scale = nullptr;
    if constexpr (kv_is_coded(type)) {
      v_scale = reinterpret_cast<const float*>(v + hd * kBlockTokens);
      prefetch_l2(next_v + hd * kBlockTokens), prefetch_l2(next_v + hd * kBlockTokens + 64);
    }
    const int token0 = block * kBlockTokens;
    scores<mode, type>(n, q, k, next, hd, scratch.s);
    if (token0 + kBlockTokens - 1 > view.position(base) || token0 < view.first_visible(last)) {
      for (int r = 0; r < n; r++)
        softmax_row<mode, type, true>(view.factors, scratch.s, v_scale, scratch.p, r,
                                      view.first_visible(base + r) - token0,
                                      view.position(base + r) + 1 - token0, hd, t);
    } else {
      for (int r = 0; r < n; r++)
        softmax_row<mode, type, false>(view.factors, scratch.s, v_scale, scratch.p, r, 0, 0, hd, t);
    }
    const int tokens = view.position(last) + 1 - token0;
    weighted_sums<mode, type>(n, scratch.p, v, next_v, hd, tokens < kBlockTokens ? tokens : kBlockTokens,
                              t.o);
  }
}

// (log_max, total, o) += (m, l, x): two disjoint sets of tokens of one row; -inf as m leaves everything as it
// is.
static inline void merge_row(float& log_max, float& total, float* o, float m, float l, const float* x,
                             int head_dim) {
  if (m == minus_infinity()) return;
  const float now = m > log_max || m != m ? m : log_max;
  const float a = exp2_scalar(log_max - now), b = exp2_scalar(m - now);
  log_max = now;
  total = total * a + l * b;
  const F fa = set1(a), fb = set1(b);
  for (int d = 0; d < head_dim; d += 16) store(o + d, fma(load(x + d), fb, mul(load(o + d), fa)));
}

// A row's sums -> its output. A sink is one more token with weight but without a value.
static inline void finish_row(const AttentionArgs& a, const ItemView& view, const AttentionItem& item, int i,
                              float log_max, float total, const float* o) {
  const int head = view.head0 + i % view.group;
  float* out =
      a.out + size_t(item.row + i / view.group) * a.out_stride + size_t(head) * size_t(view.head_dim);
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
static inline void merge_parts(const AttentionArgs& a, const AttentionItem& item, const ItemView& view,
                               Scratch& scratch) {
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

template <Mode mode, KvType type>
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
      attend_split<mode, type>(a, view, blocks, item.kv_head, split, base, n,
                               scratch.q + size_t(base) * size_t(hd), scratch, t);
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

// ---- Prologue

static inline void norm_head(float* x, int n, const HeadNorm& norm) {
  F sum = zero();
  for (int i = 0; i < n; i += 16) sum = fma(load(x + i), load(x + i), sum);
  const F factor = set1(1.0f / __builtin_sqrtf(hsum(sum) / float(n) + norm.eps)), offset = set1(norm.offset);
  for (int i = 0; i < n; i += 16)
    store(x + i, mul(mul(load(x + i), factor), add(load(norm.weight + i), offset)));
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
static inline void write_floats(uint8_t* head, const KvLayer& kv, int token, const float* k, const float* v) {
  const int hd = kv.head_dim;
  float* to = reinterpret_cast<float*>(head) + token;
  for (int d = 0; d < hd; d++) to[d * kBlockTokens] = k[d];
  memcpy(head + kv.v_offset + sizeof(float) * size_t(token) * size_t(hd), v, sizeof(float) * size_t(hd));
}

static inline void write_halves(uint8_t* head, const KvLayer& kv, int token, const float* k, const float* v) {
  const int hd = kv.head_dim;
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

template <Code code>
static inline void write_codes(uint8_t* head, const KvLayer& kv, int token, const float* k, const float* v) {
  const int hd = kv.head_dim;
  uint8_t codes[512];
  float* scales = reinterpret_cast<float*>(head + hd * kBlockTokens);
  scales[token] = encode_row<code>(k, hd, codes);
  for (int d = 0; d < hd; d += 2) memcpy(head + d * kBlockTokens + 2 * token, codes + d, 2);
  uint8_t* to_v = head + kv.v_offset;
  scales = reinterpret_cast<float*>(to_v + hd * kBlockTokens);
  scales[token] = encode_row<code>(v, hd, codes);
  to_v += token / 2 * 2 * hd + token % 2;
  for (int d = 0; d < hd; d++) to_v[2 * d] = codes[d];
}

static inline void write_token(uint8_t* head, const KvLayer& kv, int token, const float* k, const float* v) {
  switch (kv.type) {
    case KvType::bf16: return write_halves(head, kv, token, k, v);
    case KvType::f32: return write_floats(head, kv, token, k, v);
    case KvType::int8: return write_codes<Code::int8>(head, kv, token, k, v);
    case KvType::fp8: return write_codes<Code::e4m3>(head, kv, token, k, v);
  }
}

// V in the slot after an even one, which is read together with it, becomes zero.
static inline void clear_partner(uint8_t* head, const KvLayer& kv, int token) {
  const int hd = kv.head_dim;
  uint8_t* v = head + kv.v_offset;
  if (kv.type == KvType::bf16) {
    uint16_t* to = reinterpret_cast<uint16_t*>(v) + token * hd + 1;
    for (int d = 0; d < hd; d++) to[2 * d] = 0;
  } else if (kv_is_coded(kv.type)) {
    for (int d = 0; d < hd; d++) v[token * hd + 1 + 2 * d] = 0;
    reinterpret_cast<float*>(v + hd * kBlockTokens)[token + 1] = 0;
  }
}

template <KvType type>
static void attend(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  if constexpr (type == KvType::f32)
    attend_item<Mode::exact, type>(a, item, scratch);
  else if (a.exact)
    attend_item<Mode::exact, type>(a, item, scratch);
  else
    attend_item<Mode::dot, type>(a, item, scratch);
}

}  // namespace attention

// For batch rows [row0, row1): per-head norm and rotation of q and k in place, then k and v into the cache.
// Threads may share the rows in any way.
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
    const bool clear = row + 1 == a.seqs.row_start[s + 1] && token % 2 == 0;
    for (int h = 0; h < a.kv_heads; h++) {
      uint8_t* head = a.kv.base + size_t(block) * a.kv.block_bytes + size_t(h) * a.kv.head_bytes;
      attention::write_token(head, a.kv, token, k + h * a.head_dim, v + h * a.head_dim);
      if (clear) attention::clear_partner(head, a.kv, token);
    }
  }
}

// Output rows of one item (or, with parts, one part of the way there). Needs the prologue of every row of the
// batch. scratch: attention_scratch_floats(head_dim) floats, 64-byte aligned, of the calling thread.
static void attention_item(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  switch (a.kv.type) {
    case KvType::bf16: return attention::attend<KvType::bf16>(a, item, scratch);
    case KvType::f32: return attention::attend<KvType::f32>(a, item, scratch);
    case KvType::int8: return attention::attend<KvType::int8>(a, item, scratch);
    case KvType::fp8: return attention::attend<KvType::fp8>(a, item, scratch);
  }
}

}  // namespace ff::FF_NS
