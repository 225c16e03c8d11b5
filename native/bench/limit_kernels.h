// Loops that do one thing as fast as an instruction set allows: what `fourfold bench limits` measures.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace ff {

// A loop over one multiply-add instruction on many independent accumulators.
struct PeakLoop {
  const char* instructions;         // what an iteration is made of; null: this instruction set has none
  double operations_per_iteration;  // a multiply-add is two
  uint32_t (*run)(int64_t iterations);
};

struct LimitKernels {
  // Loads every byte of [data, data + bytes) once; data aligned to 64 bytes, bytes a multiple of 512.
  uint64_t (*read)(const uint8_t* data, size_t bytes);
  PeakLoop int8, bf16, fp32;
};

// Precondition: isa_available(isa).
const LimitKernels& limit_kernels(Isa isa);

}  // namespace ff
