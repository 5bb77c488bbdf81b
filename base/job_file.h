// Names of files that every process of a job writes one of.
#pragma once

#include <string>

namespace heddle {

// What this process is in its job by the environment (HEDDLE_ROLE or DMLC_ROLE, HEDDLE_RANK):
// "scheduler", "worker1"; "worker-4711" with the process id where the rank is not said; empty if
// no role is.
std::string PlaceInJob();

// `name` with the place for "%r". In a process of a job a name without "%r" and "%p" gets the place
// before its ending, "run.trace" becomes "run.worker1.trace", so that no two processes write to one
// file. Outside of a job "%r" is "process".
std::string JobFileName(const std::string& name);

// "run.trace" with "2" is "run.2.trace"; "folder.d/run" is "folder.d/run.2".
std::string BeforeEnding(std::string name, const std::string& text);

}  // namespace heddle
