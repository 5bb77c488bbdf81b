// The `heddle` program, run as a user runs it.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/build_info.h"
#include "tests/tools/child_process.h"
#include "tools/testing/temp_folder.h"
#include "tools/testing/test_certificates.h"

namespace heddle::tools {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kHeddle = HEDDLE_COMMAND;

json ReadJson(const std::string& path) {
  std::ifstream file(path);
  return json::parse(file);
}

TEST(Command, VersionIsThatOfTheBuild) {
  const ProgramResult result = RunProgram({kHeddle, "--version"});
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.output, "heddle " + std::string(kVersion) + "\n");
}

TEST(Command, NeedsASubcommandThatItKnows) {
  EXPECT_EQ(RunProgram({kHeddle}).status, 1);
  const ProgramResult unknown = RunProgram({kHeddle, "weave", "--fast"});
  EXPECT_EQ(unknown.status, 1);
  EXPECT_THAT(unknown.output, HasSubstr("unknown command 'weave': expected one of bench, doctor"));
  const ProgramResult help = RunProgram({kHeddle, "--help"});
  EXPECT_EQ(help.status, 0);
  for (const char* command : {"bench", "doctor", "launch", "run", "scheduler", "server", "status",
                              "trace", "wire-dump"}) {
    EXPECT_THAT(help.output, HasSubstr(command));
  }
}

TEST(Command, NamesWhatItDoesNotKnowBeforeWhatItLacks) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"launch", "--bogus"},
                                                    {"launch", "--bogus", "--", "train"},
                                                    {"launch", "-n", "2", "--bogus", "--", "train"},
                                                    {"trace", "--bogus"},
                                                    {"trace", "some.trace", "--bogus"}}) {
    std::vector<std::string> command = {kHeddle};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const ProgramResult result = RunProgram(command);
    EXPECT_EQ(result.status, 1);
    EXPECT_EQ(result.output,
              fmt::format("heddle: unexpected '--bogus': `heddle {} --help` lists what it takes\n",
                          arguments[0]));
  }
  const ProgramResult lacking = RunProgram({kHeddle, "launch", "-n", "2"});
  EXPECT_EQ(lacking.status, 1);
  EXPECT_THAT(lacking.output, StartsWith("program is required"));
}

TEST(Command, OutputThatIsLostIsAnError) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--version"},
        {"launch", "--launcher", "kubernetes", "--image", "i", "-n", "1", "--", "t"}}) {
    for (const std::string to : {"> /dev/full", ">&-"}) {
      std::vector<std::string> command = {"/bin/sh", "-c", "exec \"$@\" " + to, "sh", kHeddle};
      command.insert(command.end(), arguments.begin(), arguments.end());
      const ProgramResult result = RunProgram(command);
      EXPECT_EQ(result.status, 1) << arguments[0] << to;
      EXPECT_THAT(result.output, StartsWith("heddle: ")) << arguments[0] << to;
    }
  }
  // Used to be ended by an exception that nobody caught.
  EXPECT_EQ(
      RunProgram({"/bin/sh", "-c", "exec \"$@\" > /dev/full 2>&1", "sh", kHeddle, "weave"}).status,
      1);
}

TEST(TraceCommand, DoesNotWriteOverWhatItReads) {
  const TempFolder folder;
  const std::string file = folder / "run.trace", other = folder / "link.json";
  {
    RunningProgram program({TRACED_PROGRAM, file});
    ASSERT_EQ(program.ReadLine(), "ready");
  }
  const auto bytes = std::filesystem::file_size(file);
  std::filesystem::create_hard_link(file, other);
  for (const std::string& output : {file, other}) {
    const ProgramResult result = RunProgram({kHeddle, "trace", file, "-o", output});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr(output + ": expected another file to write"));
    EXPECT_EQ(std::filesystem::file_size(file), bytes);
  }
}

TEST(TraceCommand, SaysThatTheDiskHadNoRoom) {
  const TempFolder folder;
  const std::string file = folder / "run.trace";
  // As a full disk, a limit of what a file may have: 32 KiB, too little for a thread's records.
  const ProgramResult bench =
      RunProgram({"/bin/sh", "-c",
                  "ulimit -f 64; exec " + std::string(kHeddle) +
                      " bench --store local --devices 1 --sizes 4096 --time-ms 20"},
                 {"HEDDLE_TRACE=" + file});
  ASSERT_EQ(bench.status, 0) << bench.output;
  EXPECT_THAT(RunProgram({kHeddle, "trace", file, "-o", folder / "run.json"}).output,
              HasSubstr("records found no room on the disk"));
}

// The main promise of traces: they are there when the process was killed.
TEST(TraceCommand, ConvertsTheFileOfAKilledProcess) {
  const TempFolder folder;
  const std::string file = folder / "run.trace", output = folder / "run.json";
  RunningProgram program({TRACED_PROGRAM, file});
  ASSERT_EQ(program.ReadLine(), "ready");
  program.Kill();

  const ProgramResult result = RunProgram({kHeddle, "trace", file, "-o", output});
  ASSERT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("killed"));
  const json trace = ReadJson(output);
  EXPECT_EQ(trace["otherData"]["complete"], false);
  std::map<std::string, int> slices, pending;
  int arrows = 0, waits = 0;
  for (const json& event : trace["traceEvents"]) {
    const std::string type = event["ph"], category = event.value("cat", "");
    if (type == "X" && category == "op") ++slices[event["name"]];
    if (type == "X" && category == "wait") waits += event["name"] == "WaitForVar counter";
    if (type == "b" && category == "pending") ++pending[event["name"]];
    if (type == "s") ++arrows;
  }
  EXPECT_EQ(slices["count"], 1000);
  EXPECT_EQ(arrows, 999);
  EXPECT_EQ(waits, 1);
  EXPECT_EQ(pending, (std::map<std::string, int>{{"stuck", 1}, {"behind", 1}}));
}

class TraceCommandFiles : public ::testing::Test {
 protected:
  TraceCommandFiles() {
    RunningProgram program({TRACED_PROGRAM, file_});
    EXPECT_EQ(program.ReadLine(), "ready");
  }
  // Of a shell's words, in which heddle is $0 and the file $1.
  ProgramResult Shell(const std::string& words) const {
    return RunProgram({"/bin/sh", "-c", words, kHeddle, file_});
  }

  const TempFolder folder_;
  const std::string file_ = folder_ / "run.trace";
};

TEST_F(TraceCommandFiles, GoThroughPipes) {
  const std::string output = folder_ / "run.json";
  ASSERT_EQ(RunProgram({kHeddle, "trace", file_, "-o", output}).status, 0);
  const json expected = ReadJson(output);
  for (const std::string words : {"\"$0\" trace \"$1\" -o -", "cat \"$1\" | \"$0\" trace - -o -",
                                  "cat \"$1\" | \"$0\" trace /dev/stdin -o - | cat"}) {
    const ProgramResult result =
        Shell("cd '" + folder_.path() + "' && (" + words + ") 2> said > out");
    EXPECT_EQ(result.status, 0) << words << result.output;
    EXPECT_EQ(ReadJson(folder_ / "out"), expected) << words;
    std::ifstream said(folder_ / "said");
    EXPECT_THAT(std::string((std::istreambuf_iterator<char>(said)), {}),
                StartsWith("stdout: 1002 ops"));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "-"));
  }
  EXPECT_EQ(Shell("\"$0\" trace \"$1\" -o - > /dev/full").status, 1);
}

TEST_F(TraceCommandFiles, GivenTwiceCountOnce) {
  std::filesystem::copy(file_, folder_ / "copy.trace");
  std::filesystem::create_symlink(file_, folder_ / "link.trace");
  for (const std::string other : {"run.trace", "copy.trace", "link.trace"}) {
    const ProgramResult result =
        RunProgram({kHeddle, "trace", file_, folder_ / other, "-o", folder_ / "run.json"});
    EXPECT_EQ(result.status, 1);
    EXPECT_EQ(result.output, "heddle: expected each trace once, got the same one as " + file_ +
                                 " and as " + (folder_ / other) + "\n");
    EXPECT_FALSE(std::filesystem::exists(folder_ / "run.json"));
  }
}

TEST_F(TraceCommandFiles, CutAtAChunksEndAreNotTakenForWhole) {
  constexpr std::uintmax_t kChunk = 64 << 10;
  const auto size = std::filesystem::file_size(file_);
  ASSERT_GT(size, kChunk);
  std::filesystem::resize_file(file_, size - kChunk);
  const ProgramResult result = RunProgram({kHeddle, "trace", file_, "-o", folder_ / "run.json"});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.output, HasSubstr("cut: 65536 bytes at the end of the file are missing"));
}

TEST_F(TraceCommandFiles, MayNotGrowBeyondALimitWithoutAnError) {
  const ProgramResult result =
      Shell("ulimit -f 1; exec \"$0\" trace \"$1\" -o '" + (folder_ / "run.json") + "'");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("run.json: could not be written completely"));
}

TEST(TraceCommand, BadFilesAreErrorsThatNameThem) {
  const TempFolder folder;
  const std::string output = folder / "out.json";
  const ProgramResult missing = RunProgram({kHeddle, "trace", folder / "missing", "-o", output});
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.output, StartsWith("heddle: "));
  EXPECT_THAT(missing.output, HasSubstr(folder / "missing"));
  const ProgramResult other = RunProgram({kHeddle, "trace", kHeddle, "-o", output});
  EXPECT_EQ(other.status, 1);
  EXPECT_THAT(other.output, HasSubstr("another format"));
  EXPECT_FALSE(std::filesystem::exists(output));
}

TEST(TraceCommand, OutputThatCannotBeWrittenIsAnError) {
  const TempFolder folder;
  const std::string file = folder / "run.trace";
  {
    RunningProgram program({TRACED_PROGRAM, file});
    ASSERT_EQ(program.ReadLine(), "ready");
  }
  const ProgramResult result = RunProgram({kHeddle, "trace", file, "-o", folder / "no/out.json"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr(folder / "no/out.json"));
}

TEST(Command, SecondsThatAreNoNumberAreRefused) {
  for (const std::vector<std::string>& options :
       {std::vector<std::string>{"launch", "-n", "1", "-s", "1", "--linger", "nan", "--", "true"},
        {"launch", "-n", "1", "-s", "1", "--grace", "nan", "--", "true"},
        {"status", "127.0.0.1:1", "--timeout", "nan"}}) {
    std::vector<std::string> command = {kHeddle};
    command.insert(command.end(), options.begin(), options.end());
    const ProgramResult result = RunProgram(command);
    EXPECT_NE(result.status, 0);
    EXPECT_THAT(result.output, HasSubstr("Value nan not in range"));
  }
}

TEST(DoctorCommand, SaysWhatItFound) {
  const ProgramResult result = RunProgram({kHeddle, "doctor"}, {"HEDDLE_NUM_WORKERS=3"});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr(std::string(kVersion)));
  for (const BuildPart& part : kOptionalParts) {
    EXPECT_THAT(result.output, HasSubstr(std::string(part.name)));
    if (part.name == "CUDA" && part.version == "off") {
      EXPECT_THAT(result.output, HasSubstr("WITH_CUDA"));  // why there are no GPUs
    }
  }
  EXPECT_THAT(result.output, HasSubstr("HEDDLE_NUM_WORKERS=3"));
  EXPECT_THAT(result.output, HasSubstr("No problems found."));
}

TEST(DoctorCommand, SettingsThatAreWrongAreProblems) {
  const ProgramResult value = RunProgram({kHeddle, "doctor"}, {"HEDDLE_ENGINE=steam"});
  EXPECT_EQ(value.status, 1);
  EXPECT_THAT(value.output, HasSubstr("PROBLEM"));
  EXPECT_THAT(value.output, HasSubstr("steam"));
  for (const char* const setting :
       {"HEDDLE_CPU_ALLOCATOR=steam", "HEDDLE_GPU_ALLOCATOR=steam", "HEDDLE_PINNED_MEMORY_MAX=-1",
        "HEDDLE_NCCL_DEADLINE_MS=steam", "HEDDLE_NCCL_RANK=1", "HEDDLE_TRACE=/nowhere/run.trace",
        "HEDDLE_TRACE=/dev/full", "HEDDLE_GPU_SUMS=steam",
        "HEDDLE_WIRE_CAPTURE=/nowhere/job.wire"}) {
    const ProgramResult result = RunProgram({kHeddle, "doctor"}, {setting});
    EXPECT_EQ(result.status, 1) << setting;
    EXPECT_THAT(result.output, HasSubstr("PROBLEM")) << setting;
    EXPECT_THAT(result.output, HasSubstr("found 1 problem(s)")) << setting;
  }
  const std::vector<std::string> many = {"HEDDLE_ENGINE=steam",       "HEDDLE_NUM_WORKERS=many",
                                         "HEDDLE_AGEING=often",       "HEDDLE_CPU_ALLOCATOR=steam",
                                         "HEDDLE_CPU_MEMORY_MAX=big", "HEDDLE_LOG_LEVEL=loud"};
  const ProgramResult all = RunProgram({kHeddle, "doctor"}, many);
  EXPECT_THAT(all.output, HasSubstr("found 6 problem(s)"));
  for (const std::string& setting : many) {
    const std::string problem = "environment variable " + setting.substr(0, setting.find('='));
    EXPECT_THAT(all.output, HasSubstr("PROBLEM               " + problem));
  }
  const ProgramResult right =
      RunProgram({kHeddle, "doctor"}, {"HEDDLE_GPU_SUMS=tree", "HEDDLE_WIRE_CAPTURE=capture.wire",
                                       "HEDDLE_LIBRARY=libheddle.so",  // of examples/perl
                                       "HEDDLE_LOG_LEVEL=debug"});
  EXPECT_EQ(right.status, 0) << right.output;
  const ProgramResult name = RunProgram({kHeddle, "doctor"}, {"HEDDLE_NUM_WORKER=3"});
  EXPECT_EQ(name.status, 1);
  EXPECT_THAT(name.output, HasSubstr("no such variable"));
}

TEST(DoctorCommand, LooksForTheFolderThatACaptureOfThisProcessGoesTo) {
  const TempFolder folder;
  const std::vector<std::string> setting = {"HEDDLE_WIRE_CAPTURE=" + (folder / "%r/job.wire")};
  const ProgramResult missing = RunProgram({kHeddle, "doctor"}, setting);
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.output, HasSubstr("no file can be made in " + (folder / "process") + ":"));
  std::filesystem::create_directory(folder / "process");
  const ProgramResult there = RunProgram({kHeddle, "doctor"}, setting);
  EXPECT_EQ(there.status, 0) << there.output;
}

TEST(DoctorCommand, ChecksTheSettingsOfAJobAndKeepsItsSecret) {
  const ProgramResult good =
      RunProgram({kHeddle, "doctor"}, {"DMLC_NUM_WORKER=5", "HEDDLE_TOKEN=hush", "HEDDLE_RANK=2"});
  EXPECT_EQ(good.status, 0) << good.output;
  EXPECT_THAT(good.output, HasSubstr("num_workers 5 (DMLC_NUM_WORKER)"));
  EXPECT_THAT(good.output, Not(HasSubstr("hush")));
  const ProgramResult bad = RunProgram({kHeddle, "doctor"}, {"DMLC_NUM_WORKER=2", "HEDDLE_RANK=2"});
  EXPECT_EQ(bad.status, 1);
  EXPECT_THAT(bad.output, HasSubstr("rank 2 (HEDDLE_RANK)"));
  const ProgramResult part = RunProgram({kHeddle, "doctor"}, {"DMLC_ROLE=worker"});
  EXPECT_EQ(part.status, 1);
  EXPECT_THAT(part.output, HasSubstr("PROBLEM               worker: root_host is missing"));
}

TEST(DoctorCommand, SaysWhereAProcessWouldListenOrWhyItCannot) {
  EXPECT_THAT(RunProgram({kHeddle, "doctor"}, {"HEDDLE_ROOT_HOST=127.0.0.1"}).output,
              HasSubstr("as server at 127.0.0.1"));
  const ProgramResult open = RunProgram(
      {kHeddle, "doctor"}, {"HEDDLE_ROOT_HOST=127.0.0.1", "HEDDLE_BIND_ADDRESS=0.0.0.0"});
  EXPECT_EQ(open.status, 1);
  EXPECT_THAT(open.output, HasSubstr("HEDDLE_TOKEN_FILE"));
}

TEST(DoctorCommand, ATokenFileThatOthersMayReadIsAProblem) {
  const TempFolder folder;
  const std::string file = folder / "token";
  std::ofstream(file) << "hush";
  const auto doctor = [&](unsigned mode) {
    std::filesystem::permissions(file, static_cast<std::filesystem::perms>(mode));
    return RunProgram({kHeddle, "doctor"}, {"HEDDLE_TOKEN_FILE=" + file});
  };
  EXPECT_EQ(doctor(0600).status, 0);
  const ProgramResult result = doctor(0640);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("chmod 600 '" + file + "'"));
  EXPECT_THAT(result.output, HasSubstr("mode 640"));
  EXPECT_THAT(result.output, Not(HasSubstr("hush")));
}

TEST(DoctorCommand, TlsFilesThatCannotBeUsedAreAProblem) {
  TestCertificates& certificates = TestCertificates::Shared();
  const kvstore::dist::TlsOptions good = certificates.right();
  const auto doctor = [](const kvstore::dist::TlsOptions& tls) {
    return RunProgram({kHeddle, "doctor"},
                      {"HEDDLE_TLS_CERTIFICATE=" + tls.certificate, "HEDDLE_TLS_KEY=" + tls.key,
                       "HEDDLE_TLS_AUTHORITIES=" + tls.authorities});
  };
  EXPECT_EQ(doctor(good).status, 0) << doctor(good).output;
  kvstore::dist::TlsOptions other_key = good, no_authorities = good;
  other_key.key = certificates.Make("DNS:localhost").key;
  no_authorities.authorities = "/nowhere";
  const std::pair<kvstore::dist::TlsOptions, std::string> problems[] = {
      {other_key, "tls_key: expected a file with the certificate's key"},
      {no_authorities, "tls_authorities: expected a file"},
      {certificates.Make("DNS:localhost", "ours", -1), "has expired"}};
  for (const auto& [tls, problem] : problems) {
    const ProgramResult result = doctor(tls);
    EXPECT_EQ(result.status, 1) << problem;
    EXPECT_THAT(result.output, HasSubstr("PROBLEM"));
    EXPECT_THAT(result.output, HasSubstr(problem));
  }
}

// What others would say of the certificate, it says before there are others.
TEST(DoctorCommand, ACertificateThatOthersWillNotAcceptIsAProblem) {
  TestCertificates& certificates = TestCertificates::Shared();
  const auto doctor = [](const kvstore::dist::TlsOptions& tls) {
    return RunProgram({kHeddle, "doctor"},
                      {"HEDDLE_TLS_CERTIFICATE=" + tls.certificate, "HEDDLE_TLS_KEY=" + tls.key,
                       "HEDDLE_TLS_AUTHORITIES=" + tls.authorities, "HEDDLE_TLS_NAME=" + tls.name});
  };
  const auto usable_for = [&](const std::string& usage) {
    return certificates.Make("DNS:job -addext extendedKeyUsage=" + usage);
  };
  kvstore::dist::TlsOptions named = usable_for("clientAuth,serverAuth");
  EXPECT_EQ(doctor(named).status, 0) << doctor(named).output;
  named.name = "job";
  EXPECT_EQ(doctor(named).status, 0) << doctor(named).output;
  kvstore::dist::TlsOptions other_name = named;
  other_name.name = "elsewhere";
  certificates.Run("x509 -in " + certificates.Path("ours") + " -signkey " +
                   certificates.Path("ours.key") + " -days -1 -out " +
                   certificates.Path("old_ours"));
  kvstore::dist::TlsOptions old_authority = named;
  old_authority.authorities = certificates.Path("old_ours");
  const std::pair<kvstore::dist::TlsOptions, std::string> problems[] = {
      {certificates.Make("DNS:job", "theirs"), " is not signed by a known authority"},
      {usable_for("serverAuth"), " may not be used by processes that connect (keyUsage, "},
      {usable_for("clientAuth"), " may not be used by processes that listen (keyUsage, "},
      {old_authority, " is signed by one that has expired"},
      {other_name, " is not for 'elsewhere' (HEDDLE_TLS_NAME)"}};
  for (const auto& [tls, problem] : problems) {
    const ProgramResult result = doctor(tls);
    EXPECT_EQ(result.status, 1) << problem;
    EXPECT_THAT(result.output, HasSubstr("PROBLEM: " + tls.certificate + problem));
  }
}

TEST(DoctorCommand, ALimitOfOpenFilesBelowWhatTheJobMayNeedIsAProblem) {
  const auto doctor = [](const std::string& workers) {
    return RunProgram({"/bin/sh", "-c", "ulimit -n 256; exec " + std::string(kHeddle) + " doctor"},
                      {"HEDDLE_JOB_WORKERS=" + workers, "HEDDLE_JOB_SERVERS=1"});
  };
  EXPECT_EQ(doctor("4").status, 0);
  EXPECT_EQ(doctor("25").status, 1);  // each may be one of this host, and cost six
  const ProgramResult result = doctor("1000");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("256 at most"));
  EXPECT_THAT(result.output, HasSubstr("ulimit -n "));
  EXPECT_THAT(result.output, HasSubstr("locked memory"));
}

TEST(DoctorCommand, InAJobItLooksAtTheWayToAllOthersAndAtTheClocks) {
  const ProgramResult result =
      RunProgram({kHeddle, "launch", "-n", "2", "-s", "2", "--", kHeddle, "doctor", "--in-job"});
  EXPECT_EQ(result.status, 0) << result.output;
  for (const char* const worker : {"[worker 0] ", "[worker 1] "}) {
    EXPECT_THAT(result.output, HasSubstr(worker + std::string("No problems found.")));
  }
  EXPECT_THAT(result.output, HasSubstr("all servers, and they all workers"));
  EXPECT_THAT(result.output, HasSubstr(" s between worker "));
}

TEST(BenchCommand, MeasuresWhatWasAskedFor) {
  const TempFolder folder;
  const std::string output = folder / "bench.json";
  const ProgramResult result =
      RunProgram({kHeddle, "bench", "--store", "local,device", "--devices", "1,3", "--sizes",
                  "4KiB,64KiB", "--time-ms", "5", "--json", output});
  ASSERT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("64 KiB"));
  EXPECT_THAT(result.output, HasSubstr("p99: of the push+pull of 100 rounds"));
  const json bench = ReadJson(output);
  EXPECT_EQ(bench["heddle"], kVersion);
  ASSERT_EQ(bench["results"].size(), 8u);
  EXPECT_EQ(bench["results"][0]["store"], "local");
  EXPECT_EQ(bench["results"][7]["store"], "device");
  EXPECT_EQ(bench["results"][7]["devices"], 3);
  EXPECT_EQ(bench["results"][7]["bytes"], 65536);
  for (const json& row : bench["results"]) {
    EXPECT_GE(row["rounds"], 5);
    EXPECT_GT(row["latency_us"], 0);
    EXPECT_GE(row["latency_p99_us"], row["latency_us"]);
    EXPECT_GT(row["bandwidth_gb_s"], 0);
  }
}

TEST(BenchCommand, DrawsCurves) {
  const TempFolder folder;
  if (RunProgram({"gnuplot", "--version"}).status != 0) GTEST_SKIP() << "gnuplot is not installed";
  for (const std::string name : {"bench.png", "bench.svg"}) {
    const ProgramResult result =
        RunProgram({kHeddle, "bench", "--store", "local", "--devices", "1,2", "--sizes",
                    "4096,8192", "--time-ms", "2", "--plot", folder / name});
    EXPECT_EQ(result.status, 0) << result.output;
    std::ifstream file(folder / name, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), {});
    if (name == "bench.png") {
      EXPECT_THAT(bytes, StartsWith("\x89PNG"));
    } else {
      EXPECT_THAT(bytes, HasSubstr("local, 2 devices"));
      EXPECT_THAT(bytes, HasSubstr("</svg>"));
    }
  }
}

TEST(BenchCommand, TheNameOfAPlotIsANameAndNothingElse) {
  const TempFolder folder;
  if (RunProgram({"gnuplot", "--version"}).status != 0) GTEST_SKIP() << "gnuplot is not installed";
  const std::string file = folder / "a `touch ran` $(touch ran) \"b\" 'c' \\d.svg";
  const ProgramResult result = RunProgram({kHeddle, "bench", "--store", "local", "--devices", "1",
                                           "--sizes", "4096", "--time-ms", "2", "--plot", file});
  EXPECT_EQ(result.status, 0) << result.output;
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    files.push_back(entry.path());
  }
  EXPECT_EQ(files, std::vector<std::string>{file});
  EXPECT_FALSE(std::filesystem::exists("ran"));
  EXPECT_THAT(RunProgram({kHeddle, "bench", "--plot", folder / "a\nb.svg"}).output,
              HasSubstr("expected a name of one line"));
}

// As gnuplot ends where the disk is full.
TEST(BenchCommand, APlotThatIsNotWholeIsAnError) {
  const TempFolder folder;
  std::ofstream(folder / "gnuplot") << "#!/bin/sh\ncat > /dev/null\n";
  std::filesystem::permissions(folder / "gnuplot", std::filesystem::perms::owner_all);
  const ProgramResult result =
      RunProgram({kHeddle, "bench", "--store", "local", "--devices", "1", "--sizes", "4096",
                  "--time-ms", "2", "--plot", folder / "empty.svg"},
                 {"PATH=" + folder.path() + ":" + std::getenv("PATH")});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("could not be written completely"));
}

TEST(BenchCommand, OnePointIsDrawnWithoutWarnings) {
  const TempFolder folder;
  if (RunProgram({"gnuplot", "--version"}).status != 0) GTEST_SKIP() << "gnuplot is not installed";
  const ProgramResult result =
      RunProgram({kHeddle, "bench", "--store", "local", "--devices", "1", "--sizes", "4096",
                  "--time-ms", "2", "--plot", folder / "bench.svg"});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.output, Not(HasSubstr("arning")));
}

TEST(BenchCommand, MissingGnuplotIsNamedBeforeAnythingIsMeasured) {
  const TempFolder folder;
  const ProgramResult result =
      RunProgram({kHeddle, "bench", "--plot", folder / "bench.png"}, {"PATH=/nowhere"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("gnuplot-nox"));
  EXPECT_THAT(result.output, Not(HasSubstr("local")));
}

TEST(BenchCommand, FilesThatCannotBeWrittenAreNamedBeforeAnythingIsMeasured) {
  for (const std::string option : {"--json", "--plot"}) {
    if (option == "--plot" && RunProgram({"gnuplot", "--version"}).status != 0) continue;
    const ProgramResult result = RunProgram({kHeddle, "bench", "--store", "local", "--sizes", "4",
                                             "--time-ms", "1", option, "/nowhere/bench.png"});
    EXPECT_EQ(result.status, 1);
    EXPECT_EQ(result.output,
              "heddle: /nowhere/bench.png: cannot be opened for writing: No such file or "
              "directory\n");
  }
  const TempFolder folder;
  const std::string output = folder / "bench.json";
  EXPECT_EQ(RunProgram({kHeddle, "bench", "--sizes", "7", "--json", output}).status, 1);
  EXPECT_FALSE(std::filesystem::exists(output));
}

TEST(BenchCommand, BadOptionsAreErrorsThatSayWhatWasExpected) {
  const ProgramResult plot = RunProgram({kHeddle, "bench", "--plot", "bench.pdf"});
  EXPECT_EQ(plot.status, 1);
  EXPECT_THAT(plot.output, HasSubstr(".png or .svg"));
  // The plot took the place of the results.
  const ProgramResult same =
      RunProgram({kHeddle, "bench", "--json", "bench.svg", "--plot", "bench.svg"});
  EXPECT_EQ(same.status, 1);
  EXPECT_THAT(same.output, HasSubstr("expected another file"));
  const ProgramResult size = RunProgram({kHeddle, "bench", "--sizes", "7"});
  EXPECT_EQ(size.status, 1);
  EXPECT_EQ(size.output, "heddle: array size: expected a positive multiple of 4 bytes, got 7\n");
  // Used to become "-1".
  const ProgramResult large = RunProgram({kHeddle, "bench", "--sizes", "99999999999999999999"});
  EXPECT_NE(large.status, 0);
  EXPECT_THAT(large.output, HasSubstr("99999999999999999999 not in range"));
  const ProgramResult store = RunProgram({kHeddle, "bench", "--store", "cloud"});
  EXPECT_EQ(store.status, 1);
  EXPECT_THAT(store.output, HasSubstr("cloud"));
  EXPECT_NE(RunProgram({kHeddle, "bench", "--devices", "0"}).status, 0);
  // Used to mean what HEDDLE_NUM_WORKERS says.
  const ProgramResult workers = RunProgram({kHeddle, "bench", "--workers", "0"});
  EXPECT_EQ(workers.status, 1);
  EXPECT_THAT(workers.output, HasSubstr("--workers: Value 0 not in range"));
  // Of several workers each would wait for rounds that the others do not make.
  for (const std::string type : {"dist_sync", "Dist_Sync"}) {
    const ProgramResult job = RunProgram({kHeddle, "bench", "--store", type});
    EXPECT_EQ(job.status, 1);
    EXPECT_THAT(job.output, HasSubstr("expected a type for one process"));
  }
}

TEST(WireDumpCommand, BytesToShowAreAWholeNumber) {
  for (const std::string payload : {"-1", "1k", "18446744073709551616"}) {
    const ProgramResult result =
        RunProgram({kHeddle, "wire-dump", "--payload", payload, "job.wire"});
    EXPECT_NE(result.status, 0);
    EXPECT_THAT(result.output, AllOf(HasSubstr("--payload"), HasSubstr(payload)));
    EXPECT_LT(result.output.size(), 200U) << result.output;
  }
}

}  // namespace
}  // namespace heddle::tools
