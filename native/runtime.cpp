#include "runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "sampler.h"

namespace ff {

namespace {

constexpr int kLogitChunk =
    32;  // logit rows computed and sampled at a time: bounds the logits held in memory

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Hands out pieces of one allocation, each on its own cache lines; first pass with base null counts the
// bytes.
struct Carver {
  uint8_t* base;
  size_t used = 0;
  template <class T>
  T* take(size_t count) {
    T* p = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += round_up(count * sizeof(T), 64);
    return p;
  }
};

}  // namespace

Runtime::Pages::Pages(size_t n) : bytes(round_up(std::max<size_t>(n, 1), n >= (1 << 20) ? 1 << 21 : 4096)) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data = static_cast<uint8_t*>(p);
  // On small pages, translating addresses takes a tenth of the time of a step of many rows. If it is refused:
  // slower, not wrong.
  madvise(data, bytes, MADV_HUGEPAGE);
}
Runtime::Pages::Pages(Pages&& other) noexcept { *this = std::move(other); }
Runtime::Pages& Runtime::Pages::operator=(Pages&& other) noexcept {
  std::swap(data, other.data);
  std::swap(bytes, other.bytes);
  return *this;
}
Runtime::Pages::~Pages() {
  if (data) munmap(data, bytes);
}

Runtime::Runtime(ProgramSpec spec, RuntimeLimits limits, Isa isa)
    : spec_(std::move(spec)), limits_(limits), k_(kernels(isa)), team_(limits.threads) {
  spec_.check();
  const size_t tokens = size_t(limits.max_tokens);
  const size_t threads = size_t(team_.size());

  int widest = 16, head_dim = 16;
  for (const Op& op : spec_.ops) widest = std::max(widest, op.x.width);
  for (const LayerShape& l : spec_.layers) head_dim = std::max(head_dim, l.head_dim);
  const size_t k = round_up(size_t(widest), 64);
  normed_stride_ = k;

  auto rows = [&](Carver& c, size_t n) {
    ActRows r;
    r.q_stride = k;
    r.scale_stride = k / kActGroup;
    r.sum_stride = k / 16;
    r.q = c.take<int8_t>(n * k);
    r.scale = c.take<float>(n * r.scale_stride);
    r.sums16 = c.take<int32_t>(n * r.sum_stride);
    r.sums32 = c.take<int32_t>(n * r.sum_stride);
    r.bf16 = c.take<uint16_t>(n * k);
    r.outliers = c.take<float>(n * kMaxOutliers);
    return r;
  };
  auto lay_out_arena = [&](Carver c) {
    slot_.clear(), slot_stride_.clear(), cos_.clear(), sin_.clear();
    for (size_t s = 0; s < spec_.slot_width.size(); s++) {
      slot_stride_.push_back(round_up(size_t(spec_.slot_width[s]), 16));
      const size_t n = spec_.slot_is_logit_rows[s] ? size_t(kLogitChunk) : tokens;
      slot_.push_back(c.take<float>(n * slot_stride_.back()));
    }
    for (const RopeTable& t : spec_.ropes) {
      cos_.push_back(c.take<float>(tokens * t.inv_freq.size()));
      sin_.push_back(c.take<float>(tokens * t.inv_freq.size()));
    }
    shared_ = rows(c, std::max<size_t>(tokens, kLogitChunk));
    shared_normed_ = c.take<float>(std::max<size_t>(tokens, kLogitChunk) * k);
    return c.used;
  };
  arena_ = Pages(lay_out_arena({nullptr}));
  lay_out_arena({arena_.data});

  const size_t scratch =
      std::max({matmul_scratch_bytes(int(k)), attention_scratch_floats(head_dim) * sizeof(float),
                sample_scratch_bytes(spec_.vocab)});
  auto lay_out_scratch = [&](Carver c) {
    threads_.assign(threads, {});
    for (ThreadState& t : threads_) {
      t.scratch = c.take<uint8_t>(scratch);
      t.gate = c.take<float>(size_t(kRowChunk) * kBlockTiles * kTile);
      t.normed = c.take<float>(size_t(kStreamRows) * k);
      t.rows = rows(c, kStreamRows);
    }
    return c.used;
  };
  scratch_ = Pages(lay_out_scratch({nullptr}));
  lay_out_scratch({scratch_.data});

  for (const LayerShape& l : spec_.layers)
    kv_block_bytes_ += ff::kv_block_bytes(spec_.kv_type, l.kv_heads, l.head_dim);
  kv_ = Pages(kv_block_bytes_ * size_t(limits.num_blocks));
  // All layers of a block lie together: what is touched, on pages of 2 MiB, grows with the blocks in use.
  uint8_t* base = kv_.data;
  for (const LayerShape& l : spec_.layers) {
    KvLayer v{};
    v.base = base;
    v.v_offset = kv_half_bytes(spec_.kv_type, l.head_dim);
    v.head_bytes = 2 * v.v_offset;
    v.block_bytes = kv_block_bytes_;
    v.kv_heads = l.kv_heads;
    v.head_dim = l.head_dim;
    v.type = spec_.kv_type;
    kv_layers_.push_back(v);
    base += v.head_bytes * size_t(l.kv_heads);
  }

  size_t partial_slots = 0, groups = 0, partial_floats = attention_partial_floats(head_dim);
  for (const Op& op : spec_.ops) {
    plan_of_.push_back(-1);
    if (op.kind != OpKind::attention) continue;
    const AttentionShape shape{op.heads, op.kv_heads, op.window, team_.size()};
    auto same = [&](const AttentionPlan& p) {
      return p.shape.heads == shape.heads && p.shape.kv_heads == shape.kv_heads &&
             p.shape.window == shape.window;
    };
    auto found = std::find_if(plans_.begin(), plans_.end(), same);
    plan_of_.back() = int32_t(found - plans_.begin());
    if (found != plans_.end()) continue;
    AttentionPlan plan{
        shape, attention_plan_bounds(shape, limits.max_tokens, limits.max_seqs, limits.max_context), {}, 0};
    plan.items.resize(plan.bounds.items);
    partial_slots = std::max(partial_slots, plan.bounds.partial_slots);
    groups = std::max(groups, plan.bounds.groups);
    plans_.push_back(std::move(plan));
  }
  partials_ = Pages(partial_slots * partial_floats * sizeof(float));
  part_counts_.assign(groups, 0);
  position_.resize(tokens);
  first_logit_op_ = size_t(std::find_if(spec_.ops.begin(), spec_.ops.end(),
                                        [](const Op& op) { return op.kind == OpKind::gather; }) -
                           spec_.ops.begin());
}

Runtime::~Runtime() = default;

void Runtime::copy_block(int32_t from, int32_t to) {
  std::memcpy(kv_.data + size_t(to) * kv_block_bytes_, kv_.data + size_t(from) * kv_block_bytes_,
              kv_block_bytes_);
}

void Runtime::read_block(int32_t block, uint8_t* out) const {
  std::memcpy(out, kv_.data + size_t(block) * kv_block_bytes_, kv_block_bytes_);
}

void Runtime::write_block(int32_t block, const uint8_t* data) {
  std::memcpy(kv_.data + size_t(block) * kv_block_bytes_, data, kv_block_bytes_);
}

void Runtime::step(const StepBatch& batch) {
  batch_ = &batch;
  for (int s = 0; s < batch.seqs.count; s++)
    for (int r = batch.seqs.row_start[s]; r < batch.seqs.row_start[s + 1]; r++)
      position_[size_t(r)] = batch.seqs.context[s] + r - batch.seqs.row_start[s];
  for (AttentionPlan& p : plans_) p.count = plan_attention(batch.seqs, p.shape, p.items.data(), p.bounds);
  team_.run(&Runtime::work, this);
  batch_ = nullptr;
}

void Runtime::work(void* self, Team::Member& member) {
  Walk walk{member};
  static_cast<Runtime*>(self)->run(walk);
}

void Runtime::run(Walk& w) {
  rotations(w);
  for (size_t i = 0; i < first_logit_op_; i++) execute(spec_.ops[i], w);
  const int rows = batch_->sample_count;
  for (w.chunk_begin = 0; w.chunk_begin < rows; w.chunk_begin += kLogitChunk) {
    w.chunk_rows = std::min(kLogitChunk, rows - w.chunk_begin);
    for (size_t i = first_logit_op_; i < spec_.ops.size(); i++) execute(spec_.ops[i], w);
    sample(spec_.ops.back(), w);
  }
}

}  // namespace ff
