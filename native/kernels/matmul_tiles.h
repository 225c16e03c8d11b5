// Many rows, and bf16 weights, on a tile unit (tile_unit.h). Included by matmul.h.
//
// int8 has the bits of every other instruction set: the sums of a weight group are exact, the arithmetic on
// them is in the canonical order. bf16 has an order of its own, the same for one row and for many:
//   y = 0; for each 32 k: even = odd = 0; over its pairs: even = fma(x, w, even), odd = fma(x, w, odd)
//     y = y + (even + odd)
//   then dot_bf16 over the pairs that are left
#pragma once

#include "kernels/tile_unit.h"

namespace ff::FF_NS {

#if defined(FF_ISA_AVX512)
using Tiles = TileUnit;
#else
using Tiles = EmulatedTileUnit;
#endif

constexpr int kTileRows16 = 16, kTileBytes = 64;

// What rows of ints [rows][16], sums of one weight group over one tile of columns, become: see panel_rows.
// ROWS is the number of rows if that is known to the compiler, else 0.
template <class Unit, int GROUP, bool OFFSET, int ROWS>
static void tile_rows(Unit& unit, const MatmulArgs& a, const Panel& panel, int column, int tile,
                      int block_tile, int row0, int block_row, int count) {
  const Matrix& m = *a.w;
  const int rows = ROWS ? ROWS : count, groups = m.k / GROUP;
  const int8_t* q = a.act.q + size_t(row0) * a.act.q_stride;
  const float* scales = a.act.scale + size_t(row0) * a.act.scale_stride;
  const int32_t* sums = row_sums(a.act, GROUP, row0);
  alignas(64) int32_t products[2][kTileRows16][16];
  // One group ahead of the arithmetic, so that the unit and the vector ports work at the same time.
  auto multiply = [&](int g) {
    const uint8_t* w = panel.w + (size_t(g) * (GROUP / 4) * kRegTiles + size_t(column)) * 64;
    unit.template clear<0>();
    unit.template load<1>(q + size_t(g) * GROUP, a.act.q_stride);
    unit.template load<2>(w, kRegTiles * 64);
    unit.template dot_s8u8<0, 1, 2>();
    unit.template store<0>(products[g & 1], 64);
  };
  F y[kTileRows16], part[kTileRows16];
  FF_UNROLL(16)
  for (int r = 0; r < rows; r++) y[r] = zero();
  multiply(0);
  for (int g = 0, block = 0; g < groups; block++) {
    for (int sub = 0; sub < kActGroup / GROUP && g < groups; sub++, g++) {
      if (g + 1 < groups) multiply(g + 1);
      const F scale = load(panel.scale + (size_t(g) * kRegTiles + size_t(column)) * 16);
      const F offset = OFFSET ? load(panel.offset + (size_t(g) * kRegTiles + size_t(column)) * 16) : zero();
      FF_UNROLL(16)
      for (int r = 0; r < rows; r++) {
        const int32_t sum = sums[size_t(r) * a.act.sum_stride + size_t(g)];
        I i = iload(products[g & 1][r]);
        if (!OFFSET) i = iadd(i, iset1(-m.zero * sum));
        part[r] = sub ? fma(to_float(i), scale, part[r]) : mul(to_float(i), scale);
        if (OFFSET) part[r] = fma(to_float(iset1(sum)), offset, part[r]);
      }
    }
    FF_UNROLL(16)
    for (int r = 0; r < rows; r++)
      y[r] = fma(part[r], set1(scales[size_t(r) * a.act.scale_stride + size_t(block)]), y[r]);
  }
  for (int r = 0; r < rows; r++) {
    F outlier = zero();
    for (int i = 0; i < a.outlier_count; i++)
      outlier = fma(set1(a.act.outliers[size_t(row0 + r) * kMaxOutliers + size_t(i)]),
                    load(panel.column + (size_t(i) * kRegTiles + size_t(column)) * 16), outlier);
    finish(a, add(y[r], outlier), row0 + r, tile, block_row + r, block_tile);
  }
}

// Rows of the block over the first `tiles` tiles of the panel; tile is the first one's number.
template <class Unit, int GROUP, bool OFFSET>
static void tile_panel(const MatmulArgs& a, const Panel& panel, int tiles, int tile, int block_tile, int row0,
                       int row1) {
  Unit unit;
  for (int r = row0, configured = 0; r < row1; r += kTileRows16) {
    const int rows = row1 - r < kTileRows16 ? row1 - r : kTileRows16;
    if (rows != configured) {
      TileShapes shapes;
      shapes.set(0, rows, kTileBytes);
      shapes.set(1, rows, GROUP);
      shapes.set(2, GROUP / 4, kTileBytes);
      unit.configure(shapes);
      configured = rows;
    }
    for (int t = 0; t < tiles; t++) {
      if (rows == kTileRows16) {
        tile_rows<Unit, GROUP, OFFSET, kTileRows16>(unit, a, panel, t, tile + t, block_tile + t, r, r - row0,
                                                    rows);
      } else {
        tile_rows<Unit, GROUP, OFFSET, 0>(unit, a, panel, t, tile + t, block_tile + t, r, r - row0, rows);
      }
    }
  }
  unit.release();
}

// One register tile of sums: the pairs left after `done` ones, and the rest of the row's way.
template <int T, class Unit>
static void finish_bf16(Unit& unit, const MatmulArgs& a, int done, int tile, int block_tile, int row0,
                        int block_row, int rows) {
  const Matrix& m = *a.w;
  alignas(64) float sums[kTileRows16][16];
  unit.template store<T>(sums, 64);
  const uint16_t* w = reinterpret_cast<const uint16_t*>(m.data + size_t(tile) * m.tile_bytes());
  for (int r = 0; r < rows; r++) {
    const uint16_t* x = a.act.bf16 + size_t(row0 + r) * a.act.q_stride;
    F y = load(sums[r]);
    for (int i = done; i < (m.k + 1) / 2; i++) {
      uint32_t pair;
      memcpy(&pair, x + 2 * i, 4);
      y = dot_bf16(y, w + size_t(i) * 32, pair);
    }
    finish(a, y, row0 + r, tile, block_row + r, block_tile);
  }
}

// Up to 32 rows and one or two tiles of columns: sums 0 1 / 2 3, rows in 4 and 5, weights in 6 and 7.
template <bool LOWER, bool RIGHT, class Unit>
static void bf16_square(Unit& unit, const MatmulArgs& a, int tile, int block_tile, int row0, int block_row,
                        int rows) {
  const Matrix& m = *a.w;
  const uint16_t* x = a.act.bf16 + size_t(row0) * a.act.q_stride;
  const uint8_t* w = m.data + size_t(tile) * m.tile_bytes();
  const size_t stride = a.act.q_stride * 2;
  unit.template clear<0>();
  if (RIGHT) unit.template clear<1>();
  if (LOWER) unit.template clear<2>();
  if (LOWER && RIGHT) unit.template clear<3>();
  const int steps = m.k / 32;
  for (int i = 0; i < steps; i++, x += 32, w += 1024) {
    unit.template load<4>(x, stride);
    unit.template load<6>(w, 64);
    unit.template dot_bf16<0, 4, 6>();
    if (RIGHT) {
      unit.template load<7>(w + m.tile_bytes(), 64);
      unit.template dot_bf16<1, 4, 7>();
    }
    if (LOWER) {
      unit.template load<5>(x + 16 * a.act.q_stride, stride);
      unit.template dot_bf16<2, 5, 6>();
    }
    if (LOWER && RIGHT) unit.template dot_bf16<3, 5, 7>();
  }
  const int upper = LOWER ? kTileRows16 : rows, lower = rows - kTileRows16;
  finish_bf16<0>(unit, a, 16 * steps, tile, block_tile, row0, block_row, upper);
  if (RIGHT) finish_bf16<1>(unit, a, 16 * steps, tile + 1, block_tile + 1, row0, block_row, upper);
  if (LOWER) finish_bf16<2>(unit, a, 16 * steps, tile, block_tile, row0 + 16, block_row + 16, lower);
  if (LOWER && RIGHT)
    finish_bf16<3>(unit, a, 16 * steps, tile + 1, block_tile + 1, row0 + 16, block_row + 16, lower);
}

template <class Unit>
static void bf16_tiles(const MatmulArgs& a, int tile0, int tile1, int row0, int row1) {
  Unit unit;
  for (int r = row0; r < row1; r += 2 * kTileRows16) {
    const int rows = row1 - r < 2 * kTileRows16 ? row1 - r : 2 * kTileRows16;
    const int upper = rows < kTileRows16 ? rows : kTileRows16, lower = rows - upper;
    TileShapes shapes;
    shapes.set(0, upper, kTileBytes), shapes.set(1, upper, kTileBytes), shapes.set(4, upper, kTileBytes);
    if (lower)
      shapes.set(2, lower, kTileBytes), shapes.set(3, lower, kTileBytes), shapes.set(5, lower, kTileBytes);
    shapes.set(6, kTileRows16, kTileBytes), shapes.set(7, kTileRows16, kTileBytes);
    unit.configure(shapes);
    for (int t = tile0; t < tile1; t += 2) {
      const bool right = t + 1 < tile1;
      const int block_tile = t - tile0, block_row = r - row0;
      if (lower && right) bf16_square<true, true>(unit, a, t, block_tile, r, block_row, rows);
      if (lower && !right) bf16_square<true, false>(unit, a, t, block_tile, r, block_row, rows);
      if (!lower && right) bf16_square<false, true>(unit, a, t, block_tile, r, block_row, rows);
      if (!lower && !right) bf16_square<false, false>(unit, a, t, block_tile, r, block_row, rows);
    }
  }
  unit.release();
}

}  // namespace ff::FF_NS
