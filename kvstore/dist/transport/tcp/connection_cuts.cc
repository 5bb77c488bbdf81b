// Connections that are cut, and what they say so that they can be resumed (connection.h, Cuts).
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <boost/asio/post.hpp>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "base/mutex.h"
#include "kvstore/dist/protocol/wire.h"
#include "kvstore/dist/protocol/words.h"
#include "kvstore/dist/transport/tcp/connection.h"

namespace heddle::kvstore::dist {
namespace {

// The connection has failed, rather than the peer ended.
bool IsCut(int error) {
  switch (error) {
    case ECONNRESET:
    case ECONNABORTED:
    case ENETRESET:
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN:
      return true;
    default:
      return false;
  }
}

}  // namespace

std::uint64_t Connection::progress() {
  MutexLock lock(tx_mutex_);
  return received() + queue_.confirmed();
}

bool Connection::idle() {
  MutexLock lock(tx_mutex_);
  return queue_.all_confirmed();
}

void Connection::Cut() {
  {
    MutexLock lock(tx_mutex_);
    cut_ = true;
    shutdown(fd_, SHUT_RDWR);  // ends a write in progress
    while (writing_) written_.Wait(tx_mutex_);
    ++epoch_;  // the writer may have armed a wait with the earlier one
    queue_.Cut();
    boost::system::error_code ignored;
    socket_.close(ignored);
    fd_ = -1;
  }
  receiver_.Restart();
}

bool Connection::Resume(Channel channel, std::uint64_t received_by_peer,
                        std::unique_ptr<WireCapture> capture) {
  SendQueue::Ended ended;
  bool possible = false;
  {
    MutexLock lock(tx_mutex_);
    queue_.Arrived(received());
    possible = queue_.Restart(received_by_peer, &ended);
    if (possible) {
      Assign(channel);
      capture_ = std::move(capture);
      write_armed_ = false;
      tx_error_ = channel.told_reset ? ECONNRESET : 0;
      cut_ = false;
    }
  }
  SendQueue::Release(std::move(ended));
  if (!possible) return false;
  arrived_there_ = received_by_peer;
  told_ = told_before_ = received();  // while they connected
  owed_bytes_ = 0;
  owes_word_ = false;
  low_water_mark_ = 1;
  confirm_watch_.Reset();
  ReadSoon();
  Pump(1);
  return true;
}

// The reactor's.
void Connection::OnComplete(const Message& message, std::uint64_t bytes) {
  if (rings_ != nullptr) return;
  heard_in_full_ += kHeaderBytes + bytes;
  arrivals_are_new_ = arrivals_are_new_ || message.arrivals > 0 || message.kind == Kind::kReceived;
  arrived_there_ += message.arrivals;
  if (message.kind == Kind::kReceived) {
    arrived_there_ = message.sequence;
    return;
  }
  received_.store(received() + 1, std::memory_order_relaxed);
  const std::uint64_t told = told_.load(std::memory_order_relaxed);
  if (std::exchange(told_before_, told) != told) owed_bytes_ = 0;
  owed_bytes_ += kHeaderBytes + bytes;
  // release: the writer that sees it counts this message
  if (owed_bytes_ >= kOwedMax) owes_word_.store(true, std::memory_order_release);
  if (bytes > SendQueue::kSmallMax) ConfirmInTime();
}

void Connection::TakeArrivals() {
  if (!std::exchange(arrivals_are_new_, false)) return;
  SendQueue::Ended ended;
  bool goes_on = false;
  {
    MutexLock lock(tx_mutex_);
    const bool held = queue_.held();
    queue_.Confirm(arrived_there_, &ended);
    goes_on = held && !queue_.held();
  }
  SendQueue::Release(std::move(ended));
  if (goes_on) Pump(1);
}

void Connection::ConfirmInTime() {
  if (std::exchange(owe_timer_runs_, true)) return;
  owe_timer_.expires_after(kOweTime);
  owe_timer_.async_wait(
      [self = shared_from_this(), owed = received()](const boost::system::error_code& error) {
        self->reactor_.Awake();
        self->owe_timer_runs_ = false;
        if (error || self->ended_) return;
        const std::uint64_t told = self->told_.load(std::memory_order_relaxed);
        if (told == self->received()) return;
        if (told < owed) {
          self->owes_word_.store(true, std::memory_order_release);
          self->Pump(1);
        }
        self->ConfirmInTime();  // what is to say it may be taken back
      });
}

void Connection::SpeakEvery(std::chrono::milliseconds period) {
  boost::asio::post(reactor_.context(), [self = shared_from_this(), period] {
    self->reactor_.Awake();
    if (!self->ended_) self->SpeakAfter(period);
  });
}

void Connection::SpeakAfter(std::chrono::milliseconds period) {
  speak_timer_.expires_after(period);
  speak_timer_.async_wait(
      [self = shared_from_this(), period](const boost::system::error_code& error) {
        self->reactor_.Awake();
        if (error || self->ended_) return;
        self->owes_word_.store(true, std::memory_order_release);
        self->Pump(1);
        self->SpeakAfter(period);
      });
}

void Connection::ExpectConfirmations(std::chrono::milliseconds limit) {
  boost::asio::post(reactor_.context(), [self = shared_from_this(), limit] {
    self->reactor_.Awake();
    self->confirm_limit_ = limit;
    if (!self->ended_) self->LookAfter(limit / ConfirmWatch::kLooks);
  });
}

void Connection::LookAfter(std::chrono::milliseconds period) {
  look_timer_.expires_after(period);
  look_timer_.async_wait(
      [self = shared_from_this(), period](const boost::system::error_code& error) {
        self->reactor_.Awake();
        if (error || self->ended_) return;
        if (self->LookForConfirmations()) self->LookAfter(period);
      });
}

bool Connection::LookForConfirmations() {
  ConfirmWatch::Sight now{.heard = heard_, .heard_in_full = heard_in_full_};
  {
    MutexLock lock(tx_mutex_);
    if (cut_ || tx_closed_) return true;
    int in_flight = 0;
    if (ioctl(fd_, TIOCOUTQ, &in_flight) != 0) in_flight = 0;
    now.owes = queue_.owed();
    now.waits = !queue_.empty() || Unsent();
    now.confirmed = queue_.said_received();
    now.sent = sent_;
    now.in_flight = static_cast<std::uint64_t>(in_flight);
  }
  if (!confirm_watch_.Look(now)) return true;
  End(false, fmt::format("it is alive, but has {} nothing for {} of what was sent to it",
                         now.owes ? "confirmed" : "taken in", InSeconds(confirm_limit_)));
  return false;
}

// In the reactor, by the reading side.
void Connection::Broken(int error) {
  const std::string why = TextOf(error);
  if (!can_resume() || !IsCut(error)) {
    End(false, why);
    return;
  }
  Cut();
  events_.cut(why);
}

}  // namespace heddle::kvstore::dist
