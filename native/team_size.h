// How many members of a team take part in a run.
#pragma once

#include <algorithm>

namespace ff {

// A team that meets at barriers is as fast as its last member. When another process has one of the cores, the
// members wait for its time slices (milliseconds) again and again, and one member fewer, which leaves that
// core to it, is faster. So: give up a member when a run loses more than a member is worth; take it back
// after a while, and wait longer each time that proves wrong.
class TeamSize {
 public:
  explicit TeamSize(int most) : most_(most), now_(most) {}

  int now() const { return now_; }

  // A run of now() members. begin, end: seconds on any clock; away: seconds that members were off their CPUs,
  // waited: seconds they stood at barriers, each summed over the members. A wait for a member that is at work
  // is no loss of this kind, nor is time in which all were away (a cgroup's quota): hence the lesser of the
  // two.
  void ran(double begin, double end, double away, double waited) {
    if (now_ > 1) {
      seconds_ += end - begin;
      lost_ += std::min(away, waited / (now_ - 1));
      if (seconds_ < kWindow) return;
      const double share = lost_ / seconds_;
      seconds_ = lost_ = 0;
      if (share * now_ > 1) {
        now_--;
        retry_at_ = end + pause_;
        pause_ = std::min(2 * pause_, kLongestPause);
        return;
      }
    }
    if (end < retry_at_) return;
    if (now_ < most_) {
      now_++;
      retry_at_ = end + kSettled;
    } else {
      pause_ = kFirstPause;
    }
  }

 private:
  static constexpr double kWindow = 0.1, kFirstPause = 0.2, kLongestPause = 6.4, kSettled = 1;

  const int most_;
  int now_;
  double seconds_ = 0, lost_ = 0, retry_at_ = 0, pause_ = kFirstPause;
};

}  // namespace ff
