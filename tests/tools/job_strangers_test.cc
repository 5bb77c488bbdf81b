// Goal: bad bytes on the ports of a running job get an answer where one can be read, a closed
// connection and a line in the log; the job goes on with right results, and the memory of its roles
// stays where it was. Method: a job that works all the while, and plain sockets to its scheduler
// and servers. What the bytes may do to a transport by itself is in tests/kvstore/dist.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
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

namespace heddle::tools {
namespace {

using kvstore::dist_test::HeaderOf;
using kvstore::dist_test::PlainSocket;
using kvstore::dist_test::Preamble;
using ::testing::HasSubstr;
using Process = JobProcesses::Process;
using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)

class JobStrangers : public ::testing::Test {
 protected:
  JobStrangers()
      : job_({.num_workers = 2,
              .num_servers = 2,
              .program = {FAULT_PROGRAM, "dist_sync", folder_ / "end"}},
             random_) {}

  std::string job_id() const { return JobIdOf(job_); }
  // Of a handshake that is right but for what `change` makes wrong.
  std::string Refusal(const std::string& address, const std::function<void(Identity&)>& change) {
    Identity self{
        .node = {Role::kWorker, 9}, .incarnation = 77, .job_id = job_id(), .token = "secret"};
    change(self);
    Handshake handshake = Handshake::Connecting(self, Link::kUrgent);
    PlainSocket socket(address);
    socket.Say(handshake.Start());
    while (handshake.wanted() > 0) {
      const std::string heard = socket.Hear(handshake.wanted());
      if (heard.empty()) break;
      socket.Say(handshake.Feed(std::as_bytes(std::span(heard))));
    }
    socket.HearAll();  // it closes
    return handshake.why();
  }
  // Member of the job as far as anybody can see, it says this.
  void SayAsMember(const std::string& address, const std::string& bytes) {
    PlainSocket socket(address);
    socket.ShakeHands(-1, job_id(), Link::kUrgent, "secret");
    socket.Say(bytes);
    socket.HearAll();
  }
  void EveryKindOnce(const std::string& address);

  const std::uint64_t seed_ = kvstore_test::TestSeed();
  std::mt19937_64 random_{seed_};
  const TempFolder folder_;
  JobProcesses job_;
};

void JobStrangers::EveryKindOnce(const std::string& address) {
  {
    PlainSocket browser(address);
    browser.Say("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_THAT(browser.HearAll(), HasSubstr("heddle"));
  }
  {
    PlainSocket other(address);
    std::string preamble = Preamble();
    ++preamble[4];
    other.Say(preamble);
    EXPECT_THAT(other.HearAll(), HasSubstr("version"));
  }
  EXPECT_THAT(Refusal(address, [](Identity& self) { self.job_id = "other"; }), HasSubstr("job"));
  EXPECT_THAT(Refusal(address, [](Identity& self) { self.token = "hush"; }), HasSubstr("token"));
  EXPECT_THAT(Refusal(address, [](Identity& self) { self.token = ""; }), HasSubstr("token"));
  const auto noise = [this](std::size_t bytes) {
    std::string text(bytes, '\0');
    for (char& c : text) c = static_cast<char>(random_());
    return text;
  };
  {
    PlainSocket stranger(address);
    stranger.Say(noise(1 + random_() % 5000));
    stranger.Say(noise(100));  // enough for whatever it takes the beginning for
    shutdown(stranger.fd(), SHUT_WR);
    stranger.HearAll();
  }
  SayAsMember(address, "\xff" + noise(199));  // no kind of message
  Message push;
  push.kind = Kind::kPush;
  std::string header = HeaderOf(push);
  constexpr std::size_t kPayloadBytesAt = 8;              // docs/wire.md
  header[kPayloadBytesAt + 7] = static_cast<char>(0x80);  // 2^63
  SayAsMember(address, header);
}

TEST_F(JobStrangers, HarmNobody) {
  const auto until = Clock::now() + kForever;
  ASSERT_TRUE(job_.WaitForOutput(job_.Find("worker 0"), "settled", until)) << job_.Describe();
  const std::vector<std::string> roles = {"scheduler", "server 0", "server 1"};
  std::vector<std::string> addresses;
  for (const std::string& role : roles) addresses.push_back(AddressOf(job_, role));
  std::vector<long> before;
  constexpr int kRounds = 60, kWarmUp = 20;
  for (int round = 0; round < kRounds && !HasFailure(); ++round) {
    if (round == kWarmUp) {
      for (const std::string& role : roles) before.push_back(job_.Find(role).ResidentKiB());
    }
    for (const std::string& address : addresses) EveryKindOnce(address);
  }
  for (std::size_t i = 0; i < before.size(); ++i) {
    const Process& process = job_.Find(roles[i]);
    const long after = process.ResidentKiB();
    std::printf("%s: %ld KiB before, %ld after\n", roles[i].c_str(), before[i], after);
    // Eight strangers a round: a leak of so much as 5 KiB each would be seen.
    EXPECT_LT(after, before[i] + 8 * (kRounds - kWarmUp) * 5) << roles[i];
    const std::string log = process.Output();
    for (const char* const words :
         {"version", "wrong job", "token", "unknown kind 255", "9223372036854775808"}) {
      EXPECT_THAT(log, HasSubstr(words)) << roles[i];
    }
  }
  std::ofstream(folder_ / "end") << "end\n";
  EXPECT_TRUE(job_.WaitForEnd(Clock::now() + kForever));
  for (const Process& process : job_.processes()) EXPECT_EQ(process.status, 0) << process.name;
  if (HasFailure()) ADD_FAILURE() << job_.Describe().substr(0, 20'000);
}

}  // namespace
}  // namespace heddle::tools
