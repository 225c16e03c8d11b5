// The Python module: checks shapes, dtypes and ranges, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "pack.h"
#include "runtime.h"

namespace nb = nanobind;

void bind_bench(nb::module_& m);
void bind_text(nb::module_& m);

namespace ff {

void bind_attention_tests(nb::module_& m);
void bind_machine(nb::module_& m);
void bind_matmul_tests(nb::module_& m);

namespace {

template <class T, size_t D>
using Array = nb::ndarray<const T, nb::ndim<D>, nb::c_contig, nb::device::cpu>;
template <class T, size_t D>
using Out = nb::ndarray<T, nb::ndim<D>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

Isa parse_isa(const std::string& name) {
  if (name == "auto") return best_isa();
  std::string known = "auto";
  for (Isa isa : kIsas) {
    if (name == isa_name(isa)) {
      if (!isa_available(isa)) throw std::invalid_argument("this CPU or build does not have " + name);
      return isa;
    }
    known += std::string(", ") + isa_name(isa);
  }
  throw std::invalid_argument("unknown instruction set " + name + "; known are " + known);
}

KvType parse_kv_type(int type) {
  require(type >= 0 && type <= 3, "kv_type must be 0 (bf16), 1 (f32), 2 (int8) or 3 (fp8)");
  return KvType(type);
}

Matrix describe(int n, int k, int elem, int bits, int group, int zero, bool has_offset, bool wide) {
  require(elem >= 0 && elem <= 5,
          "elem must be 0 (ints), 1 (f32), 2 (f16), 3 (bf16), 4 (f8_e4m3) or 5 (f8_e5m2)");
  Matrix m;
  m.n = n, m.k = k, m.elem = Elem(elem), m.bits = bits, m.group = group, m.zero = zero;
  m.has_offset = has_offset, m.wide = wide;
  if (const char* fault = m.fault()) throw std::invalid_argument(fault);
  return m;
}

// A ProgramSpec under construction, and the arrays its matrices point into: given as they are, never
// converted, since a converted copy would be gone after the call.
struct Builder {
  ProgramSpec spec;
  std::vector<nb::object> keep;

  int add_matrix(nb::object data, int n, int k, int elem, int bits, int group, int zero, bool has_offset,
                 bool wide) {
    const auto bytes = nb::cast<Array<uint8_t, 1>>(data, false);
    Matrix m = describe(n, k, elem, bits, group, zero, has_offset, wide);
    require(bytes.shape(0) == m.bytes(), "packed matrix has the wrong number of bytes");
    require(reinterpret_cast<uintptr_t>(bytes.data()) % 64 == 0, "packed matrix is not aligned to 64 bytes");
    m.data = bytes.data();
    keep.push_back(std::move(data));
    spec.matrices.push_back(m);
    return int(spec.matrices.size()) - 1;
  }
  int add_vector(Array<float, 1> v) {
    spec.vectors.emplace_back(v.data(), v.data() + v.shape(0));
    return int(spec.vectors.size()) - 1;
  }
  int add_rope(Array<float, 1> inv_freq, float scale) {
    spec.ropes.push_back({{inv_freq.data(), inv_freq.data() + inv_freq.shape(0)}, scale});
    return int(spec.ropes.size()) - 1;
  }
  int add_layer(int kv_heads, int head_dim) {
    require(kv_heads > 0 && head_dim > 0, "a layer needs at least one head of one column");
    spec.layers.push_back({kv_heads, head_dim});
    return int(spec.layers.size()) - 1;
  }
  void add_slot(int width, bool logit_rows) {
    require(width > 0, "a slot needs at least one column");
    spec.slot_width.push_back(width);
    spec.slot_is_logit_rows.push_back(logit_rows);
  }

  using View = std::tuple<int, int, int>;  // slot, start, width
  using Norm = std::tuple<int, int, float, float, bool>;

  static Ref ref(const View& v) { return {std::get<0>(v), std::get<1>(v), std::get<2>(v)}; }
  static NormRef norm(const Norm& n) {
    return {std::get<0>(n), std::get<1>(n), std::get<2>(n), std::get<3>(n), std::get<4>(n)};
  }
  // Keeps columns of the last op's input out of its int8 groups; one fp16 array [tiles, outliers, 16] per
  // matrix.
  void set_outliers(const std::vector<int>& channels, const nb::list& columns) {
    require(!spec.ops.empty(), "no op to set outliers of");
    Op& op = spec.ops.back();
    require(nb::len(columns) == op.segments.size(), "one array of columns per matrix");
    op.outliers.assign(channels.begin(), channels.end());
    for (size_t i = 0; i < op.segments.size(); i++) {
      const auto array = nb::cast<Array<uint16_t, 1>>(columns[i], false);
      const Matrix& m = spec.matrices.at(size_t(op.segments[i].matrix));
      require(array.shape(0) == size_t(m.tiles()) * kTile * channels.size(), "columns have the wrong length");
      op.segments[i].outlier_columns = array.data();
      keep.push_back(nb::borrow(columns[i]));
    }
  }
  // How the matmul of the last op is cut: (least, most, stream_rows, runs, block, chunk) by ascending rows.
  void set_divisions(const std::vector<std::tuple<int, int, int, bool, int, int>>& divisions) {
    require(!spec.ops.empty(), "no op to divide");
    for (const auto& [least, most, stream_rows, runs, block, chunk] : divisions)
      spec.ops.back().divisions.push_back({least, most, stream_rows, runs, block, chunk});
  }
  void add_op(int kind, View x, View y, View z, View out, int residual,
              const std::vector<std::tuple<int, int>>& segments, Norm norm_, Norm k_norm, int act,
              float scale, float softcap, int heads, int kv_heads, int head_dim, int window, int layer,
              int sinks, int rope) {
    require(kind >= 0 && kind <= int(OpKind::logits), "unknown op kind");
    require(act >= 0 && act <= 3, "unknown activation");
    Op op{};
    op.kind = OpKind(kind);
    op.x = ref(x), op.y = ref(y), op.z = ref(z), op.out = ref(out);
    op.residual = residual;
    for (const auto& [matrix, bias] : segments) op.segments.push_back({matrix, bias, nullptr});
    op.norm = norm(norm_), op.k_norm = norm(k_norm);
    op.act = Act(act), op.scale = scale, op.softcap = softcap;
    op.heads = heads, op.kv_heads = kv_heads, op.head_dim = head_dim, op.window = window, op.layer = layer;
    op.sinks = sinks, op.rope = rope;
    spec.ops.push_back(std::move(op));
  }
};

struct Engine {
  std::vector<nb::object> keep;
  std::unique_ptr<Runtime> runtime;
  std::vector<int32_t> row_start;

  Engine(Builder& b, int vocab, int hidden, int integers, int kv_type, int threads, int max_tokens,
         int max_seqs, int max_context, int num_blocks, const std::string& isa) {
    require(vocab > 0 && hidden > 0, "vocab and hidden must be positive");
    require(integers >= 0 && integers <= 2, "integers must be 0 (int8), 1 (bf16) or 2 (fp32)");
    require(threads >= 1 && threads <= 1024, "threads must be between 1 and 1024");
    require(max_tokens >= 1 && max_seqs >= 1 && max_context >= 1 && num_blocks >= 1,
            "limits must be positive");
    ProgramSpec spec = b.spec;
    spec.vocab = vocab, spec.hidden = hidden, spec.integers = Compute(integers),
    spec.kv_type = parse_kv_type(kv_type);
    keep = b.keep;
    const Isa chosen = parse_isa(isa);
    nb::gil_scoped_release release;
    runtime = std::make_unique<Runtime>(
        std::move(spec), RuntimeLimits{threads, max_tokens, max_seqs, max_context, num_blocks}, chosen);
    row_start.resize(size_t(max_seqs) + 1);
  }

  void step(Array<int32_t, 1> tokens, Array<int32_t, 1> seq_tokens, Array<int32_t, 1> seq_context,
            Array<int32_t, 1> block_start, Array<int32_t, 1> blocks, Array<uint8_t, 1> samples,
            Array<int32_t, 1> history, Array<int32_t, 1> bias_ids, Array<float, 1> bias_values,
            Array<int32_t, 1> ban_ids, std::optional<Array<uint32_t, 2>> masks, Out<int32_t, 1> token,
            Out<float, 1> logprob, Out<int32_t, 1> rank, Out<int32_t, 2> top_ids, Out<float, 2> top_logprobs,
            Out<uint8_t, 1> status, std::optional<Out<float, 2>> logits,
            std::optional<Array<uint8_t, 1>> masks_ready) {
    const RuntimeLimits& limits = runtime->limits();
    const int vocab = runtime->spec().vocab;
    const int count = int(seq_tokens.shape(0)), rows = int(tokens.shape(0));
    require(rows >= 1 && rows <= limits.max_tokens, "too many tokens for one step");
    require(count >= 1 && count <= limits.max_seqs, "too many sequences for one step");
    require(int(seq_context.shape(0)) == count && int(block_start.shape(0)) == count + 1,
            "one entry per sequence");
    for (int i = 0; i < rows; i++)
      require(tokens.data()[i] >= 0 && tokens.data()[i] < vocab, "token id outside the vocabulary");
    row_start[0] = 0;
    for (int s = 0; s < count; s++) {
      const int n = seq_tokens.data()[s], context = seq_context.data()[s];
      const int first = block_start.data()[s], last = block_start.data()[s + 1];
      require(n >= 1 && context >= 0 && n <= rows && context <= limits.max_context - n,
              "sequence longer than the context");
      require(first >= 0 && first <= last && size_t(last) <= blocks.shape(0), "block_start is not ascending");
      require((last - first) * kBlockTokens >= context + n, "too few KV blocks for a sequence");
      for (int i = first; i < last; i++)
        require(blocks.data()[i] >= 0 && blocks.data()[i] < limits.num_blocks, "KV block does not exist");
      row_start[size_t(s) + 1] = row_start[size_t(s)] + n;
    }
    require(row_start[size_t(count)] == rows, "sequences and tokens differ in number");

    require(samples.shape(0) % sizeof(SampleRow) == 0, "sample records have the wrong size");
    require(reinterpret_cast<uintptr_t>(samples.data()) % 8 == 0, "sample records are not aligned");
    const auto* records = reinterpret_cast<const SampleRow*>(samples.data());
    const int wanted = int(samples.shape(0) / sizeof(SampleRow));
    const auto within = [](int begin, int end, size_t size) {
      return begin >= 0 && begin <= end && size_t(end) <= size;
    };
    const int width = int(top_ids.shape(1));
    for (int i = 0; i < wanted; i++) {
      const SampleRow& r = records[i];
      require(r.row >= 0 && r.row < rows, "logit row outside the batch");
      require(r.target < vocab, "target outside the vocabulary");
      require(r.logprobs <= width, "top_ids is too narrow");
      require(r.allowed_vocab > 0, "allowed_vocab must be positive");
      require(within(r.history_start, r.history_end, history.shape(0)) &&
                  r.history_prompt_end >= r.history_start && r.history_prompt_end <= r.history_end,
              "history range");
      require(within(r.bias_start, r.bias_end, bias_ids.shape(0)), "bias range");
      require(within(r.ban_start, r.ban_end, ban_ids.shape(0)), "ban range");
      require(r.mask < 0 || (masks && size_t(r.mask) < masks->shape(0)), "mask row");
    }
    require(bias_ids.shape(0) == bias_values.shape(0), "one bias value per id");
    for (const auto* ids : {&history, &bias_ids, &ban_ids})
      for (size_t i = 0; i < ids->shape(0); i++)
        require(ids->data()[i] >= 0 && ids->data()[i] < vocab, "token id outside the vocabulary");
    if (masks) require(masks->shape(1) * 32 >= size_t(vocab), "masks are too narrow");
    if (masks_ready) require(masks_ready->shape(0) == 1, "masks_ready is one flag");
    for (size_t n : {token.shape(0), logprob.shape(0), rank.shape(0), top_ids.shape(0), top_logprobs.shape(0),
                     status.shape(0)})
      require(n == size_t(wanted), "one output per logit row");
    require(int(top_logprobs.shape(1)) == width, "top_ids and top_logprobs differ in width");
    if (logits)
      require(logits->shape(0) == size_t(wanted) && int(logits->shape(1)) == vocab,
              "logits have the wrong shape");

    StepBatch b{};
    b.tokens = tokens.data(), b.token_count = rows;
    b.seqs = {count, row_start.data(), seq_context.data(), block_start.data(), blocks.data()};
    b.samples = records, b.sample_count = wanted;
    b.inputs = {history.data(),
                bias_ids.data(),
                bias_values.data(),
                ban_ids.data(),
                masks ? masks->data() : nullptr,
                masks ? int(masks->shape(1)) : 0};
    b.outputs = {token.data(),        logprob.data(), rank.data(),  top_ids.data(),
                 top_logprobs.data(), width,          status.data()};
    b.logits = logits ? logits->data() : nullptr;
    b.masks_ready = masks_ready ? masks_ready->data() : nullptr;
    nb::gil_scoped_release release;
    runtime->step(b);
  }

  void copy_blocks(const std::vector<std::tuple<int, int>>& pairs) {
    for (const auto& [from, to] : pairs) {
      const int n = runtime->limits().num_blocks;
      require(from >= 0 && from < n && to >= 0 && to < n, "KV block does not exist");
      runtime->copy_block(from, to);
    }
  }

  void read_block(int block, Out<uint8_t, 1> out) const {
    check_block(block, out.shape(0));
    runtime->read_block(block, out.data());
  }

  void write_block(int block, Array<uint8_t, 1> data) {
    check_block(block, data.shape(0));
    runtime->write_block(block, data.data());
  }

  void check_block(int block, size_t bytes) const {
    require(block >= 0 && block < runtime->limits().num_blocks, "KV block does not exist");
    require(bytes == runtime->kv_block_bytes(), "a KV block's content has kv_block_bytes bytes");
  }
};

}  // namespace
}  // namespace ff

NB_MODULE(_native, m) {
  using namespace ff;
  using namespace nb::literals;
  nb::set_leak_warnings(false);

  m.attr("BLOCK_TOKENS") = kBlockTokens;
  m.attr("ACTIVATION_GROUP") = kActGroup;
  m.attr("MAX_OUTLIERS") = kMaxOutliers;
  m.def("isas", [] {
    std::vector<std::string> names;
    for (Isa isa : kIsas)
      if (isa_available(isa)) names.emplace_back(isa_name(isa));
    return names;
  });

  m.def(
      "kv_block_bytes",
      [](int kv_type, int kv_heads, int head_dim) {
        require(kv_heads > 0 && head_dim > 0, "a layer needs at least one head of one column");
        return kv_block_bytes(parse_kv_type(kv_type), kv_heads, head_dim);
      },
      "kv_type"_a, "kv_heads"_a, "head_dim"_a);
  m.def(
      "packed_bytes",
      [](int n, int k, int elem, int bits, int group, int zero, bool has_offset, bool wide) {
        return describe(n, k, elem, bits, group, zero, has_offset, wide).bytes();
      },
      "n"_a, "k"_a, "elem"_a, "bits"_a = 0, "group"_a = 0, "zero"_a = 0, "has_offset"_a = false,
      "wide"_a = false);
  m.def(
      "pack_ints",
      [](Array<uint8_t, 2> q, Array<float, 2> scale, std::optional<Array<float, 2>> offset, int bits,
         int group, int zero, bool wide, Out<uint8_t, 1> out) {
        const Matrix d = describe(int(q.shape(0)), int(q.shape(1)), int(Elem::ints), bits, group, zero,
                                  offset.has_value(), wide);
        require(scale.shape(0) == q.shape(0) && int(scale.shape(1)) == d.k / group,
                "scale is [n, k / group]");
        if (offset)
          require(offset->shape(0) == q.shape(0) && int(offset->shape(1)) == d.k / group,
                  "offset is [n, k / group]");
        require(out.shape(0) == d.bytes(), "out has the wrong number of bytes");
        nb::gil_scoped_release release;
        pack_ints(d, q.data(), scale.data(), offset ? offset->data() : nullptr, out.data());
      },
      "q"_a.noconvert(), "scale"_a.noconvert(), "offset"_a.none().noconvert(), "bits"_a, "group"_a, "zero"_a,
      "wide"_a, "out"_a.noconvert());
  m.def(
      "extract_columns",
      [](Array<uint8_t, 1> packed, int n, int k, int bits, int group, int zero, bool has_offset, bool wide,
         Array<int32_t, 1> columns, Out<uint16_t, 1> out) {
        Matrix d = describe(n, k, int(Elem::ints), bits, group, zero, has_offset, wide);
        require(packed.shape(0) == d.bytes(), "packed matrix has the wrong number of bytes");
        require(out.shape(0) == size_t(d.tiles()) * kTile * columns.shape(0), "out has the wrong length");
        for (size_t i = 0; i < columns.shape(0); i++)
          require(columns.data()[i] >= 0 && columns.data()[i] < k, "column outside the matrix");
        d.data = packed.data();
        nb::gil_scoped_release release;
        extract_columns(d, columns.data(), int(columns.shape(0)), out.data());
      },
      "packed"_a, "n"_a, "k"_a, "bits"_a, "group"_a, "zero"_a, "has_offset"_a, "wide"_a,
      "columns"_a.noconvert(), "out"_a.noconvert());
  m.def(
      "pack_dense",
      [](Array<uint8_t, 2> rows, int k, int elem, Out<uint8_t, 1> out) {
        require(elem >= 1 && elem <= 3, "elem must be 1 (f32), 2 (f16) or 3 (bf16)");
        const Matrix d = describe(int(rows.shape(0)), k, elem, 0, 0, 0, false, false);
        require(rows.shape(1) == size_t(k) * (elem == 1 ? 4 : 2), "rows have the wrong number of bytes");
        require(out.shape(0) == d.bytes(), "out has the wrong number of bytes");
        nb::gil_scoped_release release;
        pack_dense(d, rows.data(), out.data());
      },
      "rows"_a.noconvert(), "k"_a, "elem"_a, "out"_a.noconvert());

  m.def(
      "pack_fp8",
      [](Array<uint8_t, 2> codes, Array<float, 2> scale, int group, int elem, Out<uint8_t, 1> out) {
        require(elem == 4 || elem == 5, "elem must be 4 (f8_e4m3) or 5 (f8_e5m2)");
        const Matrix d = describe(int(codes.shape(0)), int(codes.shape(1)), elem, 0, group, 0, false, false);
        require(scale.shape(0) == codes.shape(0) && int(scale.shape(1)) == d.scale_groups(),
                "scale is [n, ceil(k / group)]");
        require(out.shape(0) == d.bytes(), "out has the wrong number of bytes");
        nb::gil_scoped_release release;
        pack_fp8(d, codes.data(), scale.data(), out.data());
      },
      "codes"_a.noconvert(), "scale"_a.noconvert(), "group"_a, "elem"_a, "out"_a.noconvert());

  using View = Builder::View;
  using Norm = Builder::Norm;
  const View no_view{-1, 0, 0};
  const Norm no_norm{-1, -1, 0.0f, 0.0f, false};
  nb::class_<Builder>(m, "Program")
      .def(nb::init<>())
      .def("add_matrix", &Builder::add_matrix, "data"_a, "n"_a, "k"_a, "elem"_a, "bits"_a = 0, "group"_a = 0,
           "zero"_a = 0, "has_offset"_a = false, "wide"_a = false)
      .def("add_vector", &Builder::add_vector, "values"_a.noconvert())
      .def("add_rope", &Builder::add_rope, "inv_freq"_a.noconvert(), "scale"_a)
      .def("add_layer", &Builder::add_layer, "kv_heads"_a, "head_dim"_a)
      .def("add_slot", &Builder::add_slot, "width"_a, "logit_rows"_a)
      .def("set_divisions", &Builder::set_divisions, "divisions"_a)
      .def("set_outliers", &Builder::set_outliers, "channels"_a, "columns"_a)
      .def("add_op", &Builder::add_op, "kind"_a, "x"_a = no_view, "y"_a = no_view, "z"_a = no_view, "out"_a,
           "residual"_a = -1, "segments"_a = std::vector<std::tuple<int, int>>{}, "norm"_a = no_norm,
           "k_norm"_a = no_norm, "act"_a = 0, "scale"_a = 1.0f, "softcap"_a = 0.0f, "heads"_a = 1,
           "kv_heads"_a = 1, "head_dim"_a = 0, "window"_a = 0, "layer"_a = 0, "sinks"_a = -1, "rope"_a = -1);
  nb::class_<Engine>(m, "Runtime")
      .def(nb::init<Builder&, int, int, int, int, int, int, int, int, int, const std::string&>(), "program"_a,
           "vocab"_a, "hidden"_a, "integers"_a, "kv_type"_a, "threads"_a, "max_tokens"_a, "max_seqs"_a,
           "max_context"_a, "num_blocks"_a, "isa"_a)
      .def("step", &Engine::step, "tokens"_a.noconvert(), "seq_tokens"_a.noconvert(),
           "seq_context"_a.noconvert(), "block_start"_a.noconvert(), "blocks"_a.noconvert(),
           "samples"_a.noconvert(), "history"_a.noconvert(), "bias_ids"_a.noconvert(),
           "bias_values"_a.noconvert(), "ban_ids"_a.noconvert(), "masks"_a.none().noconvert(),
           "token"_a.noconvert(), "logprob"_a.noconvert(), "rank"_a.noconvert(), "top_ids"_a.noconvert(),
           "top_logprobs"_a.noconvert(), "status"_a.noconvert(), "logits"_a.none().noconvert(),
           "masks_ready"_a.none().noconvert() = nb::none())
      .def("copy_blocks", &Engine::copy_blocks, "pairs"_a)
      .def("read_block", &Engine::read_block, "block"_a, "out"_a.noconvert())
      .def("write_block", &Engine::write_block, "block"_a, "data"_a.noconvert())
      .def("start_observing", [](Engine& e) { e.runtime->start_observing(); })
      .def(
          "observed",
          [](const Engine& e, int op) {
            require(op >= 0 && size_t(op) < e.runtime->spec().ops.size(), "op does not exist");
            return e.runtime->observed(size_t(op));
          },
          "op"_a)
      .def_prop_ro("kv_block_bytes", [](const Engine& e) { return e.runtime->kv_block_bytes(); })
      .def_prop_ro("arena_bytes", [](const Engine& e) { return e.runtime->arena_bytes(); });

  bind_bench(m);
  bind_text(m);
  bind_attention_tests(m);
  bind_machine(m);
  bind_matmul_tests(m);
}
