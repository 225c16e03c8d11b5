#include "bench/limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>

namespace ff {

namespace scalar {
const LimitKernels& limit_kernels();
}
#if defined(__x86_64__)
namespace avx2 {
const LimitKernels& limit_kernels();
}
namespace avxvnni {
const LimitKernels& limit_kernels();
}
namespace avx512vnni {
const LimitKernels& limit_kernels();
}
namespace avx512 {
const LimitKernels& limit_kernels();
}
namespace amx {
const LimitKernels& limit_kernels();
}
#endif

const LimitKernels& limit_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2: return avx2::limit_kernels();
    case Isa::avxvnni: return avxvnni::limit_kernels();
    case Isa::avx512vnni: return avx512vnni::limit_kernels();
    case Isa::avx512: return avx512::limit_kernels();
    case Isa::amx: return amx::limit_kernels();
#endif
    default: return scalar::limit_kernels();
  }
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kChunk = size_t(4) << 20;  // what a thread reads at a time: the last to finish waits little
constexpr int64_t kBatch = 100'000;         // iterations between looks at the clock

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

size_t whole_pages(size_t bytes) {
  return std::max<size_t>(1, (bytes + kHugePage - 1) / kHugePage) * kHugePage;
}

uint8_t* map(size_t bytes) {
  // kHugePage more, so that prefetching past the end stays inside.
  void* p = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(p, bytes + kHugePage, MADV_HUGEPAGE);  // refused: slower, which is then what the machine can do
#endif
  return static_cast<uint8_t*>(p);
}

// Keeps what a loop computed from being optimised away.
std::atomic<uint64_t> sink{0};

}  // namespace

void LimitBench::Unmap::operator()(uint8_t* p) const { munmap(p, bytes + kHugePage); }

LimitBench::LimitBench(Isa isa, int threads, size_t bytes)
    : kernels_(limit_kernels(isa)),
      team_(threads),
      bytes_(whole_pages(bytes)),
      buffer_(map(bytes_), Unmap{bytes_}) {
  team_.run(
      [](void* self, Team::Member& member) {
        auto& b = *static_cast<LimitBench*>(self);
        const size_t pages = b.bytes_ / kHugePage, n = size_t(b.team_.size()), id = size_t(member.id);
        const size_t from = pages * id / n * kHugePage, to = pages * (id + 1) / n * kHugePage;
        std::memset(b.buffer_.get() + from, 1, to - from);
      },
      this);
}

double LimitBench::read() {
  const auto start = Clock::now();
  team_.run(
      [](void* self, Team::Member& member) {
        auto& b = *static_cast<LimitBench*>(self);
        uint64_t sum = 0;
        for (size_t at; (at = size_t(b.team_.claim(member)) * kChunk) < b.bytes_;)
          sum += b.kernels_.read(b.buffer_.get() + at, std::min(kChunk, b.bytes_ - at));
        sink.fetch_add(sum, std::memory_order_relaxed);
      },
      this);
  return seconds_since(start);
}

double LimitBench::peak(const PeakLoop& loop, double seconds) {
  struct Task {
    const PeakLoop& loop;
    double seconds;
    std::atomic<int64_t> iterations{0};
  } task{loop, seconds};
  const auto start = Clock::now();
  team_.run(
      [](void* argument, Team::Member&) {
        auto& t = *static_cast<Task*>(argument);
        const auto begun = Clock::now();
        int64_t done = 0;
        do {
          sink.fetch_add(t.loop.run(kBatch), std::memory_order_relaxed);
          done += kBatch;
        } while (seconds_since(begun) < t.seconds);
        t.iterations.fetch_add(done, std::memory_order_relaxed);
      },
      &task);
  return double(task.iterations.load()) * loop.operations_per_iteration / seconds_since(start);
}

}  // namespace ff
