// Packed tiles back to bytes or floats. The layout is stated in matrix.h.
#pragma once

#include "kernels/codes.h"
#include "kernels/int_kinds.h"
#include "matrix.h"
#include "vec.h"

namespace ff::FF_NS {

static FF_INLINE F load_scale(const uint8_t* p, bool wide) {
  return wide ? load(reinterpret_cast<const float*>(p)) : load_f16(reinterpret_cast<const uint16_t*>(p));
}

// One group of one tile: w[s] holds k = 4s .. 4s+3 of sixteen columns, unsigned.
template <int BITS, int GROUP>
static FF_INLINE void unpack_group(const uint8_t* p, B (&w)[GROUP / 4]) {
  constexpr int steps = GROUP / 4, half = steps / 2;
  if constexpr (BITS == 8) {
    FF_UNROLL(8)
    for (int s = 0; s < steps; s++) w[s] = bload(p + 64 * s);
  } else {
    FF_UNROLL(8)
    for (int s = 0; s < half; s++) {
      const B x = bload(p + 64 * s);
      w[s] = low_nibbles(x);
      w[s + half] = high_nibbles(x);
    }
    const uint8_t* high = p + 64 * half;
    if constexpr (BITS == 5) {
      FF_UNROLL(8)
      for (int s = 0; s < steps; s++) w[s] = or_bit4(w[s], high + 8 * s);
    } else if constexpr (BITS == 6) {
      FF_UNROLL(2)
      for (int s = 0; s < steps; s += 4) {
        const B h = bload(high + 16 * s);
        w[s] = or_bits45<0>(w[s], h);
        w[s + 1] = or_bits45<1>(w[s + 1], h);
        w[s + 2] = or_bits45<2>(w[s + 2], h);
        w[s + 3] = or_bits45<3>(w[s + 3], h);
      }
    }
  }
}

template <int BITS, int GROUP>
static void decode_group(const Matrix& m, const uint8_t* p, float* out, size_t stride) {
  B w[GROUP / 4];
  unpack_group<BITS, GROUP>(p, w);
  const F d = load_scale(p + m.ints_bytes(), m.wide);
  const F o = m.has_offset ? load_scale(p + m.ints_bytes() + kTile * (m.wide ? 4 : 2), m.wide) : zero();
  uint8_t bytes[64];
  for (int s = 0; s < GROUP / 4; s++) {
    bstore(bytes, w[s]);
    for (int j = 0; j < 4; j++) {
      int32_t q[16];
      for (int c = 0; c < 16; c++) q[c] = int32_t(bytes[4 * c + j]) - m.zero;
      // Multiply, then add: the rounding of the reference dequantizers.
      store(out + size_t(4 * s + j) * stride, add(mul(to_float(iload(q)), d), o));
    }
  }
}

template <Code code>
static void decode_fp8(const Matrix& m, const uint8_t* tile, int k0, int n, float* out, size_t stride) {
  const CodeReader<code> reader;
  for (int k = k0; k < k0 + n; k += 2) {
    const int group = k / m.group, begin = group * m.group;
    const int length = m.k - begin < m.group ? m.k - begin : m.group;
    const uint8_t* p = tile + size_t(begin) * kTile + size_t(group) * kTile * 4;
    const F scale = load(reinterpret_cast<const float*>(p + size_t(length) * kTile));
    const Pairs w = reader.one(p + size_t(k - begin) * kTile);
    store(out + size_t(k - k0) * stride, mul(even(w), scale));
    store(out + size_t(k - k0 + 1) * stride, mul(odd(w), scale));
  }
}

// k0 .. k0 + n - 1 of a tile as fp32, row i of sixteen columns at out + i * stride. k0 is a multiple of 64,
// n at most 64.
static void decode_tile(const Matrix& m, int tile, int k0, int n, float* out, size_t stride) {
  const uint8_t* p = m.data + size_t(tile) * m.tile_bytes();
  switch (m.elem) {
    case Elem::f32:
      for (int i = 0; i < n; i++)
        store(out + size_t(i) * stride, load(reinterpret_cast<const float*>(p) + size_t(k0 + i) * 16));
      return;
    case Elem::f16:
      for (int i = 0; i < n; i++)
        store(out + size_t(i) * stride, load_f16(reinterpret_cast<const uint16_t*>(p) + size_t(k0 + i) * 16));
      return;
    case Elem::bf16:
      for (int i = 0; i < n; i++) {
        const uint16_t* w = reinterpret_cast<const uint16_t*>(p) + size_t((k0 + i) / 2) * 32;
        store(out + size_t(i) * stride, i & 1 ? bf16_odd(w) : bf16_even(w));
      }
      return;
    case Elem::f8_e4m3: return decode_fp8<Code::e4m3>(m, p, k0, n, out, stride);
    case Elem::f8_e5m2: return decode_fp8<Code::e5m2>(m, p, k0, n, out, stride);
    case Elem::ints:
      for (int i = 0; i < n; i += m.group) {
        const uint8_t* group = p + size_t((k0 + i) / m.group) * m.group_bytes();
        with_int_kind(m, [&](auto kind) {
          decode_group<kind.bits, kind.group>(m, group, out + size_t(i) * stride, stride);
        });
      }
      return;
  }
}

// One row (output feature) of the matrix as fp32, times factor: embedding lookup from the packed head.
static void decode_row(const Matrix& m, int row, float factor, float* out) {
  alignas(64) float block[64][16];
  for (int k = 0; k < m.k; k += 64) {
    const int n = m.k - k < 64 ? m.k - k : 64;
    decode_tile(m, row / kTile, k, n, &block[0][0], 16);
    for (int i = 0; i < n; i++) out[k + i] = block[i][row % kTile] * factor;
  }
}

}  // namespace ff::FF_NS
