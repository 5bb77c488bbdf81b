#include "benchmarks/dist/futex_peer.h"

#include <climits>

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/check.h"

namespace heddle::bench_dist {
namespace {

void* SharedPage() {
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(page != MAP_FAILED);
  return page;
}

void SleepWhile(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  while (word.load(std::memory_order_acquire) == value) {
    syscall(SYS_futex, &word, FUTEX_WAIT, value, nullptr, nullptr, 0);
  }
}

void Wake(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  word.store(value, std::memory_order_release);
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

FutexEcho::FutexEcho() : words_(new (SharedPage()) Words{}) {
  process_ = std::make_unique<Process>([this] {
    for (std::uint32_t count = 0;; ++count) {
      SleepWhile(words_->asked, count);
      Wake(words_->answered, count + 1);
    }
  });
}

FutexEcho::~FutexEcho() {
  process_.reset();
  munmap(words_, 4096);
}

void FutexEcho::RoundTrip() {
  Wake(words_->asked, count_ + 1);
  SleepWhile(words_->answered, count_++);
}

}  // namespace heddle::bench_dist
