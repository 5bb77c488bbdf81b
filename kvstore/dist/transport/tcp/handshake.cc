#include "kvstore/dist/transport/tcp/handshake.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "base/check.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/codec.h"

namespace heddle::kvstore::dist {
namespace {

constexpr std::size_t kDigestsBytes = 2 * sizeof(Digest) + sizeof(MeetingName);
constexpr std::size_t kHelloBytes = 1 + 4 + 8 + 1 + 1 + 1 + 8 + 4 + kDigestsBytes;

std::string_view AsText(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

Digest Sha256(std::string_view text) {
  Digest digest;
  CHECK(EVP_Digest(text.data(), text.size(), reinterpret_cast<unsigned char*>(digest.data()),
                   nullptr, EVP_sha256(), nullptr) == 1);
  return digest;
}

// Header and meta of one message of the handshake.
std::string Frame(Kind kind, std::string meta) {
  Message message{.kind = kind};
  message.meta = std::move(meta);
  std::array<std::byte, kHeaderBytes> header;
  EncodeHeader(message, header);
  return std::string(reinterpret_cast<const char*>(header.data()), header.size()) + message.meta;
}

// What a welcome says besides the proof.
std::string Encode(const WelcomeBody& body) {
  WireWriter writer;
  writer.Put(body.shares);
  writer.Put(body.received);
  return writer.Take();
}

bool Decode(std::string_view said, WelcomeBody* body) {
  WireReader reader(said);
  reader.Get(&body->shares);
  reader.Get(&body->received);
  return reader.Ended();
}

std::string PreambleText() {
  const auto preamble = EncodePreamble();
  return {reinterpret_cast<const char*>(preamble.data()), preamble.size()};
}

// Of what a stranger wrote in a log, of the job's id in an answer to strangers.
constexpr std::size_t kWordsMax = 512, kJobIdMax = 256;

// The beginning of it, fit for a log.
std::string Printable(std::string_view text, std::size_t bytes_max) {
  std::string printable(text.substr(0, bytes_max));
  for (char& c : printable) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return printable;
}

}  // namespace

std::string Encode(const HelloBody& body) {
  WireWriter writer;
  writer.Put(body.node.role);
  writer.Put(body.node.rank);
  writer.Put(body.incarnation);
  writer.Put(body.link);
  writer.Put(body.has_token);
  writer.Put(body.resumes);
  writer.Put(body.received);
  writer.Put(body.attempt);
  for (const std::byte byte : body.job) writer.Put(static_cast<std::uint8_t>(byte));
  for (const std::byte byte : body.nonce) writer.Put(static_cast<std::uint8_t>(byte));
  for (const std::byte byte : body.meeting) writer.Put(static_cast<std::uint8_t>(byte));
  return writer.Take();
}

bool Decode(std::string_view meta, HelloBody* body) {
  if (meta.size() != kHelloBytes) return false;
  WireReader reader(meta.substr(0, kHelloBytes - kDigestsBytes));
  reader.GetEnum(&body->node.role, Role::kWorker, Role::kScheduler);
  reader.Get(&body->node.rank);
  reader.Get(&body->incarnation);
  reader.GetEnum(&body->link, Link::kUrgent, Link::kBulk);
  reader.Get(&body->has_token);
  reader.Get(&body->resumes);
  reader.Get(&body->received);
  reader.Get(&body->attempt);
  auto digests = std::as_bytes(std::span(meta).last(kDigestsBytes));
  const auto take = [&digests](auto& digest) {
    std::copy_n(digests.begin(), digest.size(), digest.begin());
    digests = digests.subspan(digest.size());
  };
  take(body->job);
  take(body->nonce);
  take(body->meeting);
  return reader.Ended() && body->node.rank >= -1;
}

Handshake::Handshake(const Identity& self, Link link, const MeetingName& meeting,
                     std::optional<std::uint64_t> received, std::uint32_t attempt, bool connecting)
    : self_(self), connecting_(connecting), meeting_(meeting) {
  HelloBody hello{.node = self.node,
                  .incarnation = self.incarnation,
                  .link = link,
                  .has_token = !self.token.empty(),
                  .resumes = received.has_value(),
                  .received = received.value_or(0),
                  .attempt = attempt,
                  .job = Sha256(self.job_id),
                  .meeting = meeting};
  CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(hello.nonce.data()), sizeof(Digest)) == 1,
        "no random numbers");
  own_hello_ = Encode(hello);
}

std::string Handshake::Start() {
  // The accepting end first looks at what has come: it may be a browser.
  if (!connecting_) return {};
  preamble_sent_ = true;
  return PreambleText() + Frame(Kind::kHello, own_hello_);
}

std::size_t Handshake::wanted() const {
  return state_ == State::kGoing ? part_bytes_ - part_received_.size() : 0;
}

std::string Handshake::Feed(std::span<const std::byte> bytes) {
  CHECK(bytes.size() <= wanted());
  part_received_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (part_ == Part::kPreamble) return OnPreamble();
  if (part_received_.size() < part_bytes_) return {};
  return part_ == Part::kHeader ? OnHeader() : OnMessage();
}

std::string Handshake::OnPreamble() {
  const auto first = std::as_bytes(std::span(part_received_));
  const std::string wrong = CheckPreamble(first);
  if (!wrong.empty()) {
    state_ = State::kFailed;
    why_ = wrong;
    return connecting_ ? std::string() : AnswerToStranger(first, wrong);
  }
  if (part_received_.size() < kPreambleBytes) return {};
  part_ = Part::kHeader;
  part_bytes_ = kHeaderBytes;
  part_received_.clear();
  return {};
}

std::string Handshake::OnHeader() {
  std::uint32_t meta_bytes = 0;
  std::uint64_t payload_bytes = 0;
  const auto header = std::as_bytes(std::span(part_received_));
  const std::string wrong = DecodeHeader(header.first<kHeaderBytes>(), kStrangerLimits, &message_,
                                         &meta_bytes, &payload_bytes);
  if (!wrong.empty()) return Fail(wrong);
  part_ = Part::kMeta;
  part_bytes_ = meta_bytes;
  part_received_.clear();
  return meta_bytes == 0 ? OnMessage() : std::string();
}

std::string Handshake::OnMessage() {
  message_.meta = std::move(part_received_);
  part_ = Part::kHeader;
  part_bytes_ = kHeaderBytes;
  part_received_.clear();
  if (message_.kind == Kind::kRefused) {
    ErrorBody error;
    refused_by_peer_ = true;
    state_ = State::kFailed;
    why_ = Decode(message_.meta, &error) ? "it refused: " + Printable(error.message, kWordsMax)
                                         : "it refused, and its reason cannot be read";
    return {};
  }
  if (!hello_received_) {
    return connecting_ ? OnHello(Kind::kChallenge, {}) : OnHello(Kind::kHello, PreambleText());
  }
  return OnProof();
}

std::string Handshake::OnProof() {
  const Kind expected = connecting_ ? Kind::kWelcome : Kind::kProof;
  if (message_.kind != expected) {
    return Fail(fmt::format("expected a {}, given a {}", Name(expected), Name(message_.kind)));
  }
  const std::string_view meta = message_.meta;
  const std::string_view said = meta.substr(std::min(meta.size(), sizeof(Digest)));
  const Digest proof = Proof(!connecting_, said);
  if (meta.size() < proof.size() || CRYPTO_memcmp(meta.data(), proof.data(), proof.size()) != 0) {
    return Fail("wrong token (HEDDLE_TOKEN, HEDDLE_TOKEN_FILE)");
  }
  if (connecting_ ? !Decode(said, &welcome_) : !said.empty()) {
    return Fail(fmt::format("a {} that cannot be understood", Name(expected)));
  }
  if (welcome_.shares && meeting_ == MeetingName{}) {
    return Fail("shared memory that nobody asked for");
  }
  state_ = connecting_ ? State::kDone : State::kAdmit;
  return {};
}

std::string Handshake::OnHello(Kind expected, std::string answer_if_right) {
  if (message_.kind != expected) {
    return Fail(fmt::format("expected a {}, given a {}", Name(expected), Name(message_.kind)));
  }
  if (!Decode(message_.meta, &peer_)) {
    return Fail(fmt::format("a {} that cannot be understood", Name(expected)));
  }
  hello_received_ = true;
  peer_hello_ = std::move(message_.meta);
  const std::string wrong = CheckPeer();
  if (!wrong.empty()) return Fail(wrong);
  if (connecting_) return Frame(Kind::kProof, std::string(AsText(Proof(true, {}))));
  preamble_sent_ = true;
  return answer_if_right + Frame(Kind::kChallenge, own_hello_);
}

std::string Handshake::CheckPeer() const {
  if (!refusal_.empty()) return refusal_;
  if (peer_.job != Sha256(self_.job_id)) {
    return fmt::format("wrong job: expected the one with the id '{}'",
                       Printable(self_.job_id, kJobIdMax));
  }
  const bool has_token = !self_.token.empty();
  if (peer_.has_token != has_token) {
    return fmt::format("expected {} token, given {} (HEDDLE_TOKEN, HEDDLE_TOKEN_FILE)",
                       has_token ? "a" : "no", has_token ? "none" : "one");
  }
  return {};
}

Digest Handshake::Proof(bool of_connecting, std::string_view said) const {
  const std::string& connecting_hello = connecting_ ? own_hello_ : peer_hello_;
  const std::string& accepting_hello = connecting_ ? peer_hello_ : own_hello_;
  const std::string text = fmt::format("heddle {} {}{}{}", of_connecting ? "connects" : "accepts",
                                       connecting_hello, accepting_hello, said);
  Digest digest;
  unsigned int bytes = 0;
  CHECK(HMAC(EVP_sha256(), self_.token.data(), static_cast<int>(self_.token.size()),
             reinterpret_cast<const unsigned char*>(text.data()), text.size(),
             reinterpret_cast<unsigned char*>(digest.data()), &bytes) != nullptr);
  CHECK(bytes == digest.size());
  return digest;
}

std::string Handshake::Admit(const WelcomeBody& welcome) {
  CHECK(state_ == State::kAdmit);
  state_ = State::kDone;
  const std::string said = Encode(welcome);
  return Frame(Kind::kWelcome, fmt::format("{}{}", AsText(Proof(false, said)), said));
}

std::string Handshake::Refuse(const std::string& why) { return Fail(why); }

// Both ends read it: `why` speaks of what was expected and given, not of "you" or "it".
std::string Handshake::Fail(const std::string& why) {
  state_ = State::kFailed;
  why_ = why;
  const std::string refusal =
      Frame(Kind::kRefused, Encode(ErrorBody{.code = ErrorBody::Code::kNetwork, .message = why}));
  return std::exchange(preamble_sent_, true) ? refusal : PreambleText() + refusal;
}

}  // namespace heddle::kvstore::dist
