#include "threads.h"

#include <time.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

namespace ff {

namespace {

// A barrier inside a step is short: spin for some tens of microseconds, then let others run between looks.
// A wait of kShortWait spins is part of every phase; longer ones are timed.
// Between steps the scheduler works for some hundred microseconds: stay awake for a few times that, then
// sleep.
constexpr int kBarrierSpins = 4000;
constexpr int kShortWait = 512;
constexpr auto kAwake = std::chrono::milliseconds(2);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // a pause of about the length of x86's; "yield" does nothing on most cores
#else
  std::this_thread::yield();
#endif
}

double seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

}  // namespace

Team::Team(int threads) : size_(threads < 1 ? 1 : threads), present_(size_), epoch_(uint32_t(size_)) {
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
  epoch_.fetch_add(kOneRun, std::memory_order_release);
  epoch_.notify_all();
  grown_.fetch_add(1, std::memory_order_release);
  grown_.notify_all();
  for (auto& t : threads_) t.join();
}

// Until a run has this member again, or the team is dismissed.
Team::Epoch Team::park(int id) {
  for (;;) {
    const uint32_t before = grown_.load(std::memory_order_acquire);
    const Epoch now{epoch_.load(std::memory_order_acquire)};
    if (now.members() > id || leaving_.load(std::memory_order_relaxed)) return now;
    grown_.wait(before, std::memory_order_acquire);
  }
}

void Team::loop(int id) {
  uint32_t seen = uint32_t(size_);
  for (;;) {
    Epoch now{epoch_.load(std::memory_order_acquire)};
    const auto until = std::chrono::steady_clock::now() + kAwake;
    for (int spins = 0; now.word == seen; now.word = epoch_.load(std::memory_order_acquire)) {
      relax();
      if (++spins % 256) continue;
      sched_yield();
      if (std::chrono::steady_clock::now() < until) continue;
      asleep_.fetch_add(1, std::memory_order_seq_cst);
      epoch_.wait(seen, std::memory_order_seq_cst);
      asleep_.fetch_sub(1, std::memory_order_relaxed);
    }
    if (now.members() <= id) now = park(id);
    if (leaving_.load(std::memory_order_relaxed)) return;
    seen = now.word;
    Member member{id, 0, now.members(), 0};
    work_as(member);
  }
}

void Team::work_as(Member& member) {
  if (member.present == 1) return work_(argument_, member);
  const double begin = seconds(CLOCK_MONOTONIC), ran = seconds(CLOCK_THREAD_CPUTIME_ID);
  work_(argument_, member);
  const double away = seconds(CLOCK_MONOTONIC) - begin - (seconds(CLOCK_THREAD_CPUTIME_ID) - ran);
  away_.fetch_add(int64_t(away * 1e6), std::memory_order_relaxed);
  waited_.fetch_add(int64_t(member.waited * 1e6), std::memory_order_relaxed);
  barrier(member);
}

void Team::run(Work work, void* argument) {
  work_ = work;
  argument_ = argument;
  for (auto& c : counters_) c.value.store(0, std::memory_order_relaxed);
  away_.store(0, std::memory_order_relaxed), waited_.store(0, std::memory_order_relaxed);
  const Epoch last{epoch_.load(std::memory_order_relaxed)};
  const int members = present_.now();
  const double begin = seconds(CLOCK_MONOTONIC);
  epoch_.store((last.word & ~kMemberMask) + kOneRun + uint32_t(members), std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst)) epoch_.notify_all();
  if (members > last.members()) {
    grown_.fetch_add(1, std::memory_order_release);
    grown_.notify_all();
  }
  Member member{0, 0, members, 0};
  work_as(member);
  present_.ran(begin, seconds(CLOCK_MONOTONIC), 1e-6 * double(away_.load(std::memory_order_relaxed)),
               1e-6 * double(waited_.load(std::memory_order_relaxed)));
}

void Team::barrier(Member& member) {
  const uint32_t generation = generation_.load(std::memory_order_relaxed);
  const uint32_t phase = member.phase++;
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == member.present - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    counters_[(phase + 2) % 3].value.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  double since = 0;
  for (int spins = 0; generation_.load(std::memory_order_acquire) == generation;) {
    relax();
    if (++spins == kShortWait) since = seconds(CLOCK_MONOTONIC);
    if (spins >= kBarrierSpins) sched_yield();
  }
  if (since != 0) member.waited += seconds(CLOCK_MONOTONIC) - since;
}

}  // namespace ff
