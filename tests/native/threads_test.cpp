// Team under load: plain memory written in one phase is read by others in the next, so that ThreadSanitizer
// sees every order that the barrier does not give. Exit status 0 if every item was computed once and seen by
// all.
#include "threads.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

namespace {

constexpr int kPhases = 7;

struct Job {
  ff::Team* team;
  int items;
  std::vector<std::vector<int>> cells;  // [phase][item], not atomic on purpose
  std::atomic<int> faults{0};
};

void work(void* argument, ff::Team::Member& member) {
  Job& job = *static_cast<Job*>(argument);
  for (int phase = 0; phase < kPhases; phase++) {
    for (int i = job.team->claim(member); i < job.items; i = job.team->claim(member)) {
      // A neighbour's cell of the last phase, most likely written by another member.
      const int before = phase ? job.cells[size_t(phase) - 1][size_t((i + 1) % job.items)] : 0;
      job.cells[size_t(phase)][size_t(i)] += before + 1;
    }
    job.team->barrier(member);
    for (int cell : job.cells[size_t(phase)])
      if (cell != phase + 1) job.faults++;
    job.team->barrier(member);
  }
}

}  // namespace

int main() {
  for (int threads : {1, 2, 3, 5}) {
    ff::Team team(threads);
    for (int run = 0; run < 120; run++) {
      Job job{&team, 1 + run % 40, {}, {}};
      job.cells.assign(kPhases, std::vector<int>(size_t(job.items), 0));
      team.run(&work, &job);
      if (job.faults) {
        std::printf("%d threads, run %d: %d cells are wrong\n", threads, run, job.faults.load());
        return 1;
      }
      // Long enough for the members to fall asleep, now and then.
      if (run % 100 == 50) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  // More members than CPUs, for long enough that some are given up and taken back.
  {
    ff::Team team(8);
    int fewest = team.size();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    while (std::chrono::steady_clock::now() < until) {
      Job job{&team, 200, {}, {}};
      job.cells.assign(kPhases, std::vector<int>(200, 0));
      team.run(&work, &job);
      if (job.faults) {
        std::printf("%d of 8 threads: %d cells are wrong\n", team.present(), job.faults.load());
        return 1;
      }
      fewest = team.present() < fewest ? team.present() : fewest;
    }
    std::printf("at times %d of 8 took part\n", fewest);
  }
  // Teams that are made and never run, or run once.
  for (int i = 0; i < 50; i++) {
    ff::Team team(4);
    if (i % 2) continue;
    Job job{&team, 3, {}, {}};
    job.cells.assign(kPhases, std::vector<int>(3, 0));
    team.run(&work, &job);
    if (job.faults) return 1;
  }
  std::puts("threads: fine");
  return 0;
}
