// Where memory comes from on machines with several memory nodes.
#pragma once

#include <vector>

namespace ff {

// Page by page from each of these nodes in turn, for what the calling thread and threads it starts from now
// on touch first; files read by it likewise. Members of a team take work as they are free, so no page has one
// owner that it could be near to, and every node's bandwidth is used. An empty list gives back the system's
// default (the node of the thread that touches). Returns 0, or the errno: ENOSYS off Linux, EPERM where a
// container forbids it, EINVAL for nodes that are not there.
int spread_memory(const std::vector<int>& nodes);

// True if someone (numactl, the program around us) has already chosen a policy for this thread.
bool memory_policy_is_set();

}  // namespace ff
