// A job that runs while parties that mean harm connect to its ports.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/transport/tcp/handshake.h"
#include "tests/kvstore/dist/plain_socket.h"

namespace heddle::tools {

// One thread's worth of them.
class Attacker {
 public:
  virtual ~Attacker() = default;
  virtual void Run(long connections) = 0;
  virtual bool got_in() const = 0;
};

// Connects from eight loopback addresses, and closes with a reset so that ports do not run out.
class SocketAttacker : public Attacker {
 public:
  SocketAttacker(std::string address, std::uint64_t seed);
  void Run(long connections) override;
  bool got_in() const override { return got_in_; }

 protected:
  using Socket = std::unique_ptr<kvstore::dist_test::PlainSocket>;

  virtual void Attack(Socket socket) = 0;

  std::uint64_t Random(std::uint64_t below) { return random_() % below; }
  std::string Noise(std::size_t bytes);
  // A slow writer, which says this now and then.
  void Hold(Socket socket, std::string said);
  // What a node has answered: it must not be a welcome.
  void Heard(const std::string& answer);

 private:
  const std::string address_;
  std::mt19937_64 random_;
  std::deque<std::pair<Socket, std::string>> held_;
  bool got_in_ = false;
};

using MakeAttacker = std::function<std::unique_ptr<Attacker>(
    const std::string& address, const std::string& job_id, std::uint64_t seed)>;

// Runs a job with this environment, and an attacker of the scheduler and of each server, which
// makes so many connections, or as many as HEDDLE_HOSTILE_CONNECTIONS says. Expects that the job's
// results are right, that no attacker gets in, that the roles' memory stays within 64 MiB of where
// it was, and that their logs stay short.
void ExpectNoHarm(const std::vector<std::string>& environment, const MakeAttacker& make,
                  long connections);

// A stream of whole messages behind a preamble, as far as it has come, has one of this kind.
bool Has(kvstore::dist::Kind kind, std::string_view stream);

// All that a process of the job says in a handshake that is right, through a socket as PlainSocket.
template <class Socket>
std::string RecordHandshake(Socket& socket, const std::string& job_id) {
  using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)
  Handshake handshake = Handshake::Connecting(
      {.node = {Role::kWorker, -1}, .incarnation = 99, .job_id = job_id, .token = "secret"},
      Link::kUrgent);
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

// The answer to `said`, up to the end. `begun`: the other side's first words come before it.
template <class Socket>
std::string AnswerTo(Socket& socket, const std::string& said, bool begun) {
  std::string heard = begun ? socket.Hear(kvstore::dist::kPreambleBytes) : std::string();
  socket.Say(said);
  return heard + socket.HearAll();
}

}  // namespace heddle::tools
