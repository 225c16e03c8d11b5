// Checkpoint blocks, already split into integers and scales, to packed tiles.
#pragma once

#include "matrix.h"

namespace ff {

// q [n, k] bytes below 2^bits, scale and offset (or null) [n, k / group]. out: m.bytes() bytes.
void pack_ints(const Matrix& m, const uint8_t* q, const float* scale, const float* offset, uint8_t* out);

// codes [n, k], scale [n, scale_groups()].
void pack_fp8(const Matrix& m, const uint8_t* codes, const float* scale, uint8_t* out);

// rows: [n, k] of the element type of m.
void pack_dense(const Matrix& m, const void* rows, uint8_t* out);

// The columns of a packed matrix at `columns`, fp16 [tiles][count][16] (0 past the last row): what MatmulArgs
// takes.
void extract_columns(const Matrix& m, const int32_t* columns, int count, uint16_t* out);

}  // namespace ff
