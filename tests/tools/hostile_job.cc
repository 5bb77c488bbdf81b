#include "tests/tools/hostile_job.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>
#include <utility>

#include "kvstore/dist/protocol/wire.h"
#include "tests/kvstore/support.h"
#include "tests/tools/job_processes.h"
#include "tests/tools/job_roles.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {

namespace dist_test = kvstore::dist_test;
using Process = JobProcesses::Process;
using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)

namespace {

constexpr std::chrono::seconds kJobEnds{600};
constexpr long kMemoryKiB = 64 << 10;
constexpr std::size_t kLogBytesMax = 256 << 10;
constexpr std::size_t kHeldMax = 200;  // more than there is room for

}  // namespace

SocketAttacker::SocketAttacker(std::string address, std::uint64_t seed)
    : address_(std::move(address)), random_(seed) {}

void SocketAttacker::Run(long connections) {
  for (long i = 0; i < connections; ++i) {
    auto socket =
        std::make_unique<dist_test::PlainSocket>(address_, 2 + static_cast<int>(Random(8)));
    socket->EndWithReset();
    Attack(std::move(socket));
    if (held_.empty()) continue;
    const auto& [slow, said] = held_[Random(held_.size())];
    slow->Say(said);
    if (held_.size() > kHeldMax) held_.pop_front();
  }
}

std::string SocketAttacker::Noise(std::size_t bytes) {
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(random_());
  return text;
}

void SocketAttacker::Hold(Socket socket, std::string said) {
  held_.emplace_back(std::move(socket), std::move(said));
}

void SocketAttacker::Heard(const std::string& answer) {
  if (Has(Kind::kWelcome, answer)) got_in_ = true;
}

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

void ExpectNoHarm(const std::vector<std::string>& environment, const MakeAttacker& make,
                  long connections) {
  const std::uint64_t seed = kvstore_test::TestSeed();
  std::mt19937_64 random(seed);
  const char* const given = std::getenv("HEDDLE_HOSTILE_CONNECTIONS");
  if (given != nullptr) connections = std::atol(given);
  const TempFolder folder;
  JobProcesses job({.num_workers = 2,
                    .num_servers = 2,
                    .program = {FAULT_PROGRAM, "dist_sync", folder / "end"},
                    .environment = environment},
                   random);
  ASSERT_TRUE(job.WaitForOutput(job.Find("worker 0"), "settled", Clock::now() + kJobEnds))
      << job.Describe();
  const std::vector<std::string> roles = {"scheduler", "server 0", "server 1"};
  std::vector<std::unique_ptr<Attacker>> attackers;
  for (const std::string& role : roles) {
    attackers.push_back(make(AddressOf(job, role), JobIdOf(job), seed + attackers.size()));
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
  job.WaitUntil(Clock::now() + kJobEnds, [&] {
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
  EXPECT_TRUE(job.WaitForEnd(Clock::now() + kJobEnds));
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

}  // namespace heddle::tools
