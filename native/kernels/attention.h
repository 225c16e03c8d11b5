// Attention over a paged KV cache: templates, compiled once per instruction set.
//
// The result of a query row is a function of its own q, its position and the cache, never of its neighbours
// (design rule 1): splits of 512 positions, in each of them blocks of 32 in order with an online softmax
// (Milakov & Gimelshein 2018), the splits' sums merged in order. A block that a row does not see leaves its
// sums bit for bit as they were (weight zero, maximum unchanged), so it does not matter whether the block was
// skipped or met in a tile with other rows.
#pragma once

#include "attention_item.h"
#include "attention_prologue.h"
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
  uint16_t* pairs = reinterpret_cast<uint16_t*>(p) + r * kBlockTokens;
  if constexpr (kPaired<mode> && type == KvType::bf16) {
    store(t.total[r], store_bf16_sum(pairs, p0, p1, load(t.total[r])));
    return;
  }
  if constexpr (mode == Mode::dot && type == KvType::bf16) p0 = bf16_nearest(p0), p1 = bf16_nearest(p1);
  store(t.total[r], add(load(t.total[r]), add(p0, p1)));
  if constexpr (kv_is_coded(type)) p0 = mul(p0, load(v_scale)), p1 = mul(p1, load(v_scale + 16));
  if constexpr (kPaired<mode>) {
    store_bf16_sum(pairs, p0, p1, zero());
    return;
  }
  if constexpr (mode == Mode::dot && kv_is_coded(type)) p0 = bf16_nearest(p0), p1 = bf16_nearest(p1);
  store(p + r * kBlockTokens, p0), store(p + r * kBlockTokens + 16, p1);
}

// ---- Sums over a split, by vectors

template <Mode mode, KvType type>
class VectorMethod {
 public:
  static constexpr int kRows = kTileRows;

  VectorMethod(const AttentionArgs& a, const AttentionItem& item, const ItemView& view, Carver& carver)
      : view_(view), kv_(a.kv), k0_(a.kv.base + size_t(item.kv_head) * a.kv.head_bytes) {
    q_ = carver.take(kMaxTileRows * size_t(view.head_dim));
    s_ = carver.take(kTileRows * kBlockTokens), p_ = carver.take(kTileRows * kBlockTokens);
    memset(p_, 0, sizeof(float) * kTileRows * kBlockTokens);  // padding rows weigh nothing
    k_ = carver.take<uint16_t>(kSplitBlocks * kBlockTokens * size_t(view.head_dim));
    v_ = carver.take<uint16_t>(kSplitBlocks * kBlockTokens * size_t(view.head_dim));
    pack_queries(a, item);
  }

  // Many rows read the same codes: they are decoded once, to the same numbers.
  void begin_split(int split) {
    if constexpr (kv_is_coded(type)) {
      if (!expanded()) return;
      int block, end;
      view_.visible_blocks(0, view_.rows - 1, kSplitBlocks, split, block, end);
      for (; block < end; block++) {
        const uint8_t* k = k0_ + size_t(view_.blocks[block]) * kv_.block_bytes;
        decode_codes<type>(k, numbers(), k_ + block % kSplitBlocks * numbers());
        decode_codes<type>(k + kv_.v_offset, numbers(), v_ + block % kSplitBlocks * numbers());
      }
    }
  }

  void attend(int split, int base, int n, const SplitSums& sums) {
    if constexpr (kv_is_coded(type)) {
      if (expanded()) return attend_with<Bf16Reader>(split, base, n, sums);
    }
    attend_with<Reader<type>>(split, base, n, sums);
  }

 private:
  bool expanded() const { return view_.rows > 2 * kTileRows; }
  int numbers() const { return view_.head_dim * kBlockTokens; }  // of half a block

  template <class Read>
  void attend_with(int split, int base, int n, const SplitSums& sums) {
    const int hd = view_.head_dim, last = base + n - 1;
    const float* q = q_ + size_t(base) * size_t(hd);
    TileSums t;
    t.o = sums.o;
    for (int r = 0; r < kTileRows; r++) {
      t.max[r] = minus_infinity();
      store(t.total[r], zero());
    }
    memset(t.o, 0, sizeof(float) * kTileRows * size_t(hd));
    int block, end;
    view_.visible_blocks(base, last, kSplitBlocks, split, block, end);
    for (; block < end; block++) {
      const uint8_t* k = k0_ + size_t(view_.blocks[block]) * kv_.block_bytes;
      const uint8_t* next = block + 1 < end ? k0_ + size_t(view_.blocks[block + 1]) * kv_.block_bytes : k;
      const uint8_t *v = k + kv_.v_offset, *next_v = next + kv_.v_offset;
      const float *k_scale = nullptr, *v_scale = nullptr;
      if constexpr (kv_is_coded(type)) {
        k_scale = reinterpret_cast<const float*>(k + numbers());
        v_scale = reinterpret_cast<const float*>(v + numbers());
        prefetch_l2(next_v + numbers()), prefetch_l2(next_v + numbers() + 64);
        if constexpr (Read::kBytes == Bf16Reader::kBytes) {
          next = k = reinterpret_cast<const uint8_t*>(k_ + block % kSplitBlocks * numbers());
          next_v = v = reinterpret_cast<const uint8_t*>(v_ + block % kSplitBlocks * numbers());
        }
      }
      const int token0 = block * kBlockTokens;
      scores<mode, Read>(n, q, k, k_scale, next, hd, s_);
      if (token0 + kBlockTokens - 1 > view_.position(base) || token0 < view_.first_visible(last)) {
        for (int r = 0; r < n; r++)
          softmax_row<mode, type, true>(view_.factors, s_, v_scale, p_, r,
                                        view_.first_visible(base + r) - token0,
                                        view_.position(base + r) + 1 - token0, hd, t);
      } else {
        for (int r = 0; r < n; r++)
          softmax_row<mode, type, false>(view_.factors, s_, v_scale, p_, r, 0, 0, hd, t);
      }
      const int tokens = view_.position(last) + 1 - token0;
      weighted_sums<mode, Read>(n, p_, v, next_v, hd, tokens < kBlockTokens ? tokens : kBlockTokens, t.o);
    }
    for (int r = 0; r < n; r++) {
      sums.log_max[r] = log_max(t.max[r], view_.factors);
      sums.total[r] = hsum(load(t.total[r]));
    }
  }

  // q rows -> tiles of kTileRows rows, [head_dim][kTileRows] or [head_dim / 2][kTileRows] pairs; missing rows
  // are zero.
  void pack_queries(const AttentionArgs& a, const AttentionItem& item) {
    const int hd = view_.head_dim;
    for (int base = 0; base < view_.rows; base += kTileRows) {
      float* tile = q_ + size_t(base) * size_t(hd);
      for (int r = 0; r < kTileRows; r++) {
        const float* q = base + r < view_.rows ? query(a, item, view_, base + r) : nullptr;
        for (int d = 0; d < hd; d += 16) {
          const F x = q ? load(q + d) : zero();
          if constexpr (kPaired<mode>) {
            uint16_t h[16];
            store_bf16(h, x);
            uint32_t* pairs = reinterpret_cast<uint32_t*>(tile) + d / 2 * kTileRows + r;
            for (int j = 0; j < 8; j++) memcpy(pairs + j * kTileRows, h + 2 * j, 4);
          } else {
            float f[16];
            store(f, mode == Mode::dot ? bf16_nearest(x) : x);
            for (int j = 0; j < 16; j++) tile[(d + j) * kTileRows + r] = f[j];
          }
        }
      }
    }
  }

  const ItemView view_;
  const KvLayer& kv_;
  const uint8_t* k0_;
  float *q_, *s_, *p_;
  uint16_t *k_, *v_;  // of one split, if its codes are expanded
};

template <KvType type>
static void attend(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  if constexpr (type == KvType::f32)
    attend_item<VectorMethod<Mode::exact, type>>(a, item, scratch);
  else if (a.exact)
    attend_item<VectorMethod<Mode::exact, type>>(a, item, scratch);
  else
    attend_item<VectorMethod<Mode::dot, type>>(a, item, scratch);
}

}  // namespace attention

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
