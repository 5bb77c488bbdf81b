// One connection to a peer, behind its handshake.
//
// Asio tells when the socket is ready; reading and writing are own loops of readv and sendmsg of up
// to 128 KiB a call, in turn: with more a call an urgent message on the other connection waits
// longer for its turn. With TLS both go through it. With a peer of this host the bytes go through
// rings in shared memory (shm/shared_rings.h) in place of the socket, which then is a Unix one: its
// end is the end of the peer, whatever it died of. Bells (shm/meeting.h) wake who sleeps.
//
// Sending. Any thread may send; tx_mutex_ is held for the queue alone, never in a system call.
//   (C1) One thread at a time writes: writing_ is true from the fetch to the report of what was
//        written; only that thread takes from the queue. What goes straight into a ring, past an
//        empty queue, is written with tx_mutex_ held.
//   (C2) Whenever tx_mutex_ is free and something is queued, then one of: writing_ (the writer
//        looks again before it leaves), write_armed_ (a wait for room is armed, and its handler
//        pumps), tx_closed_, all there is is an open pack (its Flush is on the way), or the queue
//        is held (what the peer confirms pumps). What TLS has encrypted and not sent counts as
//        queued.
//   So whoever queues behind a writer may leave: nothing is left behind. A writer that has had
//   enough arms the wait.
//   (C3) With rings write_armed_ is wants_room_, during which nobody writes: the reactor attends to
//        this connection, or a wish for room is left in the rings, so that the bell will ring.
// Receiving happens in the reactor's handlers, hence one after another (R1 in reactor.h).
//   (C4) SO_RCVLOWAT is set only by the reactor, just before the wait for reading is armed, to what
//        is missing of the payload or less; and nobody but the handler of that wait reads while the
//        mark is above 1. Otherwise a read could take what the mark waits for. TLS reads ahead,
//        and of what it has not given yet there is less than a record.
// Ending. The socket is closed in the reactor, or after the reactor's end, and not while writing_.
//
// Cuts. A connection over TCP whose socket fails (but not: is closed by the peer, or breaks the
// rules) is *cut*: it takes in and keeps what is sent, until Resume gives it another socket to the
// same process, on which both ends send anew what the other has not received in full. So that what
// is sent can be let go, each end says how many messages it has received: with what it writes
// anyway; by itself (Kind::kReceived) after kOwedMax bytes, or kOweTime after a message that the
// peer may hold memory for (kCopiedMax); and where SpeakEvery was called, whether there is news or
// not. Connections with rings are never cut, and say nothing. A peer that goes on without a word,
// or does not take in what it is sent, is one that has failed (ExpectConfirmations,
// confirm_watch.h).
//   (C5) Socket, tls_ and capture_ change in the reactor, under tx_mutex_, while cut_ and not
//        writing_. Handlers of an earlier socket, which have another epoch_, do nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "base/mutex.h"
#include "kvstore/dist/transport/tcp/channel.h"
#include "kvstore/dist/transport/tcp/confirm_watch.h"
#include "kvstore/dist/transport/tcp/handshake.h"
#include "kvstore/dist/transport/tcp/reactor.h"
#include "kvstore/dist/transport/tcp/receiver.h"
#include "kvstore/dist/transport/tcp/send_queue.h"
#include "kvstore/dist/transport/tcp/wire_capture.h"

namespace heddle::kvstore::dist {

// What a transport has done since its start.
struct TcpCounts {
  std::atomic<std::uint64_t> messages_sent{0};
  std::atomic<std::uint64_t> bytes_sent{0};  // headers included, handshakes not
  std::atomic<std::uint64_t> writes{0};      // calls to the system, or to the rings
  std::atomic<std::uint64_t> messages_received{0};
  std::atomic<std::uint64_t> bytes_received{0};
  std::atomic<std::uint64_t> reads{0};
};

class Connection : public Attended, public std::enable_shared_from_this<Connection> {
 public:
  // Of the rings of each link, in each direction.
  static constexpr std::size_t RingBytesOf(Link link) {
    return link == Link::kBulk ? std::size_t{2} << 20 : std::size_t{256} << 10;
  }

  // Called in the reactor.
  struct Events {
    Receiver::Sink sink;
    // The peer has closed, or the connection is broken: `clean` is the former, between messages.
    // Once. Nothing is received after it.
    std::function<void(bool clean, const std::string& why)> ended;
    // The connection is cut: Resume or Close must follow.
    std::function<void(const std::string& why)> cut;
    // Between two reads of a long run of them: chance for what is more urgent.
    std::function<void()> between_reads;
  };

  Connection(Reactor& reactor, Channel channel, Link link, std::shared_ptr<BufferPool> pool,
             const WireLimits& limits, TcpCounts& counts,
             std::unique_ptr<WireCapture> capture = nullptr);

  // Begins to receive; once, after which `events` is not touched until Close.
  void Start(Events events);

  // `now`: a small message leaves at once instead of waiting for company. True: it waits, and this
  // is the first that does: Flush must follow.
  [[nodiscard]] bool Send(Transport::SendId id, Message message, std::function<void()> sent,
                          bool now) EXCLUDES(tx_mutex_);
  // The same of small messages, in order.
  [[nodiscard]] bool SendTogether(std::span<const Outgoing> messages, bool now) EXCLUDES(tx_mutex_);
  void Raise(Transport::SendId id, std::int32_t priority) EXCLUDES(tx_mutex_) {
    MutexLock lock(tx_mutex_);
    queue_.Raise(id, priority);
  }
  Revoked Revoke(Transport::SendId id) EXCLUDES(tx_mutex_);
  void Flush() EXCLUDES(tx_mutex_) { PumpAsSender(); }
  // Sends what is queued, then tells the peer that this was all. Nothing can be sent any more.
  void FinishSending() EXCLUDES(tx_mutex_);

  // In the reactor, for a connection whose low-water mark is never above 1 (kUrgent): reads what
  // there is.
  void Poll();
  // Whether it can be cut; any thread.
  bool can_resume() const { return rings_ == nullptr; }
  // Messages that were received in full; any thread.
  std::uint64_t received() const { return received_.load(std::memory_order_relaxed); }
  // Grows as messages pass, in either direction.
  std::uint64_t progress() EXCLUDES(tx_mutex_);
  // Nothing is to be sent, or waits for the peer's word that it has come.
  bool idle() EXCLUDES(tx_mutex_);
  // After Start, once, if it can be cut: from now on this end says something every `period`. Where
  // only the peer has been told of a cut, this end is told by that.
  void SpeakEvery(std::chrono::milliseconds period);
  // Likewise: the connection ends, and is not made again, when the peer is overdue for so long.
  void ExpectConfirmations(std::chrono::milliseconds limit);
  // In the reactor: this end learns otherwise that the connection is cut, if it does not know;
  // without the event.
  void Cut() EXCLUDES(tx_mutex_);
  // In the reactor, when it is cut; the peer has received so many messages. False: that cannot be.
  [[nodiscard]] bool Resume(Channel channel, std::uint64_t received_by_peer,
                            std::unique_ptr<WireCapture> capture) EXCLUDES(tx_mutex_);

  // In the reactor or after its end: drops all; no events any more.
  void Close() EXCLUDES(tx_mutex_);

  // Attended, with rings.
  Found Look() override EXCLUDES(tx_mutex_);
  bool Arm() override EXCLUDES(tx_mutex_);

 private:
  using Socket = boost::asio::generic::stream_protocol::socket;

  // System calls a turn. A sender leaves the rest of much to the reactor, which writes and reads in
  // turn: else the peer's answers would pile up there. It fills a ring, since the peer may take all
  // of it before this process' reactor runs.
  static constexpr int kCallsOfSender = 1;
  static constexpr int kCallsWithRings = 8;
  static constexpr int kReadsOfTurn = 4;
  // SO_RCVLOWAT in the midst of a payload, at most.
  static constexpr std::uint64_t kWakeBytes = 256 << 10;
  // Meta and payload of messages that are copied straight into a ring: shorter ones leave together.
  static constexpr std::size_t kStraightMin = 1024;
  static constexpr std::size_t kStraightRunsMax = 8;
  // Of a full ring, before it is written to again: one wake-up for several writes.
  static constexpr std::size_t RoomOf(Link link) { return RingBytesOf(link) / 4; }

  // See Cuts above.
  static constexpr std::uint64_t kOwedMax = 1 << 20;
  static constexpr std::chrono::milliseconds kOweTime{100};

  enum class ReadResult { kMore, kDrained, kOver };

  // What is read where a header comes next. From a socket all that has come, in one call; from a
  // ring, where calls cost little, not much of what may be a payload with a place of its own.
  static constexpr std::size_t HeaderReadOf(Link link, bool rings) {
    return link == Link::kBulk ? kHeaderBytes : rings ? 512 : Receiver::kBufferBytes;
  }

  // With rings, from any thread.
  void BeAttended();
  void OnReadable();
  void ArmBell() EXCLUDES(tx_mutex_);
  void ReadSoon();
  void OnBell();
  void OnHangUp();
  ReadResult ReadTurn();
  [[nodiscard]] bool RestComesNow() const;
  Transferred Receive(const iovec* runs, std::size_t count);
  ReadResult ReadOnce();
  // Takes the channel's socket and streams.
  void Assign(Channel& channel);
  bool Deliver(Message&& message) EXCLUDES(tx_mutex_);
  void OnComplete(const Message& message, std::uint64_t bytes);
  void ConfirmInTime();
  void TakeArrivals() EXCLUDES(tx_mutex_);
  void SpeakAfter(std::chrono::milliseconds period);
  void LookAfter(std::chrono::milliseconds period);
  // False: the peer is overdue, and the connection has ended.
  bool LookForConfirmations() EXCLUDES(tx_mutex_);
  // Something is to be written.
  bool HasMoreLocked() const REQUIRES(tx_mutex_) {
    return queue_.may_go() || Unsent() || owes_word_.load(std::memory_order_relaxed);
  }
  // Of an error of reading or writing.
  std::string TextOf(int error) const;
  void Broken(int error);
  void End(bool clean, const std::string& why);
  void Refuse(const std::string& why) EXCLUDES(tx_mutex_);
  void ArmRead();
  bool SendSmall(const Message& message, bool now) EXCLUDES(tx_mutex_);
  // Calls add(queue_) for each of `count` small messages. True: they wait, and are the first that
  // do.
  template <class Add>
  bool Pack(std::size_t count, Add add, bool now) EXCLUDES(tx_mutex_);
  // A message that would only be copied into a pack and from there into the ring goes there at
  // once, if nothing is before it. False: it does not.
  bool WriteToRing(const Message& message) EXCLUDES(tx_mutex_);
  void PumpAsSender() EXCLUDES(tx_mutex_);
  // At most so many calls. True: the rest is left to the reactor.
  bool Pump(int calls) EXCLUDES(tx_mutex_);
  Transferred Transmit(iovec* runs, std::size_t count);
  Transferred OverRings(std::optional<SharedRings::Moved> moved) const;
  // Encrypted bytes wait for room in the socket.
  bool Unsent() const { return tls_ != nullptr && tls_->unsent(); }
  void EndSendingLocked() REQUIRES(tx_mutex_);
  // False: there is room already.
  bool ArmWriteLocked() REQUIRES(tx_mutex_);
  void LeaveRestLocked() REQUIRES(tx_mutex_);
  bool GoOnWriting() EXCLUDES(tx_mutex_);
  void FailLocked(int error, SendQueue::Ended* ended) REQUIRES(tx_mutex_);

  Reactor& reactor_;
  Socket socket_;  // its waits are armed under tx_mutex_
  int fd_;
  const std::unique_ptr<SharedRings> rings_;    // null: the bytes go through the socket
  boost::asio::posix::stream_descriptor bell_;  // with rings; as socket_
  const UniqueFd peer_bell_;
  // Null: the bytes go as they are. Its lock may be taken under tx_mutex_.
  std::unique_ptr<TlsStream> tls_;
  const Link link_;
  TcpCounts& counts_;
  std::unique_ptr<WireCapture> capture_;              // null: nothing is captured; as socket_
  std::uint32_t epoch_ = 0;                           // as socket_
  std::size_t write_bytes_ = SendQueue::kFetchBytes;  // at once, at most; as socket_

  // The reactor's.
  Receiver receiver_;
  Events events_;
  bool ended_ = false;
  int low_water_mark_ = 1;
  boost::asio::steady_timer owe_timer_;
  bool owe_timer_runs_ = false;
  boost::asio::steady_timer speak_timer_;
  boost::asio::steady_timer look_timer_;
  std::chrono::milliseconds confirm_limit_{0};
  ConfirmWatch confirm_watch_;
  std::uint64_t heard_ = 0;          // bytes
  std::uint64_t heard_in_full_ = 0;  // of complete messages
  std::uint64_t owed_bytes_ = 0;     // of messages since the peer was told last
  std::uint64_t told_before_ = 0;    // told_ at that time
  std::uint64_t arrived_there_ = 0;  // of what was sent; queue_ knows it but for the last read's
  bool arrivals_are_new_ = false;
  bool hung_up_ = false;  // with rings: the peer has ended; what is in its ring is still read

  Mutex tx_mutex_;
  CondVar written_;
  SendQueue queue_ GUARDED_BY(tx_mutex_);
  std::uint64_t sent_ GUARDED_BY(tx_mutex_) = 0;  // bytes
  bool writing_ GUARDED_BY(tx_mutex_) = false;
  bool write_armed_ GUARDED_BY(tx_mutex_) = false;
  std::atomic<bool> wants_room_{false};     // written under tx_mutex_
  std::atomic<std::uint64_t> received_{0};  // written in the reactor
  std::atomic<std::uint64_t> told_{0};  // of received_ what the peer has been told; the writer's
  std::atomic<bool> owes_word_{false};  // set in the reactor, taken back by the writer
  bool cut_ GUARDED_BY(tx_mutex_) = false;
  bool finishing_ GUARDED_BY(tx_mutex_) = false;
  bool told_end_ GUARDED_BY(tx_mutex_) = false;  // to TLS
  bool tx_closed_ GUARDED_BY(tx_mutex_) = false;
  int tx_error_ GUARDED_BY(tx_mutex_) = 0;  // why sending failed, as errno
};

}  // namespace heddle::kvstore::dist
