// Products of bf16 rows with weights of any format on a tile unit (tile_unit.h), sums in fp32.
//
// An order of its own, the same for one row and for many, the weights decoded to bf16 (decode_bf16.h):
//   y = 0; for each 32 k: even = odd = 0; over its pairs: even = fma(x, w, even), odd = fma(x, w, odd)
//     y = y + (even + odd)
//   then dot_bf16 over the pairs that are left
//
// Weights are decoded by the first rows that meet them, some units of k ahead of the products, so that the
// vector ports decode while the unit multiplies; the rows after these find them in the cache. (Multiplying
// the integers and scaling the sums of each group would be exact, but takes the sums out of the unit for
// every 32 k, which limits it to a third of the speed.)
#pragma once

#include "kernels/decode_bf16.h"
#include "kernels/matmul.h"
#include "kernels/tile_unit.h"

namespace ff::FF_NS {

#if defined(FF_ISA_AVX512)
using Tiles = TileUnit;
#else
using Tiles = EmulatedTileUnit;
#endif

constexpr int kTileRows16 = 16, kSquareRows = 32, kTileBytes = 64;
constexpr int kRing = 8;  // units that are kept when no other rows will want them: they stay in the L1 cache
constexpr int kFewRows = 2;  // up to here the vector ports do better alone
constexpr int kLead = 4;     // units decoded ahead: what was just stored cannot be loaded at once

// One or two tiles of columns, decoded in order to [unit][tile][kUnit / 2][16][2].
template <class Decoder>
class Feed {
 public:
  static constexpr bool kDecodes = true;
  static constexpr size_t kUnitStride = 2 * kUnitValues;
  const size_t tile_stride = kUnitValues;
  // next: the tiles that are decoded after these, one behind the other; or null.
  FF_INLINE Feed(const Matrix& m, int tile, int tiles, const uint8_t* next, uint16_t* buffer)
      : left_(m, tile, next),
        right_(m, tile + tiles - 1, next ? next + m.tile_bytes() : nullptr),
        k_(m.k),
        buffer_(buffer) {}
  FF_INLINE const uint16_t* stage(int) const { return buffer_; }
  FF_INLINE void unit(int index, bool right) {
    const int n = k_ < kUnit ? k_ : kUnit;
    uint16_t* to = buffer_ + size_t(index) * kUnitStride;
    left_.unit(n, to);
    if (right) right_.unit(n, to + kUnitValues);
    k_ -= n;
  }

 private:
  Decoder left_, right_;
  int k_;  // not decoded yet
  uint16_t* buffer_;
};

// Weights that are bf16 already are read where they are.
class NoFeed {
 public:
  static constexpr bool kDecodes = false;
  static constexpr size_t kUnitStride = kUnitValues;
  const size_t tile_stride;
  FF_INLINE NoFeed(const Matrix& m, int tile)
      : tile_stride(m.tile_bytes() / 2),
        w_(reinterpret_cast<const uint16_t*>(m.data + size_t(tile) * m.tile_bytes())) {}
  FF_INLINE const uint16_t* stage(int k0) const { return w_ + size_t(k0) * kTile; }
  FF_INLINE void unit(int, bool) {}

 private:
  const uint16_t* w_;
};

// One stage of k of up to 32 rows and one or two tiles of columns: sums 0 1 / 2 3, rows in 4 and 5, weights
// in 6 and 7.
struct Square {
  const uint16_t* x;  // [rows, x_stride]
  size_t x_stride;
  const uint16_t* w;
  int units;    // whole ones
  int decoded;  // with the one that is not
  int mask;     // of the index of a unit in w
  float* sums;  // [rows][2][16], what earlier stages came to
  bool load;
  float* to;  // what this stage comes to; rows to_stride apart
  size_t to_stride;
};

// FIRST: these rows decode the weights.
template <bool FIRST, bool LOWER, bool RIGHT, class Unit, class Feeder>
static FF_INLINE void multiply(Unit& unit, const Square& s, Feeder& feed) {
  constexpr size_t row_bytes = 2 * kTile * sizeof(float);
  float* lower = s.sums + kTileRows16 * 2 * kTile;
  if (s.load) {
    unit.template load<0>(s.sums, row_bytes);
    if (RIGHT) unit.template load<1>(s.sums + kTile, row_bytes);
    if (LOWER) unit.template load<2>(lower, row_bytes);
    if (LOWER && RIGHT) unit.template load<3>(lower + kTile, row_bytes);
  } else {
    unit.template clear<0>();
    if (RIGHT) unit.template clear<1>();
    if (LOWER) unit.template clear<2>();
    if (LOWER && RIGHT) unit.template clear<3>();
  }
  if (FIRST)
    for (int i = 0; i < kLead && i < s.decoded; i++) feed.unit(i, RIGHT);
  const uint16_t* x = s.x;
  const size_t stride = s.x_stride * 2;
  for (int i = 0; i < s.units; i++, x += kUnit) {
    if (FIRST && i + kLead < s.decoded) feed.unit((i + kLead) & s.mask, RIGHT);
    const uint16_t* w = s.w + size_t(i & s.mask) * Feeder::kUnitStride;
    unit.template load<4>(x, stride);
    unit.template load<6>(w, 64);
    unit.template dot_bf16<0, 4, 6>();
    if (RIGHT) {
      unit.template load<7>(w + feed.tile_stride, 64);
      unit.template dot_bf16<1, 4, 7>();
    }
    if (LOWER) {
      unit.template load<5>(x + kTileRows16 * s.x_stride, stride);
      unit.template dot_bf16<2, 5, 6>();
    }
    if (LOWER && RIGHT) unit.template dot_bf16<3, 5, 7>();
  }
  const size_t to_bytes = s.to_stride * sizeof(float);
  unit.template store<0>(s.to, to_bytes);
  if (RIGHT) unit.template store<1>(s.to + kTile, to_bytes);
  if (LOWER) unit.template store<2>(s.to + kTileRows16 * s.to_stride, to_bytes);
  if (LOWER && RIGHT) unit.template store<3>(s.to + kTileRows16 * s.to_stride + kTile, to_bytes);
}

template <bool FIRST, class Unit, class Feeder>
static void multiply(Unit& unit, const Square& s, int rows, bool right, Feeder& feed) {
  if (rows > kTileRows16) {
    if (right) return multiply<FIRST, true, true>(unit, s, feed);
    return multiply<FIRST, true, false>(unit, s, feed);
  }
  if (right) return multiply<FIRST, false, true>(unit, s, feed);
  return multiply<FIRST, false, false>(unit, s, feed);
}

template <class Unit>
static void configure(Unit& unit, int rows) {
  const int upper = rows < kTileRows16 ? rows : kTileRows16, lower = rows - upper;
  TileShapes shapes;
  shapes.set(0, upper, kTileBytes), shapes.set(1, upper, kTileBytes), shapes.set(4, upper, kTileBytes);
  if (lower)
    shapes.set(2, lower, kTileBytes), shapes.set(3, lower, kTileBytes), shapes.set(5, lower, kTileBytes);
  shapes.set(6, kTileRows16, kTileBytes), shapes.set(7, kTileRows16, kTileBytes);
  unit.configure(shapes);
}

// A few rows over ints, without the unit: its sums in its order, but the weights never leave the registers,
// which halves the time. x: [ROWS, k] in fp32; k is a multiple of kUnit.
template <class Kind, int ROWS>
static void stream_tile_ints(const MatmulArgs& a, const float* x, int tile, int block_tile, int row0,
                             const uint8_t* next) {
  constexpr int BITS = Kind::bits, GROUP = Kind::group;
  const Matrix& m = *a.w;
  const size_t bytes = m.group_bytes(), stride = size_t(m.k);
  const uint8_t* p = m.data + size_t(tile) * m.tile_bytes();
  const Ahead ahead(p, m.tile_bytes(), next);
  const F zero_point = set1(float(-m.zero));
  F y[ROWS];
  FF_UNROLL(2)
  for (int r = 0; r < ROWS; r++) y[r] = zero();
  for (int k0 = 0; k0 < m.k; k0 += kUnit) {
    F even[ROWS], odd[ROWS];
    FF_UNROLL(2)
    for (int r = 0; r < ROWS; r++) even[r] = odd[r] = zero();
    FF_UNROLL(2)
    for (int g = k0; g < k0 + kUnit; g += GROUP, p += bytes) {
      prefetch_group<BITS, GROUP, Kind::offset>(ahead.of(p));
      const Scales s = load_scales<Kind::offset>(p + GROUP * BITS * 2, m.wide, zero_point);
      each_pair<BITS, GROUP>(p, s, [&](int k, F w0, F w1) {
        w0 = bf16_cut(w0), w1 = bf16_cut(w1);
        FF_UNROLL(2)
        for (int r = 0; r < ROWS; r++) {
          even[r] = fma(set1(x[size_t(r) * stride + size_t(g + k)]), w0, even[r]);
          odd[r] = fma(set1(x[size_t(r) * stride + size_t(g + k + 1)]), w1, odd[r]);
        }
      });
    }
    FF_UNROLL(2)
    for (int r = 0; r < ROWS; r++) y[r] = add(y[r], add(even[r], odd[r]));
  }
  for (int r = 0; r < ROWS; r++) finish(a, y[r], row0 + r, tile, r, block_tile);
}

// The packed weights that will be wanted when those before `tile` were used.
static const uint8_t* after(const MatmulArgs& a, int tile, int tile1) {
  return tile < tile1 ? a.w->data + size_t(tile) * a.w->tile_bytes() : a.next;
}

static void stream_ints(const MatmulArgs& a, int tile0, int tile1, int row0, int rows, float* x) {
  const int k = a.w->k;
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < k; i += kLanes)
      store(x + size_t(r) * size_t(k) + i, load_bf16(a.act.bf16 + size_t(row0 + r) * a.act.q_stride + i));
  with_int_kind(*a.w, [&](auto kind) {
    for (int t = tile0; t < tile1; t++) {
      const uint8_t* next = after(a, t + 1, tile1);
      if (rows == 1) {
        stream_tile_ints<decltype(kind), 1>(a, x, t, t - tile0, row0, next);
      } else {
        stream_tile_ints<decltype(kind), kFewRows>(a, x, t, t - tile0, row0, next);
      }
    }
  });
}

struct Place {  // of a square in the matrix and in the block
  int row, rows, tile, tiles, block_row, block_tile;
};

// Whether all that is left to do with these tiles' sums is at most to gate them and to add a residual.
static bool is_plain(const MatmulArgs& a, const Place& at) {
  const MatmulOut& o = a.out;
  return a.w->k % kUnit == 0 && (at.tile + at.tiles) * kTile <= a.w->n && !o.bias && o.scale == 1.0f &&
         o.softcap == 0.0f;
}

static float* out_of(const MatmulArgs& a, const Place& at) {
  const MatmulOut& o = a.out;
  return o.out + size_t(at.row - o.row_base) * o.stride + (at.tile * kTile - o.column_base);
}

// The same as finish, for sums that are plain.
template <bool GATE, bool RESIDUAL>
static void finish_plain(const MatmulArgs& a, const float* sums, const Place& at) {
  const MatmulOut o = a.out;
  float* out = out_of(a, at);
  const float* gate = GATE ? o.gate + size_t(at.block_row) * o.gate_stride + at.block_tile * kTile : nullptr;
  const float* residual =
      RESIDUAL ? o.residual + size_t(at.row) * o.residual_stride + at.tile * kTile : nullptr;
  for (int r = 0; r < at.rows; r++) {
    for (int t = 0; t < at.tiles * kTile; t += kTile) {
      F y = load(sums + t);
      if (GATE) y = mul(activate(o.act, load(gate + t)), y);
      if (RESIDUAL) y = add(load(residual + t), y);
      store(out + t, y);
    }
    sums += 2 * kTile, out += o.stride;
    if (GATE) gate += o.gate_stride;
    if (RESIDUAL) residual += o.residual_stride;
  }
}

// pairs: of k after the last whole unit, their weights at w.
static FF_INLINE void finish_square(const MatmulArgs& a, const Square& s, const uint16_t* w,
                                    size_t tile_stride, int pairs, const Place& at) {
  for (int r = 0; r < at.rows; r++) {
    const uint16_t* x = s.x + size_t(r) * s.x_stride + size_t(s.units) * kUnit;
    for (int t = 0; t < at.tiles; t++) {
      F y = load(s.sums + (size_t(r) * 2 + size_t(t)) * kTile);
      for (int i = 0; i < pairs; i++) {
        uint32_t pair;
        memcpy(&pair, x + 2 * i, 4);
        y = dot_bf16(y, w + size_t(t) * tile_stride + size_t(i) * 32, pair);
      }
      finish(a, y, at.row + r, at.tile + t, at.block_row + r, at.block_tile + t);
    }
  }
}

// One or two tiles of columns and all rows of the block.
template <class Unit, class Feeder>
static void tile_pair(Unit& unit, const MatmulArgs& a, Feeder& feed, Place at, int row0, int row1,
                      float* sums, int& configured) {
  const int k = a.w->k;
  const bool once = row1 - row0 <= kSquareRows;  // then nothing need be kept
  const int stage_k = once || !Feeder::kDecodes ? k : kStageK;
  const bool plain = is_plain(a, at), direct = plain && !a.out.gate && !a.out.residual;
  Square s{};
  s.x_stride = a.act.q_stride;
  s.mask = once && Feeder::kDecodes ? kRing - 1 : ~0;
  for (int k0 = 0; k0 < k; k0 += stage_k) {
    const int n = k - k0 < stage_k ? k - k0 : stage_k;
    s.units = n / kUnit;
    s.decoded = (n + kUnit - 1) / kUnit;
    s.w = feed.stage(k0);
    s.load = k0 > 0;
    for (int r = row0; r < row1; r += kSquareRows) {
      at.row = r, at.block_row = r - row0;
      at.rows = row1 - r < kSquareRows ? row1 - r : kSquareRows;
      if (at.rows != configured) configure(unit, configured = at.rows);
      s.x = a.act.bf16 + size_t(r) * a.act.q_stride + size_t(k0);
      s.sums = s.to = sums + size_t(at.block_row) * 2 * kTile;
      s.to_stride = 2 * kTile;
      const bool last = k0 + n == k;
      if (last && direct) s.to = out_of(a, at), s.to_stride = a.out.stride;
      if (Feeder::kDecodes && r == row0) {
        multiply<true>(unit, s, at.rows, at.tiles == 2, feed);
      } else {
        multiply<false>(unit, s, at.rows, at.tiles == 2, feed);
      }
      if (!last || direct) continue;
      if (!plain) {
        finish_square(a, s, s.w + size_t(s.units & s.mask) * Feeder::kUnitStride, feed.tile_stride,
                      (n - s.units * kUnit + 1) / 2, at);
      } else if (!a.out.gate) {
        finish_plain<false, true>(a, s.sums, at);
      } else if (!a.out.residual) {
        finish_plain<true, false>(a, s.sums, at);
      } else {
        finish_plain<true, true>(a, s.sums, at);
      }
    }
  }
}

// scratch: two tiles of kStageK k decoded, sums [kRowChunk][2][16]; or a few rows in fp32.
template <class Unit>
static void tile_block(const MatmulArgs& a, int tile0, int tile1, int row0, int row1, uint8_t* scratch) {
  const Matrix& m = *a.w;
  if (m.elem == Elem::ints && m.k % kUnit == 0 && row1 - row0 <= kFewRows)
    return stream_ints(a, tile0, tile1, row0, row1 - row0, reinterpret_cast<float*>(scratch));
  Unit unit;
  uint16_t* decoded = reinterpret_cast<uint16_t*>(scratch);
  float* sums = reinterpret_cast<float*>(decoded + size_t(kStageK) * 2 * kTile);
  int configured = 0;
  auto pairs = [&](auto&& make_feed) {
    for (int t = tile0; t < tile1; t += 2) {
      const Place at{0, 0, t, tile1 - t < 2 ? 1 : 2, 0, t - tile0};
      auto feed = make_feed(at);
      tile_pair(unit, a, feed, at, row0, row1, sums, configured);
    }
  };
  if (m.elem == Elem::bf16) {
    pairs([&](const Place& at) { return NoFeed(m, at.tile); });
  } else {
    with_decoder(m, [&]<class Decoder>() {
      pairs([&](const Place& at) {
        return Feed<Decoder>(m, at.tile, at.tiles, after(a, at.tile + at.tiles, tile1), decoded);
      });
    });
  }
  unit.release();
}

}  // namespace ff::FF_NS
