// Runs a Program for one batch: the whole step in one call, without allocating.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "kernel_table.h"
#include "program.h"
#include "threads.h"

namespace ff {

struct RuntimeLimits {
  int32_t threads, max_tokens, max_seqs, max_context, num_blocks;
};

// One step's inputs; the arrays belong to the caller and live during step().
struct StepBatch {
  const int32_t* tokens;
  int32_t token_count;
  Sequences seqs;
  const SampleRow* samples;
  int32_t sample_count;
  SampleInputs inputs;
  SampleOutputs outputs;
  float* logits;  // [sample_count, vocab] or null
  // inputs.masks are written beside the step, and final once this is not 0; null: they are.
  const uint8_t* masks_ready;
};

class Runtime {
 public:
  Runtime(ProgramSpec spec, RuntimeLimits limits, Isa isa);
  ~Runtime();

  // Precondition: the batch was checked (bindings.cpp): ids in the vocabulary, rows, blocks and sizes within
  // the limits.
  void step(const StepBatch& batch);

  const ProgramSpec& spec() const { return spec_; }
  const RuntimeLimits& limits() const { return limits_; }
  size_t kv_block_bytes() const { return kv_block_bytes_; }
  size_t arena_bytes() const { return arena_.bytes; }
  void copy_block(int32_t from, int32_t to);
  // A block's content, layer after layer: kv_block_bytes() bytes.
  void read_block(int32_t block, uint8_t* out) const;
  void write_block(int32_t block, const uint8_t* data);

  // From now on, steps note the largest magnitude of each column of every matmul's input; observed(op) is
  // empty for others.
  void start_observing();
  const std::vector<float>& observed(size_t op) const { return observed_.at(op); }

 private:
  // Zeroed pages from the system, touched only when used.
  struct Pages {
    uint8_t* data = nullptr;
    size_t bytes = 0;
    Pages() = default;
    explicit Pages(size_t n);
    Pages(Pages&& other) noexcept;
    Pages& operator=(Pages&& other) noexcept;
    ~Pages();
  };
  struct ThreadState {
    uint8_t* scratch;  // matmul, attention, sampling
    float* gate;       // [kRowChunk, kBlockTiles * kTile]
    float* normed;     // the rows of a small batch, which each thread prepares for itself
    ActRows rows;
  };
  // One member's walk through a step; chunk: the logit rows being computed.
  struct Walk {
    Team::Member& member;
    int32_t chunk_begin = 0, chunk_rows = 0;
  };

  static void work(void* self, Team::Member& member);
  void run(Walk&);
  void execute(const Op& op, Walk&);
  void rotations(Walk&);

  void embed(const Op&, Walk&);
  void norm(const Op&, Walk&);
  void linear(const Op&, Walk&);
  void gated(const Op&, Walk&);
  void rope(const Op&, Walk&);
  void attention(const Op&, Walk&);
  void elementwise(const Op&, Walk&);
  void gather(const Op&, Walk&);
  void sample(const Op&, Walk&);

  // Calls body(begin, end) for runs of rows / body(segment, tile0, tile1, row0, row1) for blocks of a matmul,
  // shared out among the members; ends with a barrier.
  template <class Body>
  void share_rows(Walk&, int rows, int grain, Body&& body);
  template <class Body>
  void share_blocks(Walk&, const Op&, int segments, const Division&, int rows, Body&& body);

  ActRows prepare(const Op&, int rows, Walk&);
  MatmulArgs matmul_args(const Op&, const Segment&, const Division&, const ActRows&) const;
  void observe(const Op&, const ActRows&, int rows);

  // What a kernel computes together.
  struct Grain {
    int rows, tiles;
    bool tile_unit;
  };
  Grain grain_of(const Op&) const;
  Division divide(const Op&, int segments, int rows) const;
  Compute compute_of(const Matrix&) const;
  NormArgs norm_args(const NormRef&) const;
  float* at(const Ref& r) const { return slot_[size_t(r.slot)] + r.start; }
  size_t stride(int32_t slot) const { return slot_stride_[size_t(slot)]; }
  int rows_of(int32_t slot, const Walk& w) const;
  const float* vector(int32_t i) const { return i < 0 ? nullptr : spec_.vectors[size_t(i)].data(); }

  ProgramSpec spec_;
  RuntimeLimits limits_;
  const KernelTable& k_;
  Team team_;

  Pages arena_, kv_, scratch_;
  std::vector<float*> slot_;
  std::vector<size_t> slot_stride_;
  ActRows shared_;
  float* shared_normed_ = nullptr;
  size_t normed_stride_ = 0;
  std::vector<ThreadState> threads_;
  std::vector<KvLayer> kv_layers_;
  size_t kv_block_bytes_ = 0;
  std::vector<float*> cos_, sin_;  // per rope table [max_tokens, dim / 2]

  struct AttentionPlan {
    AttentionShape shape;
    AttentionPlanBounds bounds;
    std::vector<AttentionItem> items;
    int count = 0;
  };
  std::vector<AttentionPlan> plans_;  // one per distinct shape
  std::vector<int32_t> plan_of_;      // per op
  Pages partials_;
  std::vector<int32_t> part_counts_;
  std::vector<int32_t> position_;  // of each token of the batch

  std::vector<std::vector<float>> observed_;  // per op; empty unless observing
  const StepBatch* batch_ = nullptr;
  size_t first_logit_op_ = 0;
};

}  // namespace ff
