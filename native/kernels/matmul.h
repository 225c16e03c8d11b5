// Matrix products over packed tiles. See matrix.h for the layout and DESIGN.md section 5 for the budget.
//
// The canonical order (design rule 1), the same for one row and for many, whoever computes it:
//   y = 0; for each kActGroup of k: part = 0
//     for each weight group in it: i = sum (q - zero) * a, exact in int32
//       part = fma(i, scale, part); with offsets: part = fma(sum of a, offset, part)
//     y = fma(part, activation scale, y)
//   o = 0; for each outlier: o = fma(outlier, column, o); the result is y + o
// fp32: y = fma over k in ascending order. bf16: matmul_bf16.h; fp8: matmul_fp8.h.
#pragma once

#include "kernels/group_sum.h"
#include "kernels/int_kinds.h"
#include "kernels/unpack.h"
#include "rows.h"

namespace ff::FF_NS {

#if defined(FF_ISA_AVX512)
// 12 int + 12 float accumulators + 4 weights of 32 registers.
constexpr int kRegRows = 3, kRegTiles = 4, kStreamTurns = 1;
#else
// 8 int accumulators of 16 registers; the float ones are in memory.
constexpr int kRegRows = 4, kRegTiles = 1, kStreamTurns = 8;
#endif

static FF_INLINE F activate(Act act, F g) {
  switch (act) {
    case Act::silu: return mul(g, sigmoid(g));
    case Act::gelu_tanh: {  // 0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3)))
      const F u = mul(set1(0.7978845608028654f), fma(mul(mul(g, g), g), set1(0.044715f), g));
      return mul(mul(set1(0.5f), g), add(set1(1.0f), tanh(u)));
    }
    case Act::gelu: {
      float t[16];
      store(t, g);
      for (int i = 0; i < 16; i++) t[i] = 0.5f * t[i] * (1.0f + __builtin_erff(t[i] * 0.70710678118654752f));
      return load(t);
    }
    default: return g;
  }
}

// row, tile: within the matrix; block_row, block_tile: within the block (for the gate buffer).
static FF_INLINE void finish(const MatmulArgs& a, F y, int row, int tile, int block_row, int block_tile) {
  const MatmulOut& o = a.out;
  const int column = tile * kTile, left = a.w->n - column, n = left < kTile ? left : kTile;
  if (o.bias) y = add(y, load_n(o.bias + column, n));
  if (o.scale != 1.0f) y = mul(y, set1(o.scale));
  if (o.softcap != 0.0f) y = mul(set1(o.softcap), tanh(div(y, set1(o.softcap))));
  if (o.gate)
    y = mul(activate(o.act, load(o.gate + size_t(block_row) * o.gate_stride + block_tile * kTile)), y);
  float* out = o.out + size_t(row - o.row_base) * o.stride + (column - o.column_base);
  if (n == kTile) {
    if (o.residual) y = add(load(o.residual + size_t(row) * o.residual_stride + column), y);
    store(out, y);
  } else {
    if (o.residual) y = add(load_n(o.residual + size_t(row) * o.residual_stride + column, n), y);
    store_n(out, y, n);
  }
}

static FF_INLINE const int32_t* row_sums(const ActRows& a, int group, int row) {
  return (group == 16 ? a.sums16 : a.sums32) + size_t(row) * a.sum_stride;
}

// Few rows: the packed weights are read once and unpacked in registers.
template <int BITS, int GROUP, bool OFFSET, int ROWS>
static void stream_tile(const MatmulArgs& a, int tile, int block_tile, int row0, int block_row) {
  const Matrix& m = *a.w;
  constexpr int kLines = (GROUP * BITS * 2 + (OFFSET ? 64 : 32) + 63) / 64;  // cache lines of a group
  const size_t ints = m.ints_bytes(), bytes = m.group_bytes();
  const uint8_t* p = m.data + size_t(tile) * m.tile_bytes();
  const int8_t* q = a.act.q + size_t(row0) * a.act.q_stride;
  const float* scales = a.act.scale + size_t(row0) * a.act.scale_stride;
  const int32_t* sums = row_sums(a.act, GROUP, row0);
  const size_t sum_stride = a.act.sum_stride;
  F y[ROWS];
  for (int r = 0; r < ROWS; r++) y[r] = zero();
  F o[ROWS];
  for (int r = 0; r < ROWS; r++) o[r] = zero();
  for (int i = 0; i < a.outlier_count; i++) {
    const F w = load_f16(a.outlier_columns + (size_t(tile) * a.outlier_count + i) * kTile);
    for (int r = 0; r < ROWS; r++)
      o[r] = fma(set1(a.act.outliers[size_t(row0 + r) * kMaxOutliers + i]), w, o[r]);
  }
  const int groups = m.k / GROUP;
  for (int g = 0, block = 0; g < groups; block++) {
    F part[ROWS];
    FF_UNROLL(2)
    for (int sub = 0; sub < kActGroup / GROUP; sub++, g++, p += bytes) {
      if (sub && g == groups) break;
      B w[GROUP / 4];
      unpack_group<BITS, GROUP>(p, w);
      FF_UNROLL(10)
      for (int line = 0; line < kLines; line++) prefetch(p + 4096 + 64 * line);
      const F d = load_scale(p + ints, m.wide);
      I i[ROWS][1];
      FF_UNROLL(4)
      for (int r = 0; r < ROWS; r++) i[r][0] = group_start<BITS, OFFSET>(m.zero, sums[r * sum_stride + g]);
      add_products<BITS, GROUP / 4>(i, [&](int s, int) { return w[s]; }, q + g * GROUP, a.act.q_stride);
      FF_UNROLL(4)
      for (int r = 0; r < ROWS; r++) {
        const F f = to_float(i[r][0]);
        part[r] = sub ? fma(f, d, part[r]) : mul(f, d);
        if (OFFSET)
          part[r] = fma(to_float(iset1(sums[r * sum_stride + g])),
                        load_scale(p + ints + kTile * (m.wide ? 4 : 2), m.wide), part[r]);
      }
    }
    for (int r = 0; r < ROWS; r++)
      y[r] = fma(part[r], set1(scales[size_t(r) * a.act.scale_stride + block]), y[r]);
  }
  for (int r = 0; r < ROWS; r++) finish(a, add(y[r], o[r]), row0 + r, tile, block_row + r, block_tile);
}

// In turns of kStreamRows at most: up to some number of them, unpacking a tile that is in cache again costs
// less than a panel would.
template <int BITS, int GROUP, bool OFFSET>
static void stream_block(const MatmulArgs& a, int tile0, int tile1, int row0, int row1) {
  for (int t = tile0; t < tile1; t++) {
    int turns = (row1 - row0 + kStreamRows - 1) / kStreamRows;
    for (int r = row0, n; r < row1; r += n, turns--) {
      n = (row1 - r + turns - 1) / turns;
      switch (n) {
        case 1: stream_tile<BITS, GROUP, OFFSET, 1>(a, t, t - tile0, r, r - row0); break;
        case 2: stream_tile<BITS, GROUP, OFFSET, 2>(a, t, t - tile0, r, r - row0); break;
        case 3: stream_tile<BITS, GROUP, OFFSET, 3>(a, t, t - tile0, r, r - row0); break;
        default: stream_tile<BITS, GROUP, OFFSET, 4>(a, t, t - tile0, r, r - row0); break;
      }
    }
  }
}

// Many rows: a panel of kRegTiles tiles is unpacked once into cache and every row of the block runs over it.
struct Panel {
  uint8_t* w;     // [k / 4][kRegTiles][64]
  float* scale;   // [k / group][kRegTiles][16]
  float* offset;  // the same
  float* column;  // [outlier_count][kRegTiles][16]
};

template <int BITS, int GROUP>
static void unpack_panel(const Matrix& m, int tile0, int tiles, const Panel& to) {
  const size_t ints = m.ints_bytes(), bytes = m.group_bytes();
  for (int t = 0; t < tiles; t++) {
    const uint8_t* p = m.data + size_t(tile0 + t) * m.tile_bytes();
    for (int g = 0; g < m.k / GROUP; g++, p += bytes) {
      B w[GROUP / 4];
      unpack_group<BITS, GROUP>(p, w);
      FF_UNROLL(8)
      for (int s = 0; s < GROUP / 4; s++)
        bstore(to.w + ((size_t(g) * (GROUP / 4) + s) * kRegTiles + t) * 64, w[s]);
      store(to.scale + (size_t(g) * kRegTiles + t) * 16, load_scale(p + ints, m.wide));
      if (m.has_offset)
        store(to.offset + (size_t(g) * kRegTiles + t) * 16,
              load_scale(p + ints + kTile * (m.wide ? 4 : 2), m.wide));
    }
  }
}

template <int BITS, int GROUP, bool OFFSET, int ROWS, int TILES>
static void panel_rows(const MatmulArgs& a, const Panel& panel, int tile, int block_tile, int row0,
                       int block_row) {
  const Matrix& m = *a.w;
  const int8_t* q = a.act.q + size_t(row0) * a.act.q_stride;
  const float* scales = a.act.scale + size_t(row0) * a.act.scale_stride;
  const int32_t* sums = row_sums(a.act, GROUP, row0);
  F y[ROWS][TILES];
  FF_UNROLL(4)
  for (int r = 0; r < ROWS; r++) FF_UNROLL(4)
  for (int t = 0; t < TILES; t++) y[r][t] = zero();
  const uint8_t* w = panel.w;
  const float *d = panel.scale, *o = panel.offset;
  const int groups = m.k / GROUP;
  for (int g = 0, block = 0; g < groups; block++) {
    F part[ROWS][TILES];
    FF_UNROLL(2)
    for (int sub = 0; sub < kActGroup / GROUP; sub++, g++, d += kRegTiles * 16, o += kRegTiles * 16) {
      if (sub && g == groups) break;
      I i[ROWS][TILES];
      FF_UNROLL(4)
      for (int r = 0; r < ROWS; r++) {
        const I start = group_start<BITS, OFFSET>(m.zero, sums[size_t(r) * a.act.sum_stride + g]);
        FF_UNROLL(4)
        for (int t = 0; t < TILES; t++) i[r][t] = start;
      }
      add_products<BITS, GROUP / 4>(
          i, [&](int s, int t) { return bload(w + (s * kRegTiles + t) * 64); }, q + g * GROUP,
          a.act.q_stride);
      w += GROUP / 4 * kRegTiles * 64;
      FF_UNROLL(4)
      for (int r = 0; r < ROWS; r++) {
        FF_UNROLL(4)
        for (int t = 0; t < TILES; t++) {
          const F f = to_float(i[r][t]), scale = load(d + 16 * t);
          part[r][t] = sub ? fma(f, scale, part[r][t]) : mul(f, scale);
        }
        if (OFFSET) {
          const F sum = to_float(iset1(sums[size_t(r) * a.act.sum_stride + g]));
          FF_UNROLL(4)
          for (int t = 0; t < TILES; t++) part[r][t] = fma(sum, load(o + 16 * t), part[r][t]);
        }
        if (GROUP == kActGroup) {  // here, so that only one row's parts are alive
          const F scale = set1(scales[size_t(r) * a.act.scale_stride + block]);
          FF_UNROLL(4)
          for (int t = 0; t < TILES; t++) y[r][t] = fma(part[r][t], scale, y[r][t]);
        }
      }
    }
    if (GROUP != kActGroup) FF_UNROLL(4)
    for (int r = 0; r < ROWS; r++) {
      const F scale = set1(scales[size_t(r) * a.act.scale_stride + block]);
      FF_UNROLL(4)
      for (int t = 0; t < TILES; t++) y[r][t] = fma(part[r][t], scale, y[r][t]);
    }
  }
  F outlier[ROWS][TILES];
  FF_UNROLL(4)
  for (int r = 0; r < ROWS; r++) FF_UNROLL(4)
  for (int t = 0; t < TILES; t++) outlier[r][t] = zero();
  for (int i = 0; i < a.outlier_count; i++) FF_UNROLL(4)
  for (int r = 0; r < ROWS; r++) {
    const F x = set1(a.act.outliers[size_t(row0 + r) * kMaxOutliers + i]);
    FF_UNROLL(4)
    for (int t = 0; t < TILES; t++)
      outlier[r][t] = fma(x, load(panel.column + (size_t(i) * kRegTiles + t) * 16), outlier[r][t]);
  }
  for (int r = 0; r < ROWS; r++)
    for (int t = 0; t < TILES; t++)
      finish(a, add(y[r][t], outlier[r][t]), row0 + r, tile + t, block_row + r, block_tile + t);
}

// What is unpacked next, read from memory while there are products to compute.
struct Fetched {
  const uint8_t* at;
  int step;  // bytes at a time
  FF_INLINE void some() {
    for (int i = 0; i < step; i += 64) prefetch_l2(at + i);
    at += step;
  }
};

template <int BITS, int GROUP, bool OFFSET, int TILES>
static void panel_columns(const MatmulArgs& a, const Panel& panel, int tile, int block_tile, int row0,
                          int row1, Fetched next) {
  int r = row0;
  for (; r + kRegRows <= row1; r += kRegRows) {
    next.some();
    panel_rows<BITS, GROUP, OFFSET, kRegRows, TILES>(a, panel, tile, block_tile, r, r - row0);
  }
  if (row1 - r >= 2) {
    panel_rows<BITS, GROUP, OFFSET, 2, TILES>(a, panel, tile, block_tile, r, r - row0);
    r += 2;
  }
  if (r < row1) panel_rows<BITS, GROUP, OFFSET, 1, TILES>(a, panel, tile, block_tile, r, r - row0);
}

template <int BITS, int GROUP, bool OFFSET>
static void panel_block(const MatmulArgs& a, int tile0, int tile1, int row0, int row1, uint8_t* scratch) {
  const Matrix& m = *a.w;
  Panel panel;
  panel.w = scratch;
  panel.scale = reinterpret_cast<float*>(scratch + size_t(m.k) * kRegTiles * kTile);
  panel.offset = panel.scale + size_t(m.k / GROUP) * kRegTiles * kTile;
  panel.column = panel.offset + size_t(m.k / GROUP) * kRegTiles * kTile;
  for (int t = tile0; t < tile1; t += kRegTiles) {
    const int tiles = tile1 - t < kRegTiles ? tile1 - t : kRegTiles;
    unpack_panel<BITS, GROUP>(m, t, tiles, panel);
    for (int i = 0; i < a.outlier_count; i++)
      for (int c = 0; c < tiles; c++)
        store(panel.column + (size_t(i) * kRegTiles + c) * 16,
              load_f16(a.outlier_columns + (size_t(t + c) * a.outlier_count + i) * kTile));
    const int turns = (row1 - row0) / kRegRows, later = m.tiles() - t - tiles;
    Fetched next{m.data + size_t(t + tiles) * m.tile_bytes(), 0};
    if (turns && later)
      next.step = int(size_t(later < kRegTiles ? later : kRegTiles) * m.tile_bytes()) / turns / 64 * 64 + 64;
    if (tiles == kRegTiles) {
      panel_columns<kSumBits<BITS>, GROUP, OFFSET, kRegTiles>(a, panel, t, t - tile0, row0, row1, next);
    } else {  // the last tiles of a matrix
      for (int i = 0; i < tiles; i++) {
        Panel one{panel.w + 64 * i, panel.scale + 16 * i, panel.offset + 16 * i, panel.column + 16 * i};
        panel_columns<kSumBits<BITS>, GROUP, OFFSET, 1>(a, one, t + i, t + i - tile0, row0, row1, {});
      }
    }
  }
}

static void int8_block(const MatmulArgs& a, int tile0, int tile1, int row0, int row1, uint8_t* scratch) {
  with_int_kind(*a.w, [&](auto kind) {
    if (row1 - row0 <= a.stream_rows) {
      stream_block<kind.bits, kind.group, kind.offset>(a, tile0, tile1, row0, row1);
    } else {
      panel_block<kind.bits, kind.group, kind.offset>(a, tile0, tile1, row0, row1, scratch);
    }
  });
}

// Any weights on fp32 activations: 64 k of a panel are decoded to fp32 and every row runs over them.
template <int ROWS, int TILES>
static FF_INLINE void f32_rows(const float* w, const float* x, size_t x_stride, int k, float* y) {
  F acc[ROWS][TILES];
  FF_UNROLL(4)
  for (int r = 0; r < ROWS; r++) FF_UNROLL(4)
  for (int t = 0; t < TILES; t++) acc[r][t] = load(y + (size_t(r) * kBlockTiles + t) * 16);
  for (int i = 0; i < k; i++, w += kBlockTiles * 16) FF_UNROLL(4)
  for (int r = 0; r < ROWS; r++) {
    const F v = set1(x[size_t(r) * x_stride + i]);
    FF_UNROLL(4)
    for (int t = 0; t < TILES; t++) acc[r][t] = fma(load(w + 16 * t), v, acc[r][t]);
  }
  FF_UNROLL(4)
  for (int r = 0; r < ROWS; r++) FF_UNROLL(4)
  for (int t = 0; t < TILES; t++) store(y + (size_t(r) * kBlockTiles + t) * 16, acc[r][t]);
}

static void f32_block(const MatmulArgs& a, int tile0, int tile1, int row0, int row1, uint8_t* scratch) {
  const Matrix& m = *a.w;
  const int tiles = tile1 - tile0;
  float* w = reinterpret_cast<float*>(scratch);  // [64][kBlockTiles][16]
  float* y = w + 64 * kBlockTiles * kTile;       // [rows][kBlockTiles][16]
  for (int i = 0; i < (row1 - row0) * kBlockTiles * kTile; i += 16) store(y + i, zero());
  for (int k = 0; k < m.k; k += 64) {
    const int n = m.k - k < 64 ? m.k - k : 64;
    for (int t = 0; t < tiles; t++) decode_tile(m, tile0 + t, k, n, w + 16 * t, kBlockTiles * kTile);
    for (int r = row0; r < row1;) {
      const float* x = a.act.f32 + size_t(r) * a.act.f32_stride + k;
      float* to = y + size_t(r - row0) * kBlockTiles * kTile;
      if (row1 - r >= 4 && tiles == kBlockTiles) {
        f32_rows<4, kBlockTiles>(w, x, a.act.f32_stride, n, to);
        r += 4;
      } else {
        for (int t = 0; t < tiles; t++) f32_rows<1, 1>(w + 16 * t, x, a.act.f32_stride, n, to + 16 * t);
        r += 1;
      }
    }
  }
  for (int r = row0; r < row1; r++)
    for (int t = 0; t < tiles; t++)
      finish(a, load(y + (size_t(r - row0) * kBlockTiles + t) * 16), r, tile0 + t, r - row0, t);
}

}  // namespace ff::FF_NS
