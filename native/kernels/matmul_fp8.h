// Products of fp8 weights with bf16 activations. See matrix.h for the layout.
//
// The canonical order, the same for any number of rows: y = 0; for each group of k: part = dots over pairs of
// k in ascending order (as dot_bf16 orders them); y = fma(part, scale, y).
#pragma once

#include "kernels/codes.h"
#include "kernels/matmul.h"

namespace ff::FF_NS {

#if defined(FF_ISA_AVX512)
constexpr int kFp8Rows = 6;  // times kRegTiles: 24 sums of 32 registers, 4 more are the decoding table
#else
constexpr int kFp8Rows = 3;
#endif

template <Code code, int ROWS, int TILES>
static void fp8_rows(const MatmulArgs& a, int tile, int block_tile, int row0, int block_row) {
  const Matrix& m = *a.w;
  const CodeReader<code> reader;
  const size_t stride = m.tile_bytes();
  const uint8_t* w = m.data + size_t(tile) * stride;
  const uint16_t* x = a.act.bf16 + size_t(row0) * a.act.q_stride;
  F y[ROWS][TILES];
  for (int r = 0; r < ROWS; r++)
    for (int t = 0; t < TILES; t++) y[r][t] = zero();
  for (int k0 = 0; k0 < m.k; k0 += m.group, w += kTile * 4) {
    const int end = m.k - k0 < m.group ? m.k : k0 + m.group;
    F part[ROWS][TILES];
    FF_UNROLL(6)
    for (int r = 0; r < ROWS; r++) FF_UNROLL(4)
    for (int t = 0; t < TILES; t++) part[r][t] = zero();
    for (int k = k0; k < end; k += 4, w += 64) {
      FF_UNROLL(4)
      for (int t = 0; t < TILES; t++) {
        if (ROWS == 1) prefetch(w + size_t(t) * stride + 2048);
        Pairs low, high;
        reader.two(w + size_t(t) * stride, low, high);
        FF_UNROLL(6)
        for (int r = 0; r < ROWS; r++) {
          uint32_t pairs[2];
          memcpy(pairs, x + size_t(r) * a.act.q_stride + k, 8);
          part[r][t] = dot(dot(part[r][t], low, pairs[0]), high, pairs[1]);
        }
      }
    }
    for (int t = 0; t < TILES; t++) {
      const F scale = load(reinterpret_cast<const float*>(w + size_t(t) * stride));
      for (int r = 0; r < ROWS; r++) y[r][t] = fma(part[r][t], scale, y[r][t]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int t = 0; t < TILES; t++) finish(a, y[r][t], row0 + r, tile + t, block_row + r, block_tile + t);
}

template <Code code, int TILES>
static void fp8_columns(const MatmulArgs& a, int tile, int block_tile, int row0, int row1) {
  int r = row0;
  for (; r + kFp8Rows <= row1; r += kFp8Rows)
    fp8_rows<code, kFp8Rows, TILES>(a, tile, block_tile, r, r - row0);
  for (; r + 2 <= row1; r += 2) fp8_rows<code, 2, TILES>(a, tile, block_tile, r, r - row0);
  if (r < row1) fp8_rows<code, 1, TILES>(a, tile, block_tile, r, r - row0);
}

template <Code code>
static void fp8_codes(const MatmulArgs& a, int tile0, int tile1, int row0, int row1) {
  int t = tile0;
  if (kRegTiles == 4)
    for (; t + 4 <= tile1; t += 4) fp8_columns<code, 4>(a, t, t - tile0, row0, row1);
  for (; t < tile1; t++) fp8_columns<code, 1>(a, t, t - tile0, row0, row1);
}

static void fp8_block(const MatmulArgs& a, int tile0, int tile1, int row0, int row1) {
  if (a.w->elem == Elem::f8_e4m3) return fp8_codes<Code::e4m3>(a, tile0, tile1, row0, row1);
  return fp8_codes<Code::e5m2>(a, tile0, tile1, row0, row1);
}

}  // namespace ff::FF_NS
