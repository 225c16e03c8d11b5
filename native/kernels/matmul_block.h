// The matmul kernel of an instruction set, whatever the weights and what is computed with.
#pragma once

#include "kernels/matmul.h"
#include "kernels/matmul_bf16.h"
#include "kernels/matmul_fp8.h"

namespace ff::FF_NS {

// Tiles [tile0, tile1) (at most kBlockTiles) of rows [row0, row1) (at most kRowChunk).
static void matmul_block(const MatmulArgs& a, int tile0, int tile1, int row0, int row1, uint8_t* scratch) {
  switch (a.compute) {
    case Compute::f32: return f32_block(a, tile0, tile1, row0, row1, scratch);
    case Compute::int8: return int8_block(a, tile0, tile1, row0, row1, scratch);
    case Compute::bf16:
      if (is_fp8(a.w->elem)) return fp8_block(a, tile0, tile1, row0, row1);
      return bf16_block(a, tile0, tile1, row0, row1, scratch);
  }
}

}  // namespace ff::FF_NS
