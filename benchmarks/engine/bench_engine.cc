// What the engine costs per op, and how it answers when it sleeps, is shared or is full.
//
//   bench_engine <mode> [flags of benchmarks/peers/harness.h]
//
//   patterns   as every peer: nanoseconds per op of each op stream, --verify, --metg
//   push-call  the Push call alone, with a deep queue; heap allocations per 1000 ops
//   push-wait  push one op and wait for it, back to back and after 200 us of quiet
//   wake       Push onto a sleeping engine: the call, and the time until the op starts
//   pushers    several pushing threads, pushes from inside ops, async ops completed elsewhere
//   memory     resident bytes per pending op, a million pending
//   idle       CPU time that the process uses while its engine idles for --budget-ms
//   echo       a wait for an answer from a socket, beside a bare poll(): who runs the I/O loop
//
// Bounds to expect: an op touches about four cache lines and one of them crosses to the other core,
// so 20 to 50 ns; waking a thread takes the kernel 10 to 50 us.

#include <cstdio>
#include <exception>
#include <iterator>
#include <string_view>
#include <vector>

#include "benchmarks/engine/modes.h"

namespace heddle::bench {
namespace {

class HeddleRunner {
 public:
  HeddleRunner(int workers, bool pusher_included)
      : engine_(OptionsFor(pusher_included ? workers - 1 : workers)) {}

  void Prepare(Workload& workload) {
    // The shapes name up to four variables; those that an op does not use are never looked at.
    vars_ = MakeVars(engine_, workload.num_vars());
  }

  void Run(Workload& workload) {
    for (int i = 0; i < workload.num_ops(); ++i) {
      PushOp(engine_, vars_, workload.op(i), [&workload, i] { workload.RunBody(i); });
    }
    engine_.WaitForAll();
  }

  void Finish() { vars_.clear(); }

 private:
  Engine engine_;
  std::vector<Var> vars_;
};

struct Mode {
  std::string_view name;
  void (*measure)(const HarnessOptions& options);
};
constexpr Mode kModes[] = {
    {"push-call", &MeasurePushCall}, {"push-wait", &MeasurePushWait}, {"wake", &MeasureWake},
    {"pushers", &MeasurePushers},    {"memory", &MeasureMemory},      {"idle", &MeasureIdle},
    {"echo", &MeasureEcho},
};

int Main(int argc, char** argv) {
  const std::string_view name = argc > 1 ? argv[1] : "";
  if (name == "patterns") return HarnessMain<HeddleRunner>("heddle", argc - 1, argv + 1);
  for (const Mode& mode : kModes) {
    if (name != mode.name) continue;
    try {
      mode.measure(ParseHarnessOptions(argc - 1, argv + 1));
      return 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "bench_engine %s: %s\n", argv[1], error.what());
      return 2;
    }
  }
  std::fprintf(stderr, "usage: bench_engine patterns");
  for (const Mode& mode : kModes) {
    std::fprintf(stderr, "|%.*s", static_cast<int>(mode.name.size()), mode.name.data());
  }
  std::fprintf(stderr, " [flags]\n");
  return 2;
}

}  // namespace
}  // namespace heddle::bench

int main(int argc, char** argv) { return heddle::bench::Main(argc, argv); }
