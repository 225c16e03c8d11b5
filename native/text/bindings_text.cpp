#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "text/spm.h"

namespace nb = nanobind;

namespace {

using fourfold::text::SpmTokenizer;
using fourfold::text::TokenTexts;
using fourfold::text::TokenType;

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void make(SpmTokenizer* self, const nb::list& tokens, Vector<float> scores, Vector<uint8_t> types,
          int32_t unknown_id, bool add_space_prefix, const std::vector<int32_t>& strip_after) {
  const size_t count = nb::len(tokens);
  if (count == 0 || count > (1u << 30)) throw std::invalid_argument("a vocabulary has 1 to 2^30 tokens");
  if (scores.shape(0) != count || types.shape(0) != count) {
    throw std::invalid_argument("tokens, scores and types must have the same length");
  }
  for (int32_t id : strip_after) {
    if (id < 0 || static_cast<size_t>(id) >= count) throw std::invalid_argument("strip_after: no such token");
  }
  if (unknown_id < -1 || unknown_id >= static_cast<int64_t>(count)) {
    throw std::invalid_argument("unknown_id: no such token");
  }
  TokenTexts texts;
  texts.reserve(count, count * 8);
  for (size_t i = 0; i < count; ++i) {
    Py_ssize_t size = 0;
    const char* data =
        PyUnicode_AsUTF8AndSize(PyList_GET_ITEM(tokens.ptr(), static_cast<Py_ssize_t>(i)), &size);
    if (data == nullptr) throw nb::python_error();
    texts.add(std::string_view(data, static_cast<size_t>(size)));
  }
  std::vector<TokenType> kinds(count);
  for (size_t i = 0; i < count; ++i) kinds[i] = static_cast<TokenType>(types.data()[i]);
  new (self) SpmTokenizer(std::move(texts), std::vector<float>(scores.data(), scores.data() + count),
                          std::move(kinds), unknown_id, add_space_prefix, strip_after);
}

std::vector<int32_t> encode(const SpmTokenizer& self, const nb::bytes& text, bool parse_special) {
  const std::string_view view(text.c_str(), text.size());
  if (view.size() > (1u << 30)) throw std::invalid_argument("text is longer than 2^30 bytes");
  std::vector<int32_t> ids;
  nb::gil_scoped_release release;
  self.encode(view, parse_special, ids);
  return ids;
}

}  // namespace

void bind_text(nb::module_& m) {
  nb::class_<SpmTokenizer>(m, "SpmTokenizer",
                           "SentencePiece-style tokenizer: merging by score, byte fallback, special tokens.")
      .def("__init__", &make, nb::arg("tokens"), nb::arg("scores"), nb::arg("types"), nb::arg("unknown_id"),
           nb::arg("add_space_prefix"), nb::arg("strip_after"),
           "tokens: list of str; scores: float32 [V]; types: uint8 [V] (tokenizer.ggml.token_type); "
           "unknown_id: -1 "
           "for none.")
      .def("encode", &encode, nb::arg("text"), nb::arg("parse_special"),
           "Ids of valid UTF-8 text, as a list.");
}
