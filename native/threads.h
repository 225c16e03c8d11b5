// A team of threads that walks one list of phases together.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "team_size.h"

namespace ff {

// Every member runs the same function; between phases they meet at a barrier. Within a phase members claim
// items from a shared counter. The caller of run() is member 0. Not reentrant: one run at a time. While other
// processes are busy on the same cores, fewer members than size() take part (team_size.h).
class Team {
 public:
  // What a member carries through one run.
  struct Member {
    int id = 0;
    uint32_t phase = 0;
    int present = 1;    // members of this run
    double waited = 0;  // seconds at barriers, short waits left out
  };
  using Work = void (*)(void* argument, Member& member);

  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  // Members of the next run.
  int present() const { return present_.now(); }
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

  // Counts runs, and says how many members this one has.
  struct Epoch {
    uint32_t word;
    int members() const { return int(word & kMemberMask); }
  };
  static constexpr uint32_t kMemberMask = 0x7ff, kOneRun = 0x800;  // at most 2047 members

  void loop(int id);
  void work_as(Member& member);
  Epoch park(int id);
  void dismiss();

  const int size_;
  TeamSize present_;
  std::vector<std::thread> threads_;
  Work work_ = nullptr;
  void* argument_ = nullptr;
  // Three counters: this phase's, the next one's (already zero), and the last one's (reset at this phase's
  // end).
  Counter counters_[3];
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> epoch_;
  std::atomic<bool> leaving_{false};  // asks the threads, at the next epoch, to leave
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<uint32_t> grown_{0};  // counts the epochs that call back members who were left out
  // Of this run: microseconds that members were off their CPUs and waited for others.
  alignas(64) std::atomic<int64_t> away_{0}, waited_{0};
};

}  // namespace ff
