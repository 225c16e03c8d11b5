// What comes before attention: norm and rotation of q and k by heads, then k and v into the paged cache.
#pragma once

#include "../attention.h"
#include "../vec.h"
#include "codes.h"

namespace ff::FF_NS {
namespace attention {

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

// n rows of k or v of one KV head, the first one's first number at `at`.
struct HeadRows {
  const float* at;
  size_t stride;
  int n;
  const float* row(int i) const { return at + size_t(i) * stride; }
};

// k and v of tokens of one KV head -> the slots from `token` on of the head's place in a block.
static inline void write_floats(uint8_t* head, const KvLayer& kv, int token, HeadRows k, HeadRows v) {
  const int hd = kv.head_dim;
  float* to = reinterpret_cast<float*>(head) + token;
  float* to_v = reinterpret_cast<float*>(head + kv.v_offset) + size_t(token) * size_t(hd);
  for (int i = 0; i < k.n; i++, to++, to_v += hd) {
    for (int d = 0; d < hd; d++) to[d * kBlockTokens] = k.row(i)[d];
    memcpy(to_v, v.row(i), sizeof(float) * size_t(hd));
  }
}

static inline void write_half_keys(uint8_t* head, int hd, int token, HeadRows k) {
  uint32_t* to = reinterpret_cast<uint32_t*>(head) + token;  // [hd / 2][32] pairs
  uint16_t pairs[16][32];
  for (int i = 0; i < k.n;) {
    const int n = k.n - i >= 16 ? 16 : 1;
    for (int d = 0; d < hd; d += 32) {
      const int width = hd - d < 32 ? 16 : 32;
      for (int r = 0; r < n; r++)
        for (int j = 0; j < width; j += 16) store_bf16(pairs[r] + j, load(k.row(i + r) + d + j));
      uint32_t* to_d = to + i + d / 2 * kBlockTokens;
      if (n == 16 && width == 32) {
        transpose16(reinterpret_cast<const uint32_t*>(pairs), 16, to_d, kBlockTokens);
        continue;
      }
      for (int r = 0; r < n; r++)
        for (int j = 0; j < width / 2; j++) memcpy(to_d + r + j * kBlockTokens, pairs[r] + 2 * j, 4);
    }
    i += n;
  }
}

static inline void write_half_values(uint16_t* to, int hd, int token, HeadRows v) {
  for (int i = 0; i < v.n;) {
    uint16_t* pairs = to + (token + i) / 2 * 2 * hd;
    const bool both = (token + i) % 2 == 0 && i + 1 < v.n;
    for (int d = 0; d < hd; d += 16) {
      if (both) {
        store_bf16_pairs(pairs + 2 * d, load(v.row(i) + d), load(v.row(i + 1) + d));
      } else {  // the other token of the pair may be another thread's
        uint16_t h[16];
        store_bf16(h, load(v.row(i) + d));
        for (int j = 0; j < 16; j++) pairs[2 * (d + j) + (token + i) % 2] = h[j];
      }
    }
    i += both ? 2 : 1;
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

static inline void write_tokens(uint8_t* head, const KvLayer& kv, int token, HeadRows k, HeadRows v) {
  switch (kv.type) {
    case KvType::bf16:
      write_half_keys(head, kv.head_dim, token, k);
      return write_half_values(reinterpret_cast<uint16_t*>(head + kv.v_offset), kv.head_dim, token, v);
    case KvType::f32: return write_floats(head, kv, token, k, v);
    case KvType::int8:
      for (int i = 0; i < k.n; i++) write_codes<Code::int8>(head, kv, token + i, k.row(i), v.row(i));
      return;
    case KvType::fp8:
      for (int i = 0; i < k.n; i++) write_codes<Code::e4m3>(head, kv, token + i, k.row(i), v.row(i));
      return;
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

}  // namespace attention

// For batch rows [row0, row1): per-head norm and rotation of q and k in place, then k and v into the cache.
// Threads may share the rows in any way.
static void attention_prologue(const AttentionArgs& a, int row0, int row1) {
  int s = 0;
  for (int row = row0; row < row1;) {
    while (a.seqs.row_start[s + 1] <= row) s++;
    const int position = a.seqs.context[s] + row - a.seqs.row_start[s], token = position % kBlockTokens;
    const int32_t block = a.seqs.blocks[a.seqs.block_start[s] + position / kBlockTokens];
    // Rows of one sequence and block.
    int end = row + kBlockTokens - token;
    if (end > a.seqs.row_start[s + 1]) end = a.seqs.row_start[s + 1];
    if (end > row1) end = row1;
    for (int r = row; r < end; r++) {
      attention::prepare_heads(a.q + size_t(r) * a.q_stride, a.heads, a, a.q_norm, r);
      attention::prepare_heads(a.k + size_t(r) * a.k_stride, a.kv_heads, a, a.k_norm, r);
    }
    // Only the sequence's last row may touch the slot after its own: for the others it is the next row's.
    const int last = token + end - row - 1;
    const bool clear = end == a.seqs.row_start[s + 1] && last % 2 == 0;
    for (int h = 0; h < a.kv_heads; h++) {
      uint8_t* head = a.kv.base + size_t(block) * a.kv.block_bytes + size_t(h) * a.kv.head_bytes;
      const float* k = a.k + size_t(row) * a.k_stride + h * a.head_dim;
      const float* v = a.v + size_t(row) * a.v_stride + h * a.head_dim;
      attention::write_tokens(head, a.kv, token, {k, a.k_stride, end - row}, {v, a.v_stride, end - row});
      if (clear) attention::clear_partner(head, a.kv, last);
    }
    row = end;
  }
}

}  // namespace ff::FF_NS
