#include "attention_plan.h"

#include <algorithm>

namespace ff {
namespace {

constexpr int kSplitTokens = kSplitBlocks * kBlockTokens;
constexpr int kItemsPerThread = 4;  // enough for the largest-first order to even out
constexpr int kLoadRows = 3;        // reading a KV block costs as much as computing this many rows with it
constexpr int kDividedRows = 16;    // (query row, head) pairs up to which an item's KV may be divided

int group_of(const AttentionShape& shape) { return shape.heads / shape.kv_heads; }

int max_item_rows(const AttentionShape& shape) { return std::max(1, kMaxTileRows / group_of(shape)); }

// KV blocks that rows [first, last] (positions) see together.
int visible_blocks(int first, int last, int window) {
  const int begin = window > 0 ? std::max(0, first - window + 1) : 0;
  return last / kBlockTokens + 1 - begin / kBlockTokens;
}

int64_t cost(int rows, int group, int first, int window) {
  const int middle = first + rows / 2;
  return int64_t(visible_blocks(middle, middle, window) + 1) * (rows * group + kLoadRows);
}

// Query rows per item: as large as fits, but small enough that all threads get some.
int item_rows(const Sequences& seqs, const AttentionShape& shape) {
  const int limit = max_item_rows(shape), rows = seqs.row_start[seqs.count];
  const int wanted = (shape.threads * kItemsPerThread + shape.kv_heads - 1) / shape.kv_heads;
  const int even = (rows + wanted - 1) / wanted;
  // Whole tiles of 12 (row, head) pairs: 4 rows of groups of three, 12 rows of single heads.
  const int group = group_of(shape), step = std::max(1, 12 / group);
  return std::min(limit, std::max(step, (even + step - 1) / step * step));
}

struct Cursor {
  AttentionItem* items;
  const AttentionPlanBounds& bounds;
  size_t count = 0, groups = 0, slots = 0;
};

void add_item(Cursor& c, const Sequences& seqs, const AttentionShape& shape, AttentionItem item,
              int parts_wanted) {
  const int first = seqs.context[item.seq] + item.row - seqs.row_start[item.seq],
            last = first + item.rows - 1;
  const int begin = (shape.window > 0 ? std::max(0, first - shape.window + 1) : 0) / kSplitTokens;
  const int end = last / kSplitTokens + 1, splits = end - begin, tile_rows = item.rows * group_of(shape);
  const int parts = std::min(parts_wanted, splits);
  const size_t slots = size_t(splits) * size_t(tile_rows);
  if (parts < 2 || tile_rows > kDividedRows || c.groups == c.bounds.groups ||
      c.slots + slots > c.bounds.partial_slots) {
    c.items[c.count++] = item;
    return;
  }
  item.parts = parts;
  item.group = int32_t(c.groups++);
  item.partial = int32_t(c.slots);
  item.all_begin = begin, item.all_end = end;
  c.slots += slots;
  for (int part = 0; part < parts; part++) {
    item.split_begin = begin + splits * part / parts;
    item.split_end = begin + splits * (part + 1) / parts;
    c.items[c.count++] = item;
  }
}

}  // namespace

AttentionPlanBounds attention_plan_bounds(const AttentionShape& shape, int max_rows, int max_seqs,
                                          int max_context) {
  const size_t heads = size_t(shape.kv_heads), target = size_t(shape.threads) * kItemsPerThread;
  const size_t splits = size_t(max_context) / kSplitTokens + 1;
  AttentionPlanBounds b;
  // Every sequence ends with at most one item that is not full, and a divided item becomes at most `target`
  // of them.
  const size_t step = size_t(std::max(1, 12 / group_of(shape)));
  const size_t whole = (size_t(max_rows) / step + size_t(max_seqs)) * heads;
  b.groups = shape.threads > 1 ? target : 0;
  b.items = whole + b.groups * target;
  b.partial_slots = b.groups * splits * kDividedRows;
  return b;
}

int plan_attention(const Sequences& seqs, const AttentionShape& shape, AttentionItem* items,
                   const AttentionPlanBounds& bounds) {
  const int rows = item_rows(seqs, shape), target = shape.threads * kItemsPerThread, group = group_of(shape);
  const auto each = [&](auto&& body) {
    for (int s = 0; s < seqs.count; s++)
      for (int row = seqs.row_start[s]; row < seqs.row_start[s + 1]; row += rows)
        for (int head = 0; head < shape.kv_heads; head++)
          body(AttentionItem{s, row, std::min(rows, seqs.row_start[s + 1] - row), head});
  };
  const auto whole_work = [&](const AttentionItem& i) {
    const int first = seqs.context[i.seq] + i.row - seqs.row_start[i.seq];
    return cost(i.rows, group, first, shape.window);
  };
  // No item should be more than its share of all: one long sequence among many short ones is divided, too.
  int64_t all = 0;
  each([&](const AttentionItem& i) { all += whole_work(i); });
  const int64_t share = std::max<int64_t>(1, all / target);
  Cursor c{items, bounds};
  each([&](const AttentionItem& i) {
    const int64_t parts = shape.threads > 1 ? (whole_work(i) + share - 1) / share : 1;
    add_item(c, seqs, shape, i, int(std::min<int64_t>(parts, target)));
  });

  const auto work = [&](const AttentionItem& i) {
    const int64_t undivided = whole_work(i);
    return i.parts > 1 ? undivided * (i.split_end - i.split_begin) / (i.all_end - i.all_begin) : undivided;
  };
  std::sort(items, items + c.count, [&](const AttentionItem& a, const AttentionItem& b) {
    const int64_t wa = work(a), wb = work(b);
    if (wa != wb) return wa > wb;
    if (a.row != b.row) return a.row < b.row;
    if (a.kv_head != b.kv_head) return a.kv_head < b.kv_head;
    return a.split_begin < b.split_begin;
  });
  return int(c.count);
}

}  // namespace ff
