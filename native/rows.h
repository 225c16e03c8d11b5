// Plain data that row-wise and matmul kernels take. Nothing here owns memory.
#pragma once

#include "matrix.h"

namespace ff {

constexpr int kActGroup = 32;     // activations that share one int8 scale; a multiple of every weight group
constexpr int kMaxOutliers = 16;  // columns of an input that are kept out of its int8 groups

enum class Act : int32_t { none = 0, silu = 1, gelu_tanh = 2, gelu = 3 };

// What a matmul computes with: int8 on integer weights, bf16 on integer, bf16 and fp8 weights, or fp32 on
// any.
enum class Compute : int32_t { int8 = 0, bf16 = 1, f32 = 2 };

struct NormArgs {  // weight null: no norm. bias null: none.
  const float* weight = nullptr;
  const float* bias = nullptr;
  float eps = 0, offset = 0;
  bool layer = false;  // LayerNorm instead of RMSNorm
};

// Rows ready to be multiplied; each form is there only if some matrix of the op needs it.
struct ActRows {
  const float* f32 = nullptr;
  size_t f32_stride = 0;
  int8_t* q = nullptr;        // [rows, q_stride]
  float* scale = nullptr;     // [rows, scale_stride], one per kActGroup
  int32_t* sums16 = nullptr;  // [rows, sum_stride], sums of q over 16 consecutive k
  int32_t* sums32 = nullptr;  // [rows, sum_stride], over 32
  uint16_t* bf16 = nullptr;   // [rows, q_stride], zero-padded to even k
  float* outliers = nullptr;  // [rows, kMaxOutliers], the columns that q leaves out
  size_t q_stride = 0, scale_stride = 0, sum_stride = 0;
};

struct PrepareArgs {  // x -> norm(x) in the forms asked for
  const float* x;
  size_t x_stride;
  int32_t k;
  NormArgs norm;
  bool want_q, want_bf16;
  // Columns with much larger numbers than their neighbours would cost their group its precision: they are
  // zero in q and kept in fp32 beside it.
  const int32_t* outliers;
  int32_t outlier_count;
  float* normed;  // fp32 form; f32 of `to` must point to it if there is a norm
  size_t normed_stride;
  ActRows to;
};

struct MatmulOut {
  float* out;  // element (row_base, column_base) of the product
  size_t stride;
  int32_t row_base = 0, column_base = 0;
  const float* bias = nullptr;      // [n]
  const float* residual = nullptr;  // element (0, 0); may alias out
  size_t residual_stride = 0;
  // out = act(gate) * y; [rows, gate_stride], its first row and column are those of the block.
  const float* gate = nullptr;
  size_t gate_stride = 0;
  Act act = Act::none;
  float scale = 1, softcap = 0;
};

struct MatmulArgs {
  const Matrix* w;
  // The matrix's columns at the outliers of its input, fp16 [tiles][outlier_count][16]; null if there are
  // none.
  const uint16_t* outlier_columns = nullptr;
  int32_t outlier_count = 0;
  Compute compute;
  int32_t stream_rows = 0;  // int8: weights of blocks of up to so many rows are unpacked in registers
  ActRows act;
  MatmulOut out;
  const uint8_t* next = nullptr;  // packed weights that will be wanted after this block
};

constexpr int kStreamRows = 4;  // rows that weights unpacked in registers meet at once
constexpr int kBlockTiles = 4;  // tiles of one work item of a matmul, at most
constexpr int kRowChunk = 256;  // rows of one work item of a matmul, at most
constexpr int kStageK = 2048;   // k of two tiles of weights that are held decoded to bf16

// Bytes of scratch that matmul_block needs per thread for matrices of up to k columns.
inline size_t matmul_scratch_bytes(int k) {
  const size_t block = size_t(kBlockTiles) * kTile;
  const size_t panel = size_t(k + 64) * block;               // int8: unpacked bytes
  const size_t stage = size_t(kStageK) * 2 * kTile * 2;      // bf16: decoded weights
  const size_t scales = size_t(k / 16 + 1) * block * 4 * 2;  // int8: fp32 scales and offsets
  const size_t columns = size_t(kMaxOutliers) * block * 4;   // int8: fp32 outlier columns
  const size_t chunk = size_t(64) * block * 4;               // fp32: 64 k
  const size_t sums = size_t(kRowChunk) * block * 4;         // fp32, bf16: accumulators
  return panel + stage + scales + columns + chunk + sums + 256;
}

}  // namespace ff
