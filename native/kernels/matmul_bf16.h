// Products of bf16 rows with bf16 weights, or with integer weights decoded to bf16, without a tile unit.
//
// The canonical order, the same for one row and for many: y = dots over pairs of k in ascending order, as
// dot_bf16 orders them.
#pragma once

#include "kernels/decode_bf16.h"
#include "kernels/matmul.h"

namespace ff::FF_NS {

// Some pairs of k of a block: w [tiles of the block][pairs][16][2], w_stride values from tile to tile.
struct Bf16Stage {
  const uint16_t* x;  // [rows, x_stride]
  size_t x_stride;
  const uint16_t* w;
  size_t w_stride;
  int pairs;
  float* sums;  // [rows][kBlockTiles][16], what earlier stages came to and this one comes to
  bool first;
};

#if defined(FF_BF16)
constexpr int kBf16Rows = 4;  // times kRegTiles: 16 sums
#else
constexpr int kBf16Rows = 6;  // times kRegTiles: 24 sums of 32 registers, or 12 of 16
#endif
constexpr int kBf16Widened = 512;  // k of rows that are held as floats

// y[r][t] += the products of `pairs` pairs of row r, from x on, with tile t. Without an instruction for pairs
// the rows are widened first, and multiply as they are loaded.
template <int ROWS, int TILES>
static FF_INLINE void add_dots(const Bf16Stage& s, const uint16_t* x, const uint16_t* w, int pairs,
                               F (&y)[ROWS][TILES]) {
#if defined(FF_BF16)
  for (int i = 0; i < pairs; i++, w += 32) FF_UNROLL(4)
  for (int r = 0; r < ROWS; r++) {
    uint32_t pair;
    memcpy(&pair, x + size_t(r) * s.x_stride + 2 * i, 4);
    FF_UNROLL(4)
    for (int t = 0; t < TILES; t++) y[r][t] = dot_bf16(y[r][t], w + size_t(t) * s.w_stride, pair);
  }
#else
  alignas(64) float wide[ROWS][kBf16Widened + kLanes];
  for (int begin = 0; begin < pairs; begin += kBf16Widened / 2) {
    const int n = pairs - begin < kBf16Widened / 2 ? pairs - begin : kBf16Widened / 2;
    for (int r = 0; r < ROWS; r++) {
      const uint16_t* from = x + size_t(r) * s.x_stride + 2 * begin;
      int k = 0;
      for (; k + kLanes <= 2 * n; k += kLanes) store(&wide[r][k], load_bf16(from + k));
      for (; k < 2 * n; k++) wide[r][k] = bf16_to_f32(from[k]);
    }
    for (int i = 0; i < n; i++, w += 32) FF_UNROLL(2)
    for (int odd = 1; odd >= 0; odd--) {
      F half[TILES];
      FF_UNROLL(4)
      for (int t = 0; t < TILES; t++) {
        const uint16_t* p = w + size_t(t) * s.w_stride;
        half[t] = odd ? bf16_odd(p) : bf16_even(p);
      }
      FF_UNROLL(6)
      for (int r = 0; r < ROWS; r++) {
        const F f = set1(wide[r][2 * i + odd]);
        FF_UNROLL(4)
        for (int t = 0; t < TILES; t++) y[r][t] = fma(half[t], f, y[r][t]);
      }
    }
  }
#endif
}

template <int ROWS, int TILES>
static FF_INLINE void bf16_rows(const Bf16Stage& s, int row, int tile) {
  const uint16_t* w = s.w + size_t(tile) * s.w_stride;
  const uint16_t* x = s.x + size_t(row) * s.x_stride;
  float* sums = s.sums + (size_t(row) * kBlockTiles + size_t(tile)) * kTile;
  F y[ROWS][TILES];
  FF_UNROLL(6)
  for (int r = 0; r < ROWS; r++) FF_UNROLL(4)
  for (int t = 0; t < TILES; t++) y[r][t] = s.first ? zero() : load(sums + (r * kBlockTiles + t) * kTile);
  add_dots(s, x, w, s.pairs, y);
  FF_UNROLL(6)
  for (int r = 0; r < ROWS; r++) FF_UNROLL(4)
  for (int t = 0; t < TILES; t++) store(sums + (r * kBlockTiles + t) * kTile, y[r][t]);
}

template <int TILES>
static FF_INLINE void bf16_columns(const Bf16Stage& s, int rows, int tile) {
  int r = 0;
  for (; r + kBf16Rows <= rows; r += kBf16Rows) bf16_rows<kBf16Rows, TILES>(s, r, tile);
  for (; r < rows; r++) bf16_rows<1, TILES>(s, r, tile);
}

static void bf16_stage(const Bf16Stage& s, int rows, int tiles) {
  if (kRegTiles == 4 && tiles == 4) return bf16_columns<4>(s, rows, 0);
  for (int t = 0; t < tiles; t++) bf16_columns<1>(s, rows, t);
}

// scratch: kBlockTiles tiles of stage_k k decoded, sums.
static void bf16_block(const MatmulArgs& a, int tile0, int tile1, int row0, int row1, uint8_t* scratch) {
  constexpr int stage_k = 512;
  static_assert(stage_k * kBlockTiles <= kStageK * 2, "the scratch is sized for kStageK");
  const Matrix& m = *a.w;
  const int tiles = tile1 - tile0, rows = row1 - row0;
  uint16_t* decoded = reinterpret_cast<uint16_t*>(scratch);
  Bf16Stage s{};
  s.x = a.act.bf16 + size_t(row0) * a.act.q_stride;
  s.x_stride = a.act.q_stride;
  s.sums = reinterpret_cast<float*>(decoded + size_t(kBlockTiles) * stage_k * kTile);
  s.first = true;
  if (m.elem == Elem::bf16) {
    s.w = reinterpret_cast<const uint16_t*>(m.data + size_t(tile0) * m.tile_bytes());
    s.w_stride = m.tile_bytes() / 2;
    s.pairs = (m.k + 1) / 2;
    bf16_stage(s, rows, tiles);
  } else {
    s.w = decoded;
    s.w_stride = size_t(stage_k) * kTile;
    with_decoder(m, [&]<class Decoder>() {
      auto decoder = [&](int t) {
        return Decoder(m, tile0 + (t < tiles ? t : 0),
                       a.next ? a.next + size_t(t) * m.tile_bytes() : nullptr);
      };
      Decoder each[kBlockTiles] = {decoder(0), decoder(1), decoder(2), decoder(3)};
      for (int k0 = 0; k0 < m.k; k0 += stage_k, s.x += stage_k, s.first = false) {
        const int n = m.k - k0 < stage_k ? m.k - k0 : stage_k;
        for (int t = 0; t < tiles; t++)
          for (int k = 0; k < n; k += kUnit)
            each[t].unit(n - k < kUnit ? n - k : kUnit, decoded + (size_t(t) * stage_k + k) * kTile);
        s.pairs = (n + 1) / 2;
        bf16_stage(s, rows, tiles);
      }
    });
  }
  for (int r = 0; r < rows; r++)
    for (int t = 0; t < tiles; t++)
      finish(a, load(s.sums + (size_t(r) * kBlockTiles + size_t(t)) * kTile), row0 + r, tile0 + t, r, t);
}

}  // namespace ff::FF_NS
