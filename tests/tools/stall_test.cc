// The stall reports that docs/distributed.md explains are what a real job prints, numbers aside.
#include <csignal>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/tools/child_process.h"
#include "tests/tools/free_port.h"

namespace heddle::tools {
namespace {

using Strings = std::vector<std::string>;

// Numbers, addresses, incarnations and the log's times become the same for all.
std::string FormOf(std::string line) {
  line = std::regex_replace(line, std::regex("^.*(?=heddle warning: )"), "");
  line = std::regex_replace(line, std::regex("incarnation [0-9a-f]+"), "incarnation X");
  line = std::regex_replace(line, std::regex("[0-9]+(\\.[0-9]+)*(:[0-9]+)?"), "N");
  return line;
}

// The forms of the lines in the page's blocks "```stall <title>", by title.
std::map<std::string, Strings> DocumentedForms() {
  std::ifstream page(HEDDLE_DISTRIBUTED_PAGE);
  std::map<std::string, Strings> blocks;
  Strings* block = nullptr;
  for (std::string line; std::getline(page, line);) {
    if (line.rfind("```stall ", 0) == 0) {
      block = &blocks[line.substr(9)];
    } else if (line.rfind("```", 0) == 0) {
      block = nullptr;
    } else if (block != nullptr) {
      block->push_back(FormOf(line));
    }
  }
  return blocks;
}

std::set<std::string> FormsOf(const std::string& output) {
  std::set<std::string> forms;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) forms.insert(FormOf(line));
  return forms;
}

TEST(StallReport, TheDocumentedLinesAreThoseOfARealJob) {
  const std::string port = FreePort();
  const auto settings = [&](Strings more) {
    more.insert(more.end(),
                {"HEDDLE_ROOT_HOST=127.0.0.1", "HEDDLE_ROOT_PORT=" + port, "HEDDLE_JOB_WORKERS=3",
                 "HEDDLE_JOB_SERVERS=1", "HEDDLE_WARNING_MS=300",
                 // Who stands still is not given up.
                 "HEDDLE_DEAD_AFTER=1000"});
    return more;
  };
  const Strings worker = {WORKER_PROGRAM, "forever"};
  RunningProgram scheduler({HEDDLE_COMMAND, "scheduler"}, settings({}));
  RunningProgram server({HEDDLE_COMMAND, "server"}, settings({}));
  RunningProgram worker0(worker, settings({"HEDDLE_RANK=0"}));
  RunningProgram worker1(worker, settings({"HEDDLE_RANK=1"}));
  RunningProgram worker2(worker, settings({"HEDDLE_RANK=2"}));
  for (RunningProgram* const each : {&worker0, &worker1, &worker2}) {
    ASSERT_EQ(each->ReadLine(), "started");
  }
  worker1.Signal(SIGSTOP);

  std::map<std::string, std::string> printed;
  printed["worker 0"] = worker0.ReadUntil("missing: workers 1 (");
  worker0.Signal(SIGUSR1);
  printed["worker 0, asked"] = worker0.ReadUntil("  pushpull key");
  server.Signal(SIGUSR1);
  printed["server 0, asked"] = server.ReadUntil("1 of them wait") + server.ReadUntil("  key 'sum'");
  scheduler.Signal(SIGUSR1);
  printed["scheduler, asked"] = scheduler.ReadUntil("the end, which is an empty line");
  const std::map<std::string, Strings> documented = DocumentedForms();
  ASSERT_EQ(documented.size(), printed.size());
  for (const auto& [title, forms] : documented) {
    const std::set<std::string> real = FormsOf(printed[title]);
    for (const std::string& form : forms) {
      EXPECT_TRUE(real.contains(form)) << title << ": " << form << "\nprinted:\n" << printed[title];
    }
  }
}

}  // namespace
}  // namespace heddle::tools
