#include "numa.h"

#include <cerrno>
#include <cstddef>

#if defined(__linux__)
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ff {

#if defined(__linux__)

int spread_memory(const std::vector<int>& nodes) {
  constexpr int kMost = 1024, kBits = 8 * sizeof(unsigned long);
  unsigned long mask[kMost / kBits] = {};
  for (int node : nodes) {
    if (node < 0 || node >= kMost) return EINVAL;
    mask[node / kBits] |= 1ul << (node % kBits);
  }
  const bool any = !nodes.empty();
  // The kernel reads one bit less than it is told of.
  const long failed = syscall(SYS_set_mempolicy, any ? MPOL_INTERLEAVE : MPOL_DEFAULT, any ? mask : nullptr,
                              any ? long(kMost) + 1 : 0l);
  return failed ? errno : 0;
}

bool memory_policy_is_set() {
  int mode = MPOL_DEFAULT;
  return syscall(SYS_get_mempolicy, &mode, nullptr, 0l, nullptr, 0l) == 0 && mode != MPOL_DEFAULT;
}

#else

int spread_memory(const std::vector<int>&) { return ENOSYS; }
bool memory_policy_is_set() { return false; }

#endif

}  // namespace ff
