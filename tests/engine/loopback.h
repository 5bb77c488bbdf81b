// A network of one peer that sends everything back: what the tests of WaitPoller wait for.
#pragma once

#include <heddle/wait_poller.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

namespace heddle::engine_test {

// Answers arrive on a socket, after delays that a seed draws, and are handled by whoever calls
// RunOne: one thread at a time, others get false.
class Loopback : public WaitPoller {
 public:
  enum class OwnThread { kNo, kYes };  // kYes: one runs the loop whenever nobody else does
  explicit Loopback(OwnThread own_thread = OwnThread::kNo, int delay_us_max = 0,
                    std::uint64_t seed = 0);
  ~Loopback() override;

  // Any thread. on_answer runs inside RunOne.
  void Send(std::function<void()> on_answer);

  // From now on the peer keeps its answers until ReleaseAnswers.
  void HoldAnswers();
  void ReleaseAnswers();

  bool RunOne(Clock::time_point until) noexcept override;
  void Interrupt() noexcept override;
  void OnWait() noexcept override;

  int sent() { return Get(sent_); }
  int answered() { return Get(answered_); }
  int entered() { return Get(entered_); }  // calls of RunOne, those of its own thread aside
  int inside() { return Get(inside_); }    // of them in progress
  int interrupts() { return Get(interrupts_); }
  int announced() { return Get(announced_); }  // calls of OnWait
  void AwaitSent(int count) { Await(sent_, count); }
  void AwaitEntered(int count) { Await(entered_, count); }
  void AwaitAnnounced(int count) { Await(announced_, count); }

 private:
  int Get(const int& counter);
  void Await(const int& counter, int count);
  void Add(int& counter, int amount);
  bool Poll(Clock::time_point until);
  void Peer(int delay_us_max, std::uint64_t seed);
  void RunOwnThread();

  int near_ = -1, far_ = -1, event_ = -1;
  std::atomic<bool> led_ = false;
  std::atomic<bool> stopping_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  int sent_ = 0, answered_ = 0, entered_ = 0, inside_ = 0, interrupts_ = 0, announced_ = 0;
  bool holding_ = false;
  std::unordered_map<std::uint64_t, std::function<void()>> outstanding_;
  std::thread peer_, own_;
};

}  // namespace heddle::engine_test
