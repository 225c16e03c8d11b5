// Test entry points of the attention and sampling kernels: one batch, any instruction set, no engine around
// it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "attention_plan.h"
#include "kernel_table.h"
#include "sampler.h"

namespace nb = nanobind;

namespace ff {
namespace {

using Floats1 = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints1 = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Words2 = nb::ndarray<uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes1 = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("kernel test: ") + what);
}

const KernelTable& table_of(int isa) {
  check(isa >= 0 && isa < kIsaCount && isa_available(Isa(isa)),
        "this CPU or build does not have that instruction set");
  return kernels(Isa(isa));
}

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using AlignedFloats = std::unique_ptr<float[], Free>;

AlignedFloats aligned_floats(size_t n) {
  auto* p = static_cast<float*>(std::aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64));
  if (!p) throw std::bad_alloc();
  return AlignedFloats(p);
}

template <class A>
auto* data_or_null(const std::optional<A>& a) {
  return a ? a->data() : nullptr;
}

// Runs prologue and items of one batch on `threads` threads; returns the number of items. planned_threads:
// what the plan is made for (more of them divide the KV more finely).
int run_attention(int isa, Floats2 q, Floats2 k, Floats2 v, Floats2 out, int heads, int kv_heads,
                  int head_dim, float scale, int window, float softcap, std::optional<Floats1> sinks,
                  std::optional<Floats1> q_norm, std::optional<Floats1> k_norm, float eps, float norm_offset,
                  std::optional<Floats2> cos, std::optional<Floats2> sin, bool exact, int kv_type,
                  Bytes1 pool, Ints1 row_start, Ints1 context, Ints1 block_start, Ints1 blocks, int threads,
                  int planned_threads) {
  const KernelTable& table = table_of(isa);
  const int rows = int(q.shape(0)), count = int(context.shape(0));
  check(kv_heads > 0 && heads % kv_heads == 0 && heads / kv_heads <= kMaxGroup, "heads");
  check(head_dim > 0 && head_dim % 16 == 0, "head_dim must be a multiple of 16");
  check(int(q.shape(1)) == heads * head_dim && int(out.shape(1)) == heads * head_dim,
        "q and out are [rows, heads * head_dim]");
  check(int(k.shape(1)) == kv_heads * head_dim && int(v.shape(1)) == kv_heads * head_dim,
        "k, v are [rows, kv_heads * head_dim]");
  check(int(k.shape(0)) == rows && int(v.shape(0)) == rows && int(out.shape(0)) == rows,
        "as many rows in q, k, v, out");
  check(!cos == !sin, "cos and sin go together");
  if (cos)
    check(int(cos->shape(0)) == rows && int(sin->shape(0)) == rows && cos->shape(1) == sin->shape(1) &&
              int(cos->shape(1)) * 2 <= head_dim,
          "cos, sin are [rows, rope_dim / 2]");
  if (sinks) check(int(sinks->shape(0)) == heads, "sinks are [heads]");
  if (q_norm) check(int(q_norm->shape(0)) == head_dim, "q_norm is [head_dim]");
  if (k_norm) check(int(k_norm->shape(0)) == head_dim, "k_norm is [head_dim]");
  check(int(row_start.shape(0)) == count + 1 && int(block_start.shape(0)) == count + 1,
        "row_start, block_start: [sequences + 1]");
  check(row_start.data()[count] == rows && block_start.data()[count] <= int(blocks.shape(0)),
        "last row_start, block_start");
  check(threads >= 1 && threads <= 16 && planned_threads >= 1 && planned_threads <= 64, "threads");

  AttentionArgs a{};
  a.q = q.data(), a.k = k.data(), a.v = v.data(), a.out = out.data();
  a.q_stride = a.out_stride = size_t(heads) * head_dim, a.k_stride = a.v_stride = size_t(kv_heads) * head_dim;
  a.rows = rows, a.heads = heads, a.kv_heads = kv_heads, a.head_dim = head_dim;
  a.scale = scale, a.window = window, a.softcap = softcap, a.sinks = data_or_null(sinks);
  a.q_norm = {data_or_null(q_norm), eps, norm_offset}, a.k_norm = {data_or_null(k_norm), eps, norm_offset};
  a.cos = data_or_null(cos), a.sin = data_or_null(sin), a.rope_dim = cos ? int(cos->shape(1)) * 2 : 0;
  a.exact = exact;
  check(kv_type >= 0 && kv_type <= 3, "kv_type");
  const KvType type = KvType(kv_type);
  const size_t half = kv_half_bytes(type, head_dim);
  a.kv = {pool.data(), kv_block_bytes(type, kv_heads, head_dim), 2 * half, half, kv_heads, head_dim, type};
  a.seqs = {count, row_start.data(), context.data(), block_start.data(), blocks.data()};
  int longest = 0;
  for (int s = 0; s < count; s++) {
    const int end = context.data()[s] + row_start.data()[s + 1] - row_start.data()[s];
    check(context.data()[s] >= 0 && row_start.data()[s] <= row_start.data()[s + 1], "context, row_start");
    check((end + kBlockTokens - 1) / kBlockTokens <= block_start.data()[s + 1] - block_start.data()[s],
          "too few blocks");
    for (int i = block_start.data()[s]; i < block_start.data()[s + 1]; i++)
      check(blocks.data()[i] >= 0 && (size_t(blocks.data()[i]) + 1) * a.kv.block_bytes <= pool.shape(0),
            "block id");
    longest = std::max(longest, end);
  }

  const AttentionShape shape{heads, kv_heads, window, planned_threads};
  const AttentionPlanBounds bounds = attention_plan_bounds(shape, rows, count, longest);
  std::vector<AttentionItem> items(bounds.items);
  std::vector<int32_t> counts(bounds.groups, 0);
  AlignedFloats partials = aligned_floats(bounds.partial_slots * attention_partial_floats(head_dim));
  a.partials = partials.get(), a.part_counts = counts.data();
  const int n = plan_attention(a.seqs, shape, items.data(), bounds);

  nb::gil_scoped_release release;
  const auto on_threads = [&](auto work) {
    std::vector<std::thread> others;
    for (int t = 1; t < threads; t++) others.emplace_back(work, t);
    work(0);
    for (auto& t : others) t.join();
  };
  on_threads([&](int t) { table.attention_prologue(a, rows * t / threads, rows * (t + 1) / threads); });
  std::atomic<int> next{0};
  on_threads([&](int) {
    AlignedFloats scratch = aligned_floats(attention_scratch_floats(head_dim));
    for (int i; (i = next.fetch_add(1)) < n;) table.attention_item(a, items[size_t(i)], scratch.get());
  });
  for (const int32_t c : counts) check(c == 0, "a part count was left behind");
  return n;
}

// Samples every row of logits; `rows` is the memory of as many SampleRow records. Outputs as in StepResult.
void run_sampling(int isa, Floats2 logits, Bytes1 rows, Ints1 history, Ints1 bias_ids, Floats1 bias_values,
                  Ints1 ban_ids, std::optional<Words2> masks, Ints1 token, Floats1 logprob, Ints1 rank,
                  Ints2 top_ids, Floats2 top_logprobs, Bytes1 status) {
  const KernelTable& table = table_of(isa);
  const size_t n = logits.shape(0), vocab = logits.shape(1);
  check(rows.shape(0) == n * sizeof(SampleRow), "one record per row");
  for (const size_t size : {token.shape(0), logprob.shape(0), rank.shape(0), top_ids.shape(0),
                            top_logprobs.shape(0), status.shape(0)})
    check(size == n, "one output per row");
  check(top_ids.shape(1) == top_logprobs.shape(1), "top_ids and top_logprobs are [rows, k]");
  check(bias_ids.shape(0) == bias_values.shape(0), "as many biases as ids");
  if (masks) check(masks->shape(1) == (vocab + 31) / 32, "masks are [n, ceil(vocab / 32)]");
  const SampleInputs in{history.data(), bias_ids.data(),     bias_values.data(),
                        ban_ids.data(), data_or_null(masks), int32_t((vocab + 31) / 32)};
  const SampleOutputs out{token.data(),   logprob.data(),      rank.data(),
                          top_ids.data(), top_logprobs.data(), int32_t(top_ids.shape(1)),
                          status.data()};
  AlignedFloats scratch = aligned_floats(sample_scratch_bytes(int(vocab)) / sizeof(float));
  nb::gil_scoped_release release;
  for (size_t i = 0; i < n; i++) {
    SampleRow row;
    std::memcpy(&row, rows.data() + i * sizeof(SampleRow), sizeof(SampleRow));
    check(row.target < int(vocab) && row.history_end <= int(history.shape(0)) &&
              row.bias_end <= int(bias_ids.shape(0)) && row.ban_end <= int(ban_ids.shape(0)) &&
              row.mask < (masks ? int(masks->shape(0)) : 0),
          "record out of range");
    table.sample_row(logits.data() + i * vocab, int(vocab), row, in, out, int(i), scratch.get());
  }
}

}  // namespace

void bind_attention_tests(nb::module_& m) {
  m.def("test_uniform", &sample_uniform, nb::arg("seed"), nb::arg("counter"));
  m.def("test_sampling", &run_sampling, nb::arg("isa"), nb::arg("logits"), nb::arg("rows"),
        nb::arg("history"), nb::arg("bias_ids"), nb::arg("bias_values"), nb::arg("ban_ids"),
        nb::arg("masks").none(), nb::arg("token"), nb::arg("logprob"), nb::arg("rank"), nb::arg("top_ids"),
        nb::arg("top_logprobs"), nb::arg("status"));
  m.def("test_attention", &run_attention, nb::arg("isa"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
        nb::arg("out"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("scale"),
        nb::arg("window"), nb::arg("softcap"), nb::arg("sinks").none(), nb::arg("q_norm").none(),
        nb::arg("k_norm").none(), nb::arg("eps"), nb::arg("norm_offset"), nb::arg("cos").none(),
        nb::arg("sin").none(), nb::arg("exact"), nb::arg("kv_type"), nb::arg("pool"), nb::arg("row_start"),
        nb::arg("context"), nb::arg("block_start"), nb::arg("blocks"), nb::arg("threads"),
        nb::arg("planned_threads"));
}

}  // namespace ff
