// Whether the peer of a connection takes in, and confirms, what it is sent.
//
// What a connection has sent is kept until the peer confirms it (connection.h, Cuts), so a peer
// that never does would hold memory, and whoever waits for it, for ever. It is *overdue* once
// kLooks looks in a row have found something that it should have confirmed, or should take in, and
// none of:
//   (1) It has confirmed more.
//   (2) Bytes of what it should have confirmed, or of what is sent, are on their way, and some have
//       arrived: a slow link, or a slow peer in the midst of a long message.
//   (3) Bytes of its own have come, behind which its word may be: of a message under way, or at
//       most kBehindMax of complete ones.
// Looks are counted, not time: a process that stood still itself looks once when it goes on, and
// has read what came meanwhile by the next look.
// Threads: one call at a time.
#pragma once

#include <cstdint>

namespace heddle::kvstore::dist {

class ConfirmWatch {
 public:
  static constexpr int kLooks = 8;
  // Of the peer, since the last look: fewer may be no more than what it says of itself now and
  // then.
  static constexpr std::uint64_t kHeardMin = 64 << 10;
  // What lies before its word in its socket's buffer.
  static constexpr std::uint64_t kBehindMax = std::uint64_t{16} << 20;

  // Counts are of all bytes and messages since the first look, or since earlier.
  struct Sight {
    bool owes = false;   // something has left that an honest peer confirms, see SendQueue::owed
    bool waits = false;  // something is to be sent
    std::uint64_t confirmed = 0;      // messages
    std::uint64_t sent = 0;           // bytes given to the system
    std::uint64_t in_flight = 0;      // of those, what the peer's system has not taken
    std::uint64_t heard = 0;          // bytes
    std::uint64_t heard_in_full = 0;  // bytes of complete messages
  };

  // True: the peer is overdue.
  bool Look(const Sight& now) {
    const bool expects = now.owes || now.waits;
    const bool news = now.confirmed != last_.confirmed || !expects || !expected_;
    if (news || !last_.owes) {
      sent_ = now.sent;
      heard_in_full_ = now.heard_in_full;
    }
    const bool some_arrived = now.sent - now.in_flight != last_.sent - last_.in_flight;
    const bool under_way = !now.owes || now.in_flight > now.sent - sent_;
    const bool heard =
        now.heard - last_.heard >= kHeardMin && now.heard_in_full - heard_in_full_ < kBehindMax;
    quiet_ = news || (some_arrived && under_way) || heard ? 0 : quiet_ + 1;
    expected_ = expects;
    last_ = now;
    return quiet_ >= kLooks;
  }
  // The connection is made anew.
  void Reset() { *this = {}; }

 private:
  Sight last_;
  bool expected_ = false;  // at the last look something was
  // When what is owed was first seen to be, or some of it was confirmed last.
  std::uint64_t sent_ = 0;
  std::uint64_t heard_in_full_ = 0;
  int quiet_ = 0;  // looks in a row
};

}  // namespace heddle::kvstore::dist
