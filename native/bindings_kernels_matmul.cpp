// Test entry points of the matmul and row kernels on any instruction set, without a Program around them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "kernel_table.h"

namespace nb = nanobind;

namespace ff {
namespace {

using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Out2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes1 = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints1 = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Halves1 = nb::ndarray<const uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

// out = act(gate) * (norm(x) w^T + bias) + residual, computed as blocks of `tiles` tiles and `rows` rows.
// outliers: columns of x kept out of the int8 groups; outlier_columns: those of the matrix, as
// extract_columns gives.
void matmul(int isa, Floats2 x, Bytes1 packed, int n, int elem, int bits, int group, int zero,
            bool has_offset, bool wide, int compute, std::optional<Floats1> norm_weight, float eps,
            std::optional<Floats1> bias, std::optional<Floats2> residual, std::optional<Floats2> gate,
            int act, std::optional<Ints1> outliers, std::optional<Halves1> outlier_columns, int tiles,
            int rows, Out2 out) {
  require(isa >= 0 && isa < kIsaCount && isa_available(Isa(isa)),
          "this CPU or build does not have that instruction set");
  const KernelTable& table = kernels(Isa(isa));
  const int m = int(x.shape(0)), k = int(x.shape(1));
  Matrix w;
  w.n = n, w.k = k, w.elem = Elem(elem), w.bits = bits, w.group = group, w.zero = zero,
  w.has_offset = has_offset, w.wide = wide;
  if (const char* fault = w.fault()) throw std::invalid_argument(fault);
  require(packed.shape(0) == w.bytes(), "packed matrix has the wrong number of bytes");
  w.data = packed.data();
  require(int(out.shape(0)) == m && int(out.shape(1)) == n, "out is [m, n]");
  require(elem >= 0 && elem <= 5 && compute >= 0 && compute <= 2, "elem or compute");
  require(compute != int(Compute::int8) || w.elem == Elem::ints, "int8 needs integer weights");
  require(compute != int(Compute::bf16) || (w.elem != Elem::f32 && w.elem != Elem::f16),
          "bf16 needs integer, bf16 or fp8 weights");
  require(tiles >= 1 && tiles <= kBlockTiles && rows >= 1 && rows <= kRowChunk, "block size");
  if (norm_weight) require(int(norm_weight->shape(0)) == k, "norm weight is [k]");
  if (bias) require(int(bias->shape(0)) == n, "bias is [n]");
  if (residual) require(int(residual->shape(0)) == m && int(residual->shape(1)) == n, "residual is [m, n]");
  if (gate) require(int(gate->shape(0)) == m && int(gate->shape(1)) == n, "gate is [m, n]");

  require(!outliers == !outlier_columns, "outliers and their columns go together");
  const int outlier_count = outliers ? int(outliers->shape(0)) : 0;
  if (outliers) {
    require(outlier_count <= kMaxOutliers, "too many outliers");
    for (int i = 0; i < outlier_count; i++)
      require(outliers->data()[i] >= 0 && outliers->data()[i] < k, "outlier outside the matrix");
    require(outlier_columns->shape(0) == size_t(w.tiles()) * kTile * size_t(outlier_count),
            "outlier columns");
  }

  const size_t stride = (size_t(k) + 63) / 64 * 64;
  std::vector<int8_t> q(size_t(m) * stride);
  std::vector<float> scale(size_t(m) * stride / kActGroup), normed(size_t(m) * stride);
  std::vector<int32_t> sums16(size_t(m) * stride / 16), sums32(size_t(m) * stride / 16);
  std::vector<uint16_t> bf16(size_t(m) * stride);
  std::vector<float> kept(size_t(m) * kMaxOutliers);
  PrepareArgs p{};
  p.x = x.data(), p.x_stride = size_t(k), p.k = k;
  if (norm_weight) p.norm.weight = norm_weight->data();
  p.norm.eps = eps;
  p.want_q = compute == int(Compute::int8), p.want_bf16 = compute == int(Compute::bf16);
  p.normed = normed.data(), p.normed_stride = stride;
  p.outliers = outliers ? outliers->data() : nullptr, p.outlier_count = outlier_count;
  p.to.outliers = kept.data();
  p.to.q = q.data(), p.to.q_stride = stride, p.to.scale = scale.data(),
  p.to.scale_stride = stride / kActGroup;
  p.to.sums16 = sums16.data(), p.to.sums32 = sums32.data(), p.to.sum_stride = stride / 16,
  p.to.bf16 = bf16.data();
  p.to.f32 = norm_weight ? normed.data() : x.data();
  p.to.f32_stride = norm_weight ? stride : size_t(k);
  table.prepare_rows(p, 0, m);

  MatmulArgs a{};
  a.w = &w, a.compute = Compute(compute), a.act = p.to;
  a.stream_rows = table.stream_rows;
  a.outlier_columns = outlier_columns ? outlier_columns->data() : nullptr, a.outlier_count = outlier_count;
  a.out.out = out.data(), a.out.stride = size_t(n);
  if (bias) a.out.bias = bias->data();
  if (residual) a.out.residual = residual->data(), a.out.residual_stride = size_t(n);
  a.out.act = Act(act);
  std::vector<uint8_t> scratch(matmul_scratch_bytes(k) + 64);
  std::vector<float> block(size_t(kRowChunk) * kBlockTiles * kTile);
  uint8_t* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
  for (int t = 0; t < w.tiles(); t += tiles)
    for (int r = 0; r < m; r += rows) {
      const int t1 = std::min(w.tiles(), t + tiles), r1 = std::min(m, r + rows);
      if (gate) {
        for (int i = r; i < r1; i++)
          for (int c = t * kTile; c < std::min(n, t1 * kTile); c++)
            block[size_t(i - r) * kBlockTiles * kTile + size_t(c - t * kTile)] =
                gate->data()[size_t(i) * n + c];
        a.out.gate = block.data(), a.out.gate_stride = kBlockTiles * kTile;
      }
      table.matmul_block(a, t, t1, r, r1, aligned);
    }
}

void embed(int isa, Bytes1 packed, int n, int k, int elem, int bits, int group, int zero, bool has_offset,
           bool wide, nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> ids, Out2 out) {
  require(isa >= 0 && isa < kIsaCount && isa_available(Isa(isa)),
          "this CPU or build does not have that instruction set");
  Matrix w;
  w.n = n, w.k = k, w.elem = Elem(elem), w.bits = bits, w.group = group, w.zero = zero,
  w.has_offset = has_offset, w.wide = wide;
  if (const char* fault = w.fault()) throw std::invalid_argument(fault);
  require(packed.shape(0) == w.bytes(), "packed matrix has the wrong number of bytes");
  require(out.shape(0) == ids.shape(0) && int(out.shape(1)) == k, "out is [ids, k]");
  for (size_t i = 0; i < ids.shape(0); i++)
    require(ids.data()[i] >= 0 && ids.data()[i] < n, "row outside the matrix");
  w.data = packed.data();
  kernels(Isa(isa)).embed_rows(w, ids.data(), 1.0f, out.data(), size_t(k), 0, int(ids.shape(0)));
}

}  // namespace

void bind_matmul_tests(nb::module_& m) {
  using namespace nb::literals;
  nb::list names;
  for (int i = 0; i < kIsaCount; i++) names.append(isa_name(Isa(i)));
  m.attr("TEST_ISAS") = nb::tuple(names);
  m.def("test_matmul", &matmul, "isa"_a, "x"_a.noconvert(), "packed"_a.noconvert(), "n"_a, "elem"_a, "bits"_a,
        "group"_a, "zero"_a, "has_offset"_a, "wide"_a, "compute"_a, "norm_weight"_a.none().noconvert(),
        "eps"_a, "bias"_a.none().noconvert(), "residual"_a.none().noconvert(), "gate"_a.none().noconvert(),
        "act"_a, "outliers"_a.none().noconvert(), "outlier_columns"_a.none().noconvert(), "tiles"_a, "rows"_a,
        "out"_a.noconvert());
  m.def("test_embed", &embed, "isa"_a, "packed"_a.noconvert(), "n"_a, "k"_a, "elem"_a, "bits"_a, "group"_a,
        "zero"_a, "has_offset"_a, "wide"_a, "ids"_a.noconvert(), "out"_a.noconvert());
}

}  // namespace ff
