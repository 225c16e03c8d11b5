// Dividing one layer's attention into work items for threads. The division changes no bit of the result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"

namespace ff {

// Floats of scratch per thread for attention_item: q, o and what the kernels keep of a tile of rows; on a
// tile unit also K and V of a split.
constexpr size_t attention_scratch_floats(int head_dim) {
  const size_t padded = (size_t(head_dim) + 31) / 32 * 32;
  return (2 * kMaxTileRows + 32) * padded + (kSplitBlocks + 1) * kBlockTokens * padded +
         32 * 8 * kBlockTokens + 4 * kMaxTileRows + 512;
}

// Floats of one slot of AttentionArgs::partials: a row's weighted sum, the logarithm of its largest weight,
// the weights' sum, and padding to whole cache lines.
constexpr size_t attention_partial_floats(int head_dim) { return size_t(head_dim) + 16; }

// What the division depends on; layers that agree in it can share one plan of a step.
struct AttentionShape {
  int32_t heads, kv_heads, window;
  int32_t threads;
};

// Bounds for buffers that last for a session: batches of at most max_rows tokens, max_seqs sequences and
// max_context tokens in each.
struct AttentionPlanBounds {
  size_t items, groups, partial_slots;
};
AttentionPlanBounds attention_plan_bounds(const AttentionShape&, int max_rows, int max_seqs, int max_context);

// Fills items, the largest first, and returns how many. Sequences with few rows have their KV divided too
// when there are not enough items to keep the threads busy. `bounds` are the sizes of the buffers; the plan
// always fits in buffers of attention_plan_bounds. Allocates nothing.
int plan_attention(const Sequences&, const AttentionShape&, AttentionItem* items,
                   const AttentionPlanBounds& bounds);

}  // namespace ff
