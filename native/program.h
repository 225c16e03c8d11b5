// A Program as the runtime runs it: flat ops over slots of an arena. Built by Python once, read-only
// afterwards.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention.h"
#include "matrix.h"
#include "rows.h"

namespace ff {

enum class OpKind : int32_t { embed, norm, linear, rope, attention, gate, add, scale, gather, logits };

// Columns [start, start + width) of a slot.
struct Ref {
  int32_t slot = -1, start = 0, width = 0;
};

struct Segment {  // one matrix of a linear; its outputs follow those of the segment before
  int32_t matrix = -1, bias = -1;
  const uint16_t* outlier_columns = nullptr;  // fp16 [tiles][outliers][16], not owned
};

// How a matmul is cut into blocks, which a thread computes one at a time.
struct Division {
  int32_t least = 1, most = 0;  // of so many rows
  int32_t stream_rows = 0;      // see MatmulArgs
  bool runs = false;            // a thread takes a run of blocks that lie together, as long as its share
  int32_t block = 1;            // tiles of a block
  int32_t chunk = 1;            // rows of a block, at most
};

struct NormRef {  // indices of vectors, -1: none
  int32_t weight = -1, bias = -1;
  float eps = 0, offset = 0;
  bool layer = false;
};

struct Op {
  OpKind kind;
  Ref x, y, z;  // inputs; attention: q, k, v
  Ref out;
  int32_t residual = -1;  // slot
  std::vector<Segment> segments;
  std::vector<int32_t> outliers;    // columns of x kept out of its int8 groups
  std::vector<Division> divisions;  // measured, by ascending rows; none: by rule
  NormRef norm, k_norm;             // attention: of q, of k
  Act act = Act::none;
  float scale = 1, softcap = 0;
  int32_t heads = 1, kv_heads = 1, head_dim = 0, window = 0, layer = 0;
  int32_t sinks = -1, rope = -1;
};

struct RopeTable {
  std::vector<float> inv_freq;
  float scale = 1;
};

struct LayerShape {
  int32_t kv_heads, head_dim;
};

struct ProgramSpec {
  std::vector<Op> ops;
  std::vector<Matrix> matrices;
  std::vector<std::vector<float>> vectors;
  std::vector<RopeTable> ropes;
  std::vector<LayerShape> layers;
  std::vector<int32_t> slot_width;  // floats
  std::vector<bool> slot_is_logit_rows;
  int32_t vocab = 0, hidden = 0;
  // What integer weights are multiplied in; f32 means every matmul, and attention.
  Compute integers = Compute::int8;
  KvType kv_type = KvType::bf16;

  // Throws std::invalid_argument naming the op if anything is out of range or of the wrong width.
  void check() const;
};

}  // namespace ff
