// How two processes of one host and one user come to share memory, while they connect by TCP.
//
//   connecting                                 accepting
//   listens at a Unix socket with a random
//   name; hello{..., name}                ->
//   proof                                 ->
//                                         <-   connects to that name, sends memory and bells
//                                         <-   welcome{shares}
//   takes the connection, memory and bells
//
// So nothing is made before the peer has proved itself, and both know at the end of the handshake
// which way their messages go. The Unix connection stays: its end is the end of the peer. Its name
// is abstract: there is no file that could be left, and only processes in one network namespace
// find it. Who is on another host, in another namespace, of another user, or where the system
// forbids any of this, talks over TCP.
//
// A *bell* wakes a side that sleeps: an eventfd, with which a round trip of wake-ups took 40 us
// where it took 53 with bytes through the socket. Both sides hold the same one, so a hostile peer
// could have ringing its bell block; it has the job's token and is of the same user, who may stop
// this process altogether.
//
// Threads: a meeting point is used by one.
#pragma once

#include <array>
#include <cstddef>

#include "base/unique_fd.h"
#include "kvstore/dist/transport/tcp/channel.h"

namespace heddle::kvstore::dist {

// Of a meeting point; all zero: there is none.
using MeetingName = std::array<std::byte, 16>;

class MeetingPoint {
 public:
  // NetworkError if the system does not allow it.
  MeetingPoint();

  const MeetingName& name() const { return name_; }
  // Once the peer says that it was here: what it left. NetworkError if that is not so, or it cannot
  // be used.
  Channel Take();

 private:
  MeetingName name_{};
  UniqueFd listener_;
};

// Makes rings and leaves them at the meeting point. NetworkError if it is not of this host and
// user, or the system does not allow it. Never blocks.
Channel MeetAt(const MeetingName& name, std::size_t ring_bytes);

}  // namespace heddle::kvstore::dist
