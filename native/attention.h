// The contract of attention over a paged KV cache: plain data shared by the runtime, the planner of work
// items and the kernels of every instruction set. Nothing here owns memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff {

constexpr int kSplitBlocks = 16;   // KV blocks whose softmax is computed by itself, then merged in order
constexpr int kMaxGroup = 16;      // query heads per KV head
constexpr int kMaxTileRows = 144;  // (query row, query head) pairs of one work item

enum class KvType : int32_t { bf16 = 0, f32 = 1, int8 = 2, fp8 = 3 };

constexpr bool kv_is_coded(KvType type) { return type == KvType::int8 || type == KvType::fp8; }

constexpr int kBlockTokens = 32;  // tokens per KV block

// Bytes of K (or of V) of one KV head in a block.
constexpr size_t kv_half_bytes(KvType type, int head_dim) {
  const size_t numbers = size_t(head_dim) * kBlockTokens;
  if (kv_is_coded(type)) return numbers + kBlockTokens * sizeof(float);
  return numbers * (type == KvType::f32 ? 4 : 2);
}

// Bytes of one layer's block.
constexpr size_t kv_block_bytes(KvType type, int kv_heads, int head_dim) {
  return 2 * size_t(kv_heads) * kv_half_bytes(type, head_dim);
}

// One layer of the KV pool. Block b begins at base + b * block_bytes; inside it KV head h begins at
// h * head_bytes, K first, then V (at v_offset):
//   bf16: K as [head_dim / 2][32 tokens][2], V as [32 / 2 tokens][head_dim][2]  (pairs, as vdpbf16ps reads)
//   f32:  K as [head_dim][32 tokens],        V as [32 tokens][head_dim]
//   int8, fp8 (codes.h: int8, e4m3): in pairs as bf16, one byte per number, then 32 fp32 scales; K and V of a
//     token and head have a scale each, so that a row's codes depend on the row alone
// The pool is zero at start. A slot past the end of a sequence may hold another request's old numbers, even
// NaN, so kernels never let such a slot into a sum (not even multiplied by zero).
struct KvLayer {
  uint8_t* base;
  size_t block_bytes, head_bytes, v_offset;
  int32_t kv_heads, head_dim;
  KvType type;
};

// The sequences of one batch. Sequence s has tokens rows row_start[s] .. row_start[s + 1] - 1 of the batch at
// positions context[s] + i; its KV block for position p is blocks[block_start[s] + p / 32].
struct Sequences {
  int32_t count;
  const int32_t* row_start;    // [count + 1]
  const int32_t* context;      // [count]
  const int32_t* block_start;  // [count + 1]
  const int32_t* blocks;
};

struct HeadNorm {  // RMSNorm over each head; weight null: none
  const float* weight;
  float eps, offset;
};

struct AttentionArgs {
  // Rows of the batch, row stride in floats; q, k and v may be columns of one matrix. q and k are overwritten
  // by the prologue (norm and rotation in place).
  float *q, *k;
  const float* v;
  size_t q_stride, k_stride, v_stride;
  float* out;
  size_t out_stride;
  int32_t rows, heads, kv_heads, head_dim;
  float scale;         // > 0
  int32_t window;      // 0: none; else a query sees itself and the window - 1 tokens before it
  float softcap;       // 0: none
  const float* sinks;  // [heads] or null
  HeadNorm q_norm, k_norm;
  const float *cos, *sin;  // [rows, rope_dim / 2] of this batch's tokens, scaled; null: no rotation
  int32_t rope_dim;
  bool exact;  // fp32 throughout; otherwise q and probabilities may be rounded to bf16 for dot products
  KvLayer kv;
  Sequences seqs;
  // Where items that share their rows' KV (parts > 1) meet, of the sizes in attention_plan.h; may be null if
  // there are none. part_counts is all zero between layers.
  float* partials = nullptr;
  int32_t* part_counts = nullptr;
};

// A work item: query rows [row, row + rows) of the batch, all of them of sequence seq, and all query heads of
// KV head kv_head; rows * group <= kMaxTileRows. It reads the splits [split_begin, split_end) of the KV (512
// tokens each, clipped to what the rows see).
//
// parts > 1: as many items divide the same rows' splits between them. Each leaves every split's sums in the
// slots partial, partial + 1, ... (one per split and query head row, split-major, from the first item's split
// on), counts itself in part_counts[group], and the last one to finish merges all in order of position. So
// the division changes no bit.
struct AttentionItem {
  int32_t seq, row, rows, kv_head;
  int32_t split_begin = 0, split_end = INT32_MAX;
  int32_t parts = 1, group = 0;
  int32_t all_begin = 0, all_end = 0;  // parts > 1: the splits of all parts together
  int32_t partial = 0;                 // parts > 1: first slot of the group
};

}  // namespace ff
