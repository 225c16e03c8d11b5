// Weights of integer and fp8 formats as bf16, in the layout of a bf16 tile (matrix.h): [k / 2][16][2].
//
// ints: w = fma(q, scale, offset), the offset of a matrix without offsets being -zero * scale; fp8: w = code
// * scale; both rounded to bf16, ties to even. Ints of 4 bits are rounded to multiples of 2^-7 of the power
// of two below their group's largest magnitude, which are bf16 too and cost one subtraction: for a single
// row, decoding is what takes the time.
#pragma once

#include "kernels/codes.h"
#include "kernels/unpack.h"

namespace ff::FF_NS {

constexpr int kUnit = 32;  // k that a decoder writes at once: one cache line a column, 1 KiB a tile
constexpr int kUnitValues = kUnit * kTile;

// w = at(q) of a group of ints of 4 bits, for sixteen columns.
class Grid {
 public:
  FF_INLINE Grid(F scale, F offset) : scale_(scale) {
    const F top = max(max(abs(offset), abs(fma(set1(15.0f), scale, offset))), set1(0x1p-80f));
    // The last bit of numbers of this size is the grid's step.
    large_ = mul(power_below(top), set1(1.5f * 0x1p16f));
    offset_ = add(offset, large_);
  }
  FF_INLINE F at(F q) const { return sub(fma(q, scale_, offset_), large_); }

 private:
  F scale_, offset_, large_;
};

// Decodes one tile from its first k on. A unit of fewer than kUnit k is the last one of the matrix.
template <int BITS, int GROUP, bool OFFSET>
class IntDecoder {
 public:
  FF_INLINE IntDecoder(const Matrix& m, int tile)
      : p_(m.data + size_t(tile) * m.tile_bytes()), zero_(float(-m.zero)), wide_(m.wide) {}
  FF_INLINE void unit(int n, uint16_t* out) {
    group(out);
    if (GROUP < kUnit && n > GROUP) group(out + GROUP * kTile);
  }

 private:
  static constexpr int kInts = GROUP * BITS * 2;  // bytes of a group

  FF_INLINE void group(uint16_t* out) {
    constexpr int steps = GROUP / 4, lines = (kInts + (OFFSET ? 64 : 32) + 63) / 64;
    FF_UNROLL(10)
    for (int line = 0; line < lines; line++) prefetch(p_ + 4096 + 64 * line);
    const int scale_bytes = kTile * (wide_ ? 4 : 2);
    const F d = load_scale(p_ + kInts, wide_);
    const F o = OFFSET ? load_scale(p_ + kInts + scale_bytes, wide_) : mul(set1(zero_), d);
    if constexpr (BITS == 4) {
      const Grid grid(d, o);
      FF_UNROLL(4)
      for (int s = 0; s < steps / 2; s++) {
        const B x = bload(p_ + 64 * s);
        uint16_t *low = out + 64 * s, *high = out + 64 * (s + steps / 2);
        store_bf16_halves(low, grid.at(nibble<0>(x)), grid.at(nibble<2>(x)));
        store_bf16_halves(low + 32, grid.at(nibble<4>(x)), grid.at(nibble<6>(x)));
        store_bf16_halves(high, grid.at(nibble<1>(x)), grid.at(nibble<3>(x)));
        store_bf16_halves(high + 32, grid.at(nibble<5>(x)), grid.at(nibble<7>(x)));
      }
    } else {
      B w[steps];
      unpack_group<BITS, GROUP>(p_, w);
      FF_UNROLL(8)
      for (int s = 0; s < steps; s++) {
        uint16_t* to = out + 64 * s;
        store_bf16_pairs(to, fma(to_float(byte<0>(w[s])), d, o), fma(to_float(byte<1>(w[s])), d, o));
        store_bf16_pairs(to + 32, fma(to_float(byte<2>(w[s])), d, o), fma(to_float(byte<3>(w[s])), d, o));
      }
    }
    p_ += kInts + scale_bytes * (OFFSET ? 2 : 1);
  }

  const uint8_t* p_;
  float zero_;
  bool wide_;
};

template <Code code>
class Fp8Decoder {
 public:
  FF_INLINE Fp8Decoder(const Matrix& m, int tile)
      : p_(m.data + size_t(tile) * m.tile_bytes()), left_(m.k), group_(m.group) {
    start();
  }
  FF_INLINE void unit(int n, uint16_t* out) {
    for (int i = 0; i < n; i += 4, out += 64) {
      if (in_group_ == 0) p_ += kTile * 4, start();
      prefetch(p_ + 4096);
      Pairs low, high;
      reader_.two(p_, low, high);
      store_bf16_pairs(out, mul(even(low), scale_), mul(odd(low), scale_));
      store_bf16_pairs(out + 32, mul(even(high), scale_), mul(odd(high), scale_));
      p_ += 64, in_group_ -= 4, left_ -= 4;
    }
  }

 private:
  FF_INLINE void start() {  // of a group; its scales are behind its codes
    in_group_ = left_ < group_ ? left_ : group_;
    scale_ = load(reinterpret_cast<const float*>(p_ + size_t(in_group_) * kTile));
  }

  CodeReader<code> reader_;
  const uint8_t* p_;
  F scale_;
  int left_, group_, in_group_;
};

template <int BITS, class Body>
static FF_INLINE void with_int_decoder(const Matrix& m, Body&& body) {
  if (m.group == 32) {
    if (m.has_offset) return body.template operator()<IntDecoder<BITS, 32, true>>();
    return body.template operator()<IntDecoder<BITS, 32, false>>();
  }
  if (m.has_offset) return body.template operator()<IntDecoder<BITS, 16, true>>();
  return body.template operator()<IntDecoder<BITS, 16, false>>();
}

// Calls body.operator()<Decoder>() with the decoder of the matrix, which is ints or fp8.
template <class Body>
static FF_INLINE void with_decoder(const Matrix& m, Body&& body) {
  if (m.elem == Elem::f8_e4m3) return body.template operator()<Fp8Decoder<Code::e4m3>>();
  if (m.elem == Elem::f8_e5m2) return body.template operator()<Fp8Decoder<Code::e5m2>>();
  switch (m.bits) {
    case 4: return with_int_decoder<4>(m, body);
    case 5: return with_int_decoder<5>(m, body);
    case 6: return with_int_decoder<6>(m, body);
    default: return with_int_decoder<8>(m, body);
  }
}

}  // namespace ff::FF_NS
