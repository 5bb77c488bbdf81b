// A job of real processes with TLS in all three roles: it runs, its connections show nothing, and
// nothing secret is in what its processes say or write.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/dist/plain_socket.h"
#include "tests/kvstore/support.h"
#include "tests/tools/job_processes.h"
#include "tests/tools/job_roles.h"
#include "tools/testing/temp_folder.h"
#include "tools/testing/test_certificates.h"

namespace heddle::tools {
namespace {

using kvstore::dist_test::PlainSocket;
using ::testing::HasSubstr;
using Process = JobProcesses::Process;

std::string ContentOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The second line of a key in PEM: 64 letters that nothing else has.
std::string PartOfKey(const std::string& path) {
  const std::string text = ContentOf(path);
  return text.substr(text.find('\n') + 1, 40);
}

TEST(JobTls, AllRolesUseItAndNothingSecretIsSaid) {
  std::mt19937_64 random(kvstore_test::TestSeed());
  TestCertificates certificates;
  const kvstore::dist::TlsOptions tls = certificates.right();
  const TempFolder folder;
  JobProcesses job(
      {.num_workers = 2,
       .num_servers = 2,
       .program = {FAULT_PROGRAM, "dist_sync", folder / "end"},
       .environment = {"HEDDLE_TLS_CERTIFICATE=" + tls.certificate, "HEDDLE_TLS_KEY=" + tls.key,
                       "HEDDLE_TLS_AUTHORITIES=" + tls.authorities, "HEDDLE_SHARED_MEMORY=0",
                       "HEDDLE_TRACE=" + (folder / "job.trace"),
                       "HEDDLE_WIRE_CAPTURE=" + (folder / "job.wire")}},
      random);
  ASSERT_TRUE(job.WaitForOutput(job.Find("worker 1"), "joined", Clock::now() + kForever))
      << job.Describe();
  for (const std::string role : {"scheduler", "server 0", "server 1"}) {
    PlainSocket stranger(AddressOf(job, role));
    kvstore::dist::Handshake handshake =
        kvstore::dist::Handshake::Connecting({.node = {kvstore::dist::Role::kWorker, -1},
                                              .incarnation = 5,
                                              .job_id = JobIdOf(job),
                                              .token = "secret"},
                                             kvstore::dist::Link::kUrgent);
    stranger.Say(handshake.Start());
    EXPECT_THAT(stranger.HearAll(), HasSubstr("expected TLS, given none")) << role;
  }
  for (const Process& process : job.processes()) process.program->Signal(SIGUSR1);
  std::ofstream(folder / "end") << "end\n";
  EXPECT_TRUE(job.WaitForEnd(Clock::now() + kForever));
  std::vector<std::string> written;
  for (const Process& process : job.processes()) {
    EXPECT_EQ(process.status, 0) << process.name << ":\n" << process.Output();
    written.push_back(process.Output());
  }
  for (const auto& file : std::filesystem::directory_iterator(folder / "")) {
    written.push_back(ContentOf(file.path()));
  }
  EXPECT_GT(written.size(), 10u);  // traces and captures are there
  for (const std::string& text : written) {
    EXPECT_EQ(text.find("secret"), std::string::npos);
    EXPECT_EQ(text.find(PartOfKey(tls.key)), std::string::npos);
  }
}

// A process whose certificate is wrong ends, and says why; the job waits for the right one.
TEST(JobTls, AWrongCertificateEndsTheProcessThatShowsIt) {
  std::mt19937_64 random(kvstore_test::TestSeed());
  TestCertificates certificates;
  const kvstore::dist::TlsOptions ours = certificates.right();
  const kvstore::dist::TlsOptions theirs = certificates.Make("DNS:localhost", "theirs");
  JobProcesses job(
      {.num_workers = 1,
       .num_servers = 1,
       .program = {"/usr/bin/env", "HEDDLE_TLS_CERTIFICATE=" + theirs.certificate,
                   "HEDDLE_TLS_KEY=" + theirs.key, FAULT_PROGRAM, "dist_sync", "1"},
       .environment = {"HEDDLE_TLS_CERTIFICATE=" + ours.certificate, "HEDDLE_TLS_KEY=" + ours.key,
                       "HEDDLE_TLS_AUTHORITIES=" + ours.authorities}},
      random);
  Process& worker = job.Find("worker 0");
  EXPECT_TRUE(job.WaitUntil(Clock::now() + kForever, [&] { return worker.status.has_value(); }));
  EXPECT_EQ(worker.status, 1);
  EXPECT_THAT(worker.Output(), HasSubstr("it did not accept this process's certificate"));
  const Process& scheduler = job.Find("scheduler");
  EXPECT_TRUE(job.WaitForOutput(scheduler, "its certificate is not signed by a known authority",
                                Clock::now() + kForever));
  EXPECT_FALSE(scheduler.status.has_value());
}

}  // namespace
}  // namespace heddle::tools
