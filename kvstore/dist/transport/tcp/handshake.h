// How the two ends of a new connection learn who the other is, and that it belongs to the job.
//
//   connecting                                accepting
//   preamble, kHello{who, nonce}         ->
//                                        <-   preamble, kChallenge{who, nonce}
//   kProof{HMAC}                         ->
//                                        <-   kWelcome{HMAC, shares, received}
//
// The HMACs (SHA-256) have the job's token as key and cover a label of the side, both bodies
// before, hence both nonces, and what else the message says: neither can be replayed, nor sent back
// to its sender. Who connects may name a place where peers of the same host can leave shared memory
// (shm/meeting.h); `shares` says that the peer has done so, and all messages go that way. Who
// connects again after a cut says so in its hello, and either end how many messages it has received
// before, so that the other one goes on behind them. In place
// of any message either side may say kRefused, with the reason in words, and close. A job without a
// token goes through the same steps with an empty key, which proves nothing.
//
// No sockets here: bytes in, bytes out. Before the peer has proved itself it costs kBytesMax at
// most. Neither the token nor what is made from it is ever put in words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/protocol/wire.h"
#include "kvstore/dist/transport/shm/meeting.h"

namespace heddle::kvstore::dist {

// Which messages a connection is for. The values are those on the wire.
enum class Link : std::uint8_t {
  kBulk = 1,    // long ones
  kUrgent = 2,  // all others; all, where there is no bulk connection
};

using Digest = std::array<std::byte, 32>;

struct HelloBody {  // kHello, kChallenge
  NodeId node;      // rank -1: not known yet
  Incarnation incarnation = 0;
  Link link = Link::kUrgent;
  bool has_token = false;
  bool resumes = false;        // the connection goes on with one that was cut
  std::uint64_t received = 0;  // messages, before the cut
  // How many times the sender has tried to make this connection, this one included, from 1. One
  // that was given up may be heard of late.
  std::uint32_t attempt = 0;
  Digest job{};  // SHA-256 of the job's id
  Digest nonce{};
  MeetingName meeting{};  // zero in a kChallenge, and where there is none
};

std::string Encode(const HelloBody& body);
bool Decode(std::string_view meta, HelloBody* body);

// Who this end is.
struct Identity {
  NodeId node;
  Incarnation incarnation = 0;
  std::string job_id;
  std::string token;
};

// What the accepting end says last.
struct WelcomeBody {
  bool shares = false;         // it has left memory at the meeting point
  std::uint64_t received = 0;  // messages, before the cut
};

class Handshake {
 public:
  enum class State {
    kGoing,
    kAdmit,  // accepting: the peer has proved itself, and the program must say Admit or Refuse
    kDone,
    kFailed,  // why() says it; what Feed returned is still to be sent
  };
  // What is buffered of a peer.
  static constexpr std::size_t kBytesMax = 8 << 10;

  // `received`: of a connection that was cut.
  static Handshake Connecting(const Identity& self, Link link, const MeetingName& meeting = {},
                              std::optional<std::uint64_t> received = std::nullopt,
                              std::uint32_t attempt = 1) {
    return {self, link, meeting, received, attempt, true};
  }
  static Handshake Accepting(const Identity& self) {
    return {self, Link::kUrgent, {}, std::nullopt, 0, false};
  }

  // Accepting: whoever passes as far as its hello is refused. Before the first Feed.
  void RefuseAll(const std::string& why) { refusal_ = why; }
  // What is to be sent before anything comes.
  std::string Start();
  // At most so many bytes may be given to the next Feed; 0 when the handshake is over.
  std::size_t wanted() const;
  // Takes bytes; returns what is to be sent.
  std::string Feed(std::span<const std::byte> bytes);
  std::string Admit(const WelcomeBody& welcome = {});
  std::string Refuse(const std::string& why);

  State state() const { return state_; }
  // In words that make sense behind "<peer>: ".
  const std::string& why() const { return why_; }
  // The peer refused, rather than this end.
  bool refused_by_peer() const { return refused_by_peer_; }
  // From kAdmit or kDone on.
  const HelloBody& peer() const { return peer_; }
  // Connecting, from kDone on.
  const WelcomeBody& welcome() const { return welcome_; }

 private:
  Handshake(const Identity& self, Link link, const MeetingName& meeting,
            std::optional<std::uint64_t> received, std::uint32_t attempt, bool connecting);

  std::string OnPreamble();
  std::string OnHeader();
  std::string OnMessage();
  std::string OnHello(Kind expected, std::string answer_if_right);
  std::string OnProof();
  std::string CheckPeer() const;
  // `said`: what the message says besides.
  Digest Proof(bool of_connecting, std::string_view said) const;
  std::string Fail(const std::string& why);

  const Identity self_;
  const bool connecting_;
  const MeetingName meeting_;
  std::string own_hello_;   // the encoded body
  std::string peer_hello_;  // likewise
  HelloBody peer_;
  State state_ = State::kGoing;
  std::string why_;
  std::string refusal_;  // of all; empty: of none
  bool refused_by_peer_ = false;
  bool preamble_sent_ = false;

  enum class Part { kPreamble, kHeader, kMeta } part_ = Part::kPreamble;
  std::size_t part_bytes_ = kPreambleBytes;
  std::string part_received_;
  Message message_;
  bool hello_received_ = false;
  WelcomeBody welcome_;
};

}  // namespace heddle::kvstore::dist
