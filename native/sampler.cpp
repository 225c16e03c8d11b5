#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace ff {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int kLeastBuffer = 4096;  // values gathered before the k-th largest of them is sought

// A token in an order other than that of ids, lowest key first.
struct Entry {
  float key, weight;
  int32_t id;
};

// The tokens still in the running, in order of id. ids null: all of them.
struct Candidates {
  float* weight;
  int32_t* ids;
  int count;
  int32_t id(int i) const { return ids ? ids[i] : i; }
};

struct Scratch {
  float* raw;
  float* weight[2];
  int32_t* ids[2];
  Entry* entries;
  int32_t* counts;  // shares the place of entries

  Scratch(void* memory, int vocab) {
    const size_t n = (size_t(vocab) + 127) / 64 * 64;
    raw = static_cast<float*>(memory);
    weight[0] = raw + n, weight[1] = raw + 2 * n;
    ids[0] = reinterpret_cast<int32_t*>(raw + 3 * n), ids[1] = reinterpret_cast<int32_t*>(raw + 4 * n);
    entries = reinterpret_cast<Entry*>(raw + 5 * n);
    counts = reinterpret_cast<int32_t*>(raw + 5 * n);
  }
};

// x > just_below(b) is x >= b.
float just_below(float b) { return std::nextafter(b, -kInf); }

// The k-th largest of x, or -inf if fewer than k are larger than -inf. buffer: n + 64 floats.
float kth_largest(const SamplingKernels& kernels, const float* x, int n, int k, float* buffer) {
  const int room = std::min(n + 32, std::max(4 * std::min(k, n), kLeastBuffer));
  int count = 0, position = 0;
  float bound = -kInf;
  while (position < n) {
    count += kernels.collect(x, &position, n, bound, room - count, buffer + count, nullptr);
    if (count < k) continue;
    std::nth_element(buffer, buffer + k - 1, buffer + count, std::greater<>());
    bound = buffer[k - 1];
    count = k;
  }
  return bound;
}

// The last entry, by (key, id), of the shortest run with a mass of `need`; with ties kept its id does not
// count.
Entry mass_cut(Entry* e, int n, double need, bool keep_ties) {
  const auto before = [](const Entry& a, const Entry& b) {
    return a.key != b.key ? a.key < b.key : a.id < b.id;
  };
  const int32_t every_id = std::numeric_limits<int32_t>::max();
  int low = 0, high = n;
  // Quickselect by mass: what is before `low` is in, what is from `high` on is out.
  while (high - low > 32) {
    const float a = e[low].key, b = e[low + (high - low) / 2].key, c = e[high - 1].key;
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    Entry* const less = std::partition(e + low, e + high, [=](const Entry& x) { return x.key < pivot; });
    Entry* const same = std::partition(less, e + high, [=](const Entry& x) { return x.key == pivot; });
    double mass = 0, mass_same = 0;
    for (const Entry* x = e + low; x < less; x++) mass += double(x->weight);
    if (mass >= need) {
      high = int(less - e);
      continue;
    }
    need -= mass;
    for (const Entry* x = less; x < same; x++) mass_same += double(x->weight);
    if (mass_same >= need && keep_ties) return {pivot, 0, every_id};
    if (mass_same >= need) {  // equal keys are equal weights here
      const auto last =
          std::clamp<ptrdiff_t>(ptrdiff_t(std::ceil(need / double(less->weight))) - 1, 0, same - less - 1);
      std::nth_element(less, less + last, same, before);
      return less[last];
    }
    need -= mass_same;
    low = int(same - e);
  }
  std::sort(e + low, e + high, before);
  for (int i = low; i < high; i++) {
    need -= double(e[i].weight);
    if (need <= 0) return {e[i].key, 0, keep_ties ? every_id : e[i].id};
  }
  return {kInf, 0, every_id};  // rounding: the mass of all is a hair short
}

class Sampler {
 public:
  Sampler(const SamplingKernels& kernels, float* logits, int vocab, const SampleRow& row,
          const SampleInputs& in, void* memory)
      : k_(kernels), logits_(logits), vocab_(vocab), row_(row), in_(in), scratch_(memory, vocab) {}

  bool changes_logits() const {
    return row_.mask >= 0 || row_.allowed_vocab < vocab_ || row_.ban_end > row_.ban_start ||
           row_.bias_end > row_.bias_start || penalizes();
  }

  float* keep_raw() {
    std::copy(logits_, logits_ + vocab_, scratch_.raw);
    return scratch_.raw;
  }

  void change_logits() {
    if (row_.mask >= 0)
      k_.apply_mask(logits_, vocab_, in_.masks + size_t(row_.mask) * size_t(in_.mask_words));
    if (row_.allowed_vocab < vocab_)
      std::fill(logits_ + std::max(row_.allowed_vocab, 0), logits_ + vocab_, -kInf);
    for (int i = row_.ban_start; i < row_.ban_end; i++)
      if (known(in_.ban_ids[i])) logits_[in_.ban_ids[i]] = -kInf;
    for (int i = row_.bias_start; i < row_.bias_end; i++)
      if (known(in_.bias_ids[i])) logits_[in_.bias_ids[i]] += in_.bias_values[i];
    if (penalizes()) penalize();
  }

  int32_t draw(float max) {
    max_ = max;
    inverse_temperature_ = 1.0f / row_.temperature;
    Candidates c = top_k();
    double total = k_.sum(c.weight, c.count);
    const auto narrow = [&](Candidates kept) { c = kept, total = k_.sum(c.weight, c.count); };
    if (row_.top_p < 1.0f) narrow(top_p(c, total));
    if (row_.min_p > 0.0f) narrow(at_least(c, std::min(row_.min_p, 1.0f)));
    if (row_.typical_p < 1.0f) narrow(typical(c, total));
    return c.id(pick(c, total * sample_uniform(row_.seed, row_.counter)));
  }

  // The k most likely tokens of the logits as they are, best first.
  void report_top(int k, float log_total, int32_t* ids, float* logprobs) {
    const float kth = kth_largest(k_, logits_, vocab_, k, scratch_.weight[0]);
    int position = 0;
    const float bound = kth == -kInf ? kth : just_below(kth);
    const int n =
        k_.collect(logits_, &position, vocab_, bound, vocab_ + 32, scratch_.weight[0], scratch_.ids[0]);
    for (int i = 0; i < n; i++) scratch_.entries[i] = {-scratch_.weight[0][i], 0, scratch_.ids[0][i]};
    const int shown = std::min(n, k);
    std::partial_sort(
        scratch_.entries, scratch_.entries + shown, scratch_.entries + n,
        [](const Entry& a, const Entry& b) { return a.key != b.key ? a.key < b.key : a.id < b.id; });
    for (int i = 0; i < shown; i++) {
      ids[i] = scratch_.entries[i].id;
      logprobs[i] = -scratch_.entries[i].key - log_total;
    }
  }

 private:
  bool known(int32_t id) const { return id >= 0 && id < vocab_; }

  bool penalizes() const {
    return row_.history_end > row_.history_start &&
           (row_.repetition_penalty != 1.0f || row_.presence_penalty != 0.0f ||
            row_.frequency_penalty != 0.0f);
  }

  // counts[id] = 1 (seen) + 2 * occurrences in the output. Only the entries of ids in the history are ever
  // read.
  void penalize() {
    int32_t* counts = scratch_.counts;
    const auto each = [&](int begin, int end, auto&& f) {
      for (int i = begin; i < end; i++)
        if (known(in_.history[i])) f(in_.history[i]);
    };
    each(row_.history_start, row_.history_end, [&](int32_t id) { counts[id] = 1; });
    each(row_.history_prompt_end, row_.history_end, [&](int32_t id) { counts[id] += 2; });
    each(row_.history_start, row_.history_end, [&](int32_t id) {
      if (counts[id] == 0) return;  // met before
      float& x = logits_[id];
      if (row_.repetition_penalty != 1.0f)
        x = x > 0 ? x / row_.repetition_penalty : x * row_.repetition_penalty;
      const int32_t output = counts[id] / 2;
      if (output > 0) {
        x -= row_.frequency_penalty * float(output);
        x -= row_.presence_penalty;
      }
      counts[id] = 0;
    });
  }

  Candidates top_k() {
    Candidates c{scratch_.weight[0], nullptr, vocab_};
    const float* x = logits_;
    if (row_.top_k > 0 && row_.top_k < vocab_) {
      const float kth = kth_largest(k_, logits_, vocab_, row_.top_k, scratch_.weight[1]);
      c.ids = scratch_.ids[0];
      int position = 0;
      c.count = k_.collect(logits_, &position, vocab_, kth == -kInf ? kth : just_below(kth), vocab_ + 32,
                           scratch_.weight[1], c.ids);
      x = scratch_.weight[1];
    }
    k_.weights(x, c.count, max_, inverse_temperature_, c.weight);
    return c;
  }

  // The candidates that `keep`(index) says, out of those with weight > bound.
  template <class Keep>
  Candidates filter(const Candidates& c, float bound, Keep keep) {
    const int to = c.weight == scratch_.weight[0] ? 1 : 0;
    Candidates kept{scratch_.weight[to], scratch_.ids[to], 0};
    int position = 0;
    const int n = k_.collect(c.weight, &position, c.count, bound, vocab_ + 32, kept.weight, kept.ids);
    for (int i = 0; i < n; i++) {
      const int from = kept.ids[i];
      if (!keep(from)) continue;
      kept.weight[kept.count] = c.weight[from];
      kept.ids[kept.count++] = c.id(from);
    }
    return kept;
  }

  Candidates at_least(const Candidates& c, float weight) {
    return filter(c, just_below(weight), [](int) { return true; });
  }

  Candidates top_p(const Candidates& c, double total) {
    // All tokens below (1 - p) * total / count together weigh less than 1 - p: none of them is needed.
    // (0.999: rounding.)
    const double p = double(row_.top_p);
    const float bound = just_below(float(0.999 * (1 - p) * total / c.count));
    const Candidates likely = filter(c, bound, [](int) { return true; });
    for (int i = 0; i < likely.count; i++)
      scratch_.entries[i] = {-likely.weight[i], likely.weight[i], likely.id(i)};
    const Entry cut = mass_cut(scratch_.entries, likely.count, p * total, false);
    if (cut.key == kInf) return likely;
    const float least = -cut.key;
    return filter(likely, just_below(least),
                  [&](int i) { return likely.weight[i] > least || likely.id(i) <= cut.id; });
  }

  float scaled(const Candidates& c, int i) const { return (logits_[c.id(i)] - max_) * inverse_temperature_; }

  // Tokens by the distance of their information from the entropy. With y = log of the weight, the information
  // of a token less the entropy is mean(y) - y: the normalization drops out.
  Candidates typical(const Candidates& c, double total) {
    double mean = 0;
    for (int i = 0; i < c.count; i++)
      if (c.weight[i] > 0) mean += double(c.weight[i]) * double(scaled(c, i));
    mean /= total;
    const auto distance = [&](int i) { return float(std::fabs(mean - double(scaled(c, i)))); };
    int n = 0;
    for (int i = 0; i < c.count; i++)
      if (c.weight[i] > 0) scratch_.entries[n++] = {distance(i), c.weight[i], c.id(i)};
    const Entry cut = mass_cut(scratch_.entries, n, double(row_.typical_p) * total, true);
    return filter(c, 0.0f, [&](int i) { return distance(i) <= cut.key; });
  }

  // The first candidate at which the running sum of weights passes `target`.
  int pick(const Candidates& c, double target) {
    double before = 0, sum = 0;
    int run = 0;
    for (int begin = 0; begin < c.count && sum <= target; begin += kSumRun) {
      const double weight = k_.sum(c.weight + begin, std::min(kSumRun, c.count - begin));
      if (weight > 0) run = begin, before = sum;
      sum += weight;
    }
    int last = run;
    for (int i = run; i < std::min(run + kSumRun, c.count); i++) {
      if (c.weight[i] <= 0) continue;
      last = i;
      before += double(c.weight[i]);
      if (before > target) break;
    }
    return last;  // without a break: rounding made the run's sum a hair more than that of its parts
  }

  const SamplingKernels& k_;
  float* logits_;
  int vocab_;
  const SampleRow& row_;
  const SampleInputs& in_;
  Scratch scratch_;
  float max_ = 0, inverse_temperature_ = 1;
};

}  // namespace

double sample_uniform(uint64_t seed, uint64_t counter) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  uint32_t c[4] = {uint32_t(counter), uint32_t(counter >> 32), 0, 0};
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k1,
                              uint32_t(a)};
    std::copy(next, next + 4, c);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return double((uint64_t(c[1]) << 32 | c[0]) >> 11) * 0x1p-53;
}

void choose_token(const SamplingKernels& kernels, float* logits, int vocab, const SampleRow& row,
                  const SampleInputs& in, const SampleOutputs& out, int index, void* memory) {
  out.token[index] = -1;
  out.logprob[index] = std::numeric_limits<float>::quiet_NaN();
  out.rank[index] = 0;
  out.status[index] = 0;
  int32_t* top_ids = out.top_ids + size_t(index) * size_t(out.top_width);
  float* top_logprobs = out.top_logprobs + size_t(index) * size_t(out.top_width);
  std::fill(top_ids, top_ids + out.top_width, -1);
  std::fill(top_logprobs, top_logprobs + out.top_width, -kInf);

  LogitScan scan = kernels.scan(logits, vocab);
  if (!scan.finite) {
    out.status[index] = 1;
    return;
  }
  Sampler sampler(kernels, logits, vocab, row, in, memory);
  const bool targeted = row.target >= 0, report = targeted || row.logprobs >= 0;
  float log_total = 0;
  if (report) {
    log_total = float(double(scan.max) + std::log(kernels.sum_exp(logits, vocab, scan.max)));
    const int k = std::min({row.logprobs, out.top_width, vocab});
    if (k > 0) sampler.report_top(k, log_total, top_ids, top_logprobs);
  }

  int32_t token = targeted ? row.target : scan.argmax;
  const float* raw = logits;
  if (!targeted) {
    if (sampler.changes_logits()) {
      if (report) raw = sampler.keep_raw();
      sampler.change_logits();
      scan = kernels.scan(logits, vocab);
      if (!scan.finite) {
        out.status[index] = scan.max == -kInf ? 2 : 1;
        std::fill(top_ids, top_ids + out.top_width, -1);
        std::fill(top_logprobs, top_logprobs + out.top_width, -kInf);
        return;
      }
      token = scan.argmax;
    }
    if (row.temperature >= kGreedyTemperature && row.top_k != 1) token = sampler.draw(scan.max);
  }
  out.token[index] = token;
  if (report) {
    out.logprob[index] = raw[token] - log_total;
    out.rank[index] = 1 + kernels.count_greater(raw, vocab, raw[token]);
  }
}

}  // namespace ff
