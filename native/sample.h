// The contract of sampling: the record of engine/batch.py's SAMPLE_DTYPE and what a logit row yields.
#pragma once

#include <cstdint>

namespace ff {

struct SampleRow {
  uint64_t seed, counter;
  int32_t row, target;
  float temperature;
  int32_t top_k;
  float top_p, min_p, typical_p, repetition_penalty, presence_penalty, frequency_penalty;
  int32_t logprobs, allowed_vocab;
  int32_t history_start, history_prompt_end, history_end;
  int32_t bias_start, bias_end, ban_start, ban_end, mask;
};
static_assert(sizeof(SampleRow) == 96);

struct SampleInputs {
  const int32_t* history;
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* ban_ids;
  const uint32_t* masks;  // [n, mask_words] or null
  int32_t mask_words;
};

struct SampleOutputs {  // arrays over logit rows
  int32_t* token;
  float* logprob;
  int32_t* rank;
  int32_t* top_ids;     // [rows, top_width]
  float* top_logprobs;  // [rows, top_width]
  int32_t top_width;
  uint8_t* status;  // 0 fine, 1 not all finite, 2 masks and bans left no token
};

}  // namespace ff
