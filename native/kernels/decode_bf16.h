// Weights of integer and fp8 formats as bf16, in the layout of a bf16 tile (matrix.h): [k / 2][16][2].
//
// ints: w = fma(q, d, o) cut off to bf16, d being scale * kCut and o being offset * kCut, or -zero * d if the
// matrix has no offsets; fp8: w = code * (scale * kCut), cut off. For a single row decoding is what takes the
// time, and cutting off costs one operation, rounding three.
#pragma once

#include "kernels/codes.h"
#include "kernels/unpack.h"

namespace ff::FF_NS {

constexpr int kUnit = 32;  // k that a decoder writes at once: one cache line a column, 1 KiB a tile
constexpr int kUnitValues = kUnit * kTile;

// What cutting off a mantissa of 8 bits takes away on average, if magnitudes are spread evenly over their
// logarithms: 2^-8 E[1 / m] = 2^-8 / (2 ln 2). With it the error has no bias and a standard deviation of
// 0.175 %; rounding has 0.166 %.
constexpr float kCut = 1.0f + 0x1p-8f * 0.72134752f;

// The weights of a group of ints, for sixteen columns, before they are cut off.
struct Scales {
  F d, o;
  FF_INLINE F at(F q) const { return fma(q, d, o); }
  FF_INLINE F at(I q) const { return at(to_float(q)); }
};

// p: behind the ints.
template <bool OFFSET>
static FF_INLINE Scales load_scales(const uint8_t* p, bool wide, F minus_zero) {
  const F cut = set1(kCut), d = mul(load_scale(p, wide), cut);
  return {d, OFFSET ? mul(load_scale(p + kTile * (wide ? 4 : 2), wide), cut) : mul(minus_zero, d)};
}

// Calls body(k, w0, w1) for each pair of k of a group in ascending order, the weights cut off neither.
template <int BITS, int GROUP, class Body>
static FF_INLINE void each_pair(const uint8_t* p, const Scales& s, Body&& body) {
  constexpr int steps = GROUP / 4;
  if constexpr (BITS == 4) {
    FF_UNROLL(4)
    for (int i = 0; i < steps / 2; i++) {
      const B x = bload(p + 64 * i);
      body(4 * i, s.at(nibble<0>(x)), s.at(nibble<2>(x)));
      body(4 * i + 2, s.at(nibble<4>(x)), s.at(nibble<6>(x)));
    }
    FF_UNROLL(4)
    for (int i = 0; i < steps / 2; i++) {
      const B x = bload(p + 64 * i);
      body(4 * i + GROUP / 2, s.at(nibble<1>(x)), s.at(nibble<3>(x)));
      body(4 * i + GROUP / 2 + 2, s.at(nibble<5>(x)), s.at(nibble<7>(x)));
    }
  } else {
    B w[steps];
    unpack_group<BITS, GROUP>(p, w);
    FF_UNROLL(8)
    for (int i = 0; i < steps; i++) {
      body(4 * i, s.at(byte<0>(w[i])), s.at(byte<1>(w[i])));
      body(4 * i + 2, s.at(byte<2>(w[i])), s.at(byte<3>(w[i])));
    }
  }
}

// Where the weights are that will be wanted when those at p were used: 4 KiB on, in this tile or behind the
// beginning of the one that comes after it.
struct Ahead {
  const uint8_t* end;  // of the tile
  ptrdiff_t jump;      // from there to the next one

  Ahead(const uint8_t* tile, size_t bytes, const uint8_t* next)
      : end(tile + bytes), jump(next ? next - end : 0) {}
  FF_INLINE const uint8_t* of(const uint8_t* p) const {
    p += 4096;
    return p < end ? p : p + jump;
  }
};

template <int BITS, int GROUP, bool OFFSET>
static FF_INLINE void prefetch_group(const uint8_t* p) {
  constexpr int lines = (GROUP * BITS * 2 + (OFFSET ? 64 : 32) + 63) / 64;
  FF_UNROLL(10)
  for (int line = 0; line < lines; line++) prefetch(p + 64 * line);
}

// Decodes one tile from its first k on. A unit of fewer than kUnit k is the last one of the matrix.
// next: the tile that will be decoded after it, or null.
template <int BITS, int GROUP, bool OFFSET>
class IntDecoder {
 public:
  FF_INLINE IntDecoder(const Matrix& m, int tile, const uint8_t* next)
      : p_(m.data + size_t(tile) * m.tile_bytes()),
        ahead_(p_, m.tile_bytes(), next),
        bytes_(m.group_bytes()),
        zero_(set1(float(-m.zero))),
        wide_(m.wide) {}
  FF_INLINE void unit(int n, uint16_t* out) {
    group(out);
    if (GROUP < kUnit && n > GROUP) group(out + GROUP * kTile);
  }

 private:
  FF_INLINE void group(uint16_t* out) {
    prefetch_group<BITS, GROUP, OFFSET>(ahead_.of(p_));
    const Scales s = load_scales<OFFSET>(p_ + GROUP * BITS * 2, wide_, zero_);
    each_pair<BITS, GROUP>(p_, s, [&](int k, F w0, F w1) { store_bf16_cut(out + k * kTile, w0, w1); });
    p_ += bytes_;
  }

  const uint8_t* p_;
  Ahead ahead_;
  size_t bytes_;
  F zero_;
  bool wide_;
};

template <Code code>
class Fp8Decoder {
 public:
  FF_INLINE Fp8Decoder(const Matrix& m, int tile, const uint8_t* next)
      : p_(m.data + size_t(tile) * m.tile_bytes()),
        ahead_(p_, m.tile_bytes(), next),
        left_(m.k),
        group_(m.group) {
    start();
  }
  FF_INLINE void unit(int n, uint16_t* out) {
    for (int i = 0; i < n; i += 4, out += 64) {
      if (in_group_ == 0) p_ += kTile * 4, start();
      prefetch(ahead_.of(p_));
      Pairs low, high;
      reader_.two(p_, low, high);
      store_bf16_cut(out, mul(even(low), scale_), mul(odd(low), scale_));
      store_bf16_cut(out + 32, mul(even(high), scale_), mul(odd(high), scale_));
      p_ += 64, in_group_ -= 4, left_ -= 4;
    }
  }

 private:
  FF_INLINE void start() {  // of a group; its scales are behind its codes
    in_group_ = left_ < group_ ? left_ : group_;
    scale_ = mul(load(reinterpret_cast<const float*>(p_ + size_t(in_group_) * kTile)), set1(kCut));
  }

  CodeReader<code> reader_;
  const uint8_t* p_;
  Ahead ahead_;
  F scale_;
  int left_, group_, in_group_;
};

// Calls body.operator()<Decoder>() with the decoder of the matrix, which is ints or fp8.
template <class Body>
static FF_INLINE void with_decoder(const Matrix& m, Body&& body) {
  if (m.elem == Elem::f8_e4m3) return body.template operator()<Fp8Decoder<Code::e4m3>>();
  if (m.elem == Elem::f8_e5m2) return body.template operator()<Fp8Decoder<Code::e5m2>>();
  with_int_kind(
      m, [&](auto kind) { body.template operator()<IntDecoder<kind.bits, kind.group, kind.offset>>(); });
}

}  // namespace ff::FF_NS
