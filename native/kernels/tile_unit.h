// A unit of eight registers, each a tile of up to 16 rows of up to 64 bytes, that multiplies tiles: Intel AMX
// (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TILELOADD, TDPBSUD, TDPBF16PS).
//
// TileUnit is that hardware, EmulatedTileUnit the same operations in C++. A thread owns one between
// configure() and release(); configure() may be called again to change the shapes.
#pragma once

#include "vec.h"

namespace ff::FF_NS {

struct TileShapes {  // the operand of LDTILECFG
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row, per tile
  uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int row_bytes) {
    rows[tile] = uint8_t(tile_rows);
    bytes[tile] = uint16_t(row_bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

#if defined(__x86_64__)

// Written as assembly, because the compilers' own functions take tile numbers as text, not as template
// arguments, and do not say that they read memory.
class TileUnit {
 public:
  FF_INLINE void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  FF_INLINE void release() { asm volatile("tilerelease"); }
  template <int T>
  FF_INLINE void clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  // Row i of the tile is at p + i * stride bytes.
  template <int T>
  FF_INLINE void load(const void* p, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  FF_INLINE void store(void* p, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  // C[m][n] += sum over k, j of A[m][4k + j] * B[k][4n + j]: A signed bytes, B unsigned ones, C int32. Exact.
  template <int C, int A, int B>
  FF_INLINE void dot_s8u8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  // C[m][n] += sum over k of A[m][2k] * B[k][2n], plus the sum over k of A[m][2k + 1] * B[k][2n + 1]: bf16, C
  // fp32; the two sums ascend over k by fma and are added to each other, then to C.
  template <int C, int A, int B>
  FF_INLINE void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

#endif

// Denormals count here; the hardware takes them as zero.
class EmulatedTileUnit {
 public:
  void configure(const TileShapes& shapes) {
    shapes_ = shapes;
    memset(tiles_, 0, sizeof tiles_);
  }
  void release() { shapes_ = {}; }
  template <int T>
  void clear() {
    memset(tiles_[T], 0, sizeof tiles_[T]);
  }
  template <int T>
  void load(const void* p, size_t stride) {
    clear<T>();
    for (int i = 0; i < shapes_.rows[T]; i++)
      memcpy(tiles_[T][i], static_cast<const uint8_t*>(p) + size_t(i) * stride, shapes_.bytes[T]);
  }
  template <int T>
  void store(void* p, size_t stride) {
    for (int i = 0; i < shapes_.rows[T]; i++)
      memcpy(static_cast<uint8_t*>(p) + size_t(i) * stride, tiles_[T][i], shapes_.bytes[T]);
  }
  template <int C, int A, int B>
  void dot_s8u8() {
    check_shapes<C, A, B>();
    for (int m = 0; m < shapes_.rows[C]; m++)
      for (int n = 0; n < shapes_.bytes[C] / 4; n++) {
        int32_t sum = at<int32_t>(C, m, n);
        for (int k = 0; k < shapes_.rows[B]; k++)
          for (int j = 0; j < 4; j++)
            sum += at<int8_t>(A, m, 4 * k + j) * int32_t(at<uint8_t>(B, k, 4 * n + j));
        memcpy(&tiles_[C][m][4 * n], &sum, 4);
      }
  }
  template <int C, int A, int B>
  void dot_bf16() {
    check_shapes<C, A, B>();
    for (int m = 0; m < shapes_.rows[C]; m++)
      for (int n = 0; n < shapes_.bytes[C] / 4; n++) {
        float sum[2] = {};
        for (int k = 0; k < shapes_.rows[B]; k++)
          for (int j = 0; j < 2; j++)
            sum[j] = __builtin_fmaf(bf16_to_f32(at<uint16_t>(A, m, 2 * k + j)),
                                    bf16_to_f32(at<uint16_t>(B, k, 2 * n + j)), sum[j]);
        const float total = at<float>(C, m, n) + (sum[0] + sum[1]);
        memcpy(&tiles_[C][m][4 * n], &total, 4);
      }
  }

 private:
  template <class T>
  T at(int tile, int row, int column) const {
    T x;
    memcpy(&x, &tiles_[tile][row][size_t(column) * sizeof(T)], sizeof(T));
    return x;
  }
  // The hardware raises #UD for shapes that do not fit each other.
  template <int C, int A, int B>
  void check_shapes() const {
    const TileShapes& s = shapes_;
    const bool fit = s.rows[C] == s.rows[A] && s.bytes[C] == s.bytes[B] && s.bytes[A] == 4 * s.rows[B] &&
                     s.rows[C] && s.rows[B] && s.bytes[B] && s.rows[A] <= 16 && s.rows[B] <= 16 &&
                     s.bytes[A] <= 64 && s.bytes[B] <= 64;
    if (!fit) __builtin_trap();
  }

  TileShapes shapes_;
  uint8_t tiles_[8][16][64];
};

}  // namespace ff::FF_NS
