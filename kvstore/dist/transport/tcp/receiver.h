// Bytes of one connection become messages.
//
// The connection asks with Prepare where the next bytes shall go, reads, and says with Commit how
// many came. Payloads go straight to their Landing, or into pooled memory; headers and small
// messages go through a buffer. Behind a payload the reading looks ahead: by a header if it is long
// (what follows a long payload is likely another one, which must not land in the buffer), else by a
// buffer full (all small messages that have come, in one call).
//
// Bytes of peers are not trusted: memory is taken as bytes come, at most a few MiB ahead, whatever
// sizes a header names; sizes above the limits end the connection.
// Threads: one call at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sys/uio.h>

#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/protocol/wire.h"
#include "kvstore/dist/transport/tcp/buffer_pool.h"
#include "kvstore/dist/transport/transport.h"

namespace heddle::kvstore::dist {

class Receiver {
 public:
  static constexpr std::size_t kBufferBytes = 64 << 10;
  // Of one read, at most.
  static constexpr std::size_t kReadBytes = 128 << 10;
  // Payloads above this are followed by the lookahead of a header.
  static constexpr std::size_t kLongPayload = 64 << 10;

  // What becomes of messages. The functions must not call the receiver.
  struct Sink {
    std::function<std::shared_ptr<Landing>(const Message& header, std::uint64_t payload_bytes)>
        land;
    // False: nothing more is wanted, Commit returns.
    std::function<bool(Message&& message)> deliver;
  };

  // A message is complete, with so many bytes behind its header, and will be delivered.
  using OnComplete = std::function<void(const Message& message, std::uint64_t bytes)>;

  // `header_read`: what a read takes where a header comes next, from kHeaderBytes, in the
  // expectation of a long payload, to kBufferBytes.
  Receiver(std::shared_ptr<BufferPool> pool, const WireLimits& limits, std::size_t header_read,
           Sink sink, OnComplete on_complete);

  // Fills at most `count` (2 or more) runs; returns how many. The memory is held until Commit.
  std::size_t Prepare(iovec* runs, std::size_t count);
  // `bytes` have been read into the runs of the last Prepare; 0 for none. Calls the sink. Returns
  // what is wrong with the bytes, in words; empty: nothing.
  [[nodiscard]] std::string Commit(std::size_t bytes);

  // A new connection follows: what had come of a message that is not complete comes again.
  void Restart();

  // How many bytes are missing to the end of the payload that is being received; 0 outside of one.
  std::uint64_t rest() const { return state_ == State::kPayload ? payload_bytes_ - received_ : 0; }
  // How what is read into the runs of the last Prepare is best stored.
  ops::StoreMode store_mode() const {
    return reading_landing_ ? landing_->store_mode() : ops::StoreMode::kCached;
  }
  // Nothing of a message has come that is not complete.
  bool between_messages() const { return state_ == State::kHeader && buffered() == 0; }

 private:
  enum class State { kHeader, kMeta, kPayload };

  std::size_t buffered() const { return end_ - begin_; }
  // The next `bytes` of the payload; as many runs as there is room for.
  std::size_t PreparePayload(iovec* runs, std::size_t count, std::size_t room);
  void BeginPayload();
  void GrowPayload();
  std::string Parse();
  std::string TakeHeader();
  void TakeMeta();
  void TakePayload();
  void SkipFullRuns();
  void EndPayload();
  bool Deliver();

  const std::shared_ptr<BufferPool> pool_;
  const WireLimits limits_;
  const std::size_t header_read_;
  const Sink sink_;
  const OnComplete on_complete_;

  State state_ = State::kHeader;
  Message message_;
  std::uint32_t meta_bytes_ = 0;
  std::uint64_t payload_bytes_ = 0;
  std::uint64_t received_ = 0;  // of the payload

  // What has been read and not looked at lies in [begin_, end_).
  std::vector<std::byte> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::size_t prepared_payload_ = 0;  // bytes of the last Prepare that belong to the payload

  // Where the payload goes: runs_, of which those before run_ are full, and of that one run_bytes_.
  // With a landing those are its runs; else they are in chunks_, which grow as bytes come.
  std::shared_ptr<Landing> landing_;
  bool reading_landing_ = false;  // BeginRead was called
  bool dropping_ = false;         // the landing was given up: what comes goes to the trash
  std::vector<std::span<std::byte>> runs_;
  std::size_t run_ = 0;
  std::size_t run_bytes_ = 0;
  std::vector<std::shared_ptr<std::byte>> chunks_;
  std::uint64_t chunk_bytes_ = 0;  // of all chunks
};

}  // namespace heddle::kvstore::dist
