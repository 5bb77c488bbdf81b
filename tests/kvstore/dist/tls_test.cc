// TLS over a pair of sockets: what goes in comes out, and every certificate that is not right is
// refused with words that say why, at both ends.
#include "kvstore/dist/transport/tcp/tls.h"

#include <heddle/error.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/kvstore/dist/random_bodies.h"
#include "tools/testing/test_certificates.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using tools::TestCertificates;
using State = TlsStream::State;

TestCertificates& Certificates() { return TestCertificates::Shared(); }

void Await(int fd, short events) {
  pollfd wait{.fd = fd, .events = events, .revents = 0};
  ASSERT_EQ(poll(&wait, 1, 60'000), 1);
}

struct TlsEnds {
  TlsEnds(const TlsOptions& connecting_options, const TlsOptions& accepting_options,
          const std::string& host = "localhost")
      : connecting_context(connecting_options), accepting_context(accepting_options) {
    std::array<int, 2> fds{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds.data()), 0);
    connecting_fd = fds[0];
    accepting_fd = fds[1];
    connecting = connecting_context.Connecting(connecting_fd, host);
    accepting = accepting_context.Accepting(accepting_fd);
  }
  ~TlsEnds() {
    close(connecting_fd);
    close(accepting_fd);
  }
  // Both as far as they come. Who connects is done before the other has seen its certificate, and
  // learns from its first read what that made of it.
  void Shake() {
    State there = State::kGoing, here = State::kGoing;
    for (int i = 0; i < 10 && (there == State::kGoing || here == State::kGoing); ++i) {
      if (there == State::kGoing) there = connecting->Shake();
      if (here == State::kGoing) here = accepting->Shake();
    }
    open = there == State::kOpen && here == State::kOpen;
    if (there != State::kOpen) return;
    char byte = 0;
    const iovec run{&byte, 1};
    connecting->Read(&run, 1);
  }

  const TlsContext connecting_context, accepting_context;
  int connecting_fd = -1, accepting_fd = -1;
  std::unique_ptr<TlsStream> connecting, accepting;
  bool open = false;
};

// Says all of `text`, in runs of all lengths.
void Say(TlsStream& stream, int fd, std::string text, std::mt19937_64& random) {
  for (std::size_t said = 0; said < text.size() || stream.unsent();) {
    std::vector<iovec> runs;
    for (std::size_t at = said; at < text.size() && runs.size() < 5;) {
      const std::size_t bytes = std::min<std::size_t>(
          text.size() - at, 1 + (random() % 2 ? random() % 100 : random() % 40'000));
      runs.push_back({text.data() + at, bytes});
      at += bytes;
    }
    const auto [bytes, error] = stream.Write(runs.data(), runs.size());
    if (bytes >= 0) {
      said += static_cast<std::size_t>(bytes);
    } else {
      ASSERT_EQ(error, EAGAIN);
    }
    if (stream.unsent()) Await(fd, POLLOUT);
  }
}

std::string Hear(TlsStream& stream, int fd, std::size_t bytes, std::mt19937_64& random) {
  std::string heard;
  std::string buffer(50'000, '\0');
  while (heard.size() < bytes) {
    const std::size_t first = 1 + random() % 20'000;
    const std::array<iovec, 2> runs = {
        {{buffer.data(), first}, {buffer.data() + first, buffer.size() - first}}};
    const auto [got, error] = stream.Read(runs.data(), runs.size());
    if (got > 0) {
      heard.append(buffer, 0, static_cast<std::size_t>(got));
      continue;
    }
    if (got == 0 || error != EAGAIN) return heard;
    Await(fd, POLLIN);
  }
  return heard;
}

TEST(Tls, CarriesBytesBothWaysAtOnce) {
  const std::uint64_t seed = TestSeed();
  TlsEnds ends(Certificates().right(), Certificates().right());
  ends.Shake();
  ASSERT_TRUE(ends.open) << ends.connecting->why() << ends.accepting->why();
  std::mt19937_64 random(seed);
  const auto text = [&random](std::size_t bytes) {
    std::string made(bytes, '\0');
    for (char& c : made) c = static_cast<char>(random());
    return made;
  };
  const std::string there = text(3'000'000), back = text(2'000'000);
  std::array<std::mt19937_64, 4> randoms;
  for (auto& each : randoms) each.seed(random());
  std::string heard_there, heard_back;
  std::vector<std::thread> threads;
  threads.emplace_back([&] { Say(*ends.connecting, ends.connecting_fd, there, randoms[0]); });
  threads.emplace_back([&] { Say(*ends.accepting, ends.accepting_fd, back, randoms[1]); });
  threads.emplace_back(
      [&] { heard_there = Hear(*ends.accepting, ends.accepting_fd, there.size(), randoms[2]); });
  threads.emplace_back(
      [&] { heard_back = Hear(*ends.connecting, ends.connecting_fd, back.size(), randoms[3]); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(heard_there == there);
  EXPECT_TRUE(heard_back == back);
}

// What goes over the wire is neither what was said nor the same each time.
TEST(Tls, TheWireShowsNothing) {
  TlsEnds ends(Certificates().right(), Certificates().right());
  ends.Shake();
  ASSERT_TRUE(ends.open);
  const std::string secret(1000, 's');
  const iovec run{const_cast<char*>(secret.data()), secret.size()};
  ASSERT_EQ(ends.connecting->Write(&run, 1).bytes, 1000);
  std::string wire(5000, '\0');
  const ssize_t bytes = recv(ends.accepting_fd, wire.data(), wire.size(), 0);
  ASSERT_GT(bytes, 1000);
  EXPECT_EQ(wire.find("sss"), std::string::npos);
}

TEST(Tls, AnEndInOrderIsTold) {
  TlsEnds ends(Certificates().right(), Certificates().right());
  ends.Shake();
  std::mt19937_64 random(1);
  Say(*ends.connecting, ends.connecting_fd, "last words", random);
  ends.connecting->Finish();
  EXPECT_EQ(ends.connecting->Write(nullptr, 0).bytes, 0);
  EXPECT_FALSE(ends.connecting->unsent());
  EXPECT_EQ(Hear(*ends.accepting, ends.accepting_fd, 100, random), "last words");
  // The other direction goes on.
  Say(*ends.accepting, ends.accepting_fd, "answer", random);
  EXPECT_EQ(Hear(*ends.connecting, ends.connecting_fd, 6, random), "answer");
}

// The network may end a connection, but it cannot pass that off as the peer's end.
TEST(Tls, AnEndThatWasNotAnnouncedIsAnError) {
  TlsEnds ends(Certificates().right(), Certificates().right());
  ends.Shake();
  shutdown(ends.connecting_fd, SHUT_WR);
  char byte = 0;
  const iovec run{&byte, 1};
  const auto [bytes, error] = ends.accepting->Read(&run, 1);
  EXPECT_EQ(bytes, -1);
  EXPECT_EQ(error, EPIPE);
}

// Also when something waits to be sent: that cannot be sent any more either, for another reason.
TEST(Tls, AResetIsToldToWhoReads) {
  TlsEnds ends(Certificates().right(), Certificates().right());
  ends.Shake();
  std::string text(50'000, 't');
  const iovec run{text.data(), text.size()};
  while (!ends.connecting->unsent()) ASSERT_EQ(ends.connecting->Write(&run, 1).error, 0);
  close(std::exchange(ends.accepting_fd, -1));  // it has not read all of it, which is a reset
  const auto [bytes, error] = ends.connecting->Read(&run, 1);
  EXPECT_EQ(bytes, -1);
  EXPECT_EQ(error, ECONNRESET);
}

TEST(Tls, ChangedBytesAreAnError) {
  TlsEnds ends(Certificates().right(), Certificates().right());
  ends.Shake();
  const std::string forged = std::string("\x17\x03\x03\x00\x40", 5) + std::string(64, 'x');
  ASSERT_GT(send(ends.connecting_fd, forged.data(), forged.size(), 0), 0);
  char byte = 0;
  const iovec run{&byte, 1};
  const auto [bytes, error] = ends.accepting->Read(&run, 1);
  EXPECT_EQ(bytes, -1);
  EXPECT_EQ(error, EPROTO);
  EXPECT_THAT(ends.accepting->why(), HasSubstr("TLS failed"));
}

TEST(Tls, OtherBytesAreNoHandshake) {
  TlsEnds ends(Certificates().right(), Certificates().right());
  ASSERT_GT(send(ends.connecting_fd, "HEDL and so on", 14, 0), 0);
  EXPECT_EQ(ends.accepting->Shake(), State::kFailed);
  EXPECT_THAT(ends.accepting->why(), HasSubstr("TLS failed"));
}

TEST(Tls, TheHostsAddressOrItsNameIsExpected) {
  for (const char* const host : {"localhost", "127.0.0.1"}) {
    TlsEnds ends(Certificates().Make("DNS:anything"), Certificates().right(), host);
    ends.Shake();
    EXPECT_TRUE(ends.open) << host << ": " << ends.connecting->why();
  }
}

TEST(Tls, OneNameMayBeExpectedOfAll) {
  TlsOptions job = Certificates().Make("DNS:heddle-job");
  job.name = "heddle-job";
  TlsEnds ends(job, job, "10.1.2.3");
  ends.Shake();
  EXPECT_TRUE(ends.open) << ends.connecting->why() << ends.accepting->why();
}

void ExpectRefused(const TlsOptions& connecting, const TlsOptions& accepting,
                   const std::string& connecting_says, const std::string& accepting_says) {
  TlsEnds ends(connecting, accepting);
  ends.Shake();
  EXPECT_FALSE(ends.open);
  EXPECT_THAT(ends.connecting->why(), HasSubstr(connecting_says));
  EXPECT_THAT(ends.accepting->why(), HasSubstr(accepting_says));
}

constexpr const char* kMine = "it did not accept this process's certificate: ";

TEST(Tls, ExpiredCertificatesAreNamedAtBothEnds) {
  const TlsOptions expired = Certificates().Make("DNS:localhost", "ours", -1);
  const std::string told = std::string(kMine) + "it has expired";
  ExpectRefused(Certificates().right(), expired, "its certificate has expired", told);
  ExpectRefused(expired, Certificates().right(), told, "its certificate has expired");
}

TEST(Tls, UnknownAuthoritiesAreNamedAtBothEnds) {
  const TlsOptions strange = Certificates().Make("DNS:localhost", "theirs");
  const std::string told = std::string(kMine) + "no authority that it knows has signed it";
  const std::string seen = "its certificate is not signed by a known authority";
  ExpectRefused(Certificates().right(), strange, seen, told);
  ExpectRefused(strange, Certificates().right(), told, seen);
}

TEST(Tls, WrongNamesAreNamedAtBothEnds) {
  const TlsOptions other = Certificates().Make("DNS:elsewhere,IP:127.0.0.2");
  const std::string told = std::string(kMine) + "it is for another name";
  ExpectRefused(Certificates().right(), other, "its certificate is not for 'localhost'", told);
  TlsOptions strict = Certificates().Make("DNS:localhost,DNS:heddle-job");
  strict.name = "heddle-job";
  ExpectRefused(other, strict, told, "its certificate is not for 'heddle-job'");
}

// Names are those of the subjectAltName, also where there is none.
TEST(Tls, TheCommonNameIsNoName) {
  const TestCertificates& files = Certificates();
  TlsOptions common = Certificates().right();
  common.certificate = files.Path("common");
  common.key = files.Path("common.key");
  files.Run("req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout " +
            common.key + " -subj /CN=localhost -out " + files.Path("common.request"));
  files.Run("x509 -req -in " + files.Path("common.request") + " -CA " + files.Path("ours") +
            " -CAkey " + files.Path("ours.key") + " -CAcreateserial -out " + common.certificate);
  const std::string told = std::string(kMine) + "it is for another name";
  ExpectRefused(Certificates().right(), common, "its certificate is not for 'localhost'", told);
  TlsOptions strict = Certificates().right();
  strict.name = "localhost";
  ExpectRefused(common, strict, told, "its certificate is not for 'localhost'");
}

// Whoever is named as an authority is one, whoever has signed its own certificate.
TEST(Tls, AnAuthorityMayBeSignedByAnother) {
  const TestCertificates& files = Certificates();
  files.Run("req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout " +
            files.Path("between.key") +
            " -subj /CN=between -addext basicConstraints=critical,CA:true -out " +
            files.Path("between.request"));
  files.Run("x509 -req -in " + files.Path("between.request") + " -CA " + files.Path("ours") +
            " -CAkey " + files.Path("ours.key") + " -CAcreateserial -copy_extensions copy -out " +
            files.Path("between"));
  TlsOptions under = Certificates().Make("DNS:localhost", "between");
  under.authorities = files.Path("between");
  TlsEnds ends(under, under);
  ends.Shake();
  EXPECT_TRUE(ends.open) << ends.connecting->why() << ends.accepting->why();
  // Which does not make those authorities that stand above it.
  TlsOptions beside = Certificates().right();
  beside.authorities = under.authorities;
  ExpectRefused(Certificates().right(), beside, std::string(kMine) + "no authority that it knows",
                "its certificate is not signed by a known authority");
}

void ExpectBadFile(const TlsOptions& options, const std::string& path,
                   const std::string& expected) {
  try {
    const TlsContext context(options);
    ADD_FAILURE() << expected;
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(expected), HasSubstr("'" + path + "'")));
    EXPECT_THAT(error.what(), Not(HasSubstr("PRIVATE")));
  }
}

TEST(Tls, FilesThatCannotBeUsedAreNamed) {
  const TlsOptions& good = Certificates().right();
  const std::string none = Certificates().Path("none");
  const std::string noise = Certificates().Path("noise");
  std::ofstream(noise) << "not a certificate\n";
  for (const std::string& path : {none, noise}) {
    TlsOptions bad = good;
    bad.certificate = path;
    ExpectBadFile(bad, path, "tls_certificate: expected a file with a certificate");
    bad = good;
    bad.key = path;
    ExpectBadFile(bad, path, "tls_key: expected a file with the certificate's key");
    bad = good;
    bad.authorities = path;
    ExpectBadFile(bad, path, "tls_authorities: expected a file with certificates of authorities");
  }
  TlsOptions missing = good;
  missing.key = none;
  ExpectBadFile(missing, none, "No such file or directory");
  TlsOptions mixed = good;
  mixed.key = Certificates().Make("DNS:localhost").key;
  ExpectBadFile(mixed, mixed.key, "key values mismatch");
  TlsOptions locked = good;
  locked.key = Certificates().Path("locked");
  Certificates().Run("ec -in " + good.key + " -aes128 -passout pass:hush -out " + locked.key);
  ExpectBadFile(locked, locked.key, "without a passphrase");
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
