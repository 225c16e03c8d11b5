// int8 products of every instruction set of this build and CPU, and of the emulated tile unit: the same bits
// as the scalar kernel's, and the same on every architecture (the digest below was computed on x86-64). Needs
// no Python, so that it also runs under an emulator of another architecture. Exit status 0 if all agree.
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernel_table.h"
#include "pack.h"

namespace {

using namespace ff;

constexpr uint64_t kDigest = 0x6da96d6abe5f54f0u;

struct Random {  // Marsaglia's xorshift64
  uint64_t state = 88172645463325252u;
  uint32_t next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return uint32_t(state >> 32);
  }
  float number() { return float(int32_t(next())) * 0x1p-31f; }
};

struct Case {
  int rows, n, k, bits, group;
  bool offset;
};

std::vector<float> product(const Case& c, Isa isa, int stream_rows) {
  Random random;
  Matrix w;
  w.n = c.n, w.k = c.k, w.elem = Elem::ints, w.bits = c.bits, w.group = c.group, w.has_offset = c.offset;
  w.zero = c.offset ? 0 : 1 << (c.bits - 1);
  std::vector<uint8_t> q(size_t(c.n) * c.k);
  for (uint8_t& x : q) x = uint8_t(random.next() & ((1u << c.bits) - 1));
  std::vector<float> scale(size_t(c.n) * c.k / c.group), offset(c.offset ? scale.size() : 0);
  // Whole multiples of 2^-8: exact in fp16.
  for (float& x : scale) x = float(int(random.next() % 64) - 32) * 0x1p-8f;
  for (float& x : offset) x = float(int(random.next() % 64) - 32) * 0x1p-8f;
  std::vector<uint8_t> packed(w.bytes() + 64);
  w.data = packed.data() + (64 - reinterpret_cast<uintptr_t>(packed.data()) % 64) % 64;
  pack_ints(w, q.data(), scale.data(), c.offset ? offset.data() : nullptr, const_cast<uint8_t*>(w.data));

  const size_t stride = (size_t(c.k) + 63) / 64 * 64, rows = size_t(c.rows);
  std::vector<float> x(rows * c.k), scales(rows * stride / kActGroup), outliers(rows * kMaxOutliers);
  for (float& v : x) v = random.number();
  std::vector<int8_t> a(rows * stride);
  std::vector<int32_t> sums16(rows * stride / 16), sums32(rows * stride / 16);
  PrepareArgs p{};
  p.x = x.data(), p.x_stride = size_t(c.k), p.k = c.k, p.want_q = true;
  p.to.f32 = x.data(), p.to.f32_stride = size_t(c.k), p.to.outliers = outliers.data();
  p.to.q = a.data(), p.to.q_stride = stride;
  p.to.scale = scales.data(), p.to.scale_stride = stride / kActGroup;
  p.to.sums16 = sums16.data(), p.to.sums32 = sums32.data(), p.to.sum_stride = stride / 16;
  kernels(isa).prepare_rows(p, 0, c.rows);

  std::vector<float> out(rows * c.n);
  MatmulArgs m{};
  m.w = &w, m.compute = Compute::int8, m.act = p.to, m.out.out = out.data(), m.out.stride = size_t(c.n);
  m.stream_rows = stream_rows;
  std::vector<uint8_t> scratch(matmul_scratch_bytes(c.k) + 64);
  uint8_t* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
  for (int t = 0; t < w.tiles(); t += kBlockTiles)
    kernels(isa).matmul_block(m, t, t + kBlockTiles < w.tiles() ? t + kBlockTiles : w.tiles(), 0, c.rows,
                              aligned);
  return out;
}

}  // namespace

int main() {
  uint64_t digest = 14695981039346656037u;  // FNV-1a
  for (int rows : {1, 4, 5, 16, 23, 48})
    for (int bits : {4, 5, 6, 8})
      for (int group : {16, 32})
        for (bool offset : {false, true}) {
          if (!int_kind_exists(bits, group, offset)) continue;
          const Case c{rows, 70, 160, bits, group, offset};
          const std::vector<float> want = product(c, Isa::scalar, 0);
          for (int i = 1; i < kIsaCount; i++) {
            if (!isa_available(Isa(i))) continue;
            for (int stream_rows : {0, 48}) {  // in panels, in registers
              const std::vector<float> got = product(c, Isa(i), stream_rows);
              if (!std::memcmp(got.data(), want.data(), want.size() * sizeof(float))) continue;
              std::printf("%s: %d rows (%d streamed), %d bits, groups of %d, offset %d: not scalar's bits\n",
                          isa_name(Isa(i)), rows, stream_rows, bits, group, int(offset));
              return 1;
            }
          }
          for (float f : want) {
            uint32_t u;
            std::memcpy(&u, &f, 4);
            for (int b = 0; b < 32; b += 8) digest = (digest ^ (u >> b & 255)) * 1099511628211u;
          }
        }
  if (digest != kDigest) {
    std::printf("digest %016llx instead of %016llx\n", static_cast<unsigned long long>(digest),
                static_cast<unsigned long long>(kDigest));
    return 1;
  }
  std::puts("kernels: fine");
  return 0;
}
