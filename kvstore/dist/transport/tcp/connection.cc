#include "kvstore/dist/transport/tcp/connection.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include <boost/asio/post.hpp>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/log.h"
#include "base/pause.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/wire.h"

namespace heddle::kvstore::dist {
namespace {

constexpr std::size_t kRunsOfRead = 64;
constexpr std::size_t kRunsOfWrite = 256;
// With little unsent data in the socket it stays in the cache, and what is urgent overtakes.
constexpr int kUnsentBytes = 16 << 10;
// Congestion control within a host, where there is nothing to control: one that paces (BBR) sets a
// timer of the kernel for every few packets, which takes up to half of the time. Every Linux has
// this one.
constexpr std::string_view kUnpaced = "reno";
// In one write, at least: within a host a segment takes 64 KiB.
constexpr std::size_t kSegmentsMin = 4;
constexpr int kTcpRtoMaxMs = 44;  // TCP_RTO_MAX_MS of <linux/tcp.h>
constexpr int kRtoMaxMs = 1000;

std::string SystemText(int error) {
  if (error == EPROTO) return "it has broken the rules of the memory that it shares";
  return std::generic_category().message(error);
}

void SetOption(int fd, int level, int name, int value, const char* text) {
  if (setsockopt(fd, level, name, &value, sizeof value) != 0) {
    Log(LogLevel::kWarning, "set {} of a connection to {}: {}", text, value, SystemText(errno));
  }
}

using SocketName = int (*)(int fd, sockaddr* name, socklen_t* length);

// The address without the port; empty if it is not one of IP.
std::string IpAddressBytes(int fd, SocketName name_of) {
  sockaddr_in6 name{};
  socklen_t length = sizeof name;
  if (name_of(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0) return {};
  if (name.sin6_family == AF_INET6) {
    return {reinterpret_cast<const char*>(&name.sin6_addr), sizeof name.sin6_addr};
  }
  sockaddr_in v4{};
  std::memcpy(&v4, &name, sizeof v4);
  return v4.sin_family == AF_INET
             ? std::string(reinterpret_cast<const char*>(&v4.sin_addr), sizeof v4.sin_addr)
             : std::string();
}

// Both ends have the same address: there is no network between them.
bool IsWithinHost(int fd) {
  const std::string own = IpAddressBytes(fd, getsockname);
  return !own.empty() && own == IpAddressBytes(fd, getpeername);
}

// How much to write at once: whole segments, since what is left of one would leave as a packet of
// its own, which costs as much as a full one.
std::size_t WriteBytesOf(int fd) {
  int segment = 0;
  socklen_t length = sizeof segment;
  if (getsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &segment, &length) != 0 || segment <= 0) {
    return SendQueue::kFetchBytes;
  }
  const auto bytes = static_cast<std::size_t>(segment);
  return std::max(SendQueue::kFetchBytes / bytes, kSegmentsMin) * bytes;
}

void Count(std::atomic<std::uint64_t>& count, std::uint64_t by) {
  count.fetch_add(by, std::memory_order_relaxed);
}

}  // namespace

Connection::Connection(Reactor& reactor, Channel channel, Link link,
                       std::shared_ptr<BufferPool> pool, const WireLimits& limits,
                       TcpCounts& counts, std::unique_ptr<WireCapture> capture)
    : reactor_(reactor),
      socket_(reactor.context()),
      fd_(channel.socket.get()),
      rings_(std::move(channel.rings)),
      bell_(reactor.context()),
      peer_bell_(std::move(channel.peer_bell)),
      link_(link),
      counts_(counts),
      capture_(std::move(capture)),
      receiver_(
          std::move(pool), limits, HeaderReadOf(link, rings_ != nullptr),
          {.land = [this](const Message& header,
                          std::uint64_t bytes) { return events_.sink.land(header, bytes); },
           .deliver = [this](Message&& message) { return Deliver(std::move(message)); }},
          [this](const Message& message, std::uint64_t bytes) { OnComplete(message, bytes); }),
      owe_timer_(reactor.context()),
      speak_timer_(reactor.context()),
      look_timer_(reactor.context()),
      queue_(/*retains=*/rings_ == nullptr) {
  if (rings_ != nullptr) bell_.assign(channel.own_bell.Release());
  if (channel.told_reset) tx_error_ = ECONNRESET;
  Assign(channel);
}

void Connection::Assign(Channel& channel) {
  fd_ = channel.socket.get();
  tls_ = std::move(channel.tls);
  sockaddr_storage name{};
  socklen_t length = sizeof name;
  getsockname(fd_, reinterpret_cast<sockaddr*>(&name), &length);
  socket_.assign(boost::asio::generic::stream_protocol(name.ss_family, 0),
                 channel.socket.Release());
  boost::system::error_code ignored;
  socket_.native_non_blocking(true, ignored);
  if (rings_ != nullptr) return;
  write_bytes_ = WriteBytesOf(fd_);
  SetOption(fd_, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
  // Where the system knows it (Linux 6.15): after a cut the connection goes on within a second. By
  // default it would wait for as long again as the cut has lasted, while heartbeats are missed.
  setsockopt(fd_, IPPROTO_TCP, kTcpRtoMaxMs, &kRtoMaxMs, sizeof kRtoMaxMs);
  // Where the system refuses it, the connection goes as it would.
  if (IsWithinHost(fd_)) {
    setsockopt(fd_, IPPROTO_TCP, TCP_CONGESTION, kUnpaced.data(), kUnpaced.size());
  }
  if (link_ == Link::kBulk) {
    SetOption(fd_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kUnsentBytes, "TCP_NOTSENT_LOWAT");
  }
}

void Connection::Start(Events events) {
  events_ = std::move(events);
  if (tls_ == nullptr) {
    ArmRead();
  } else {
    ReadSoon();  // TLS may have taken the first messages from the socket already
  }
  if (rings_ == nullptr) return;
  ArmBell();
  BeAttended();
}

void Connection::BeAttended() {
  boost::asio::post(reactor_.context(), [self = shared_from_this()] {
    self->reactor_.Awake();
    if (!self->ended_) self->reactor_.Attend(self);
  });
}

// ---- Sending

bool Connection::Send(Transport::SendId id, Message message, std::function<void()> sent, bool now) {
  if (SendQueue::IsSmall(message)) {
    const bool waits = SendSmall(message, now);
    message.payload = {};
    if (sent) sent();
    return waits;
  }
  SendQueue::Ended dropped;
  bool idle = false;
  {
    MutexLock lock(tx_mutex_);
    queue_.Add(id, std::move(message), std::move(sent));
    if (tx_closed_ || finishing_) {
      queue_.Revoke(id, &dropped);
    } else {
      idle = !writing_ && !write_armed_ && !cut_;
    }
  }
  SendQueue::Release(std::move(dropped));
  if (idle) PumpAsSender();
  return false;
}

bool Connection::WriteToRing(const Message& message) {
  const auto payload = message.payload.runs();
  const std::uint64_t body_bytes = message.body_bytes();
  if (rings_ == nullptr || body_bytes < kStraightMin || payload.size() + 2 > kStraightRunsMax) {
    return false;
  }
  std::array<std::byte, kHeaderBytes> header;
  EncodeHeader(message, header);
  std::array<iovec, kStraightRunsMax> runs;
  std::size_t count = 0;
  const auto add = [&](std::span<const std::byte> run) {
    // Only read.
    if (!run.empty()) runs[count++] = {const_cast<std::byte*>(run.data()), run.size()};
  };
  add(header);
  add(std::as_bytes(std::span(message.meta)));
  for (const auto& run : payload) add(run);
  std::optional<SharedRings::Moved> moved;
  {
    MutexLock lock(tx_mutex_);
    if (writing_ || write_armed_ || tx_closed_ || finishing_ || !queue_.empty() ||
        !rings_->HasRoom(kHeaderBytes + body_bytes)) {
      return false;
    }
    moved = rings_->Write(runs.data(), count);
    if (!moved) return false;  // whoever pumps finds out, too
    if (capture_ != nullptr) capture_->Sent(runs.data(), moved->bytes);
  }
  OverRings(moved);
  Count(counts_.writes, 1);
  Count(counts_.bytes_sent, moved->bytes);
  return true;
}

template <class Add>
bool Connection::Pack(std::size_t count, Add add, bool now) {
  bool waits = false;
  {
    MutexLock lock(tx_mutex_);
    if (tx_closed_ || finishing_) return false;
    const bool full = add(queue_);
    // Behind a writer, or while the socket is full, they go with what is before them.
    const bool idle = !writing_ && !write_armed_ && !cut_;
    waits = idle && !full && !now && queue_.only_packed() == count;
    now = idle && (full || now);
  }
  if (now) PumpAsSender();
  return waits;
}

bool Connection::SendSmall(const Message& message, bool now) {
  if (WriteToRing(message)) return false;
  return Pack(
      1, [&](SendQueue& queue) { return queue.AddSmall(message); }, now);
}

bool Connection::SendTogether(std::span<const Outgoing> messages, bool now) {
  const auto straight = [this](const Outgoing& each) {
    return rings_ != nullptr && each.message.body_bytes() >= kStraightMin;
  };
  if (std::any_of(messages.begin(), messages.end(), straight)) {
    bool waits = false;
    for (const Outgoing& each : messages) waits |= SendSmall(each.message, now);
    return waits;
  }
  return Pack(
      messages.size(),
      [&](SendQueue& queue) {
        bool full = false;
        for (const Outgoing& each : messages) full |= queue.AddSmall(each.message);
        return full;
      },
      now);
}

void Connection::PumpAsSender() {
  if (rings_ == nullptr) {
    Pump(kCallsOfSender);
  } else if (Pump(kCallsWithRings)) {
    BeAttended();
  }
}

bool Connection::Pump(int calls) {
  bool left_rest = false;
  SendQueue::Ended ended;
  tx_mutex_.Lock();
  while (!writing_ && !tx_closed_ && !cut_ && !wants_room_ && HasMoreLocked()) {
    if (calls-- == 0) {
      LeaveRestLocked();
      left_rest = true;
      break;
    }
    // acquire: pairs with OnComplete
    const bool owes_word = owes_word_.load(std::memory_order_relaxed) &&
                           owes_word_.exchange(false, std::memory_order_acquire);
    queue_.Arrived(received());
    if (owes_word) queue_.ConfirmArrivals();
    std::array<iovec, kRunsOfWrite> runs;
    const std::size_t count =
        queue_.may_go() ? queue_.Fetch(runs.data(), runs.size(), write_bytes_) : 0;
    writing_ = true;
    tx_mutex_.Unlock();
    const auto [bytes, error] = Transmit(runs.data(), count);
    Count(counts_.writes, 1);
    if (capture_ != nullptr && bytes > 0) {
      capture_->Sent(runs.data(), static_cast<std::size_t>(bytes));
    }
    tx_mutex_.Lock();
    writing_ = false;
    written_.NotifyAll();
    if (bytes >= 0) {
      Count(counts_.bytes_sent, static_cast<std::uint64_t>(bytes));
      sent_ += static_cast<std::uint64_t>(bytes);
      queue_.Advance(static_cast<std::size_t>(bytes), &ended);
      told_.store(queue_.said(), std::memory_order_relaxed);
    } else if (error == EAGAIN || error == EWOULDBLOCK) {
      if (ArmWriteLocked()) break;
    } else if (error != EINTR) {
      FailLocked(error, &ended);
    }
  }
  if (finishing_ && !writing_ && !tx_closed_ && !cut_ && queue_.empty()) EndSendingLocked();
  tx_mutex_.Unlock();
  SendQueue::Release(std::move(ended));
  return left_rest;
}

void Connection::EndSendingLocked() {
  if (tls_ != nullptr && !std::exchange(told_end_, true)) tls_->Finish();
  if (Unsent()) {
    ArmWriteLocked();
    return;
  }
  tx_closed_ = true;
  shutdown(fd_, SHUT_WR);
}

Transferred Connection::Transmit(iovec* runs, std::size_t count) {
  if (rings_ != nullptr) return OverRings(rings_->Write(runs, count));
  return WriteTo(fd_, tls_.get(), runs, count);
}

Transferred Connection::OverRings(std::optional<SharedRings::Moved> moved) const {
  if (!moved) return {-1, EPROTO};
  // If the peer has gone, the reactor finds out.
  constexpr std::uint64_t kRing = 1;
  if (moved->wake_peer) std::ignore = write(peer_bell_.get(), &kRing, sizeof kRing);
  return moved->bytes > 0 ? Transferred{static_cast<ssize_t>(moved->bytes), 0}
                          : Transferred{-1, EAGAIN};
}

bool Connection::ArmWriteLocked() {
  if (rings_ != nullptr) {
    if (!rings_->AwaitRoom(RoomOf(link_))) return false;
    write_armed_ = true;
    wants_room_ = true;
    return true;
  }
  LeaveRestLocked();
  return true;
}

// The reactor goes on: it does look, or is told to.
void Connection::LeaveRestLocked() {
  if (rings_ != nullptr) {
    write_armed_ = true;
    wants_room_ = true;
    return;
  }
  if (std::exchange(write_armed_, true)) return;
  socket_.async_wait(Socket::wait_write,
                     [self = shared_from_this(), epoch = epoch_](const auto& error) {
                       self->reactor_.Awake();
                       if (epoch != self->epoch_) return;
                       {
                         MutexLock lock(self->tx_mutex_);
                         self->write_armed_ = false;
                       }
                       if (!error) self->Pump(1);
                     });
}

// The reading side finds out, since nothing can come any more, and reports it.
void Connection::FailLocked(int error, SendQueue::Ended* ended) {
  if (tx_error_ == 0) tx_error_ = error;
  if (can_resume() && error != EPROTO) {
    // If the reading side has been told of a reset, this one only hears that nothing goes any more.
    cut_ = true;
    queue_.Cut();
  } else {
    tx_closed_ = true;
    queue_.Clear(ended);
  }
  shutdown(fd_, SHUT_RDWR);
}

Revoked Connection::Revoke(Transport::SendId id) {
  SendQueue::Ended ended;
  Revoked result;
  {
    MutexLock lock(tx_mutex_);
    while (writing_) written_.Wait(tx_mutex_);
    result = queue_.Revoke(id, &ended);
  }
  SendQueue::Release(std::move(ended));
  return result;
}

void Connection::FinishSending() {
  {
    MutexLock lock(tx_mutex_);
    finishing_ = true;
  }
  PumpAsSender();
}

// ---- Receiving

void Connection::OnReadable() {
  const ReadResult result = ReadTurn();
  if (result == ReadResult::kDrained) ArmRead();
  if (result != ReadResult::kMore) return;
  ReadSoon();
}

// When others have had their turn.
void Connection::ReadSoon() {
  boost::asio::post(reactor_.context(), [self = shared_from_this(), epoch = epoch_] {
    self->reactor_.Awake();
    if (!self->ended_ && epoch == self->epoch_) self->OnReadable();
  });
}

Connection::ReadResult Connection::ReadTurn() {
  for (int i = 0; i < kReadsOfTurn; ++i) {
    const ReadResult result = ReadOnce();
    if (result == ReadResult::kOver) return result;
    // The rest of a short message has come, or is about to.
    if (result == ReadResult::kMore && link_ == Link::kUrgent && receiver_.rest() > 0) continue;
    if (result == ReadResult::kDrained && rings_ != nullptr && RestComesNow()) continue;
    // With rings Look does, when there is room.
    if (rings_ == nullptr) Pump(1);
    if (result == ReadResult::kDrained) return result;
    events_.between_reads();
    if (ended_ || fd_ < 0) return ReadResult::kOver;
  }
  return ReadResult::kMore;
}

// Short messages come through rings in two or three pieces, one right after the other.
bool Connection::RestComesNow() const {
  constexpr std::uint64_t kRestMax = std::uint64_t{8} << 10;
  constexpr int kPauses = 100;  // the writer may have lost its CPU
  if (receiver_.rest() == 0 || receiver_.rest() > kRestMax) return false;
  for (int i = 0; i < kPauses; ++i) {
    if (rings_->HasBytes()) return true;
    Pause();
  }
  return false;
}

void Connection::ArmBell() {
  MutexLock lock(tx_mutex_);
  bell_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                   [self = shared_from_this()](const boost::system::error_code& error) {
                     self->reactor_.Awake();
                     if (!error && !self->ended_) self->OnBell();
                   });
}

void Connection::OnBell() {
  reactor_.Attend(shared_from_this());
  Look();  // first what it rang for
  if (ended_) return;
  std::uint64_t count = 0;
  std::ignore = read(bell_.native_handle(), &count, sizeof count);
  ArmBell();
}

// Nothing is sent through the Unix socket: this is its end.
void Connection::OnHangUp() {
  hung_up_ = true;
  reactor_.Attend(shared_from_this());
}

Connection::Found Connection::Look() {
  const bool wrote = wants_room_.load(std::memory_order_relaxed) && GoOnWriting();
  const bool reads = hung_up_ || rings_->HasBytes();
  if (reads) ReadTurn();
  if (!wrote && !reads) return Found::kNothing;
  return link_ == Link::kBulk ? Found::kStream : Found::kSomething;
}

bool Connection::GoOnWriting() {
  {
    MutexLock lock(tx_mutex_);
    if (!wants_room_ || !rings_->HasRoom(RoomOf(link_))) return false;
    write_armed_ = false;
    wants_room_ = false;
  }
  Pump(1);
  return true;
}

bool Connection::Arm() {
  if (wants_room_.load(std::memory_order_relaxed)) {
    MutexLock lock(tx_mutex_);
    if (wants_room_ && !rings_->AwaitRoom(RoomOf(link_))) return false;
  }
  // In the midst of a long payload one wake-up for much of it.
  const std::uint64_t rest = receiver_.rest();
  static_assert(kWakeBytes <= RingBytesOf(Link::kBulk) / 2);  // else the peer might wait for room
  const bool long_rest = link_ == Link::kBulk && rest > 0;
  return !hung_up_ && rings_->AwaitBytes(long_rest ? std::min(rest, kWakeBytes) : 1);
}

void Connection::Poll() {
  while (!ended_ && fd_ >= 0 && ReadOnce() == ReadResult::kMore) continue;
}

Connection::ReadResult Connection::ReadOnce() {
  std::array<iovec, kRunsOfRead> runs;
  const std::size_t count = receiver_.Prepare(runs.data(), runs.size());
  std::size_t wanted = 0;
  for (std::size_t i = 0; i < count; ++i) wanted += runs[i].iov_len;
  const auto [bytes, error] = Receive(runs.data(), count);
  Count(counts_.reads, 1);
  if (capture_ != nullptr && bytes > 0) {
    capture_->Received(runs.data(), static_cast<std::size_t>(bytes));
  }
  if (bytes > 0) {
    Count(counts_.bytes_received, static_cast<std::uint64_t>(bytes));
    heard_ += static_cast<std::uint64_t>(bytes);
  }
  const std::string wrong = receiver_.Commit(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  TakeArrivals();
  if (ended_) return ReadResult::kOver;
  if (!wrong.empty()) {
    Refuse("you sent " + wrong);
    End(false, "it sent " + wrong);
    return ReadResult::kOver;
  }
  if (bytes > 0) {
    // Less than there was room for: that was all.
    return static_cast<std::size_t>(bytes) < wanted ? ReadResult::kDrained : ReadResult::kMore;
  }
  if (bytes == 0) {
    int tx_error = 0;
    {
      MutexLock lock(tx_mutex_);
      // A socket tells of a reset once: to a write in progress, perhaps.
      while (writing_) written_.Wait(tx_mutex_);
      tx_error = tx_error_;
    }
    if (tx_error != 0) {
      Broken(tx_error);
    } else if (receiver_.between_messages()) {
      End(true, "it has closed the connection");
    } else {
      End(false, "it has closed the connection in the middle of a message");
    }
    return ReadResult::kOver;
  }
  if (error == EINTR) return ReadResult::kMore;
  if (error == EAGAIN || error == EWOULDBLOCK) return ReadResult::kDrained;
  Broken(error);
  return ReadResult::kOver;
}

Transferred Connection::Receive(const iovec* runs, std::size_t count) {
  if (rings_ != nullptr) {
    const Transferred received = OverRings(rings_->Read(runs, count, receiver_.store_mode()));
    return hung_up_ && received.error == EAGAIN ? Transferred{} : received;
  }
  return ReadFrom(fd_, tls_.get(), runs, count);
}

bool Connection::Deliver(Message&& message) {
  if (ended_) return false;
  if (message.kind == Kind::kReceived) return true;
  Count(counts_.messages_received, 1);
  return events_.sink.deliver(std::move(message)) && !ended_;
}

// As far as the socket takes it, and unless the peer has not had all of a message before it.
void Connection::Refuse(const std::string& why) {
  Message refusal{.kind = Kind::kRefused, .priority = std::numeric_limits<std::int32_t>::max()};
  refusal.meta = Encode(ErrorBody{.code = ErrorBody::Code::kNetwork, .message = why});
  SendSmall(refusal, /*now=*/true);
}

std::string Connection::TextOf(int error) const {
  return error == EPROTO && tls_ != nullptr ? tls_->why() : SystemText(error);
}

void Connection::End(bool clean, const std::string& why) {
  ended_ = true;
  if (rings_ != nullptr) reactor_.Forget(this);
  events_.ended(clean, why);
}

void Connection::ArmRead() {
  // In the midst of a long payload one wake-up for much of it.
  const std::uint64_t rest = receiver_.rest();
  // Of which TLS may have read a part of a record.
  const std::uint64_t read_ahead = tls_ != nullptr ? TlsStream::kRecordBytes : 0;
  const int mark = link_ == Link::kBulk && rest > read_ahead && rings_ == nullptr
                       ? static_cast<int>(std::min(rest - read_ahead, kWakeBytes))
                       : 1;
  if (mark != low_water_mark_) {
    low_water_mark_ = mark;
    SetOption(fd_, SOL_SOCKET, SO_RCVLOWAT, mark, "SO_RCVLOWAT");
  }
  MutexLock lock(tx_mutex_);
  socket_.async_wait(Socket::wait_read,
                     [self = shared_from_this(), epoch = epoch_](const auto& error) {
                       self->reactor_.Awake();
                       if (error || self->ended_ || epoch != self->epoch_) return;
                       self->rings_ == nullptr ? self->OnReadable() : self->OnHangUp();
                     });
}

void Connection::Close() {
  ended_ = true;
  if (rings_ != nullptr) reactor_.Forget(this);
  SendQueue::Ended ended;
  {
    MutexLock lock(tx_mutex_);
    tx_closed_ = true;
    shutdown(fd_, SHUT_RDWR);  // ends a write in progress
    while (writing_) written_.Wait(tx_mutex_);
    queue_.Clear(&ended);
    boost::system::error_code ignored;
    socket_.close(ignored);
    bell_.close(ignored);
  }
  owe_timer_.cancel();
  speak_timer_.cancel();
  look_timer_.cancel();
  SendQueue::Release(std::move(ended));
}

}  // namespace heddle::kvstore::dist
