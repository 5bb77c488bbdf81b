// TLS as the nodes of a job see it: who does not belong is refused, with words that say why at both
// ends, and nothing secret is said by either.
#include <heddle/logging.h>

#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/dist/plain_socket.h"
#include "tests/kvstore/dist/tcp_node.h"
#include "tools/testing/test_certificates.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)
using testing::HasSubstr;
using testing::Not;
using tools::TestCertificates;

// All that is logged, at every level, while it lives.
class WholeLog {
 public:
  WholeLog() {
    SetLogLevel(LogLevel::kDebug);
    SetLogSink([this](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex_);
      text_.append(line).append("\n");
    });
  }
  ~WholeLog() {
    SetLogSink({});
    SetLogLevel(LogLevel::kWarning);
  }
  std::string text() {
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

TestCertificates& Certificates() { return TestCertificates::Shared(); }

TcpOptions WithTls(NodeId self, const TlsOptions& tls,
                   Reception reception = Reception::kCallersFirst) {
  TcpOptions options = OptionsOf(self, reception);
  options.tls = tls;
  options.shared_memory = false;
  options.token = "the-token-of-the-job";
  return options;
}

// What the worker's Connect throws, and what the server logs meanwhile.
struct Refusal {
  std::string worker, server;
};

Refusal Refuse(const TlsOptions& worker_tls, const TlsOptions& server_tls,
               const std::string& host = "127.0.0.1") {
  Refusal refusal;
  WholeLog log;
  TcpNode server(WithTls(kServer0, server_tls, Reception::kThread));
  TcpNode worker(WithTls(kWorker0, worker_tls));
  std::string address = server.transport->address();
  address.replace(0, address.rfind(':'), host);
  try {
    worker.transport->Connect(kServer0, address, Long());
    ADD_FAILURE() << "connected";
  } catch (const NetworkError& error) {
    refusal.worker = error.what();
  }
  EXPECT_THAT(refusal.worker, HasSubstr("connect to server 0 at " + address));
  const auto until = Long();
  while (log.text().find("refused the connection from 127.0.0.1:") == std::string::npos &&
         TestClock::now() < until) {
    std::this_thread::yield();
  }
  refusal.server = log.text();
  EXPECT_EQ(server.Received().size(), 0u);
  EXPECT_TRUE(server.connected.empty());
  EXPECT_THAT(refusal.worker + refusal.server, Not(HasSubstr("the-token-of-the-job")));
  EXPECT_THAT(refusal.worker + refusal.server, Not(HasSubstr("PRIVATE")));
  return refusal;
}

constexpr const char* kNotAccepted = "it did not accept this process's certificate: ";

TEST(TcpTls, ProcessesOfAJobMeet) {
  TcpNode server(WithTls(kServer0, Certificates().right(), Reception::kThread));
  TcpNode worker(WithTls(kWorker0, Certificates().right()));
  worker.transport->Connect(kServer0, server.transport->address(), Long());
  Message push;
  push.kind = Kind::kPush;
  push.payload = PayloadOf(std::string(1'000'000, 'x'));
  worker.transport->Send(kServer0, push);
  ASSERT_TRUE(server.WaitForMessages(1));
  EXPECT_TRUE(TextOf(server.Received()[0].second.payload) == TextOf(push.payload));
  worker.transport->Close();
  ASSERT_TRUE(server.WaitForLoss());
  EXPECT_EQ(server.Lost()[0].why, "it has closed the connection");
}

TEST(TcpTls, WhoComesWithoutIsTold) {
  const Refusal refusal = Refuse({}, Certificates().right());
  EXPECT_THAT(refusal.worker, HasSubstr("it refused: expected TLS, given none"));
  EXPECT_THAT(refusal.server, HasSubstr("expected TLS, given none"));
}

TEST(TcpTls, WhoComesWithTlsToAJobWithoutIsTold) {
  const Refusal refusal = Refuse(Certificates().right(), {});
  EXPECT_THAT(refusal.worker, HasSubstr("it refused: expected no TLS, given TLS"));
  EXPECT_THAT(refusal.server, HasSubstr("expected no TLS, given TLS"));
}

TEST(TcpTls, AServerOfAnUnknownAuthorityIsRefused) {
  const Refusal refusal =
      Refuse(Certificates().right(), Certificates().Make("IP:127.0.0.1", "theirs"));
  EXPECT_THAT(refusal.worker, HasSubstr("its certificate is not signed by a known authority"));
  EXPECT_THAT(refusal.server,
              HasSubstr(std::string(kNotAccepted) + "no authority that it knows has signed it"));
}

TEST(TcpTls, AWorkerOfAnUnknownAuthorityIsRefused) {
  const Refusal refusal =
      Refuse(Certificates().Make("IP:127.0.0.1", "theirs"), Certificates().right());
  EXPECT_THAT(refusal.worker,
              HasSubstr(std::string(kNotAccepted) + "no authority that it knows has signed it"));
  EXPECT_THAT(refusal.server, HasSubstr("its certificate is not signed by a known authority"));
}

TEST(TcpTls, AnExpiredServerIsRefused) {
  const Refusal refusal =
      Refuse(Certificates().right(), Certificates().Make("IP:127.0.0.1", "ours", -1));
  EXPECT_THAT(refusal.worker, HasSubstr("its certificate has expired"));
  EXPECT_THAT(refusal.server, HasSubstr(std::string(kNotAccepted) + "it has expired"));
}

TEST(TcpTls, AnExpiredWorkerIsRefused) {
  const Refusal refusal =
      Refuse(Certificates().Make("IP:127.0.0.1", "ours", -1), Certificates().right());
  EXPECT_THAT(refusal.worker, HasSubstr(std::string(kNotAccepted) + "it has expired"));
  EXPECT_THAT(refusal.server, HasSubstr("its certificate has expired"));
}

TEST(TcpTls, AServerOfAnotherNameIsRefused) {
  const Refusal refusal =
      Refuse(Certificates().right(), Certificates().Make("DNS:elsewhere"), "localhost");
  EXPECT_THAT(refusal.worker, HasSubstr("its certificate is not for 'localhost'"));
  EXPECT_THAT(refusal.server, HasSubstr(std::string(kNotAccepted) + "it is for another name"));
}

TEST(TcpTls, AWorkerOfAnotherNameIsRefusedWhereOneIsExpected) {
  TlsOptions strict = Certificates().right();
  strict.name = "127.0.0.1";
  const Refusal refusal = Refuse(Certificates().Make("DNS:elsewhere"), strict);
  EXPECT_THAT(refusal.worker, HasSubstr(std::string(kNotAccepted) + "it is for another name"));
  EXPECT_THAT(refusal.server, HasSubstr("its certificate is not for '127.0.0.1'"));
}

// The certificate alone does not let anybody in.
TEST(TcpTls, TheTokenIsStillNeeded) {
  TcpNode server(WithTls(kServer0, Certificates().right(), Reception::kThread));
  TcpOptions options = WithTls(kWorker0, Certificates().right());
  options.token = "another";
  TcpNode worker(options);
  try {
    worker.transport->Connect(kServer0, server.transport->address(), Long());
    ADD_FAILURE() << "connected";
  } catch (const NetworkError& error) {
    EXPECT_THAT(error.what(), HasSubstr("it refused: wrong token"));
  }
}

// A browser, other bytes, and the beginning of TLS with nothing behind it: each ends, and the job
// goes on.
TEST(TcpTls, StrangersHarmNobody) {
  TcpOptions options = WithTls(kServer0, Certificates().right(), Reception::kThread);
  options.handshake_limit = std::chrono::milliseconds(200);
  TcpNode server(options);
  const std::string address = server.transport->address();
  PlainSocket browser(address);
  browser.Say("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_THAT(browser.HearAll(), HasSubstr("heddle"));
  PlainSocket noise(address);
  noise.Say("some other protocol");
  noise.HearAll();
  PlainSocket bad(address);
  bad.Say("\x16\x03\x01" + std::string(600, 'x'));
  bad.HearAll();
  PlainSocket half(address);
  half.Say("\x16\x03");
  EXPECT_EQ(half.HearAll(), "");
  PlainSocket silent(address);
  EXPECT_EQ(silent.HearAll(), "");
  EXPECT_EQ(server.transport->stats().strangers_refused, 5u);
  TcpNode worker(WithTls(kWorker0, Certificates().right()));
  worker.transport->Connect(kServer0, address, Long());
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
