// Goal: thousands of connections that mean harm, to each port of a job that runs, change nothing:
// see hostile_job.h.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "tests/kvstore/dist/plain_socket.h"
#include "tests/tools/hostile_job.h"

namespace heddle::tools {
namespace {

using kvstore::dist_test::HeaderOf;
using kvstore::dist_test::PlainSocket;
using kvstore::dist_test::Preamble;
using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)

class PlainAttacker : public SocketAttacker {
 public:
  PlainAttacker(const std::string& address, const std::string& job_id, std::uint64_t seed)
      : SocketAttacker(address, seed), recorded_(Record(address, job_id)) {
    Message push;
    push.kind = Kind::kPush;
    push_ = HeaderOf(push);
    Message hello;
    hello.kind = Kind::kHello;
    huge_ = Preamble() + HeaderOf(hello);
  }

 private:
  static constexpr std::size_t kProofBytes = kHeaderBytes + 32;

  void Attack(Socket socket) override {
    switch (Random(6)) {
      case 0:
        socket->Say(Noise(1 + Random(2000)));
        break;
      case 1:  // half a handshake, or less
        socket->Say(recorded_.substr(0, Random(recorded_.size())));
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
        Hold(std::move(socket), recorded_.substr(0, 1));
    }
  }

  static std::string Record(const std::string& address, const std::string& job_id) {
    PlainSocket socket(address);
    return RecordHandshake(socket, job_id);
  }
  std::string HugeLength() {
    std::string text = huge_;
    const bool of_meta = Random(2) == 0;  // docs/wire.md: 4 bytes at 4, or 8 bytes at 8
    text[kPreambleBytes + (of_meta ? 7 : 15)] = static_cast<char>(0x7f);
    return text + Noise(100);
  }
  void ListenFor(PlainSocket& socket, const std::string& said) {
    const bool begun = said.size() < recorded_.size();
    Heard(AnswerTo(socket, said, begun));
  }

  const std::string recorded_;
  std::string push_, huge_;
};

TEST(JobHostile, ManyConnectionsChangeNothing) {
  ExpectNoHarm(
      {},
      [](const auto& address, const auto& job_id, std::uint64_t seed) {
        return std::make_unique<PlainAttacker>(address, job_id, seed);
      },
      2000);
}

}  // namespace
}  // namespace heddle::tools
