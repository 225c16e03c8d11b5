// Passes over a row of logits: templates, compiled once per instruction set. What is done with them is in
// sampler.cpp.
#pragma once

#include "../sample.h"
#include "../sampler.h"
#include "../vec.h"

namespace ff::FF_NS {
namespace sampling {

static FF_INLINE F load_or(const float* x, int n, float other) {
  return n >= 16 ? load(x) : first_n(load_n(x, n), set1(other), n);
}

// True unless some x is NaN or +inf.
static inline bool all_usable(const float* x, int n) {
  const F infinity = set1(__builtin_inff());
  for (int i = 0; i < n; i += 16)
    if (gt_mask(infinity, load_or(x + i, n - i, 0.0f)) != 0xffffu) return false;
  return true;
}

// One pass: the maximum by runs, so that its place has to be sought in one run only; x * 0 is NaN for NaN and
// infinities.
static LogitScan scan(const float* x, int n) {
  const float lowest = -__builtin_inff();
  float best = lowest;
  int best_run = 0;
  F odd0 = zero(), odd1 = zero();
  for (int run = 0; run < n; run += kSumRun) {
    const int end = run + kSumRun < n ? run + kSumRun : n;
    F m0 = set1(lowest), m1 = m0;
    int i = run;
    for (; i + 32 <= end; i += 32) {
      const F a = load(x + i), b = load(x + i + 16);
      odd0 = fma(a, zero(), odd0), odd1 = fma(b, zero(), odd1);
      m0 = max(a, m0), m1 = max(b, m1);
    }
    for (; i < end; i += 16) {
      const F a = load_or(x + i, end - i, 0.0f);
      odd0 = fma(a, zero(), odd0);
      m0 = max(first_n(a, m0, end - i < 16 ? end - i : 16), m0);
    }
    m0 = max(m0, m1);
    if (gt_mask(m0, set1(best))) best = hmax(m0), best_run = run;
  }
  LogitScan r{best, 0, true};
  const float odd = hsum(add(odd0, odd1));
  if (odd != odd && !all_usable(x, n)) {
    r.finite = false;
    return r;
  }
  r.finite = best > lowest;
  for (int i = best_run; i < n && r.finite; i++)
    if (x[i] == best) {
      r.argmax = i;
      break;
    }
  return r;
}

static void weights(const float* x, int n, float max, float inverse_temperature, float* w) {
  const F m = set1(max), f = set1(inverse_temperature);
  int i = 0;
  for (; i + 16 <= n; i += 16) store(w + i, exp(mul(sub(load(x + i), m), f)));
  if (i < n) store_n(w + i, exp(mul(sub(load_n(x + i, n - i), m), f)), n - i);
}

// f(i, lanes) summed over the row: in float within a run, in double from there.
template <class Value>
static FF_INLINE double sum_runs(int n, Value value) {
  double total = 0;
  for (int run = 0; run < n; run += kSumRun) {
    const int end = run + kSumRun < n ? run + kSumRun : n;
    F sum = zero();
    for (int i = run; i < end; i += 16) sum = add(sum, value(i, end - i < 16 ? end - i : 16));
    total += double(hsum(sum));
  }
  return total;
}

static double sum_exp(const float* x, int n, float max) {
  const F m = set1(max);
  return sum_runs(n, [=](int i, int lanes) { return exp(sub(load_or(x + i, lanes, -__builtin_inff()), m)); });
}

static double sum(const float* w, int n) {
  return sum_runs(n, [=](int i, int lanes) { return load_or(w + i, lanes, 0.0f); });
}

static int count_greater(const float* x, int n, float bound) {
  const F b = set1(bound);
  int count = 0;
  for (int i = 0; i < n; i += 16)
    count += __builtin_popcount(gt_mask(load_or(x + i, n - i, -__builtin_inff()), b));
  return count;
}

static int collect(const float* x, int* position, int n, float bound, int room, float* values, int32_t* ids) {
  const F b = set1(bound);
  int count = 0, i = *position;
  for (; i < n && room - count >= 16; i += 16) {
    for (uint32_t bits = gt_mask(load_or(x + i, n - i, -__builtin_inff()), b); bits; bits &= bits - 1) {
      const int at = i + __builtin_ctz(bits);
      values[count] = x[at];
      if (ids) ids[count] = at;
      count++;
    }
  }
  *position = i < n ? i : n;
  return count;
}

static void apply_mask(float* x, int n, const uint32_t* bits) {
  const F hidden = set1(-__builtin_inff());
  for (int i = 0; i < n; i += 32) {
    const uint32_t word = bits[i / 32];
    if (word == 0xffffffffu) continue;
    for (int j = 0; j < 32 && i + j < n; j += 16) {
      const int lanes = n - i - j < 16 ? n - i - j : 16;
      store_n(x + i + j, blend(word >> j & 0xffff, load_n(x + i + j, lanes), hidden), lanes);
    }
  }
}

}  // namespace sampling

constexpr SamplingKernels kSamplingKernels = {
    sampling::scan,          sampling::sum_exp, sampling::weights,    sampling::sum,
    sampling::count_greater, sampling::collect, sampling::apply_mask,
};

// choose_token (sampler.h) with this instruction set's passes.
static void sample_row(float* logits, int vocab, const SampleRow& row, const SampleInputs& in,
                       const SampleOutputs& out, int index, void* scratch) {
  choose_token(kSamplingKernels, logits, vocab, row, in, out, index, scratch);
}

}  // namespace ff::FF_NS
