// Runs ops under a trace, says "ready" and never ends by itself: a test kills it.
//
//   traced_program <trace file>
#include <heddle/engine.h>

#include <cstdio>
#include <mutex>

#include <unistd.h>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  heddle::EngineOptions options = heddle::EngineOptions::FromEnvironment();
  options.num_workers = 2;
  options.trace_file = argv[1];
  heddle::Engine engine(options);
  const heddle::Var counter = engine.NewVar("counter");
  int count = 0;
  for (int i = 0; i < 1000; ++i) {
    engine.Push({.name = "count", .reads = {counter}, .writes = {counter}}, [&count] { ++count; });
  }
  engine.WaitForVar(counter);

  const heddle::Var blocked = engine.NewVar("blocked");
  std::mutex never;
  never.lock();
  engine.Push({.name = "stuck", .writes = {blocked}}, [&never] { never.lock(); });
  engine.Push({.name = "behind", .reads = {blocked}}, [] {});
  std::puts("ready");
  std::fflush(stdout);
  for (;;) pause();
}
