// Goal: thousands of connections that mean harm, to each port of a job that runs, change nothing:
// its results are right, none of them gets in, its roles' memory stays within 64 MiB of where it
// was, and their logs stay short. Method: threads of plain sockets from eight loopback addresses,
// closed with a reset so that ports do not run out. HEDDLE_HOSTILE_CONNECTIONS says how many a
// role.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/dist/plain_socket.h"
#include "tests/kvstore/support.h"
#include "tests/tools/job_processes.h"
#include "tests/tools/job_roles.h"
#include "tests/tools/temp_folder.h"

namespace heddle::tools {
namespace {

using kvstore::dist_test::HeaderOf;
using kvstore::dist_test::PlainSocket;
using kvstore::dist_test::Preamble;
using Process = JobProcesses::Process;
using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)

constexpr std::chrono::seconds kForever{600};
constexpr long kMemoryKiB = 64 << 10;
constexpr std::size_t kLogBytesMax = 256 << 10;
constexpr std::size_t kHeldMax = 200;  // slow writers at a time, more than there is room for

// A stream of whole messages behind a preamble, as far as it has come, has one of this kind.
bool Has(Kind kind, std::string_view stream) {
  stream.remove_prefix(std::min(stream.size(), kPreambleBytes));
  while (stream.size() >= kHeaderBytes) {
    Message message;
    std::uint32_t meta_bytes = 0;
    std::uint64_t payload_bytes = 0;
    const auto header = std::as_bytes(std::span(stream)).first<kHeaderBytes>();
    if (!DecodeHeader(header, {}, &message, &meta_bytes, &payload_bytes).empty()) return false;
    if (message.kind == kind) return true;
    stream.remove_prefix(std::min<std::size_t>(stream.size(), kHeaderBytes + meta_bytes));
  }
  return false;
}

// All that a process of the job said in a handshake that was right.
std::string RecordHandshake(const std::string& address, const std::string& job_id) {
  Handshake handshake = Handshake::Connecting(
      {.node = {Role::kWorker, -1}, .incarnation = 99, .job_id = job_id, .token = "secret"},
      Link::kUrgent);
  PlainSocket socket(address);
  std::string said = handshake.Start();
  std::string all_heard;
  socket.Say(said);
  while (handshake.wanted() > 0) {
    const std::string heard = socket.Hear(handshake.wanted());
    if (heard.empty()) break;
    all_heard += heard;
    const std::string answer = handshake.Feed(std::as_bytes(std::span(heard)));
    socket.Say(answer);
    said += answer;
  }
  EXPECT_EQ(handshake.state(), Handshake::State::kDone) << handshake.why();
  EXPECT_TRUE(Has(Kind::kWelcome, all_heard));
  return said;
}

// One thread's worth of them against one address.
class Attacker {
 public:
  Attacker(std::string address, const std::string& job_id, std::uint64_t seed)
      : address_(std::move(address)), recorded_(RecordHandshake(address_, job_id)), random_(seed) {
    Message push;
    push.kind = Kind::kPush;
    push_ = HeaderOf(push);
    Message hello;
    hello.kind = Kind::kHello;
    huge_ = Preamble() + HeaderOf(hello);
  }

  void Run(long connections) {
    for (long i = 0; i < connections; ++i) {
      auto socket = std::make_unique<PlainSocket>(address_, 2 + static_cast<int>(random_() % 8));
      socket->EndWithReset();
      switch (random_() % 6) {
        case 0:
          socket->Say(Noise(1 + random_() % 2000));
          break;
        case 1:  // half a handshake, or less
          socket->Say(recorded_.substr(0, random_() % recorded_.size()));
          break;
        case 2:
          socket->Say(HugeLength());
          break;
        case 3:  // at once
          ListenFor(*socket, recorded_ + push_);
          break;
        case 4:  // step by step
          socket->Say(recorded_.substr(0, recorded_.size() - kProofBytes));
          ListenFor(*socket, recorded_.substr(recorded_.size() - kProofBytes) + push_);
          break;
        default:
          held_.push_back(std::move(socket));
      }
      SayABit();
    }
  }
  bool got_in() const { return got_in_; }

 private:
  static constexpr std::size_t kProofBytes = kHeaderBytes + 32;

  std::string Noise(std::size_t bytes) {
    std::string text(bytes, '\0');
    for (char& c : text) c = static_cast<char>(random_());
    return text;
  }
  std::string HugeLength() {
    std::string text = huge_;
    const bool of_meta = random_() % 2 == 0;  // docs/wire.md: 4 bytes at 4, or 8 bytes at 8
    text[kPreambleBytes + (of_meta ? 7 : 15)] = static_cast<char>(0x7f);
    return text + Noise(100);
  }
  // Slow writers: each says a byte now and then.
  void SayABit() {
    if (held_.empty()) return;
    held_[random_() % held_.size()]->Say(recorded_.substr(0, 1));
    if (held_.size() > kHeldMax) held_.pop_front();
  }
  // The answer to `said`, which follows the first words of the other side.
  void ListenFor(PlainSocket& socket, const std::string& said) {
    const bool has_begun = said.size() < recorded_.size();
    std::string heard = has_begun ? socket.Hear(kPreambleBytes) : std::string();
    socket.Say(said);
    heard += socket.HearAll();
    if (Has(Kind::kWelcome, heard)) got_in_ = true;
  }

  const std::string address_;
  const std::string recorded_;
  std::string push_, huge_;
  std::mt19937_64 random_;
  std::deque<std::unique_ptr<PlainSocket>> held_;
  bool got_in_ = false;
};

TEST(JobHostile, ManyConnectionsChangeNothing) {
  const std::uint64_t seed = kvstore_test::TestSeed();
  std::mt19937_64 random(seed);
  const char* const given = std::getenv("HEDDLE_HOSTILE_CONNECTIONS");
  const long connections = given == nullptr ? 2000 : std::atol(given);
  const TempFolder folder;
  JobProcesses job(
      {.num_workers = 2, .num_servers = 2, .program = {FAULT_PROGRAM, "dist_sync", folder / "end"}},
      random);
  ASSERT_TRUE(job.WaitForOutput(job.Find("worker 0"), "joined", Clock::now() + kForever))
      << job.Describe();
  const std::vector<std::string> roles = {"scheduler", "server 0", "server 1"};
  std::vector<std::unique_ptr<Attacker>> attackers;
  for (const std::string& role : roles) {
    attackers.push_back(
        std::make_unique<Attacker>(AddressOf(job, role), JobIdOf(job), seed + attackers.size()));
  }
  std::vector<long> before;
  for (const Process& process : job.processes()) before.push_back(process.ResidentKiB());
  std::atomic<int> running = static_cast<int>(attackers.size());
  std::vector<std::thread> threads;
  for (const auto& attacker : attackers) {
    threads.emplace_back([&running, &attacker = *attacker, connections] {
      attacker.Run(connections);
      --running;
    });
  }
  std::vector<long> most = before;
  const auto begin = Clock::now();
  job.WaitUntil(Clock::now() + kForever, [&] {
    for (std::size_t i = 0; i < most.size(); ++i) {
      most[i] = std::max(most[i], job.processes()[i].ResidentKiB());
    }
    return running == 0;
  });
  for (std::thread& thread : threads) thread.join();
  std::printf("%ld connections a role in %.1f s\n", connections,
              std::chrono::duration<double>(Clock::now() - begin).count());
  for (const auto& attacker : attackers) EXPECT_FALSE(attacker->got_in());
  attackers.clear();
  std::ofstream(folder / "end") << "end\n";
  EXPECT_TRUE(job.WaitForEnd(Clock::now() + kForever));
  for (std::size_t i = 0; i < most.size(); ++i) {
    const Process& process = job.processes()[i];
    std::printf("%s: %ld KiB before, at most %ld, %zu bytes of log\n", process.name.c_str(),
                before[i], most[i], process.Output().size());
    EXPECT_EQ(process.status, 0) << process.name;
    EXPECT_LT(most[i], before[i] + kMemoryKiB) << process.name;
    EXPECT_LT(process.Output().size(), kLogBytesMax) << process.name;
  }
  if (::testing::Test::HasFailure()) ADD_FAILURE() << job.Describe().substr(0, 20'000);
}

}  // namespace
}  // namespace heddle::tools
