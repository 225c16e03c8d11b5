// Measures what the machine can do at most: memory read bandwidth and multiply-add rates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "bench/limit_kernels.h"
#include "threads.h"

namespace ff {

class LimitBench {
 public:
  // A buffer of `bytes` (rounded up to 2 MiB), on huge pages where the system gives them, first touched by
  // the threads that will read it. Throws std::bad_alloc.
  LimitBench(Isa isa, int threads, size_t bytes);

  size_t bytes() const { return bytes_; }
  // Seconds in which all threads together read the buffer once.
  double read();
  // Operations per second of all threads together, measured for about `seconds`.
  double peak(const PeakLoop& loop, double seconds);

 private:
  struct Unmap {
    size_t bytes = 0;
    void operator()(uint8_t* p) const;
  };

  const LimitKernels& kernels_;
  Team team_;
  size_t bytes_;
  std::unique_ptr<uint8_t, Unmap> buffer_;
};

}  // namespace ff
