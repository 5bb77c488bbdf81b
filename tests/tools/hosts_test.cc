// Where hosts come from and which processes they get, and how a part of a job travels to them.
#include "tools/heddle/hosts.h"

#include <heddle/error.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tools/heddle/job_part.h"
#include "tools/heddle/process_tree.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

template <class Call>
std::string ErrorOf(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

std::vector<Host> Hosts(const std::map<std::string, std::string>& variables) {
  return HostsFromEnvironment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

TEST(Hosts, ANameGivenTwiceHasTwoSlots) {
  EXPECT_EQ(ParseHosts("a,user@b,a"), (std::vector<Host>{{"a", 2}, {"user@b", 1}}));
  for (const char* const bad : {"a,,b", ",", "-oProxyCommand=evil", "a, b", "a b"}) {
    EXPECT_THAT(ErrorOf([&] { ParseHosts(bad); }), HasSubstr(bad));
  }
}

TEST(Hosts, AFileHasAHostALine) {
  const TempFolder folder;
  const std::string path = folder / "hosts";
  std::ofstream(path) << "# ours\nnode1 slots=4\n\n  node2  # one\nnode1\n";
  EXPECT_EQ(ReadHostsFile(path), (std::vector<Host>{{"node1", 5}, {"node2", 1}}));
  for (const char* const bad : {"n slots=0", "n slots=x", "n 4", "n slots=1 more", "-x"}) {
    std::ofstream(path) << "fine\n" << bad << "\n";
    EXPECT_THAT(ErrorOf([&] { ReadHostsFile(path); }), HasSubstr(path + ":2")) << bad;
  }
  std::ofstream(path) << "# nobody\n";
  EXPECT_THAT(ErrorOf([&] { ReadHostsFile(path); }), HasSubstr(path));
  EXPECT_THAT(ErrorOf([&] { ReadHostsFile(folder / "none"); }), HasSubstr("No such file"));
}

TEST(Hosts, BatchSystemsTellThemInTheirOwnWays) {
  const TempFolder folder;
  // Grid Engine: host, slots, queue, processors. PBS: a line a slot.
  std::ofstream(folder / "pe") << "n1.site 4 all.q@n1.site UNDEFINED\nn2.site 2 all.q@n2.site 0\n";
  std::ofstream(folder / "pbs") << "n1\nn1\nn2\n";
  EXPECT_EQ(Hosts({{"PE_HOSTFILE", folder / "pe"}}),
            (std::vector<Host>{{"n1.site", 4}, {"n2.site", 2}}));
  EXPECT_EQ(Hosts({{"PBS_NODEFILE", folder / "pbs"}}), (std::vector<Host>{{"n1", 2}, {"n2", 1}}));
  EXPECT_EQ(Hosts({{"SLURM_JOB_NODELIST", "n[1-3],z"}, {"SLURM_TASKS_PER_NODE", "2(x3),1"}}),
            (std::vector<Host>{{"n1", 2}, {"n2", 2}, {"n3", 2}, {"z", 1}}));
  EXPECT_EQ(Hosts({{"SLURM_JOB_NODELIST", "n1"}}), (std::vector<Host>{{"n1", 1}}));
  EXPECT_THAT(Hosts({}), IsEmpty());
}

TEST(Hosts, SlurmsListsAreExpanded) {
  EXPECT_THAT(ExpandNodeList("login"), ElementsAre("login"));
  EXPECT_THAT(ExpandNodeList("n[08-11,3],a-b,r[1-2]-ib"),
              ElementsAre("n08", "n09", "n10", "n11", "n3", "a-b", "r1-ib", "r2-ib"));
  for (const char* const bad :
       {"", "n[1-", "n[2-1]", "n[a-b]", "a,,b", "a,", "n[1]m[2]", "n[0-2000000000]"}) {
    EXPECT_THAT(ErrorOf([&] { ExpandNodeList(bad); }), HasSubstr(std::string("'") + bad + "'"));
  }
}

// Against the promise itself: each rank once; neighbours together; no host beyond its slots while
// another one has free ones; local ranks count up.
TEST(Hosts, PlacesFillSlotsAndThenGrowEvenly) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int i = 0; i < 300; ++i) {
    std::vector<Host> hosts;
    int slots = 0;
    for (unsigned h = 0; h <= random() % 5; ++h) {
      hosts.push_back({"h" + std::to_string(h), static_cast<int>(1 + random() % 4)});
      slots += hosts.back().slots;
    }
    const int count = static_cast<int>(1 + random() % 30);
    const auto places = PlacesOnHosts(hosts, DistRole::kWorker, count);
    ASSERT_EQ(places.size(), hosts.size());
    int next = 0;
    for (std::size_t h = 0; h < hosts.size(); ++h) {
      const int here = static_cast<int>(places[h].size());
      const int share = (count + slots - 1) / slots;  // of a slot, at most
      EXPECT_LE(here, hosts[h].slots * share);
      if (count >= slots) {
        EXPECT_GE(here, hosts[h].slots * (count / slots));
      } else if (next + here < count) {
        EXPECT_EQ(here, hosts[h].slots) << "a later host has ranks, so this one is full";
      }
      for (int local = 0; local < here; ++local) {
        const Place& place = places[h][static_cast<std::size_t>(local)];
        EXPECT_EQ(place.rank, next++);
        EXPECT_EQ(place.local_rank, local);
        EXPECT_EQ(place.local_size, here);
      }
    }
    EXPECT_EQ(next, count);
  }
  const auto servers = PlacesOnHosts({{"a", 8}, {"b", 1}}, DistRole::kServer, 3);
  EXPECT_EQ(servers[0].size(), 2u);
  EXPECT_EQ(servers[1].size(), 1u) << "servers are spread";
}

JobPart SomePart() {
  Job job;
  job.num_workers = 3;
  job.worker = {"train", "--name", "a b\n\"c\""};
  job.server = {"heddle", "server"};
  job.environment = {{"A", "x=y\xc3\xa9"}, {"B", ""}};
  job.id = "id";
  job.token = "secret";
  job.folder = "/some/folder";
  job.grace = std::chrono::milliseconds(1234);
  return MakeJobPart(job, DistRole::kWorker, {{"n1", 2}, {"n2", 1}}, "10.0.0.1", 9091);
}

TEST(JobPart, ArrivesAsItWasSent) {
  const JobPart sent = SomePart(), got = ParseJobPart(ToText(sent));
  EXPECT_EQ(got.job.worker, sent.job.worker);
  EXPECT_EQ(got.job.server, sent.job.server);
  EXPECT_EQ(got.job.environment, sent.job.environment);
  EXPECT_EQ(got.job.token, "secret");
  EXPECT_EQ(got.job.id, "id");
  EXPECT_EQ(got.job.folder, "/some/folder");
  EXPECT_EQ(got.job.grace, std::chrono::milliseconds(1234));
  EXPECT_EQ(got.job.num_workers, 3);
  EXPECT_EQ(got.root_host, "10.0.0.1");
  EXPECT_EQ(got.root_port, 9091);
  ASSERT_EQ(got.places.size(), 2u);
  ASSERT_EQ(got.places[1].size(), 1u);
  EXPECT_EQ(PlaceName(got.places[1][0]), "worker 2");
  EXPECT_EQ(got.job.hosts[1].name, "n2");
}

TEST(JobPart, TheFrameIsReadAndNotAByteMore) {
  Pipe pipe;
  const std::string sent = Framed("the part") + "\x0f";
  ASSERT_EQ(write(pipe.write.get(), sent.data(), sent.size()), static_cast<ssize_t>(sent.size()));
  pipe.write.Close();
  EXPECT_EQ(ReadFramed(pipe.read.get()), "the part");
  char next = 0;
  EXPECT_EQ(read(pipe.read.get(), &next, 1), 1);
  EXPECT_EQ(next, 15);
  EXPECT_THAT(ErrorOf([&] { ReadFramed(pipe.read.get()); }), HasSubstr("ends early"));
}

TEST(JobPart, AnotherVersionIsNamedAndWhatIsNoPartShowsNothingOfIt) {
  std::string text = ToText(SomePart());
  const std::size_t version = text.find("\"version\":\"") + 11;
  text.replace(version, text.find('"', version) - version, "99.1");
  EXPECT_THAT(ErrorOf([&] { ParseJobPart(text); }),
              AllOf(HasSubstr("99.1"), HasSubstr("this host's is")));
  for (const std::string& bad : {std::string("secret"), std::string("{\"token\":\"secret\"}"),
                                 ToText(SomePart()).substr(0, 100) + "secret"}) {
    EXPECT_THAT(ErrorOf([&] { ParseJobPart(bad); }),
                AllOf(HasSubstr("no description"), ::testing::Not(HasSubstr("secret"))));
  }
}

TEST(JobPart, WhatIsTrueOfOneMachineOrProcessIsNotPassedOn) {
  const std::vector<std::pair<const char*, bool>> variables = {
      {"HEDDLE_TRACE", true},      {"DMLC_INTERFACE", true},    {"OMP_NUM_THREADS", true},
      {"PYTHONPATH", true},        {"HEDDLE_RANK", false},      {"HEDDLE_TOKEN", false},
      {"HEDDLE_NODE_HOST", false}, {"SOMETHING", false},        {"HEDDLE_NCCL_DEADLINE_MS", true},
      {"HEDDLE_NCCL_ID", false},   {"HEDDLE_NCCL_RANK", false}, {"HEDDLE_NCCL_PROCESSES", false}};
  for (const auto& [name, passed] : variables) setenv(name, "x", 1);
  const std::vector<Variable> passed_on = PassedOn();
  for (const auto& [name, passed] : variables) {
    EXPECT_EQ(std::count(passed_on.begin(), passed_on.end(), Variable(name, "x")), passed ? 1 : 0)
        << name;
    unsetenv(name);
  }
}

}  // namespace
}  // namespace heddle::tools
