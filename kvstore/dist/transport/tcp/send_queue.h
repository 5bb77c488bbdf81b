// What one connection still has to send, in the order in which it goes.
//
// An *item* is one long message (header and meta, then the payload where it lies), or a *pack* of
// small messages that were copied one behind another. Items leave by priority, then age. Bytes are
// fetched with Fetch, written, and reported with Advance:
//   (Q1) An item of which a byte has been fetched and reported stays in front until it is complete:
//        messages do not interleave on the wire.
//   (Q2) Between a Fetch and its Advance the memory that was fetched stays as it is; only Add* and
//        Advance are called. Otherwise the front may change by what has been added.
//   (Q3) The open pack is a part of the queue as soon as a Fetch would otherwise find nothing; so
//        what is small leaves with what is written anyway.
// A pack counts as its most urgent message: the others in it gain by that, which costs 32 KiB.
//
// Where the connection may be cut and made again, what is complete is *retained* until the peer has
// confirmed it. Both ends count the messages of a stream, so a number says which ones arrived.
//   (Q4) Retained items, then going_, then the rest: this is the order of the stream. Message
//        number confirmed_ is the first of the retained ones, or of going_ if there are none.
//   (Q5) Small messages are retained in packs of kPackBytes; only whole packs are let go.
//   (Q7) While more than retained_max bytes are retained the queue is *held*, as it would be by a
//        peer that does not read: what has begun is completed, and what the peer's messages are
//        confirmed with goes, so that two queues never hold one another; nothing else does.
// The peer's messages are confirmed by what goes anyway: the first header of each item says how
// many more have come (Message::arrivals), or an item of its own does (Kind::kReceived).
//   (Q6) said_ is what the items of which a byte has left say, together: what the peer will know,
//        if the connection is not cut. The header of an item of which none has left is written at
//        each Fetch; those of the other messages in a pack say nothing.
// Threads: none of its own; the connection's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sys/uio.h>

#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/transport/transport.h"

namespace heddle::kvstore::dist {

class SendQueue {
 public:
  // Meta and payload of a message that is copied into a pack; messages and bytes of a pack.
  static constexpr std::size_t kSmallMax = Transport::kCopiedMax;
  static constexpr std::size_t kPackMessages = 128;
  static constexpr std::size_t kPackBytes = 32 << 10;
  static constexpr std::size_t kSparesMax = 4;
  // An honest peer confirms after a MiB or so; more than that is what sockets may hold.
  static constexpr std::uint64_t kRetainedMax = std::uint64_t{64} << 20;
  // Of small messages, before an honest peer has confirmed the first of them whatever it sends.
  static constexpr std::uint64_t kUnconfirmedMax = std::uint64_t{4} << 20;
  // What one Fetch gives, unless told otherwise.
  static constexpr std::size_t kFetchBytes = 128 << 10;

  struct Item {
    std::int32_t priority = 0;
    std::uint64_t age = 0;        // counts from the oldest
    Transport::SendId id = 0;     // 0: a pack
    std::vector<std::byte> head;  // header and meta, or the pack
    std::size_t messages = 1;
    Payload payload;
    std::function<void()> sent;
    bool begun = false;          // a byte of the message has been sent, or may have been
    bool control = false;        // only says what has come: neither counted nor retained
    std::uint64_t arrivals = 0;  // so many more have come than items before it say
    std::size_t bytes_sent = 0;

    std::size_t bytes() const { return head.size() + payload.bytes(); }
  };
  // What is over: for Release.
  using Ended = std::vector<std::unique_ptr<Item>>;

  static bool IsSmall(const Message& message) { return message.body_bytes() <= kSmallMax; }

  // Calls `sent`. Without locks: owners of payloads may do anything.
  static void Release(Ended ended);

  explicit SendQueue(bool retains, std::uint64_t retained_max = kRetainedMax)
      : retains_(retains), retained_max_(retained_max) {}

  // Copies a small message. True: the pack is full, or was closed for this message: it wants to
  // go.
  bool AddSmall(const Message& message);
  void Add(Transport::SendId id, Message message, std::function<void()> sent);
  // So many messages of the peer have come; never less than before. What leaves from now on says
  // so. Not between Fetch and Advance.
  void Arrived(std::uint64_t messages) { arrived_ = messages; }
  // If nothing that waits can say it all: adds a message that does, before all else that has not
  // begun. Not between Fetch and Advance.
  void ConfirmArrivals();
  // What has been said.
  std::uint64_t said() const { return said_; }

  bool empty() const { return going_.empty() && heap_.empty() && pack_ == nullptr; }
  bool held() const { return retained_bytes_ > retained_max_; }  // Q7
  // Something is there to be fetched.
  bool may_go() const {
    return held() ? !going_.empty() && GoesThoughHeld(*going_.front()) : !empty();
  }
  // Messages of the open pack, if there is nothing else; 0 if there is.
  std::size_t only_packed() const {
    return going_.empty() && heap_.empty() && pack_ != nullptr ? pack_->messages : 0;
  }

  // Fills at most `count` runs of together at most `bytes_max`; returns how many. Only if
  // may_go().
  std::size_t Fetch(iovec* runs, std::size_t count, std::size_t bytes_max = kFetchBytes);
  void Advance(std::size_t bytes, Ended* ended);

  // See Transport::Raise. What was fetched keeps its place.
  void Raise(Transport::SendId id, std::int32_t priority);
  // See Transport::Revoke. Not between Fetch and Advance.
  Revoked Revoke(Transport::SendId id, Ended* ended);
  // The peer says that so many messages have arrived.
  void Confirm(std::uint64_t received, Ended* ended);
  // Nothing is to be sent, or to be confirmed.
  bool all_confirmed() const { return empty() && retained_.empty(); }
  // Of what is retained the peer has to confirm some, though nothing more is sent to it.
  bool owed() const;
  std::uint64_t confirmed() const { return confirmed_; }
  // As the peer has said last.
  std::uint64_t said_received() const { return said_received_; }
  // The connection is cut: what of going_ has left is not known.
  void Cut();
  // After Cut, on the next connection: the peer has received so many messages, all others are sent
  // anew; and it knows of all that have come. False: that cannot be.
  [[nodiscard]] bool Restart(std::uint64_t received, Ended* ended);
  // All there is.
  void Clear(Ended* ended);

 private:
  static bool Later(const std::unique_ptr<Item>& a, const std::unique_ptr<Item>& b) {
    return a->priority != b->priority ? a->priority < b->priority : a->age > b->age;
  }
  static bool GoesThoughHeld(const Item& item) { return item.control || item.bytes_sent > 0; }
  void Push(std::unique_ptr<Item> item);
  void ClosePack();
  std::unique_ptr<Item> TakeSpare();
  // A pack that is over.
  void Recycle(std::unique_ptr<Item> pack);
  void End(std::unique_ptr<Item> item, Ended* ended);
  void Retain(std::unique_ptr<Item> item);
  // Brings the next item from the heap to going_; false if there is none.
  bool TakeNext();
  // In the header of an item of which nothing has left.
  void Say(std::uint64_t arrivals, Item* item);
  bool OnlyRestOfOneWaits() const {
    return heap_.empty() && pack_ == nullptr &&
           (going_.empty() || (going_.size() == 1 && going_.front()->bytes_sent > 0));
  }
  void PutBackWhatIsOvertaken();

  const bool retains_;
  const std::uint64_t retained_max_;
  std::deque<std::unique_ptr<Item>> retained_;
  std::uint64_t retained_bytes_ = 0;
  std::uint64_t confirmed_ = 0;
  // The last word of the peer, which may be ahead of what Advance has been told of.
  std::uint64_t said_received_ = 0;
  std::uint64_t arrived_ = 0;
  std::uint64_t said_ = 0;
  std::deque<std::unique_ptr<Item>> going_;    // fetched from; of the first, some may be sent
  std::vector<std::unique_ptr<Item>> heap_;    // by Later
  std::unique_ptr<Item> pack_;                 // open; has a message
  std::vector<std::unique_ptr<Item>> spares_;  // empty packs, for the next
  std::uint64_t next_age_ = 0;
};

}  // namespace heddle::kvstore::dist
