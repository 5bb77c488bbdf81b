// How many CPUs this process may really use.
#pragma once

#include <string>

namespace heddle {

// The CPUs of the scheduling affinity, or what the cgroup's CPU quota (version 1 or 2, of this
// process' group and every group above it) allows if that is less: rounded up, at least 1.
// Read afresh on every call. A file that is missing or not understood counts as no limit.
// `root` stands before /proc and /sys, so that tests can bring their own.
int AvailableCpus(const std::string& root = "");

}  // namespace heddle
