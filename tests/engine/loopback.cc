#include "tests/engine/loopback.h"

#include <algorithm>
#include <cstdlib>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

namespace heddle::engine_test {
namespace {

void Require(bool good) {
  if (!good) std::abort();  // the test cannot go on
}

}  // namespace

Loopback::Loopback(OwnThread own_thread, int delay_us_max, std::uint64_t seed) {
  int sockets[2];
  Require(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  near_ = sockets[0];
  far_ = sockets[1];
  event_ = eventfd(0, EFD_NONBLOCK);
  Require(event_ >= 0);
  peer_ = std::thread([=, this] { Peer(delay_us_max, seed); });
  if (own_thread == OwnThread::kYes) own_ = std::thread([this] { RunOwnThread(); });
}

Loopback::~Loopback() {
  ReleaseAnswers();
  stopping_ = true;
  shutdown(near_, SHUT_WR);  // ends the peer once it has read what was sent
  peer_.join();
  Interrupt();
  if (own_.joinable()) own_.join();
  for (const int fd : {near_, far_, event_}) close(fd);
}

void Loopback::Send(std::function<void()> on_answer) {
  std::uint64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    id = static_cast<std::uint64_t>(++sent_);
    outstanding_.emplace(id, std::move(on_answer));
    // Under the mutex, so that ids are whole and in order. The tests send far less than fits.
    Require(send(near_, &id, sizeof(id), MSG_NOSIGNAL) == sizeof(id));
  }
  changed_.notify_all();
}

void Loopback::HoldAnswers() {
  const std::lock_guard lock(mutex_);
  holding_ = true;
}

void Loopback::ReleaseAnswers() {
  const std::lock_guard lock(mutex_);
  holding_ = false;
  changed_.notify_all();
}

void Loopback::Peer(int delay_us_max, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uint64_t id = 0;
  while (recv(far_, &id, sizeof(id), MSG_WAITALL) == sizeof(id)) {
    if (delay_us_max > 0) {
      const auto delay = static_cast<int>(random() % static_cast<unsigned>(delay_us_max + 1));
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !holding_; });
    }
    Require(send(far_, &id, sizeof(id), MSG_NOSIGNAL) == sizeof(id));
  }
}

bool Loopback::RunOne(Clock::time_point until) noexcept {
  Add(entered_, 1);
  Add(inside_, 1);
  const bool led = Poll(until);
  Add(inside_, -1);
  return led;
}

bool Loopback::Poll(Clock::time_point until) {
  if (led_.exchange(true)) return false;
  timespec timeout{};
  if (until != Clock::time_point::max()) {
    const auto left = std::max(until - Clock::now(), Clock::duration::zero());
    timeout.tv_sec = std::chrono::duration_cast<std::chrono::seconds>(left).count();
    timeout.tv_nsec = (left % std::chrono::seconds(1)).count();
  }
  pollfd fds[] = {{near_, POLLIN, 0}, {event_, POLLIN, 0}};
  const int ready = ppoll(fds, 2, until == Clock::time_point::max() ? nullptr : &timeout, nullptr);
  std::uint64_t ids[64];
  ssize_t bytes = 0;
  if (ready > 0 && (fds[0].revents & POLLIN) != 0) {
    bytes = recv(near_, ids, sizeof(ids), MSG_DONTWAIT);
    Require(bytes % static_cast<ssize_t>(sizeof(ids[0])) == 0);
  }
  if (ready > 0 && (fds[1].revents & POLLIN) != 0) {
    std::uint64_t count = 0;
    Require(read(event_, &count, sizeof(count)) == sizeof(count));
  }
  for (ssize_t i = 0; i < bytes / static_cast<ssize_t>(sizeof(ids[0])); ++i) {
    std::function<void()> on_answer;
    {
      const std::lock_guard lock(mutex_);
      on_answer = std::move(outstanding_.at(ids[i]));
      outstanding_.erase(ids[i]);
    }
    on_answer();
    Add(answered_, 1);
  }
  led_ = false;
  return true;
}

void Loopback::RunOwnThread() {
  while (!stopping_) {
    // Briefly each time: a waiting thread leads rather than this one.
    Poll(Clock::now() + std::chrono::microseconds(200));
    std::this_thread::yield();
  }
}

void Loopback::Interrupt() noexcept {
  Add(interrupts_, 1);
  const std::uint64_t one = 1;
  Require(write(event_, &one, sizeof(one)) == sizeof(one));
}

void Loopback::OnWait() noexcept { Add(announced_, 1); }

int Loopback::Get(const int& counter) {
  const std::lock_guard lock(mutex_);
  return counter;
}

void Loopback::Await(const int& counter, int count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return counter >= count; });
}

void Loopback::Add(int& counter, int amount) {
  const std::lock_guard lock(mutex_);
  counter += amount;
  changed_.notify_all();
}

}  // namespace heddle::engine_test
