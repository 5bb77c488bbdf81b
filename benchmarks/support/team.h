// A fixed team of threads, the caller one of them; between calls they spin, so that starting them
// costs nothing.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace heddle::bench {

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int i = 1; i < size; ++i) {
      threads_.emplace_back([this, i] { Serve(i); });
    }
  }
  ~Team() {
    work_ = nullptr;
    ++generation_;
    for (std::thread& thread : threads_) thread.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs work(i) on thread i.
  void Run(std::function<void(int)> work) {
    work_ = std::move(work);
    pending_ = size_ - 1;
    ++generation_;
    work_(0);
    while (pending_.load() > 0) std::this_thread::yield();
  }

 private:
  void Serve(int index) {
    for (int seen = 0;;) {
      while (generation_.load() == seen) std::this_thread::yield();
      ++seen;
      if (!work_) return;
      work_(index);
      --pending_;
    }
  }

  const int size_;
  std::function<void(int)> work_;  // published by generation_
  std::atomic<int> generation_{0};
  std::atomic<int> pending_{0};
  std::vector<std::thread> threads_;
};

}  // namespace heddle::bench
