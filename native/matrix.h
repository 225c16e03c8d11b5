// Packed weights: sixteen output columns to a tile, K interleaved: one 64-byte load meets one broadcast.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff {

constexpr int kTile = 16;  // output columns per tile

enum class Elem : int32_t { ints = 0, f32 = 1, f16 = 2, bf16 = 3, f8_e4m3 = 4, f8_e5m2 = 5 };

constexpr bool is_fp8(Elem elem) { return elem == Elem::f8_e4m3 || elem == Elem::f8_e5m2; }

// Which integers there are kernels for (kernels/int_kinds.h): those that some checkpoint format comes to.
constexpr bool int_kind_exists(int bits, int group, bool has_offset) {
  if (group == 16) return bits == 4 || (bits == 6 && !has_offset);
  return group == 32 && (bits == 4 || bits == 5 || (bits == 8 && !has_offset));
}

// A matrix [n, k] (out features, in features); data is not owned. Columns n .. 16 * tiles() - 1 are zero.
//
// ints: w = scale * (q - zero) + offset per group of `group` consecutive k of one column. A tile is k / group
//   groups of ints, 16 scales and, if has_offset, 16 offsets (fp16, or fp32 if wide). The ints are steps of
//   4 k x 16 columns, a step being 64 bytes [column][4]; with s = group / 4 steps:
//     8 bits  s x 64 bytes
//     4 bits  s / 2 x 64 bytes, the low nibbles step i, the high nibbles step i + s / 2
//     5 bits  the same, then s x 8 bytes: bit j of the 64 is bit 4 of byte j of the step
//     6 bits  the 4-bit part, then s / 4 x 64 bytes: bits 2i, 2i+1 of a byte are bits 4, 5 of step
//             4 * block + i
// f32, f16: a tile is [k][16].  bf16: a tile is [(k + 1) / 2][16][2].
// f8_e4m3, f8_e5m2 (codes.h): w = scale * code per group of `group` consecutive k of one column, the last of
//   them perhaps shorter. A group is [k in group / 2][16][2] codes and 16 scales in fp32.
struct Matrix {
  const uint8_t* data = nullptr;
  int32_t n = 0, k = 0;
  Elem elem = Elem::f32;
  int32_t bits = 0, group = 0, zero = 0;
  bool has_offset = false, wide = false;

  int tiles() const { return (n + kTile - 1) / kTile; }
  size_t ints_bytes() const {
    const size_t steps = size_t(group) / 4;
    switch (bits) {
      case 4: return steps * 32;
      case 5: return steps * 40;
      case 6: return steps * 48;
      default: return steps * 64;
    }
  }
  int scale_groups() const { return (k + group - 1) / group; }  // of fp8
  size_t group_bytes() const { return ints_bytes() + size_t(kTile) * (wide ? 4 : 2) * (has_offset ? 2 : 1); }
  size_t tile_bytes() const {
    switch (elem) {
      case Elem::ints: return size_t(k / group) * group_bytes();
      case Elem::f32: return size_t(k) * kTile * 4;
      case Elem::f16: return size_t(k) * kTile * 2;
      case Elem::f8_e4m3:
      case Elem::f8_e5m2: return size_t(k) * kTile + size_t(scale_groups()) * kTile * 4;
      default: return size_t((k + 1) / 2) * kTile * 4;
    }
  }
  size_t bytes() const { return tile_bytes() * size_t(tiles()); }
  // Null if the numbers make a matrix that the kernels read, else what is wrong.
  const char* fault() const;
};

}  // namespace ff
