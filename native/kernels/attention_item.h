// A work item of attention, whatever computes the sums over a split: where its rows are, and how splits meet.
//
// The result of a query row is a function of its own q, its position and the cache, never of its neighbours
// (design rule 1): splits of 512 positions, each with sums of its own, merged in order.
#pragma once

#include "../attention.h"
#include "../attention_plan.h"
#include "../vec.h"
#include "attention_math.h"

namespace ff::FF_NS {
namespace attention {

constexpr int kSplitTokens = kSplitBlocks * kBlockTokens;

struct ScoreFactors {
  float to_log2;   // score -> exponent of two
  float cap;       // 0: none
  float over_cap;  // scale / cap
};

// Where an item's numbers are: tile row i is head i % group of query row i / group.
struct ItemView {
  int head_dim, group, rows, first_position, window, head0;
  const int32_t* blocks;  // of the sequence
  ScoreFactors factors;
  int position(int i) const { return first_position + i / group; }
  int first_visible(int i) const {
    const int p = position(i) - window + 1;
    return window > 0 && p > 0 ? p : 0;
  }
  // A run of `unit` blocks (a power of two, counted from position 0) as far as rows [first, last] see it.
  void visible_blocks(int first, int last, int unit, int index, int& begin, int& end) const {
    begin = first_visible(first) / kBlockTokens, end = position(last) / kBlockTokens + 1;
    if (begin < index * unit) begin = index * unit;
    if (end > (index + 1) * unit) end = (index + 1) * unit;
  }
};

static inline ItemView view_of(const AttentionArgs& a, const AttentionItem& item) {
  ItemView view;
  view.head_dim = a.head_dim;
  view.group = a.heads / a.kv_heads;
  view.rows = item.rows * view.group;
  view.first_position = a.seqs.context[item.seq] + item.row - a.seqs.row_start[item.seq];
  view.window = a.window;
  view.head0 = item.kv_head * view.group;
  view.blocks = a.seqs.blocks + a.seqs.block_start[item.seq];
  view.factors.cap = a.softcap;
  view.factors.to_log2 = a.softcap != 0 ? kLog2e : a.scale * kLog2e;
  view.factors.over_cap = a.softcap != 0 ? a.scale / a.softcap : 0;
  return view;
}

static inline const float* query(const AttentionArgs& a, const AttentionItem& item, const ItemView& view,
                                 int i) {
  const size_t row = size_t(item.row + i / view.group), head = size_t(view.head0 + i % view.group);
  return a.q + row * a.q_stride + head * size_t(view.head_dim);
}

// Hands out pieces of a thread's scratch, each on its own cache lines.
struct Carver {
  float* at;
  template <class T = float>
  T* take(size_t count) {
    T* p = reinterpret_cast<T*>(at);
    at += (count * sizeof(T) + 63) / 64 * 16;
    return p;
  }
};

// A row's largest score (-inf if it saw none) as the logarithm of a weight.
static FF_INLINE float log_max(float score, const ScoreFactors& f) {
  return score == minus_infinity() ? score : score * f.to_log2;
}

// What is left of one split: for each row the logarithm (base 2) of its largest weight, -inf if it sees
// nothing there, the sum of the weights relative to that, and the weighted sum of V.
struct SplitSums {
  float *log_max, *total;
  float* o;  // [rows][head_dim]
};

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
                               float* o) {
  const size_t slot = attention_partial_floats(view.head_dim);
  const int splits = item.all_end - item.all_begin;
  for (int i = 0; i < view.rows; i++) {
    float log_max = minus_infinity(), total = 0;
    memset(o, 0, sizeof(float) * size_t(view.head_dim));
    for (int s = 0; s < splits; s++) {
      const float* x = a.partials + (size_t(item.partial) + size_t(s) * size_t(view.rows) + size_t(i)) * slot;
      merge_row(log_max, total, o, x[view.head_dim], x[view.head_dim + 1], x, view.head_dim);
    }
    finish_row(a, view, item, i, log_max, total, o);
  }
}

// Method: computes sums over one split for up to Method::kRows tile rows.
//   Method(args, item, view, carver)    takes its scratch
//   void begin_split(split)             before the rows of a split
//   void attend(split, base, n, sums)   tile rows base .. base + n - 1
template <class Method>
static void attend_item(const AttentionArgs& a, const AttentionItem& item, float* memory) {
  const ItemView view = view_of(a, item);
  const size_t hd = size_t(view.head_dim), slot = attention_partial_floats(view.head_dim);
  Carver carver{memory};
  float *o = carver.take(kMaxTileRows * hd), *split_o = carver.take(Method::kRows * hd);
  float *log_max = carver.take(kMaxTileRows), *total = carver.take(kMaxTileRows);
  float *split_log_max = carver.take(Method::kRows), *split_total = carver.take(Method::kRows);
  Method method(a, item, view, carver);

  int begin = view.first_visible(0) / kSplitTokens, end = view.position(view.rows - 1) / kSplitTokens + 1;
  if (item.split_begin > begin) begin = item.split_begin;
  if (item.split_end < end) end = item.split_end;
  const bool parted = item.parts > 1;
  for (int split = begin; split < end; split++) {
    method.begin_split(split);
    for (int base = 0; base < view.rows; base += Method::kRows) {
      const int n = view.rows - base < Method::kRows ? view.rows - base : Method::kRows;
      if (split == begin && !parted) {  // nothing to merge with yet
        method.attend(split, base, n, {log_max + base, total + base, o + size_t(base) * hd});
        continue;
      }
      method.attend(split, base, n, {split_log_max, split_total, split_o});
      for (int r = 0; r < n; r++) {
        const int i = base + r;
        const float *x = split_o + size_t(r) * hd, m = split_log_max[r], l = split_total[r];
        if (parted) {
          const size_t index = size_t(split - item.all_begin) * size_t(view.rows) + size_t(i);
          float* to = a.partials + (size_t(item.partial) + index) * slot;
          memcpy(to, x, sizeof(float) * hd);
          to[hd] = m, to[hd + 1] = l;
        } else {
          merge_row(log_max[i], total[i], o + size_t(i) * hd, m, l, x, view.head_dim);
        }
      }
    }
  }
  if (!parted) {
    for (int i = 0; i < view.rows; i++)
      finish_row(a, view, item, i, log_max[i], total[i], o + size_t(i) * hd);
  } else if (__atomic_add_fetch(&a.part_counts[item.group], 1, __ATOMIC_ACQ_REL) == item.parts) {
    __atomic_store_n(&a.part_counts[item.group], 0, __ATOMIC_RELAXED);
    merge_parts(a, item, view, o);
  }
}

}  // namespace attention
}  // namespace ff::FF_NS
