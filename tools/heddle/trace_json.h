// Writes a trace in the Trace Event Format that chrome://tracing and Perfetto open.
#pragma once

#include <cstddef>
#include <iosfwd>

#include "tools/heddle/trace_join.h"

namespace heddle::tools {

struct TraceJsonOptions {
  bool arrows = true;  // dependency arrows, which make most of a big file
};

struct TraceJsonCounts {
  std::size_t ops = 0, unfinished = 0, arrows = 0, waits = 0, messages = 0;
  std::size_t device_ops = 0, streams = 0;  // what devices did
};

// What is in it: a track for each thread with a slice for each op body (category "op") and wait
// ("wait"); async ops from start to completion ("async"); ops that were pushed and never finished
// ("pending"); and an arrow from each op to every op that had to wait for it ("dependency"). A
// track for each stream of a device with a slice for each op ("device") and, inside, for each of
// its kernels, copies and fills ("work"), and an arrow from where the op was issued ("issue"). Of
// processes of a job: the messages ("message"), what servers did with parts ("part"), and arrows
// for what requests went through ("request"). Times are microseconds since the first trace began.
TraceJsonCounts WriteTraceJson(const JoinedTrace& trace, const TraceJsonOptions& options,
                               std::ostream& out);

}  // namespace heddle::tools
