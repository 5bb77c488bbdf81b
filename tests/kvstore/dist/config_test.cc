// The settings of a distributed job, read from variables. Every field has a row in kFields; the
// tests walk it, and one checks that no field of the library is without a row.
#include "kvstore/dist/config.h"

#include <heddle/dist.h>
#include <heddle/error.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/message_of.h"
#include "tools/testing/temp_folder.h"

namespace heddle::kvstore::dist {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using tools::TempFolder;

using Variables = std::map<std::string, std::string>;

DistOptions Read(const Variables& variables, const std::vector<GivenValue>& given = {}) {
  return ReadDistOptions(
      [&](const std::string& name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        if (found == variables.end() || found->second.empty()) return std::nullopt;
        return found->second;
      },
      given);
}

// A job that lacks nothing.
Variables Complete(Variables more = {}) {
  more.merge(Variables{{"HEDDLE_ROOT_HOST", "127.0.0.1"},
                       {"HEDDLE_ROOT_PORT", "9091"},
                       {"HEDDLE_JOB_WORKERS", "4"},
                       {"HEDDLE_JOB_SERVERS", "2"}});
  return more;
}

std::string ReadError(const Variables& variables, const std::vector<GivenValue>& given = {}) {
  return MessageOf([&] { Read(variables, given); });
}

struct FieldCase {
  std::string field;
  std::vector<std::string> variables;  // the first wins
  std::string good;                    // some value that is not the default
  std::string also_good;               // another one
  std::vector<std::string> bad;        // unparsable or out of range
  std::string expected;                // what errors say of it
  std::function<std::string(const DistOptions&)> get;
};

template <class T>
std::function<std::string(const DistOptions&)> Number(T DistOptions::*member) {
  return [member](const DistOptions& options) { return std::to_string(options.*member); };
}
template <class T>
std::function<std::string(const DistOptions&)> Count(T DistOptions::*member) {
  return [member](const DistOptions& options) { return std::to_string((options.*member).count()); };
}
std::function<std::string(const DistOptions&)> Maybe(std::optional<int> DistOptions::*member) {
  return [member](const DistOptions& options) {
    return (options.*member) ? std::to_string(*(options.*member)) : "none";
  };
}
std::function<std::string(const DistOptions&)> String(std::string DistOptions::*member) {
  return [member](const DistOptions& options) { return options.*member; };
}

const std::vector<FieldCase>& Fields() {
  static const std::vector<FieldCase> fields = {
      {"role",
       {"HEDDLE_ROLE", "DMLC_ROLE"},
       "server",
       "scheduler",
       {"boss", "Server", "1"},
       "scheduler, server or worker",
       [](const DistOptions& options) { return std::string(DistRoleName(options.role)); }},
      {"rank",
       {"HEDDLE_RANK"},
       "3",
       "0",
       {"-1", "two", "65536", "1.5", "3 "},
       "from 0 to 65535",
       Maybe(&DistOptions::rank)},
      {"local_rank",
       {"HEDDLE_LOCAL_RANK"},
       "1",
       "0",
       {"-1", "x"},
       "from 0 to 65535",
       Maybe(&DistOptions::local_rank)},
      {"local_size",
       {"HEDDLE_LOCAL_SIZE"},
       "2",
       "4",
       {"0", "x"},
       "from 1 to 65536",
       Maybe(&DistOptions::local_size)},
      {"root_host",
       {"HEDDLE_ROOT_HOST", "DMLC_PS_ROOT_URI"},
       "10.0.0.1",
       "node7",
       {},
       "",
       String(&DistOptions::root_host)},
      {"root_port",
       {"HEDDLE_ROOT_PORT", "DMLC_PS_ROOT_PORT"},
       "9000",
       "65535",
       {"0", "65536", "http", "90 91", "-1", "99999999999999999999"},
       "from 1 to 65535",
       Number(&DistOptions::root_port)},
      {"num_workers",
       {"HEDDLE_JOB_WORKERS", "DMLC_NUM_WORKER"},
       "8",
       "65536",
       {"0", "-2", "many", "65537"},
       "from 1 to 65536",
       Number(&DistOptions::num_workers)},
      {"num_servers",
       {"HEDDLE_JOB_SERVERS", "DMLC_NUM_SERVER"},
       "3",
       "1",
       {"0", "", "2x"},
       "from 1 to 65536",
       Number(&DistOptions::num_servers)},
      {"job_id", {"HEDDLE_JOB_ID"}, "night-7", "x", {}, "", String(&DistOptions::job_id)},
      {"token", {"HEDDLE_TOKEN"}, "secret", "s p a c e", {}, "", String(&DistOptions::token)},
      {"insecure",
       {"HEDDLE_INSECURE"},
       "1",
       "yes",
       {"maybe", "2"},
       "1, true, yes, on, 0, false, no or off",
       [](const DistOptions& options) { return std::string(options.insecure ? "1" : "0"); }},
      {"tls_certificate",
       {"HEDDLE_TLS_CERTIFICATE"},
       "node.pem",
       "/etc/heddle/node.pem",
       {},
       "",
       String(&DistOptions::tls_certificate)},
      {"tls_key",
       {"HEDDLE_TLS_KEY"},
       "node.key",
       "/etc/heddle/node.key",
       {},
       "",
       String(&DistOptions::tls_key)},
      {"tls_authorities",
       {"HEDDLE_TLS_AUTHORITIES"},
       "ca.pem",
       "/etc/heddle/ca.pem",
       {},
       "",
       String(&DistOptions::tls_authorities)},
      {"tls_name", {"HEDDLE_TLS_NAME"}, "heddle-job", "x", {}, "", String(&DistOptions::tls_name)},
      {"bind_address",
       {"HEDDLE_BIND_ADDRESS"},
       "0.0.0.0",
       "::1",
       {},
       "",
       String(&DistOptions::bind_address)},
      {"node_host",
       {"HEDDLE_NODE_HOST", "DMLC_NODE_HOST"},
       "node3",
       "10.1.1.1",
       {},
       "",
       String(&DistOptions::node_host)},
      {"interface",
       {"HEDDLE_INTERFACE", "DMLC_INTERFACE"},
       "eth0",
       "ib0",
       {},
       "",
       String(&DistOptions::interface)},
      {"listen_fd",
       {"HEDDLE_LISTEN_FD"},
       "5",
       "7",
       {"-2", "stdin"},
       "from -1 to 2147483647",
       Number(&DistOptions::listen_fd)},
      {"failure_fd",
       {"HEDDLE_FAILURE_FD"},
       "6",
       "8",
       {"-2", "stdout"},
       "from -1 to 2147483647",
       Number(&DistOptions::failure_fd)},
      {"connect_deadline",
       {"HEDDLE_CONNECT_DEADLINE_MS"},
       "2500",
       "1",
       {"0", "1s", "-5"},
       "from 1 to 86400000",
       Count(&DistOptions::connect_deadline)},
      {"op_deadline",
       {"HEDDLE_OP_DEADLINE_MS"},
       "30000",
       "1",
       {"-1", "never"},
       "from 0 to 86400000",
       Count(&DistOptions::op_deadline)},
      {"warning_time",
       {"HEDDLE_WARNING_MS"},
       "500",
       "1",
       {"0", "x"},
       "from 1 to 86400000",
       Count(&DistOptions::warning_time)},
      {"heartbeat_interval",
       {"HEDDLE_HEARTBEAT_MS"},
       "200",
       "10",
       {"9", "x"},
       "from 10 to 86400000",
       Count(&DistOptions::heartbeat_interval)},
      {"dead_after",
       {"HEDDLE_DEAD_AFTER"},
       "5",
       "1000",
       {"1", "1001", "x"},
       "from 2 to 1000",
       Number(&DistOptions::dead_after)},
      {"slice_bytes",
       {"HEDDLE_SLICE_BYTES"},
       "65536",
       "1",
       {"-1", "64KiB", "1073741825"},
       "from 0 to 1073741824",
       Number(&DistOptions::slice_bytes)},
      {"cut_bound",
       {"HEDDLE_BIGARRAY_BOUND", "MXNET_KVSTORE_BIGARRAY_BOUND"},
       "1000",
       "9000000000000",
       {"0", "1e6"},
       "at least 1",
       Number(&DistOptions::cut_bound)},
      {"shared_memory",
       {"HEDDLE_SHARED_MEMORY"},
       "0",
       "yes",
       {"maybe", "2"},
       "1, true, yes, on, 0, false, no or off",
       [](const DistOptions& options) { return std::string(options.shared_memory ? "1" : "0"); }},
      {"spin",
       {"HEDDLE_SPIN_US"},
       "50",
       "1000000",
       {"-1", "1000001", "x"},
       "from 0 to 1000000",
       Count(&DistOptions::spin)},
      {"peer_bytes_max",
       {"HEDDLE_PEER_BYTES_MAX"},
       "1000000",
       "1",
       {"0", "1G"},
       "at least 1",
       Number(&DistOptions::peer_bytes_max)},
      {"io_threads",
       {"HEDDLE_IO_THREADS"},
       "2",
       "256",
       {"-1", "257", "x"},
       "from 0 to 256",
       Number(&DistOptions::io_threads)},
      {"io_cpu",
       {"HEDDLE_IO_CPU"},
       "3",
       "0",
       {"-2", "4096", "0,1"},
       "from -1 to 4095",
       Number(&DistOptions::io_cpu)},
  };
  return fields;
}

// What variables make of one field only, so that nothing contradicts it.
Variables Alone(const FieldCase& field, const std::string& variable, const std::string& text) {
  Variables variables = {{variable, text}};
  if (field.field.ends_with("_fd")) variables["HEDDLE_ROLE"] = "scheduler";
  if (field.field.starts_with("tls_")) {
    for (const char* const file :
         {"HEDDLE_TLS_CERTIFICATE", "HEDDLE_TLS_KEY", "HEDDLE_TLS_AUTHORITIES"}) {
      variables.try_emplace(file, "some.pem");
    }
  }
  return variables;
}

TEST(DistConfig, EveryFieldIsInTheTableOfThisTest) {
  std::set<std::string> tested;
  for (const FieldCase& field : Fields()) tested.insert(field.field);
  std::set<std::string> known;
  for (const Setting& setting : Settings()) known.insert(std::string(setting.field));
  EXPECT_EQ(tested, known);
}

TEST(DistConfig, EveryVariableSetsItsFieldAndIsRememberedAsItsSource) {
  for (const FieldCase& field : Fields()) {
    for (const std::string& variable : field.variables) {
      for (const std::string& text : {field.good, field.also_good}) {
        const DistOptions options = Read(Alone(field, variable, text));
        EXPECT_EQ(field.get(options), text == "yes" ? "1" : text) << variable;
        EXPECT_EQ(options.sources.at(field.field), variable);
        EXPECT_THAT(options.Describe(field.field), HasSubstr("(" + variable + ")"));
      }
    }
  }
}

TEST(DistConfig, HeddlesVariablesWinOverThoseOfOthers) {
  for (const FieldCase& field : Fields()) {
    if (field.variables.size() < 2) continue;
    const DistOptions options =
        Read({{field.variables[0], field.good}, {field.variables[1], field.also_good}});
    EXPECT_EQ(field.get(options), field.good) << field.field;
    EXPECT_EQ(options.sources.at(field.field), field.variables[0]);
  }
}

TEST(DistConfig, ValuesThatDoNotParseOrAreOutOfRangeNameFieldExpectedGivenAndSource) {
  for (const FieldCase& field : Fields()) {
    for (const std::string& variable : field.variables) {
      for (const std::string& bad : field.bad) {
        if (bad.empty()) continue;
        EXPECT_THAT(ReadError(Alone(field, variable, bad)),
                    AllOf(HasSubstr(field.field), HasSubstr(field.expected),
                          HasSubstr("given '" + bad + "'"), HasSubstr("(" + variable + ")")));
      }
    }
  }
}

TEST(DistConfig, OneErrorNamesAllThatIsWrong) {
  const std::string unreadable = MessageOf([] {
    Read(Complete({{"HEDDLE_ROOT_PORT", "harbour"}, {"HEDDLE_ROLE", "cook"}}),
         {{"num_servers", "-3", "--servers"}});
  });
  for (const char* const part :
       {"HEDDLE_ROOT_PORT", "harbour", "HEDDLE_ROLE", "cook", "--servers", "'-3'"}) {
    EXPECT_THAT(unreadable, HasSubstr(part));
  }
  const std::string missing = MessageOf([] { Read({}).Validate(); });
  EXPECT_THAT(missing, AllOf(HasSubstr("HEDDLE_ROOT_HOST"), HasSubstr("HEDDLE_JOB_WORKERS")));
}

TEST(DistConfig, WhatIsLeftOutHasItsDefault) {
  const DistOptions read = Read({}), plain;
  for (const FieldCase& field : Fields()) {
    EXPECT_EQ(field.get(read), field.get(plain)) << field.field;
    EXPECT_NE(field.get(plain), field.good) << field.field << ": the test would see nothing";
  }
  EXPECT_TRUE(read.sources.empty());
  EXPECT_EQ(plain.role, DistRole::kWorker);
  EXPECT_EQ(plain.heartbeat_interval, std::chrono::seconds(1));
  EXPECT_EQ(plain.dead_after, 3);
  EXPECT_EQ(plain.warning_time, std::chrono::seconds(10));
  EXPECT_EQ(plain.op_deadline.count(), 0) << "no limit while all missing ranks are alive";
  EXPECT_EQ(plain.cut_bound, 1'000'000);
  EXPECT_EQ(plain.spin.count(), 0);
}

TEST(DistConfig, EmptyVariablesCountAsUnset) {
  Variables empty;
  for (const FieldCase& field : Fields()) {
    for (const std::string& variable : field.variables) empty[variable] = "";
  }
  EXPECT_TRUE(Read(empty).sources.empty());
}

TEST(DistConfig, ABarePortIsIgnored) {
  EXPECT_EQ(Read({{"PORT", "1234"}}).root_port, 0);
  EXPECT_EQ(Read({{"PORT", "not even a number"}, {"DMLC_PS_ROOT_PORT", "9091"}}).root_port, 9091);
}

TEST(DistConfig, MissingFieldsNameRoleFieldAndEveryVariableThatWouldSetIt) {
  const std::map<std::string, std::vector<std::string>> required = {
      {"root_host", {"HEDDLE_ROOT_HOST", "DMLC_PS_ROOT_URI"}},
      {"root_port", {"HEDDLE_ROOT_PORT", "DMLC_PS_ROOT_PORT"}},
      {"num_workers", {"HEDDLE_JOB_WORKERS", "DMLC_NUM_WORKER"}},
      {"num_servers", {"HEDDLE_JOB_SERVERS", "DMLC_NUM_SERVER"}}};
  Read(Complete()).Validate();
  for (const char* const role : {"scheduler", "server", "worker"}) {
    for (const auto& [field, variables] : required) {
      Variables lacking = Complete({{"HEDDLE_ROLE", role}});
      lacking.erase(variables[0]);
      EXPECT_THAT(MessageOf([&lacking = lacking] { Read(lacking).Validate(); }),
                  AllOf(HasSubstr(role), HasSubstr(field + " is missing"), HasSubstr(variables[0]),
                        HasSubstr(variables[1])));
    }
  }
}

TEST(DistConfig, ValuesOfTheProgramAreCheckedToo) {
  DistOptions options = Read(Complete());
  options.num_workers = -3;
  EXPECT_THAT(MessageOf([&] { options.Validate(); }),
              AllOf(HasSubstr("num_workers"), HasSubstr("from 1 to 65536"), HasSubstr("'-3'")));
  options = Read(Complete());
  options.heartbeat_interval = std::chrono::milliseconds(0);
  EXPECT_THAT(
      MessageOf([&] { options.Validate(); }),
      AllOf(HasSubstr("heartbeat_interval"), HasSubstr("'0'"), HasSubstr("set by the program")));
  options = Read(Complete());
  options.rank = 4;
  EXPECT_THAT(MessageOf([&] { options.Validate(); }),
              AllOf(HasSubstr("rank 4 (set by the program)"),
                    HasSubstr("num_workers 4 (HEDDLE_JOB_WORKERS)")));
}

TEST(DistConfig, ContradictionsNameBothSidesWithTheirSources) {
  struct Case {
    Variables variables;
    std::string one, other;
  };
  const std::vector<Case> cases = {
      {{{"HEDDLE_RANK", "4"}, {"DMLC_NUM_WORKER", "4"}, {"HEDDLE_JOB_WORKERS", ""}},
       "rank 4 (HEDDLE_RANK)",
       "num_workers 4 (DMLC_NUM_WORKER)"},
      {{{"HEDDLE_RANK", "2"}, {"DMLC_ROLE", "server"}},
       "rank 2 (HEDDLE_RANK)",
       "num_servers 2 (HEDDLE_JOB_SERVERS)"},
      {{{"HEDDLE_RANK", "0"}, {"DMLC_ROLE", "scheduler"}},
       "rank 0 (HEDDLE_RANK)",
       "role scheduler (DMLC_ROLE)"},
      {{{"HEDDLE_LOCAL_RANK", "2"}, {"HEDDLE_LOCAL_SIZE", "2"}},
       "local_rank 2 (HEDDLE_LOCAL_RANK)",
       "local_size 2 (HEDDLE_LOCAL_SIZE)"},
      {{{"HEDDLE_LOCAL_SIZE", "5"}},
       "local_size 5 (HEDDLE_LOCAL_SIZE)",
       "num_workers 4 (HEDDLE_JOB_WORKERS)"},
      {{{"HEDDLE_LISTEN_FD", "5"}}, "listen_fd 5 (HEDDLE_LISTEN_FD)", "role worker (default)"},
      {{{"HEDDLE_FAILURE_FD", "6"}}, "failure_fd 6 (HEDDLE_FAILURE_FD)", "role worker (default)"},
      {{{"HEDDLE_TLS_CERTIFICATE", "a.pem"}, {"HEDDLE_TLS_KEY", "a.key"}},
       "tls_certificate a.pem (HEDDLE_TLS_CERTIFICATE)",
       "tls_authorities (not set)"},
      {{{"HEDDLE_TLS_AUTHORITIES", "ca.pem"}},
       "tls_authorities ca.pem (HEDDLE_TLS_AUTHORITIES)",
       "tls_certificate (not set)"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(ReadError(Complete(c.variables)), AllOf(HasSubstr(c.one), HasSubstr(c.other)));
  }
}

TEST(DistConfig, TheLastRanksAreNoContradiction) {
  Read(Complete({{"HEDDLE_RANK", "3"}})).Validate();
  Read(Complete({{"HEDDLE_RANK", "1"}, {"HEDDLE_ROLE", "server"}})).Validate();
  Read(Complete({{"HEDDLE_LOCAL_RANK", "1"}, {"HEDDLE_LOCAL_SIZE", "2"}})).Validate();
}

TEST(DistConfig, GivenValuesWinOverVariables) {
  const DistOptions options = Read(Complete(), {{"root_port", "7000", "--root-port"}});
  EXPECT_EQ(options.root_port, 7000);
  EXPECT_EQ(options.Describe("root_port"), "root_port 7000 (--root-port)");
  EXPECT_THAT(ReadError({}, {{"root_port", "x", "--root-port"}}),
              AllOf(HasSubstr("given 'x'"), HasSubstr("(--root-port)")));
  EXPECT_THAT(ReadError({}, {{"colour", "red", "--colour"}}), HasSubstr("'colour'"));
}

TEST(DistConfig, ARoleThatIsGivenAndThatVariablesContradictIsAnError) {
  const GivenValue server = {"role", "server", "heddle server"};
  EXPECT_EQ(Read({}, {server}).role, DistRole::kServer);
  EXPECT_EQ(Read({{"DMLC_ROLE", "server"}}, {server}).role, DistRole::kServer);
  EXPECT_THAT(
      ReadError({{"DMLC_ROLE", "worker"}}, {server}),
      AllOf(HasSubstr("role server (heddle server)"), HasSubstr("role worker (DMLC_ROLE)")));
}

// Launchers that know nothing of heddle number their processes.
TEST(DistConfig, AWorkerTakesItsLaunchersIndex) {
  struct Case {
    Variables variables;
    std::string source;
  };
  const std::vector<Case> cases = {
      {{{"OMPI_COMM_WORLD_RANK", "2"},
        {"OMPI_COMM_WORLD_SIZE", "4"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"}},
       "OMPI_COMM_WORLD_RANK"},
      {{{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "3"}},
       "PMI_RANK"},
      {{{"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "1"}},
       "SLURM_PROCID"},
  };
  for (const Case& c : cases) {
    const DistOptions options = Read(Complete(c.variables));
    EXPECT_EQ(options.rank, 2) << c.source;
    EXPECT_EQ(options.local_rank, 1) << c.source;
    EXPECT_EQ(options.Describe("rank"), "rank 2 (" + c.source + ")");
    if (c.source != "SLURM_PROCID") {
      EXPECT_EQ(options.local_size, 3) << c.source;
    }

    Variables named = c.variables;
    named["HEDDLE_RANK"] = "0";
    EXPECT_EQ(Read(Complete(named)).rank, 0) << "HEDDLE_RANK wins over " << c.source;
    for (const char* const role : {"server", "scheduler"}) {
      Variables other = c.variables;
      other["HEDDLE_ROLE"] = role;
      EXPECT_EQ(Read(Complete(other)).rank, std::nullopt) << role << " " << c.source;
    }
    Variables more_processes = c.variables;
    more_processes["HEDDLE_JOB_WORKERS"] = "3";
    EXPECT_EQ(Read(Complete(more_processes)).rank, std::nullopt)
        << "the launcher started others than the workers";
  }
}

TEST(DistConfig, ALaunchersIndexIsNoRankWhereWorkersWereLaunchedOneByOne) {
  EXPECT_EQ(Read(Complete({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}})).rank,
            std::nullopt);
  // A batch script's own environment: all that it starts without srun sees index 0.
  EXPECT_EQ(Read(Complete({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}})).rank, std::nullopt);
  EXPECT_EQ(Read(Complete({{"PMI_RANK", "x"}, {"PMI_SIZE", "4"}})).rank, std::nullopt);
}

class TokenFile {
 public:
  explicit TokenFile(const std::string& content) { std::ofstream(path()) << content; }
  std::string path() const { return folder_ / "token"; }

 private:
  TempFolder folder_;
};

TEST(DistConfig, TheTokenMayComeFromAFileWithoutItsLineEnd) {
  for (const char* const end : {"", "\n", "\r\n", " \n\n"}) {
    const TokenFile file("secret word" + std::string(end));
    const DistOptions options = Read({{"HEDDLE_TOKEN_FILE", file.path()}});
    EXPECT_EQ(options.token, "secret word");
    EXPECT_THAT(options.Describe("token"),
                AllOf(HasSubstr("HEDDLE_TOKEN_FILE"), HasSubstr(file.path())));
  }
}

TEST(DistConfig, TokenFilesThatAreNoneAreErrorsThatNameThem) {
  const TempFolder folder;
  EXPECT_THAT(ReadError({{"HEDDLE_TOKEN_FILE", folder / "none"}}),
              AllOf(HasSubstr("token"), HasSubstr("HEDDLE_TOKEN_FILE"), HasSubstr(folder / "none"),
                    HasSubstr("No such file")));
  EXPECT_THAT(ReadError({{"HEDDLE_TOKEN_FILE", folder / "."}}),
              AllOf(HasSubstr("token"), HasSubstr("HEDDLE_TOKEN_FILE"), HasSubstr("directory")));
  const TokenFile empty("\n");
  EXPECT_THAT(ReadError({{"HEDDLE_TOKEN_FILE", empty.path()}}), HasSubstr("is empty"));
  const TokenFile exact(std::string(4096, 'x')), longer(std::string(4097, 'x'));
  EXPECT_EQ(Read({{"HEDDLE_TOKEN_FILE", exact.path()}}).token.size(), 4096u);
  EXPECT_THAT(ReadError({{"HEDDLE_TOKEN_FILE", longer.path()}}),
              AllOf(HasSubstr("4096"), HasSubstr("longer")));
}

TEST(DistConfig, TwoTokensMustAgree) {
  const TokenFile file("secret");
  EXPECT_EQ(Read({{"HEDDLE_TOKEN", "secret"}, {"HEDDLE_TOKEN_FILE", file.path()}}).token, "secret");
  EXPECT_THAT(
      ReadError({{"HEDDLE_TOKEN", "other"}, {"HEDDLE_TOKEN_FILE", file.path()}}),
      AllOf(HasSubstr("HEDDLE_TOKEN and"), HasSubstr("HEDDLE_TOKEN_FILE"), HasSubstr("differ")));
}

TEST(DistConfig, NoMessageShowsTheToken) {
  DistOptions options = Read({{"HEDDLE_TOKEN", "hush"}});
  EXPECT_EQ(options.Describe("token"), "token (HEDDLE_TOKEN)");
  EXPECT_EQ(DistOptions().Describe("token"), "token (not set)");
  const TokenFile file("whisper");
  EXPECT_THAT(ReadError({{"HEDDLE_TOKEN", "hush"}, {"HEDDLE_TOKEN_FILE", file.path()}}),
              AllOf(Not(HasSubstr("hush")), Not(HasSubstr("whisper"))));
}

TEST(DistConfig, DescribeTellsDefaultsFromWhatTheProgramSet) {
  DistOptions options;
  EXPECT_EQ(options.Describe("dead_after"), "dead_after 3 (default)");
  options.dead_after = 4;
  EXPECT_EQ(options.Describe("dead_after"), "dead_after 4 (set by the program)");
  EXPECT_EQ(options.Describe("root_host"), "root_host (not set)");
  EXPECT_THAT(MessageOf([&] { options.Describe("colour"); }), HasSubstr("'colour'"));
}

TEST(DistConfig, TheEnvironmentOfTheProcessIsRead) {
  setenv("HEDDLE_DEAD_AFTER", "7", 1);
  const DistOptions options = DistOptions::FromEnvironment();
  unsetenv("HEDDLE_DEAD_AFTER");
  EXPECT_EQ(options.dead_after, 7);
  EXPECT_EQ(DistOptions::FromEnvironment().dead_after, 3);
}

// The table in docs/distributed.md: "| `field` | `VARIABLE`, `VARIABLE` | `default` | ... |".
TEST(DistConfig, TheDocumentedTableIsThatOfTheCode) {
  std::vector<std::string> expected;
  for (const Setting& setting : Settings()) {
    std::string row = "| `" + std::string(setting.field) + "` | ";
    for (std::size_t i = 0; i < setting.variables.size(); ++i) {
      row += (i > 0 ? ", `" : "`") + std::string(setting.variables[i]) + "`";
    }
    row += setting.default_text.empty() ? " | |" : " | `" + setting.default_text + "` |";
    expected.push_back(row);
  }
  std::ifstream page(HEDDLE_DISTRIBUTED_PAGE);
  std::vector<std::string> found;
  for (std::string line; std::getline(page, line);) {
    for (const std::string& row : expected) {
      if (line.rfind(row, 0) == 0) found.push_back(row);
    }
  }
  EXPECT_EQ(found, expected);
}

}  // namespace
}  // namespace heddle::kvstore::dist
