// Goal: as job_hostile_test.cc, of a job with TLS. Method: parties without TLS, with noise in the
// form of TLS, with what was recorded of a connection of the job, with a certificate of another
// authority, and with a right certificate but without the token.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/unique_fd.h"
#include "kvstore/dist/transport/tcp/tls.h"
#include "tests/kvstore/dist/plain_socket.h"
#include "tests/tools/hostile_job.h"
#include "tools/testing/test_certificates.h"

namespace heddle::tools {
namespace {

using kvstore::dist_test::HeaderOf;
using kvstore::dist_test::PlainSocket;
using kvstore::dist_test::Preamble;
using namespace kvstore::dist;  // NOLINT(google-build-using-namespace)

void Await(int fd, short events) {
  pollfd wait{.fd = fd, .events = events, .revents = 0};
  EXPECT_EQ(poll(&wait, 1, 60'000), 1) << "no answer and no end";
}

// Says and hears through TLS, as PlainSocket; over a socket that stays open as long.
class TlsSocket {
 public:
  TlsSocket(int fd, const TlsContext& context)
      : fd_(fd), stream_(context.Connecting(fd, "127.0.0.1")) {
    fcntl(fd, F_SETFL, O_NONBLOCK);
    while ((state_ = stream_->Shake()) == TlsStream::State::kGoing) Await(fd, POLLIN);
  }

  void Say(std::string_view text) {
    if (state_ != TlsStream::State::kOpen) return;
    while (!text.empty() || stream_->unsent()) {
      const iovec run{const_cast<char*>(text.data()), text.size()};
      const auto [bytes, error] = stream_->Write(&run, 1);
      if (bytes < 0 && error != EAGAIN) return;
      if (bytes > 0) text.remove_prefix(static_cast<std::size_t>(bytes));
      if (stream_->unsent()) Await(fd_, POLLOUT);
    }
  }
  std::string Hear(std::size_t bytes) {
    std::string heard;
    while (state_ == TlsStream::State::kOpen && heard.size() < bytes) {
      std::string buffer(std::min<std::size_t>(4096, bytes - heard.size()), '\0');
      const iovec run{buffer.data(), buffer.size()};
      const auto [got, error] = stream_->Read(&run, 1);
      if (got > 0) {
        heard.append(buffer, 0, static_cast<std::size_t>(got));
      } else if (error == EAGAIN) {
        Await(fd_, POLLIN);
      } else {
        break;
      }
    }
    return heard;
  }
  std::string HearAll() { return Hear(std::string::npos); }

 private:
  const int fd_;
  const std::unique_ptr<TlsStream> stream_;
  TlsStream::State state_ = TlsStream::State::kGoing;
};

struct Recorded {
  std::string encrypted;  // all that a process of the job sends up to the end of its handshake
  std::string plain;      // its handshake within TLS
};

// By a thread between that process and the job.
Recorded Record(const std::string& address, const std::string& job_id, const TlsContext& context) {
  int ends[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  UniqueFd process(ends[0]);
  const UniqueFd between(ends[1]);
  PlainSocket job(address);
  Recorded recorded;
  std::thread relay([&] {
    std::array<char, 4096> buffer;
    for (;;) {
      std::array<pollfd, 2> waits = {{{between.get(), POLLIN, 0}, {job.fd(), POLLIN, 0}}};
      poll(waits.data(), waits.size(), -1);
      for (const pollfd& wait : waits) {
        if (wait.revents == 0) continue;
        const ssize_t bytes = read(wait.fd, buffer.data(), buffer.size());
        if (bytes <= 0) return;
        const std::string_view text(buffer.data(), static_cast<std::size_t>(bytes));
        if (wait.fd == job.fd()) {
          send(between.get(), text.data(), text.size(), MSG_NOSIGNAL);
        } else {
          recorded.encrypted += text;
          job.Say(text);
        }
      }
    }
  });
  {
    TlsSocket socket(process.get(), context);
    recorded.plain = RecordHandshake(socket, job_id);
  }
  process = UniqueFd();
  relay.join();
  EXPECT_FALSE(recorded.encrypted.empty());
  return recorded;
}

class TlsAttacker : public SocketAttacker {
 public:
  TlsAttacker(const std::string& address, const std::string& job_id, std::uint64_t seed,
              const TlsOptions& right, const TlsOptions& wrong)
      : SocketAttacker(address, seed),
        right_(right),
        wrong_(wrong),
        recorded_(Record(address, job_id, right_)) {
    Message push;
    push.kind = Kind::kPush;
    push_ = HeaderOf(push);
    Message hello;
    hello.kind = Kind::kHello;
    huge_ = Preamble() + HeaderOf(hello);
    huge_[kPreambleBytes + 15] = '\x7f';  // docs/wire.md: 8 bytes of a length at 8
  }

 private:
  void Attack(Socket socket) override {
    switch (Random(9)) {
      case 0:  // without TLS
        Heard(AnswerTo(*socket, recorded_.plain + push_, /*begun=*/false));
        break;
      case 1:  // a record of a handshake, of any length
        socket->Say("\x16\x03\x01" + Noise(2 + Random(2000)));
        break;
      case 2:
        socket->Say(recorded_.encrypted.substr(0, Random(recorded_.encrypted.size())));
        break;
      case 3:
        AnswerTo(*socket, recorded_.encrypted, /*begun=*/false);
        break;
      case 4:  // of another authority
        SayWithin(*socket, wrong_, recorded_.plain + push_);
        break;
      case 5:  // without the token
        SayWithin(*socket, right_, recorded_.plain + push_);
        break;
      case 6:
        SayWithin(*socket, right_, huge_ + Noise(100));
        break;
      case 7:
        SayWithin(*socket, right_, Preamble() + Noise(1 + Random(40'000)));
        break;
      default:
        Hold(std::move(socket), recorded_.encrypted.substr(0, 1));
    }
  }
  void SayWithin(PlainSocket& socket, const TlsContext& context, const std::string& said) {
    TlsSocket within(socket.fd(), context);
    Heard(AnswerTo(within, said, /*begun=*/false));
  }

  const TlsContext right_, wrong_;
  const Recorded recorded_;
  std::string push_, huge_;
};

TEST(JobHostile, ManyConnectionsToAJobWithTlsChangeNothing) {
  TestCertificates certificates;
  const TlsOptions right = certificates.right();
  const TlsOptions wrong = certificates.Make("DNS:localhost,IP:127.0.0.1", "theirs");
  ExpectNoHarm(
      {"HEDDLE_TLS_CERTIFICATE=" + right.certificate, "HEDDLE_TLS_KEY=" + right.key,
       "HEDDLE_TLS_AUTHORITIES=" + right.authorities},
      [&](const auto& address, const auto& job_id, std::uint64_t seed) {
        return std::make_unique<TlsAttacker>(address, job_id, seed, right, wrong);
      },
      400);
}

}  // namespace
}  // namespace heddle::tools
