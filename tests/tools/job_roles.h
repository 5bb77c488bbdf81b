// What the processes of a JobProcesses are known as.
#pragma once

#include <chrono>
#include <csignal>
#include <regex>
#include <string>

#include <gtest/gtest.h>

#include "tests/tools/job_processes.h"

namespace heddle::tools {

inline std::string JobIdOf(const JobProcesses& job) {
  return job.mark().substr(job.mark().find('=') + 1);
}

// Where "scheduler" or "server 1" listens, as the scheduler knows it: "127.0.0.1:4711".
inline std::string AddressOf(JobProcesses& job, const std::string& name) {
  if (name == "scheduler") return "127.0.0.1:" + std::to_string(job.port());
  JobProcesses::Process& scheduler = job.Find("scheduler");
  std::smatch match;
  const std::regex listed(name + R"( \((127\.0\.0\.1:[0-9]+), last heard)");
  std::string output;
  EXPECT_TRUE(job.WaitUntil(Clock::now() + std::chrono::seconds(120), [&] {
    scheduler.program->Signal(SIGUSR1);
    output = scheduler.Output();
    return std::regex_search(output, match, listed);
  }));
  return match[1];
}

}  // namespace heddle::tools
