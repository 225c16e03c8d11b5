// A team of threads that walks one list of phases together.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace ff {

// Every member runs the same function; between phases they meet at a barrier. Within a phase members claim
// items from a shared counter. The caller of run() is member 0. Not reentrant: one run at a time.
class Team {
 public:
  // What a member carries through one run.
  struct Member {
    int id = 0;
    uint32_t phase = 0;
  };
  using Work = void (*)(void* argument, Member& member);

  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  void run(Work work, void* argument);

  // Ends a phase: returns when every member has called it. Writes before it are seen after it.
  void barrier(Member& member);
  // The next item of this phase, from 0 up; each number is given to one member.
  int claim(const Member& member) {
    return counters_[member.phase % 3].value.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int> value{0};
  };

  void loop(int id);
  void dismiss();

  const int size_;
  std::vector<std::thread> threads_;
  Work work_ = nullptr;
  void* argument_ = nullptr;
  // Three counters: this phase's, the next one's (already zero), and the last one's (reset at this phase's
  // end).
  Counter counters_[3];
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};  // counts runs
  std::atomic<bool> leaving_{false};            // asks the threads, at the next epoch, to leave
  alignas(64) std::atomic<int> asleep_{0};
};

}  // namespace ff
