// The kernels of one instruction set, as function pointers: the only way from the runtime into code compiled
// with its flags.
#pragma once

#include "attention.h"
#include "isa.h"
#include "rows.h"
#include "sample.h"

namespace ff {

struct KernelTable {
  void (*matmul_block)(const MatmulArgs&, int tile0, int tile1, int row0, int row1, uint8_t* scratch);
  void (*prepare_rows)(const PrepareArgs&, int row0, int row1);
  void (*norm_rows)(const NormArgs&, const float* x, size_t x_stride, float* out, size_t out_stride,
                    const float* residual, size_t residual_stride, int width, int heads, int row0, int row1);
  void (*gate_rows)(Act, const float* g, size_t g_stride, const float* u, size_t u_stride, float* out,
                    size_t out_stride, int width, int row0, int row1);
  void (*add_rows)(const float* a, size_t a_stride, float factor, const float* b, size_t b_stride, float* out,
                   size_t out_stride, int width, int row0, int row1);
  void (*rope_rows)(const float* x, size_t x_stride, float* out, size_t out_stride, int heads, int head_dim,
                    int dim, const float* cos, const float* sin, int row0, int row1);
  void (*embed_rows)(const Matrix&, const int32_t* ids, float factor, float* out, size_t out_stride, int row0,
                     int row1);
  void (*attention_prologue)(const AttentionArgs&, int row0, int row1);
  void (*attention_item)(const AttentionArgs&, const AttentionItem&, float* scratch);
  void (*sample_row)(float* logits, int vocab, const SampleRow&, const SampleInputs&, const SampleOutputs&,
                     int index, void* scratch);
  int stream_rows = 0;     // what MatmulArgs::stream_rows best is, unless measured
  bool tile_unit = false;  // bf16 products are computed 32 rows and two tiles of columns at a time
};

// Precondition: isa_available(isa).
const KernelTable& kernels(Isa isa);

}  // namespace ff
