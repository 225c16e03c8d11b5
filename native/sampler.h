// Choosing a token from a row of logits: the part that is the same for every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sample.h"

namespace ff {

struct LogitScan {
  float max;
  int32_t argmax;  // the lowest id of those with the largest logit
  bool finite;     // no NaN, no +inf, and not everything -inf
};

// The passes over a whole row, from kernels/sampling.h; the same bits on every instruction set.
struct SamplingKernels {
  LogitScan (*scan)(const float* x, int n);
  // Sum of exp(x - max).
  double (*sum_exp)(const float* x, int n, float max);
  // w = exp((x - max) * inverse_temperature).
  void (*weights)(const float* x, int n, float max, float inverse_temperature, float* w);
  // Sum of w in a fixed order, by runs of kSumRun.
  double (*sum)(const float* w, int n);
  int (*count_greater)(const float* x, int n, float bound);
  // Copies values > bound and their indices (ids null: not) from *position on, in order, until the end or
  // until fewer than 16 places of `room` are left; returns how many and moves *position to where it stopped.
  int (*collect)(const float* x, int* position, int n, float bound, int room, float* values, int32_t* ids);
  // Values whose bit is clear become -inf.
  void (*apply_mask)(float* x, int n, const uint32_t* bits);
};

constexpr int kSumRun = 256;
constexpr float kGreedyTemperature = 1e-5f;  // below: greedy, as vLLM does

// Bytes of scratch per thread, 64-byte aligned; it needs no preparation.
constexpr size_t sample_scratch_bytes(int vocab) { return (size_t(vocab) + 127) / 64 * 64 * 32; }

// u in [0, 1) with 53 bits: Philox4x32-10 (Salmon et al. 2011) of key `seed` and counter `counter`.
double sample_uniform(uint64_t seed, uint64_t counter);

// Reports on one row of logits and, unless row.target >= 0, draws its token. Overwrites the logits.
//
// logprob, rank and alternatives are of the logits as they come, over all `vocab` entries; rank is one more
// than the number of strictly larger logits; alternatives with equal logits come in order of id, and those of
// -inf are left out.
//
// Then, in this order: mask, allowed_vocab, bans (to -inf), bias (added), repetition penalty (Keskar et al.
// 2019; prompt and output ids), frequency and presence penalty (output ids); greedy if the temperature is
// below 1e-5 or top_k is 1; otherwise temperature, top_k (all equal to the k-th stay, as in vLLM and
// transformers), top_p (the fewest most likely tokens with mass >= p, equals in order of id), min_p (relative
// to the largest), typical_p (Meister et al. 2022), each over what the one before left. The draw is by
// inverse CDF in order of id.
//
// status: 1 if a logit is NaN or +inf or none is finite, 2 if masks and bans left no token; token is then -1.
// Preconditions: target < vocab and ids in history, bias and bans in [0, vocab); others are skipped.
void choose_token(const SamplingKernels&, float* logits, int vocab, const SampleRow&, const SampleInputs&,
                  const SampleOutputs&, int index, void* scratch);

}  // namespace ff
