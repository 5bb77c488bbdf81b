// What `heddle doctor` finds out about jobs of several processes.
#pragma once

#include <heddle/dist.h>

#include <functional>
#include <string_view>

namespace heddle::tools {

// Takes a line for people: a label, and what was found.
using Report = std::function<void(std::string_view label, std::string_view value)>;

// Whether this process could take its place in the job that the options describe: the addresses,
// the token's file, the limits of the system. Returns the number of problems; a problem's value
// begins with "PROBLEM: " and says how to mend it.
int CheckJobSetUp(const DistOptions& options, const Report& report);

// In a job, as each of its workers: whether everybody reaches everybody, and how the clocks differ.
// Returns the number of problems. Throws what the stores throw.
int CheckInJob(const Report& report);

}  // namespace heddle::tools
