#include "pack.h"

#include <algorithm>
#include <cstring>

namespace ff {

namespace {

uint16_t to_f16(float f) {  // round to nearest even
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint32_t sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (u >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (u < 0x38800000) {  // subnormal in fp16: let the FPU round by adding 0.5
    float a;
    std::memcpy(&a, &u, 4);
    a += 0.5f;
    std::memcpy(&u, &a, 4);
    return uint16_t(sign | (u - 0x3f000000));
  }
  return uint16_t(sign | ((u + 0xc8000fff + ((u >> 13) & 1)) >> 13));
}

void put_scale(uint8_t* out, int column, bool wide, float value) {
  if (wide) {
    std::memcpy(out + 4 * column, &value, 4);
  } else {
    const uint16_t h = to_f16(value);
    std::memcpy(out + 2 * column, &h, 2);
  }
}

void pack_group(const Matrix& m, const uint8_t (*q)[kTile], uint8_t* out) {  // q[k in group][column]
  const int steps = m.group / 4;
  auto at = [&](int step, int byte) -> uint8_t { return q[4 * step + (byte & 3)][byte >> 2]; };
  if (m.bits == 8) {
    for (int s = 0; s < steps; s++)
      for (int b = 0; b < 64; b++) out[64 * s + b] = at(s, b);
    return;
  }
  const int half = steps / 2;
  for (int s = 0; s < half; s++)
    for (int b = 0; b < 64; b++) out[64 * s + b] = uint8_t((at(s, b) & 15) | (at(s + half, b) & 15) << 4);
  uint8_t* high = out + 64 * half;
  if (m.bits == 5) {
    std::memset(high, 0, size_t(steps) * 8);
    for (int s = 0; s < steps; s++)
      for (int b = 0; b < 64; b++) high[8 * s + (b >> 3)] |= uint8_t((at(s, b) >> 4 & 1) << (b & 7));
  } else if (m.bits == 6) {
    std::memset(high, 0, size_t(steps) * 16);
    for (int s = 0; s < steps; s++)
      for (int b = 0; b < 64; b++) high[64 * (s / 4) + b] |= uint8_t((at(s, b) >> 4 & 3) << (2 * (s & 3)));
  }
}

float to_f32(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
  uint32_t u;
  if (magnitude < 0x400) {
    const float f = float(magnitude) * 5.9604644775390625e-08f;  // 2^-24
    std::memcpy(&u, &f, 4);
  } else {
    u = magnitude >= 0x7c00 ? (magnitude << 13) + 0x70000000 : (magnitude << 13) + 0x38000000;
  }
  u |= sign;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

float get_scale(const uint8_t* at, int column, bool wide) {
  if (wide) {
    float f;
    std::memcpy(&f, at + 4 * column, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, at + 2 * column, 2);
  return to_f32(h);
}

float element(const Matrix& m, int row, int k) {  // of an integer matrix
  const uint8_t* p = m.data + size_t(row / kTile) * m.tile_bytes() + size_t(k / m.group) * m.group_bytes();
  const int column = row % kTile, within = k % m.group, steps = m.group / 4, half = steps / 2;
  const int step = within / 4, byte = 4 * column + within % 4;
  int q;
  if (m.bits == 8) {
    q = p[64 * step + byte];
  } else {
    const uint8_t x = p[64 * (step % half) + byte];
    q = step < half ? x & 15 : x >> 4;
    const uint8_t* high = p + 64 * half;
    if (m.bits == 5) q |= (high[8 * step + byte / 8] >> (byte % 8) & 1) << 4;
    if (m.bits == 6) q |= (high[64 * (step / 4) + byte] >> (2 * (step % 4)) & 3) << 4;
  }
  const uint8_t* scales = p + m.ints_bytes();
  const float w = float(q - m.zero) * get_scale(scales, column, m.wide);
  return m.has_offset ? w + get_scale(scales + kTile * (m.wide ? 4 : 2), column, m.wide) : w;
}

}  // namespace

void extract_columns(const Matrix& m, const int32_t* columns, int count, uint16_t* out) {
  for (int t = 0; t < m.tiles(); t++)
    for (int i = 0; i < count; i++)
      for (int c = 0; c < kTile; c++, out++)
        *out = t * kTile + c < m.n ? to_f16(element(m, t * kTile + c, columns[i])) : 0;
}

const char* Matrix::fault() const {
  if (n < 1 || k < 1) return "a matrix needs at least one row and one column";
  if (is_fp8(elem)) {
    if (k % 4) return "k of an fp8 matrix must be a multiple of 4";
    if (group < 4 || group % 4) return "group of an fp8 matrix must be a multiple of 4";
    return nullptr;
  }
  if (elem != Elem::ints) return nullptr;
  if (bits != 4 && bits != 5 && bits != 6 && bits != 8) return "bits must be 4, 5, 6 or 8";
  if (group != 16 && group != 32) return "group must be 16 or 32";
  if (!int_kind_exists(bits, group, has_offset)) return "no kernel takes these bits, group and offsets";
  if (k % group) return "k must be a multiple of the group";
  if (zero < 0 || zero > 255) return "zero must be between 0 and 255";
  if (zero && has_offset) return "a matrix has a zero point or offsets, not both";
  return nullptr;
}

void pack_ints(const Matrix& m, const uint8_t* q, const float* scale, const float* offset, uint8_t* out) {
  const int groups = m.k / m.group;
  uint8_t block[32][kTile];
  for (int t = 0; t < m.tiles(); t++) {
    const int columns = std::min(kTile, m.n - t * kTile);
    for (int g = 0; g < groups; g++) {
      // Absent columns hold the zero point, so that they are zero whatever their scale.
      for (int i = 0; i < m.group; i++) std::memset(block[i], m.zero, kTile);
      for (int c = 0; c < columns; c++) {
        const uint8_t* row = q + size_t(t * kTile + c) * m.k + size_t(g) * m.group;
        for (int i = 0; i < m.group; i++) block[i][c] = row[i];
      }
      pack_group(m, block, out);
      uint8_t* scales = out + m.ints_bytes();
      std::memset(scales, 0, m.group_bytes() - m.ints_bytes());
      for (int c = 0; c < columns; c++) {
        const size_t at = size_t(t * kTile + c) * groups + g;
        put_scale(scales, c, m.wide, scale[at]);
        if (m.has_offset) put_scale(scales + kTile * (m.wide ? 4 : 2), c, m.wide, offset[at]);
      }
      out += m.group_bytes();
    }
  }
}

void pack_dense(const Matrix& m, const void* rows, uint8_t* out) {
  const size_t size = m.elem == Elem::f32 ? 4 : 2;
  const bool pairs = m.elem == Elem::bf16;
  const auto* in = static_cast<const uint8_t*>(rows);
  std::memset(out, 0, m.bytes());
  for (int t = 0; t < m.tiles(); t++, out += m.tile_bytes()) {
    const int columns = std::min(kTile, m.n - t * kTile);
    for (int c = 0; c < columns; c++) {
      const uint8_t* row = in + size_t(t * kTile + c) * m.k * size;
      for (int i = 0; i < m.k; i++) {
        const size_t at = pairs ? size_t(i / 2) * 32 + size_t(c) * 2 + (i & 1) : size_t(i) * kTile + c;
        std::memcpy(out + at * size, row + size_t(i) * size, size);
      }
    }
  }
}

void pack_fp8(const Matrix& m, const uint8_t* codes, const float* scale, uint8_t* out) {
  const int groups = m.scale_groups();
  std::memset(out, 0, m.bytes());
  for (int t = 0; t < m.tiles(); t++) {
    const int columns = std::min(kTile, m.n - t * kTile);
    for (int g = 0; g < groups; g++) {
      const int k0 = g * m.group, length = std::min(m.group, m.k - k0);
      for (int c = 0; c < columns; c++) {
        const uint8_t* row = codes + size_t(t * kTile + c) * m.k + k0;
        for (int i = 0; i < length; i += 2) std::memcpy(out + size_t(i) * kTile + 2 * c, row + i, 2);
      }
      out += size_t(length) * kTile;
      for (int c = 0; c < columns; c++)
        std::memcpy(out + 4 * c, scale + size_t(t * kTile + c) * groups + g, 4);
      out += kTile * 4;
    }
  }
}

}  // namespace ff
