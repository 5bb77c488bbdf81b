// The handshake of connections: both ends in one process, bytes handed across.
#include "kvstore/dist/transport/tcp/handshake.h"

#include <algorithm>
#include <random>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/dist/random_bodies.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)
using testing::HasSubstr;
using State = Handshake::State;

constexpr NodeId kServer1{Role::kServer, 1};
constexpr NodeId kWorker2{Role::kWorker, 2};

Identity Of(NodeId node, std::string job = "job", std::string token = "secret") {
  return {.node = node, .incarnation = 7, .job_id = std::move(job), .token = std::move(token)};
}

// Gives `bytes` to `to` as far as it wants them, `step` at a time; returns what it says.
std::string Give(std::string_view bytes, Handshake& to, std::size_t step = 1 << 20) {
  std::string said;
  while (!bytes.empty() && to.wanted() > 0) {
    const std::size_t count = std::min({bytes.size(), to.wanted(), step});
    said += to.Feed(std::as_bytes(std::span(bytes.substr(0, count))));
    bytes.remove_prefix(count);
  }
  EXPECT_TRUE(bytes.empty() || to.state() != State::kGoing);
  return said;
}

struct Handshakes {
  Handshake connecting;
  Handshake accepting;

  // To the end, admitting.
  void Run(std::size_t step = 1 << 20) {
    std::string there = connecting.Start();
    EXPECT_EQ(accepting.Start(), "");
    while (!there.empty()) {
      std::string back = Give(there, accepting, step);
      if (accepting.state() == State::kAdmit) back += accepting.Admit();
      there = Give(back, connecting, step);
    }
  }
};

Handshakes Make(const Identity& connecting, const Identity& accepting, Link link = Link::kBulk) {
  return {Handshake::Connecting(connecting, link), Handshake::Accepting(accepting)};
}

TEST(Handshake, EndsLearnWhoTheOtherIs) {
  for (const std::size_t step : {std::size_t{1}, std::size_t{7}, std::size_t{1} << 20}) {
    Handshakes ends = Make(Of(kWorker2), Of(kServer1));
    ends.Run(step);
    ASSERT_EQ(ends.connecting.state(), State::kDone) << ends.connecting.why();
    ASSERT_EQ(ends.accepting.state(), State::kDone) << ends.accepting.why();
    EXPECT_EQ(ends.connecting.peer().node, kServer1);
    EXPECT_EQ(ends.accepting.peer().node, kWorker2);
    EXPECT_EQ(ends.accepting.peer().incarnation, 7u);
    EXPECT_EQ(ends.accepting.peer().link, Link::kBulk);
  }
}

TEST(Handshake, WithoutTokensBothPass) {
  Handshakes ends = Make(Of(kWorker2, "job", ""), Of(kServer1, "job", ""));
  ends.Run();
  EXPECT_EQ(ends.connecting.state(), State::kDone);
}

void ExpectRefused(Handshakes ends, const std::string& why) {
  ends.Run();
  EXPECT_EQ(ends.accepting.state(), State::kFailed);
  EXPECT_THAT(ends.accepting.why(), HasSubstr(why));
  EXPECT_EQ(ends.connecting.state(), State::kFailed);
  EXPECT_TRUE(ends.connecting.refused_by_peer());
  EXPECT_THAT(ends.connecting.why(), HasSubstr(why));
  EXPECT_THAT(ends.connecting.why(), testing::Not(HasSubstr("secret")));
}

TEST(Handshake, AnotherJobIsRefused) {
  ExpectRefused(Make(Of(kWorker2, "job"), Of(kServer1, "other")), "wrong job");
}

// Who has not proved the token is told no more of it than fits into the answer.
TEST(Handshake, ALongJobIdIsToldInPart) {
  Handshakes ends = Make(Of(kWorker2, "job"), Of(kServer1, "no\njob" + std::string(5000, 'x')));
  const std::string answer = Give(ends.connecting.Start(), ends.accepting);
  EXPECT_LT(answer.size(), 500u);
  Give(answer, ends.connecting);
  EXPECT_TRUE(ends.connecting.refused_by_peer()) << ends.connecting.why();
  EXPECT_THAT(ends.connecting.why(),
              testing::MatchesRegex("it refused: wrong job: .* id 'no\\?jobx+'"));
}

TEST(Handshake, AnotherTokenIsRefused) {
  ExpectRefused(Make(Of(kWorker2, "job", "secret1"), Of(kServer1, "job", "secret2")),
                "wrong token");
}

TEST(Handshake, AMissingTokenIsRefusedOnEitherSide) {
  ExpectRefused(Make(Of(kWorker2, "job", ""), Of(kServer1)), "expected a token, given none");
  ExpectRefused(Make(Of(kWorker2), Of(kServer1, "job", "")), "expected no token, given one");
}

TEST(Handshake, TheProgramMayRefuse) {
  Handshakes ends = Make(Of(kWorker2), Of(kServer1));
  const std::string back = Give(ends.connecting.Start(), ends.accepting);
  EXPECT_EQ(Give(Give(back, ends.connecting), ends.accepting), "");
  ASSERT_EQ(ends.accepting.state(), State::kAdmit);
  Give(ends.accepting.Refuse("there is a worker 2 already"), ends.connecting);
  EXPECT_EQ(ends.connecting.state(), State::kFailed);
  EXPECT_THAT(ends.connecting.why(), HasSubstr("there is a worker 2 already"));
}

// An attacker without the token listens in, and later sends the same bytes again, or sends to an
// end what that end has said itself.
TEST(Handshake, ProofsAreGoodOnce) {
  Handshakes first = Make(Of(kWorker2), Of(kServer1));
  const std::string hello = first.connecting.Start();
  const std::string challenge = Give(hello, first.accepting);
  const std::string proof = Give(challenge, first.connecting);
  Give(proof, first.accepting);
  ASSERT_EQ(first.accepting.state(), State::kAdmit);
  const std::string welcome = first.accepting.Admit();

  Handshake again = Handshake::Accepting(Of(kServer1));
  Give(hello, again);
  Give(proof, again);
  EXPECT_EQ(again.state(), State::kFailed);

  Handshake connects = Handshake::Connecting(Of(kWorker2), Link::kBulk);
  connects.Start();
  Give(challenge, connects);
  Give(welcome, connects);
  EXPECT_EQ(connects.state(), State::kFailed);
  EXPECT_FALSE(connects.refused_by_peer());

  Handshake mirrored = Handshake::Connecting(Of(kWorker2), Link::kBulk);
  Give(mirrored.Start(), mirrored);
  EXPECT_EQ(mirrored.state(), State::kFailed);
}

MeetingName SomeMeeting() {
  MeetingName meeting{};
  meeting[5] = std::byte{9};
  return meeting;
}

TEST(Handshake, WhetherMemoryIsSharedIsToldAndProved) {
  for (const bool shares : {false, true}) {
    for (const bool changed : {false, true}) {
      Handshake connecting = Handshake::Connecting(Of(kWorker2), Link::kBulk, SomeMeeting());
      Handshake accepting = Handshake::Accepting(Of(kServer1));
      Give(Give(Give(connecting.Start(), accepting), connecting), accepting);
      EXPECT_EQ(accepting.peer().meeting, SomeMeeting());
      EXPECT_EQ(connecting.peer().meeting, MeetingName{});
      std::string welcome = accepting.Admit({.shares = shares});
      if (changed) welcome.back() ^= 1;
      Give(welcome, connecting);
      EXPECT_EQ(connecting.state(), changed ? State::kFailed : State::kDone);
      if (!changed) {
        EXPECT_EQ(connecting.welcome().shares, shares);
      }
    }
  }
}

TEST(Handshake, MemoryThatNobodyAskedForIsRefused) {
  Handshakes ends = Make(Of(kWorker2), Of(kServer1));
  Give(Give(Give(ends.connecting.Start(), ends.accepting), ends.connecting), ends.accepting);
  Give(ends.accepting.Admit({.shares = true}), ends.connecting);
  EXPECT_EQ(ends.connecting.state(), State::kFailed);
  EXPECT_THAT(ends.connecting.why(), HasSubstr("shared memory that nobody asked for"));
}

TEST(Handshake, ABrowserGetsAPage) {
  Handshake accepting = Handshake::Accepting(Of(kServer1));
  const std::string answer = Give("GET / HTTP/1.1\r\nHost: a\r\n\r\n", accepting);
  EXPECT_EQ(accepting.state(), State::kFailed);
  EXPECT_THAT(answer, HasSubstr("HTTP/1.1 400"));
  EXPECT_THAT(accepting.why(), HasSubstr("HTTP"));
}

TEST(Handshake, AWebServerIsKnownForOne) {
  Handshake connecting = Handshake::Connecting(Of(kWorker2), Link::kBulk);
  connecting.Start();
  EXPECT_EQ(Give("HTTP/1.1 400 Bad Request\r\n\r\n", connecting), "");
  EXPECT_EQ(connecting.state(), State::kFailed);
}

// Somebody between the ends changes one bit of what either says about itself, or of the proof.
TEST(Handshake, ChangedBodiesDoNotPass) {
  std::mt19937_64 random(TestSeed());
  for (int i = 0; i < 300; ++i) {
    Handshakes ends = Make(Of(kWorker2), Of(kServer1));
    std::string hello = ends.connecting.Start();
    // The body is what is last.
    const auto damage = [&](std::string& text, std::size_t body_bytes) {
      text[text.size() - 1 - random() % body_bytes] ^= static_cast<char>(1 << random() % 8);
    };
    const auto which = random() % 3;
    if (which == 0) damage(hello, 32);
    std::string challenge = Give(hello, ends.accepting);
    if (which == 1) damage(challenge, 32);
    std::string proof = Give(challenge, ends.connecting);
    if (which == 2) damage(proof, 32);
    Give(proof, ends.accepting);
    EXPECT_EQ(ends.accepting.state(), State::kFailed);
  }
}

TEST(Handshake, RandomBytesDoNotPass) {
  std::mt19937_64 random(TestSeed());
  for (int i = 0; i < 1000; ++i) {
    Handshake accepting = Handshake::Accepting(Of(kServer1));
    const auto preamble = EncodePreamble();
    std::string bytes(reinterpret_cast<const char*>(preamble.data()), preamble.size());
    for (int j = 0; j < 600; ++j) bytes += static_cast<char>(random() % (i % 2 == 0 ? 256 : 4));
    Give(bytes, accepting, 1 + random() % 100);
    EXPECT_LE(accepting.wanted(), Handshake::kBytesMax);
    EXPECT_NE(accepting.state(), State::kAdmit);
  }
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
