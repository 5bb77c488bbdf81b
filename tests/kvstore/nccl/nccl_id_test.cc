// What a process without a scheduler is told of the others.
#include "kvstore/nccl/nccl_id.h"

#include <heddle/error.h>

#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "kvstore/nccl/nccl_meeting.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {
namespace {

using kvstore::DeviceClaim;
using kvstore::Nccl;
using kvstore::NcclProcess;

Nccl::Id SomeId(int first) {
  Nccl::Id id;
  for (std::size_t i = 0; i < id.size(); ++i) {
    id[i] = static_cast<char>(first + 7 * static_cast<int>(i));
  }
  return id;
}

// Sets variables for a scope.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& variables) {
    for (const auto& [name, value] : variables)
      setenv(("HEDDLE_NCCL_" + name).c_str(), value.c_str(), 1);
  }
  ~Environment() {
    for (const char* const name : {"HEDDLE_NCCL_ID", "HEDDLE_NCCL_RANK", "HEDDLE_NCCL_PROCESSES"}) {
      unsetenv(name);
    }
  }
};

TEST(NcclId, TextKeepsEveryByte) {
  const Nccl::Id id = SomeId(100);
  EXPECT_EQ(kvstore::TextOf(id).size(), 256u);
  EXPECT_EQ(kvstore::IdOf("id", kvstore::TextOf(id)), id);
}

TEST(NcclId, OtherTextsAreRefused) {
  const std::string text = kvstore::TextOf(SomeId(1));
  for (const std::string& bad :
       {std::string(), text.substr(1), text + "0", "g" + text.substr(1), " " + text.substr(1)}) {
    ExpectInvalid([&] { kvstore::IdOf("HEDDLE_NCCL_ID", bad); },
                  {"HEDDLE_NCCL_ID", "256 hexadecimal digits"});
  }
}

TEST(NcclProcess, ComesFromTheEnvironmentWholeOrNotAtAll) {
  EXPECT_FALSE(NcclProcess::FromEnvironment());
  const std::string id = kvstore::TextOf(SomeId(3));
  {
    const Environment all({{"ID", id}, {"RANK", "2"}, {"PROCESSES", "3"}});
    const std::optional<NcclProcess> process = NcclProcess::FromEnvironment();
    ASSERT_TRUE(process);
    EXPECT_EQ(process->id, SomeId(3));
    EXPECT_EQ(process->rank, 2);
    EXPECT_EQ(process->processes, 3);
  }
  const std::vector<std::pair<std::map<std::string, std::string>, std::string>> wrong = {
      {{{"RANK", "2"}, {"PROCESSES", "3"}}, "HEDDLE_NCCL_ID is not set"},
      {{{"ID", id}, {"PROCESSES", "3"}}, "HEDDLE_NCCL_RANK is not set"},
      {{{"ID", id}, {"RANK", "0"}}, "HEDDLE_NCCL_PROCESSES is not set"},
      {{{"ID", id}, {"RANK", "3"}, {"PROCESSES", "3"}}, "HEDDLE_NCCL_RANK"},
      {{{"ID", id}, {"RANK", "0"}, {"PROCESSES", "0"}}, "HEDDLE_NCCL_PROCESSES"},
      {{{"ID", "abc"}, {"RANK", "0"}, {"PROCESSES", "1"}}, "HEDDLE_NCCL_ID"},
  };
  for (const auto& [variables, part] : wrong) {
    const Environment some(variables);
    ExpectInvalid([] { NcclProcess::FromEnvironment(); }, {part});
  }
}

TEST(DeviceClaim, IsOfOneProcessAndId) {
  const int pid = getpid();  // other programs may run this test too
  const std::string gpu = fmt::format("GPU-1-{}", pid);
  std::optional<DeviceClaim> first(std::in_place, SomeId(1), 0, gpu);
  ExpectInvalid([&] { DeviceClaim(SomeId(1), 3, gpu); }, {"gpu(3)", gpu});
  const DeviceClaim other_gpu(SomeId(1), 1, fmt::format("GPU-2-{}", pid));
  const DeviceClaim other_id(SomeId(2), 0, gpu);
  first.reset();
  const DeviceClaim again(SomeId(1), 0, gpu);
}

}  // namespace
}  // namespace heddle::kvstore_test
