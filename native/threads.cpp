#include "threads.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

namespace ff {

namespace {

// A barrier inside a step is short: spin for some tens of microseconds, then let others run between looks.
// Between steps the scheduler works for some hundred microseconds: stay awake for a few times that, then
// sleep.
constexpr int kBarrierSpins = 4000;
constexpr auto kAwake = std::chrono::milliseconds(2);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

Team::Team(int threads) : size_(threads < 1 ? 1 : threads) {
  threads_.reserve(size_t(size_) - 1);
  try {
    for (int i = 1; i < size_; i++) threads_.emplace_back([this, i] { loop(i); });
  } catch (...) {  // the system allows no more: those that run already must not outlive this object
    dismiss();
    throw;
  }
}

Team::~Team() { dismiss(); }

void Team::dismiss() {
  leaving_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (auto& t : threads_) t.join();
}

void Team::loop(int id) {
  uint32_t seen = 0;
  for (;;) {
    uint32_t now = epoch_.load(std::memory_order_acquire);
    const auto until = std::chrono::steady_clock::now() + kAwake;
    for (int spins = 0; now == seen; now = epoch_.load(std::memory_order_acquire)) {
      relax();
      if (++spins % 256) continue;
      sched_yield();
      if (std::chrono::steady_clock::now() < until) continue;
      asleep_.fetch_add(1, std::memory_order_seq_cst);
      epoch_.wait(seen, std::memory_order_seq_cst);
      asleep_.fetch_sub(1, std::memory_order_relaxed);
    }
    if (leaving_.load(std::memory_order_relaxed)) return;
    seen = now;
    Member member{id, 0};
    work_(argument_, member);
    barrier(member);
  }
}

void Team::run(Work work, void* argument) {
  work_ = work;
  argument_ = argument;
  for (auto& c : counters_) c.value.store(0, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst)) epoch_.notify_all();
  Member member{0, 0};
  work(argument, member);
  barrier(member);
}

void Team::barrier(Member& member) {
  const uint32_t generation = generation_.load(std::memory_order_relaxed);
  const uint32_t phase = member.phase++;
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    counters_[(phase + 2) % 3].value.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; generation_.load(std::memory_order_acquire) == generation;) {
    relax();
    if (++spins >= kBarrierSpins) sched_yield();
  }
}

}  // namespace ff
