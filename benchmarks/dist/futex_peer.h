// A round trip of a thread of one process that wakes one of another and is woken by it: the least
// that any answer from a sleeping process takes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "benchmarks/dist/processes.h"

namespace heddle::bench_dist {

class FutexEcho {
 public:
  FutexEcho();  // forks
  ~FutexEcho();
  FutexEcho(const FutexEcho&) = delete;
  FutexEcho& operator=(const FutexEcho&) = delete;

  void RoundTrip();
  const Process& process() const { return *process_; }

 private:
  struct Words {
    alignas(64) std::atomic<std::uint32_t> asked;
    alignas(64) std::atomic<std::uint32_t> answered;
  };

  Words* const words_;  // shared by both
  std::uint32_t count_ = 0;
  std::unique_ptr<Process> process_;
};

}  // namespace heddle::bench_dist
