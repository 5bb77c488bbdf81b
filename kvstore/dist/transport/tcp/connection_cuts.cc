// Connections that are cut, and what they say so that they can be resumed (connection.h, Cuts).
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <boost/asio/post.hpp>
#include <sys/socket.h>

#include "base/mutex.h"
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
    possible = queue_.Restart(received_by_peer, &ended);
    if (possible) {
      Assign(channel);
      capture_ = std::move(capture);
      write_armed_ = false;
      tx_error_ = 0;
      cut_ = false;
      owes_ = Owes::kNothing;  // the peer was told while it connected
    }
  }
  SendQueue::Release(std::move(ended));
  if (!possible) return false;
  owed_bytes_ = 0;
  owes_since_ = false;
  low_water_mark_ = 1;
  ReadSoon();
  Pump(1);
  return true;
}

// The reactor's.
void Connection::OnComplete(const Message& message, std::uint64_t bytes) {
  if (rings_ != nullptr || message.kind == Kind::kReceived) return;
  received_.store(received() + 1, std::memory_order_relaxed);
  if (owes_since_ && owes_.load(std::memory_order_relaxed) == Owes::kNothing) {
    owes_since_ = false;
    owed_bytes_ = 0;
  }
  owed_bytes_ += bytes;
  if (bytes <= SendQueue::kSmallMax && owed_bytes_ < kOwedSmall) return;
  owes_since_ = true;
  // release: the writer that sees it counts this message
  owes_.store(owed_bytes_ < kOwedMax ? Owes::kWithNextWrite : Owes::kNow,
              std::memory_order_release);
  ConfirmInTime();
}

void Connection::ConfirmInTime() {
  if (std::exchange(owe_timer_runs_, true)) return;
  owe_timer_.expires_after(kOweTime);
  owe_timer_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    self->reactor_.Awake();
    self->owe_timer_runs_ = false;
    if (error || self->ended_ || self->owes_.load(std::memory_order_relaxed) == Owes::kNothing) {
      return;
    }
    self->owes_.store(Owes::kNow, std::memory_order_release);
    self->Pump(1);
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
        self->owes_since_ = true;
        self->owes_.store(Owes::kNow, std::memory_order_release);
        self->Pump(1);
        self->SpeakAfter(period);
      });
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
