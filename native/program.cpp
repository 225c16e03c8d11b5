#include "program.h"

#include <stdexcept>

#include "attention.h"

namespace ff {

namespace {

class Checker {
 public:
  explicit Checker(const ProgramSpec& p) : p_(p) {}

  void op(size_t index) {
    const Op& o = p_.ops[index];
    index_ = index;
    ref(o.out, "out");
    if (o.residual >= 0) {
      require(size_t(o.residual) < p_.slot_width.size(), "residual slot does not exist");
      require(p_.slot_width[size_t(o.residual)] >= o.out.width, "residual is narrower than the output");
    }
    norm(o.norm);
    norm(o.k_norm);
    switch (o.kind) {
      case OpKind::embed:
        segments(o, 1, 1);
        require(matrix(o, 0).n == p_.vocab && matrix(o, 0).k == o.out.width, "embedding has the wrong shape");
        return;
      case OpKind::norm:
        ref(o.x, "x");
        require(o.norm.weight >= 0, "norm without a weight");
        require(o.x.width == o.out.width && o.heads > 0 && o.out.width % o.heads == 0, "norm widths differ");
        require(vector(o.norm.weight) == o.out.width / o.heads, "norm weight has the wrong length");
        return;
      case OpKind::linear:
      case OpKind::logits: return linear(o);
      case OpKind::rope:
        ref(o.x, "x");
        rope(o);
        require(o.x.width == o.out.width && o.out.width == o.heads * o.head_dim, "rope widths differ");
        return;
      case OpKind::attention: return attention(o);
      case OpKind::gate:
      case OpKind::add:
        ref(o.x, "x");
        ref(o.y, "y");
        require(o.x.width == o.out.width && o.y.width == o.out.width, "widths differ");
        return;
      case OpKind::scale:
      case OpKind::gather:
        ref(o.x, "x");
        require(o.x.width == o.out.width, "widths differ");
        return;
    }
    require(false, "unknown kind");
  }

 private:
  void require(bool ok, const char* what) const {
    if (!ok) throw std::invalid_argument("op " + std::to_string(index_) + ": " + what);
  }
  void ref(const Ref& r, const char* name) const {
    const bool ok = r.slot >= 0 && size_t(r.slot) < p_.slot_width.size() && r.start >= 0 && r.width > 0 &&
                    r.start + r.width <= p_.slot_width[size_t(r.slot)];
    if (!ok)
      throw std::invalid_argument("op " + std::to_string(index_) + ": " + name + " is outside its slot");
  }
  int vector(int32_t i) const {
    require(i >= 0 && size_t(i) < p_.vectors.size(), "vector does not exist");
    return int(p_.vectors[size_t(i)].size());
  }
  void norm(const NormRef& n) const {
    if (n.weight >= 0) vector(n.weight);
    if (n.bias >= 0) require(vector(n.bias) == vector(n.weight), "norm bias has the wrong length");
  }
  const Matrix& matrix(const Op& o, size_t i) const { return p_.matrices[size_t(o.segments[i].matrix)]; }
  void segments(const Op& o, size_t least, size_t most) const {
    require(o.segments.size() >= least && o.segments.size() <= most, "wrong number of matrices");
    for (const Segment& s : o.segments) {
      require(s.matrix >= 0 && size_t(s.matrix) < p_.matrices.size(), "matrix does not exist");
      if (s.bias >= 0)
        require(vector(s.bias) == p_.matrices[size_t(s.matrix)].n, "bias has the wrong length");
    }
  }
  void linear(const Op& o) const {
    ref(o.x, "x");
    segments(o, 1, 16);
    if (o.norm.weight >= 0) require(vector(o.norm.weight) == o.x.width, "norm weight has the wrong length");
    require(o.outliers.size() <= size_t(kMaxOutliers), "too many outlier columns");
    for (int32_t c : o.outliers) require(c >= 0 && c < o.x.width, "outlier column outside the input");
    int32_t rows = 0;
    for (const Division& d : o.divisions) {
      require(d.least > rows && d.most >= d.least, "divisions must be for more and more rows");
      require(d.block >= 1 && d.block <= kBlockTiles && d.chunk >= 1 && d.chunk <= kRowChunk,
              "a division's blocks are too large");
      rows = d.most;
    }
    if (!o.outliers.empty())
      for (const Segment& s : o.segments) require(s.outlier_columns, "a matrix without its outlier columns");
    int n = 0;
    for (size_t i = 0; i < o.segments.size(); i++) {
      require(matrix(o, i).k == o.x.width, "matrix and input differ in width");
      n += matrix(o, i).n;
    }
    if (o.act != Act::none) {
      require(o.segments.size() == 2 && matrix(o, 0).n == matrix(o, 1).n,
              "a gate needs two matrices of one shape");
      n /= 2;
    }
    require(n == o.out.width, "matrices and output differ in width");
    require(o.kind != OpKind::logits || n == p_.vocab, "logits are not as wide as the vocabulary");
  }
  void rope(const Op& o) const {
    require(o.rope >= 0 && size_t(o.rope) < p_.ropes.size(), "rotation table does not exist");
    require(int(2 * p_.ropes[size_t(o.rope)].inv_freq.size()) <= o.head_dim, "rotation is wider than a head");
  }
  void attention(const Op& o) const {
    ref(o.x, "q");
    ref(o.y, "k");
    ref(o.z, "v");
    require(o.layer >= 0 && size_t(o.layer) < p_.layers.size(), "layer does not exist");
    const LayerShape& l = p_.layers[size_t(o.layer)];
    require(l.kv_heads == o.kv_heads && l.head_dim == o.head_dim, "attention and its layer differ in shape");
    require(o.heads > 0 && o.kv_heads > 0 && o.heads % o.kv_heads == 0,
            "heads must be a multiple of kv_heads");
    require(o.heads / o.kv_heads <= 16, "more than 16 query heads share a KV head");
    require(o.head_dim >= 16 && o.head_dim % 16 == 0 && o.head_dim <= 512,
            "head_dim must be a multiple of 16 up to 512");
    require(o.x.width == o.heads * o.head_dim && o.out.width == o.x.width,
            "q and output have the wrong width");
    require(o.y.width == o.kv_heads * o.head_dim && o.z.width == o.y.width, "k or v has the wrong width");
    require(o.scale > 0 && o.window >= 0 && o.softcap >= 0, "scale, window or soft cap is out of range");
    if (o.norm.weight >= 0) require(vector(o.norm.weight) == o.head_dim, "q norm has the wrong length");
    if (o.k_norm.weight >= 0) require(vector(o.k_norm.weight) == o.head_dim, "k norm has the wrong length");
    if (o.sinks >= 0) require(vector(o.sinks) == o.heads, "sinks have the wrong length");
    if (o.rope >= 0) rope(o);
  }

  const ProgramSpec& p_;
  size_t index_ = 0;
};

}  // namespace

void ProgramSpec::check() const {
  if (ops.empty() || ops.back().kind != OpKind::logits)
    throw std::invalid_argument("the last op must be logits");
  if (slot_width.size() != slot_is_logit_rows.size()) throw std::invalid_argument("slots without kinds");
  for (size_t i = 0; i < matrices.size(); i++)
    if (const char* fault = matrices[i].fault())
      throw std::invalid_argument("matrix " + std::to_string(i) + ": " + fault);
  Checker checker(*this);
  for (size_t i = 0; i < ops.size(); i++) checker.op(i);
}

}  // namespace ff
