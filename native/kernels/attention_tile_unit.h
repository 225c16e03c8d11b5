// Attention on a tile unit (tile_unit.h): scores and weighted sums of up to 32 rows at a time.
//
// Within a split the softmax goes by runs of 128 positions, counted from position 0: the scores of a run,
// their maximum, then weights (rounded to bf16) and sums, which count less where the maximum rose. The tile
// unit adds the products of 32 positions (of 32 numbers of a head) at a time, in order, to each row by
// itself. So a row's bits depend on that row alone here too: positions that it does not see have the weight
// zero.
#pragma once

#include "attention_item.h"
#include "kernels/tile_unit.h"
#include "kv_reader.h"

namespace ff::FF_NS {
namespace attention {

constexpr int kRunBlocks = 4, kRunTokens = kRunBlocks * kBlockTokens, kRunVectors = kRunTokens / 16;
constexpr int kUnitRows = 16, kUnitBytes = 64;
static_assert(kSplitBlocks % kRunBlocks == 0);

template <KvType type, class Unit>
class TileMethod {
 public:
  static constexpr int kRows = 2 * kUnitRows;

  TileMethod(const AttentionArgs& a, const AttentionItem& item, const ItemView& view, Carver& carver)
      : view_(view),
        kv_(a.kv),
        k0_(a.kv.base + size_t(item.kv_head) * a.kv.head_bytes),
        steps_((view.head_dim + 31) / 32),
        end_(view.position(view.rows - 1) + 1),
        end_block_((end_ + kBlockTokens - 1) / kBlockTokens) {
    if (item.parts > 1 && end_block_ > item.split_end * kSplitBlocks)
      end_block_ = item.split_end * kSplitBlocks;
    const size_t hd = size_t(view.head_dim), padded = size_t(steps_) * 32;
    q_ = carver.take<uint16_t>(kMaxTileRows * padded);
    s_ = carver.take<float>(kRows * kRunTokens), p_ = carver.take<uint16_t>(kRows * kRunTokens);
    tail_ = carver.take<uint16_t>(hd * kBlockTokens);
    k_ = carver.take<uint16_t>(kSplitBlocks * padded * kBlockTokens);
    v_ = carver.take<uint16_t>(kSplitBlocks * hd * kBlockTokens);
    for (int i = 0; i < view.rows; i++) {
      const float* q = query(a, item, view, i);
      uint16_t* to = q_ + size_t(i) * padded;
      for (size_t d = 0; d < hd; d += 16) store_bf16(to + d, load(q + d));
      if (padded > hd) memset(to + hd, 0, (padded - hd) * 2);
    }
  }
  ~TileMethod() { unit_.release(); }
  TileMethod(const TileMethod&) = delete;
  TileMethod& operator=(const TileMethod&) = delete;

  // Many rows read the same blocks: they are decoded once. Few rows decode a run as they come to it.
  void begin_split(int split) {
    if (view_.rows <= kRows) return;
    int begin, end;
    view_.visible_blocks(0, view_.rows - 1, kSplitBlocks, split, begin, end);
    expand(begin, end);
  }

  void attend(int split, int base, int n, const SplitSums& sums) {
    configure(n);
    const int last = base + n - 1;
    for (int r = 0; r < n; r++) {
      max_[r] = minus_infinity();
      store(total_[r], zero());
    }
    int begin, end;
    view_.visible_blocks(base, last, kSplitBlocks, split, begin, end);
    if (begin >= end) {
      memset(sums.o, 0, sizeof(float) * size_t(n) * size_t(view_.head_dim));
    }
    for (int run = begin / kRunBlocks, first = 1; begin < end; run++, first = 0) {
      const int stop = (run + 1) * kRunBlocks < end ? (run + 1) * kRunBlocks : end;
      if (view_.rows <= kRows) expand(begin, stop), prefetch_blocks(stop);
      attend_run(run, begin, stop, base, n, first, sums.o);
      begin = stop;
    }
    for (int r = 0; r < n; r++) {
      const float total = hsum(load(total_[r]));
      // NaN among the scores: the maximum may not have seen it, the sum has.
      sums.log_max[r] = total != total ? total : log_max(max_[r], view_.factors);
      sums.total[r] = total;
    }
  }

 private:
  static constexpr bool kCoded = kv_is_coded(type);

  bool copies_k() const { return kCoded || view_.head_dim % 32; }
  const uint8_t* block_at(int block) const { return k0_ + size_t(view_.blocks[block]) * kv_.block_bytes; }
  const float* scales(const uint8_t* half) const {
    return reinterpret_cast<const float*>(half + view_.head_dim * kBlockTokens);
  }
  size_t k_numbers() const { return size_t(steps_) * 32 * kBlockTokens; }
  size_t v_numbers() const { return size_t(view_.head_dim) * kBlockTokens; }

  // Pairs of tokens from the block on; the last one's partner is zero.
  int pairs_in(int block) const { return (end_ - block * kBlockTokens + 1) / 2; }

  const void* keys(int block) const {
    if (copies_k()) return k_ + size_t(block % kSplitBlocks) * k_numbers();
    return block_at(block);
  }
  const void* values(int block) const {
    if (kCoded) return v_ + size_t(block % kSplitBlocks) * v_numbers();
    return pairs_in(block) < kBlockTokens / 2 ? reinterpret_cast<const uint8_t*>(tail_)
                                              : block_at(block) + kv_.v_offset;
  }

  // Blocks as the unit reads them: bf16, K in whole steps of 32 numbers of a head, and zero where the
  // sequence has no token yet (V alone: such a score is hidden, but zero times what lies there might be NaN).
  void expand(int begin, int end) {
    const int hd = view_.head_dim;
    for (int block = begin; block < end; block++) {
      const uint8_t *k = block_at(block), *v = k + kv_.v_offset;
      const int pairs = pairs_in(block);
      const bool whole = pairs >= kBlockTokens / 2;
      if (copies_k()) {
        uint16_t* to = k_ + size_t(block % kSplitBlocks) * k_numbers();
        decode(k, hd * kBlockTokens, to);
        memset(to + hd * kBlockTokens, 0, (k_numbers() - size_t(hd) * kBlockTokens) * 2);
      }
      if (!kCoded && whole) continue;
      uint16_t* to = kCoded ? v_ + size_t(block % kSplitBlocks) * v_numbers() : tail_;
      const int numbers = whole ? hd * kBlockTokens : pairs * 2 * hd;
      decode(v, numbers, to);
      memset(to + numbers, 0, (v_numbers() - size_t(numbers)) * 2);
    }
  }

  static void decode(const uint8_t* from, int n, uint16_t* to) {
    if constexpr (kCoded) {
      decode_codes<type>(from, n, to);
    } else {
      memcpy(to, from, size_t(n) * 2);
    }
  }

  // With few rows memory is the limit, and the hardware's prefetchers do not know where the next block lies.
  void prefetch_blocks(int begin) const {
    const int end = begin + kRunBlocks < end_block_ ? begin + kRunBlocks : end_block_;
    const size_t bytes = kv_half_bytes(type, view_.head_dim);
    for (int block = begin; block < end; block++)
      for (size_t i = 0; i < 2 * bytes; i += 64) prefetch_l2(block_at(block) + i);
  }

  void configure(int n) {
    if (n == configured_) return;
    const int upper = n < kUnitRows ? n : kUnitRows, lower = n - upper;
    TileShapes shapes;
    shapes.set(0, upper, kUnitBytes), shapes.set(1, upper, kUnitBytes), shapes.set(4, upper, kUnitBytes);
    if (lower)
      shapes.set(2, lower, kUnitBytes), shapes.set(3, lower, kUnitBytes), shapes.set(5, lower, kUnitBytes);
    shapes.set(6, kUnitRows, kUnitBytes), shapes.set(7, kUnitRows, kUnitBytes);
    unit_.configure(shapes);
    configured_ = n;
  }

  void attend_run(int run, int begin, int end, int base, int n, bool first, float* o) {
    const int token0 = run * kRunTokens, last = base + n - 1;
    const int vector0 = 2 * (begin - run * kRunBlocks), vectors = 2 * (end - begin);
    for (int block = begin; block < end; block++)
      multiply_keys(keys(block), base, n, s_ + (block - run * kRunBlocks) * kBlockTokens);
    if (kCoded) gather_scales(begin, end);
    const bool all = vectors == kRunVectors && token0 + kRunTokens - 1 <= view_.position(base) &&
                     token0 >= view_.first_visible(last);
    if (all) {
      for (int r = 0; r < n; r++) softmax<true>(r, 0, kRunVectors, 0, 0, o);
    } else {
      for (int r = 0; r < n; r++)
        softmax<false>(r, vector0, vectors, view_.first_visible(base + r) - token0,
                       view_.position(base + r) + 1 - token0, o);
    }
    multiply_values(run, begin, end, n, first, o);
  }

  // s[row][32 tokens] = q[row] . K[:, token]
  void multiply_keys(const void* k, int base, int n, float* s) {
    if (n > kUnitRows)
      key_square<true>(k, base, s);
    else
      key_square<false>(k, base, s);
  }

  template <bool LOWER>
  FF_INLINE void key_square(const void* k, int base, float* s) {
    const size_t stride = size_t(steps_) * 64;
    const uint8_t* q = reinterpret_cast<const uint8_t*>(q_) + size_t(base) * stride;
    const uint8_t* w = static_cast<const uint8_t*>(k);
    unit_.template clear<0>(), unit_.template clear<1>();
    if (LOWER) unit_.template clear<2>(), unit_.template clear<3>();
    for (int i = 0; i < steps_; i++, q += 64, w += 2 * kUnitRows * kUnitBytes) {
      unit_.template load<4>(q, stride);
      unit_.template load<6>(w, 2 * kUnitBytes);
      unit_.template dot_bf16<0, 4, 6>();
      unit_.template load<7>(w + kUnitBytes, 2 * kUnitBytes);
      unit_.template dot_bf16<1, 4, 7>();
      if (LOWER) {
        unit_.template load<5>(q + kUnitRows * stride, stride);
        unit_.template dot_bf16<2, 5, 6>();
        unit_.template dot_bf16<3, 5, 7>();
      }
    }
    constexpr size_t kStride = kRunTokens * sizeof(float);
    unit_.template store<0>(s, kStride), unit_.template store<1>(s + 16, kStride);
    if (LOWER) {
      s += kUnitRows * kRunTokens;
      unit_.template store<2>(s, kStride), unit_.template store<3>(s + 16, kStride);
    }
  }

  void gather_scales(int begin, int end) {
    for (int block = begin; block < end; block++) {
      const int at = block % kRunBlocks * kBlockTokens;
      memcpy(k_scale_ + at, scales(block_at(block)), kBlockTokens * sizeof(float));
      memcpy(v_scale_ + at, scales(block_at(block) + kv_.v_offset), kBlockTokens * sizeof(float));
    }
  }

  // Scores of one row -> weights, times V's scales if it has them; the row sees the positions [begin, end) of
  // the run. whole: all of them.
  template <bool whole>
  FF_INLINE void softmax(int r, int vector0, int vectors, int begin, int end, float* o) {
    const ScoreFactors& f = view_.factors;
    const float* s = s_ + r * kRunTokens + vector0 * 16;
    if (whole) vectors = kRunVectors;
    F x[kRunVectors];
    F run_max = set1(minus_infinity());
    FF_UNROLL(8)
    for (int i = 0; i < vectors; i++) {
      x[i] = load(s + 16 * i);
      if constexpr (kCoded) x[i] = mul(x[i], load(k_scale_ + 16 * (vector0 + i)));
      if (f.cap != 0) x[i] = soft_cap(x[i], set1(f.over_cap), set1(f.cap));
      if constexpr (!whole) {
        const int at = 16 * (vector0 + i);
        x[i] = visible(x[i], begin - at, end - at);
      }
      run_max = max(x[i], run_max);
    }
    if (gt_mask(run_max, set1(max_[r]))) {
      const float before = max_[r], now = hmax(run_max);
      if (before > minus_infinity()) rescale(r, o, exp2_scalar((before - now) * f.to_log2));
      max_[r] = now;
    }
    // No token seen yet: any finite reference gives the weights exp(-inf) = 0.
    const float reference = max_[r] == minus_infinity() ? 0.0f : max_[r] * f.to_log2;
    const F factor = set1(f.to_log2), minus = set1(-reference);
    uint16_t* p = p_ + r * kRunTokens + vector0 * 16;
    F total = load(total_[r]);
    FF_UNROLL(4)
    for (int i = 0; i < vectors; i += 2) {
      F p0 = exp2<true>(fma(x[i], factor, minus)), p1 = exp2<true>(fma(x[i + 1], factor, minus));
      if constexpr (!kCoded) {
        total = store_bf16_sum(p + 16 * i, p0, p1, total);
      } else {
        total = add(total, add(p0, p1));
        const float* scale = v_scale_ + 16 * (vector0 + i);
        p0 = mul(p0, load(scale)), p1 = mul(p1, load(scale + 16));
        if constexpr (!whole) {  // a scale where there is no token yet may be NaN
          const int at = 16 * (vector0 + i);
          p0 = only(p0, zero(), begin - at, end - at);
          p1 = only(p1, zero(), begin - at - 16, end - at - 16);
        }
        store_bf16_sum(p + 16 * i, p0, p1, zero());
      }
    }
    store(total_[r], total);
  }

  void rescale(int r, float* o, float factor) {
    const F f = set1(factor);
    store(total_[r], mul(load(total_[r]), f));
    o += size_t(r) * size_t(view_.head_dim);
    for (int d = 0; d < view_.head_dim; d += 16) store(o + d, mul(load(o + d), f));
  }

  // o[row] (+)= sum over the blocks' tokens of p[row][token] * V[token]
  void multiply_values(int run, int begin, int end, int n, bool first, float* o) {
    int column = 0;
    const int hd = view_.head_dim;
    const bool lower = n > kUnitRows;
    for (; column + 32 <= hd; column += 32)
      lower ? value_square<true, true>(run, begin, end, column, first, o)
            : value_square<false, true>(run, begin, end, column, first, o);
    if (column < hd)
      lower ? value_square<true, false>(run, begin, end, column, first, o)
            : value_square<false, false>(run, begin, end, column, first, o);
  }

  template <bool LOWER, bool RIGHT>
  FF_INLINE void value_square(int run, int begin, int end, int column, bool first, float* o) {
    const size_t hd = size_t(view_.head_dim), stride = hd * sizeof(float);
    float *upper = o + column, *lower = upper + kUnitRows * hd;
    if (first) {
      unit_.template clear<0>();
      if (RIGHT) unit_.template clear<1>();
      if (LOWER) unit_.template clear<2>();
      if (LOWER && RIGHT) unit_.template clear<3>();
    } else {
      unit_.template load<0>(upper, stride);
      if (RIGHT) unit_.template load<1>(upper + 16, stride);
      if (LOWER) unit_.template load<2>(lower, stride);
      if (LOWER && RIGHT) unit_.template load<3>(lower + 16, stride);
    }
    constexpr size_t kStride = kRunTokens * sizeof(uint16_t);
    for (int block = begin; block < end; block++) {
      const uint16_t* p = p_ + (block - run * kRunBlocks) * kBlockTokens;
      const uint8_t* v = static_cast<const uint8_t*>(values(block)) + size_t(column) * 4;
      unit_.template load<4>(p, kStride);
      unit_.template load<6>(v, hd * 4);
      unit_.template dot_bf16<0, 4, 6>();
      if (RIGHT) {
        unit_.template load<7>(v + kUnitBytes, hd * 4);
        unit_.template dot_bf16<1, 4, 7>();
      }
      if (LOWER) {
        unit_.template load<5>(p + kUnitRows * kRunTokens, kStride);
        unit_.template dot_bf16<2, 5, 6>();
      }
      if (LOWER && RIGHT) unit_.template dot_bf16<3, 5, 7>();
    }
    unit_.template store<0>(upper, stride);
    if (RIGHT) unit_.template store<1>(upper + 16, stride);
    if (LOWER) unit_.template store<2>(lower, stride);
    if (LOWER && RIGHT) unit_.template store<3>(lower + 16, stride);
  }

  Unit unit_;
  const ItemView view_;
  const KvLayer& kv_;
  const uint8_t* k0_;
  const int steps_;  // of 32 numbers of a head
  const int end_;    // position after the item's last row
  int end_block_;    // after the last block that the item reads
  int configured_ = 0;
  uint16_t *q_, *p_, *tail_, *k_, *v_;
  float* s_;
  float max_[kRows];
  alignas(64) float total_[kRows][16];
  alignas(64) float k_scale_[kRunTokens], v_scale_[kRunTokens];
};

}  // namespace attention
}  // namespace ff::FF_NS
