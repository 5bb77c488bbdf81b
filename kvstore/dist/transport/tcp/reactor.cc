#include "kvstore/dist/transport/tcp/reactor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <boost/asio/post.hpp>
#include <pthread.h>
#include <sched.h>

#include "base/check.h"
#include "base/log.h"
#include "base/pause.h"

namespace heddle::kvstore::dist {
namespace {

// The owner of the reactor that this thread leads.
thread_local const void* leads_for = nullptr;

void PinThisThread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  const int error = pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  if (error != 0) {
    Log(LogLevel::kWarning, "io_cpu (HEDDLE_IO_CPU): pin an I/O thread to CPU {}: {}", cpu,
        std::strerror(error));
  }
}

}  // namespace

Reactor::Reactor(Options options) : options_(std::move(options)) {
  if (options_.reception == Reception::kCallersOnly) return;
  napping_.store(options_.reception == Reception::kCallersFirst, std::memory_order_relaxed);
  thread_ = std::thread([this] { Run(); });
}

Reactor::~Reactor() { Stop(); }

class Reactor::Leading {
 public:
  explicit Leading(const Reactor& reactor)
      : before_(std::exchange(leads_for, reactor.options_.owner)) {}
  ~Leading() { leads_for = before_; }
  Leading(const Leading&) = delete;
  Leading& operator=(const Leading&) = delete;

 private:
  const void* const before_;
};

bool Reactor::RunOne(Clock::time_point until) {
  options_.flush();
  if (options_.reception == Reception::kThread || leads_for == options_.owner) return false;
  until = std::min(until, Clock::now() + kSleepMax);
  switch (TakeLeadAsCaller(until)) {
    case Taken::kNo:
      return false;
    case Taken::kNotYet:
      return true;
    case Taken::kYes:
      Turn(until, false);
      GiveLeadUp();
  }
  return true;
}

bool Reactor::TryOne() {
  if (options_.reception == Reception::kThread || leads_for == options_.owner) return false;
  {
    MutexLock lock(mutex_);
    if (lead_ != Lead::kNobody || callers_waiting_ > 0 || stopping_) return false;
    lead_ = Lead::kCaller;
  }
  tried_.store(true, std::memory_order_relaxed);
  {
    const Leading leading(*this);
    if (!Look()) context_.poll_one();
  }
  GiveLeadUp();
  return true;
}

Reactor::Taken Reactor::TakeLeadAsCaller(Clock::time_point until) {
  led_.store(true, std::memory_order_relaxed);
  if (sends_in_doze_.load(std::memory_order_relaxed) > 0) {
    sends_in_doze_.store(0, std::memory_order_relaxed);
  }
  MutexLock lock(mutex_);
  if (lead_ == Lead::kCaller || lead_ == Lead::kStopped || stopping_) return Taken::kNo;
  if (lead_ == Lead::kOwnThread) {
    // It gives the lead up after its turn, which ends now if it is asleep. What the caller waits
    // for may be done by then, so it must look before it leads.
    ++callers_waiting_;
    caller_waits_.store(true, std::memory_order_seq_cst);
    Wake();
    if (!interrupted_.exchange(false, std::memory_order_seq_cst)) {
      lead_is_free_.WaitUntil(mutex_, until);
    }
    if (--callers_waiting_ == 0) caller_waits_.store(false, std::memory_order_relaxed);
    return Taken::kNotYet;
  }
  lead_ = Lead::kCaller;
  return Taken::kYes;
}

void Reactor::GiveLeadUp() {
  MutexLock lock(mutex_);
  lead_ = Lead::kNobody;
  if (callers_waiting_ > 0 || stopping_) lead_is_free_.NotifyAll();
}

bool Reactor::MustNotSleep(bool own_thread) {
  if (!own_thread) return interrupted_.exchange(false, std::memory_order_seq_cst);
  return stopping_.load(std::memory_order_seq_cst) ||
         caller_waits_.load(std::memory_order_seq_cst) || napping_.load(std::memory_order_seq_cst);
}

void Reactor::Turn(Clock::time_point until, bool own_thread) {
  const Leading leading(*this);
  const bool found = Look();
  const auto spin = in_stream_ ? std::max(options_.spin, kStreamSpin) : options_.spin;
  const bool spins = spin.count() > 0;
  if (!found && !MustNotSleep(own_thread) && !(spins && Spin(spin)) && ArmAttended()) {
    const auto begin = spins ? Clock::now() : Clock::time_point{};
    sleeping_.store(true, std::memory_order_seq_cst);
    std::size_t handled = 0;
    if (!MustNotSleep(own_thread)) handled = context_.run_one_until(until);  // R2
    sleeping_.store(false, std::memory_order_relaxed);
    // It would have come while spinning: that pays again.
    if (spins && handled > 0 && Clock::now() - begin < spin) spin_misses_ = 0;
  }
  options_.flush();
}

void Reactor::Attend(std::shared_ptr<Attended> attended) {
  if (std::find(attended_.begin(), attended_.end(), attended) == attended_.end()) {
    attended_.push_back(std::move(attended));
  }
}

void Reactor::Forget(const Attended* attended) {
  for (auto& each : attended_) {
    if (each.get() == attended) forgotten_.push_back(std::move(each));
  }
}

bool Reactor::Look() {
  bool found = false;
  bool stream = false;
  // By index: who looks may attend and forget others.
  for (std::size_t i = 0; i < attended_.size(); ++i) {
    if (attended_[i] == nullptr) continue;
    const Attended::Found here = attended_[i]->Look();
    if (here == Attended::Found::kNothing) continue;
    found = true;
    stream = stream || here == Attended::Found::kStream;
  }
  if (found) in_stream_ = stream;
  DropForgotten();
  if (!found) {
    looks_in_a_row_ = 0;
  } else if (++looks_in_a_row_ == kLooksInARow) {
    looks_in_a_row_ = 0;
    context_.poll();
  }
  return found;
}

void Reactor::DropForgotten() {
  if (forgotten_.empty()) return;
  std::erase(attended_, nullptr);
  forgotten_.clear();
}

bool Reactor::ArmAttended() {
  DropForgotten();
  std::erase_if(attended_, [](const auto& each) { return each->Arm(); });
  return attended_.empty();
}

// True: something has come, and was handled.
bool Reactor::Spin(std::chrono::microseconds time) {
  if (spin_misses_ >= kSpinMisses) {
    in_stream_ = false;
    return false;
  }
  const auto end = Clock::now() + time;
  do {
    bool found = false;
    for (int i = 0; i < kLooksPerYield && !attended_.empty(); ++i) {
      found = Look();
      if (found) break;
      Pause();
    }
    if (found || context_.poll_one() > 0) {
      spin_misses_ = 0;
      return true;
    }
    if (interrupted_.load(std::memory_order_relaxed) ||
        caller_waits_.load(std::memory_order_relaxed)) {
      return false;
    }
    if (options_.spin.count() > 0) sched_yield();  // the peer may need this CPU
  } while (Clock::now() < end);
  in_stream_ = false;
  ++spin_misses_;
  return false;
}

void Reactor::Interrupt() {
  if (options_.reception == Reception::kThread) return;  // it brings no caller back
  interrupted_.store(true, std::memory_order_seq_cst);
  Wake();
  if (caller_waits_.load(std::memory_order_seq_cst)) {
    MutexLock lock(mutex_);
    lead_is_free_.NotifyAll();
  }
}

void Reactor::Wake() {
  if (sleeping_.load(std::memory_order_seq_cst)) {
    boost::asio::post(context_, [this] { Awake(); });
  }
}

bool Reactor::FlushesSoon() {
  if (leads_for == options_.owner) return true;
  if (options_.reception == Reception::kCallersOnly) return true;  // in the next RunOne
  if (options_.reception == Reception::kThread) return false;
  if (napping_.load(std::memory_order_seq_cst)) return true;
  if (dozing_.load(std::memory_order_seq_cst)) {
    // Most likely this thread leads next.
    if (sends_in_doze_.fetch_add(1, std::memory_order_relaxed) + 1 != kSendsPerDoze) return false;
    napping_.store(true, std::memory_order_seq_cst);
    EndDoze();
    return false;
  }
  if (napping_.exchange(true, std::memory_order_seq_cst)) return true;
  Wake();  // it naps from now on: the next message can wait
  return false;
}

void Reactor::Stop() {
  {
    MutexLock lock(mutex_);
    if (lead_ == Lead::kStopped) return;
    stopping_ = true;
    nap_.NotifyAll();
    while (lead_ != Lead::kNobody) {
      interrupted_.store(true, std::memory_order_seq_cst);
      Wake();
      lead_is_free_.WaitUntil(mutex_, Clock::now() + kSleepMax);
    }
    lead_ = Lead::kStopped;
    lead_is_free_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

void Reactor::RunStopped(Clock::time_point until) {
  const Leading leading(*this);
  if (!Look() && ArmAttended()) context_.run_one_until(until);
  context_.poll();
  options_.flush();
}

void Reactor::Run() {
  pthread_setname_np(pthread_self(), "heddle-net");
  if (options_.cpu >= 0) PinThisThread(options_.cpu);
  const auto always = [] { return Clock::now() + std::chrono::hours(1); };
  auto callers_seen = Clock::now();
  auto nap = kNap;
  while (!stopping_.load(std::memory_order_seq_cst)) {
    bool sent = false;  // by threads that do not lead
    if (options_.reception == Reception::kCallersFirst) {
      if (nap > kNapMax) {
        sent = !Doze(nap);
      } else {
        Nap(nap);
      }
    }
    options_.flush();
    sent = sent || tried_.load(std::memory_order_relaxed);
    if (sent || led_.load(std::memory_order_relaxed)) {
      led_.store(false, std::memory_order_relaxed);
      tried_.store(false, std::memory_order_relaxed);
      callers_seen = Clock::now();
      nap = sent ? kNap : std::min(2 * nap, kDozeMax);
      continue;  // whoever has led may do so again, without waiting for this thread
    }
    {
      MutexLock lock(mutex_);
      if (lead_ != Lead::kNobody || callers_waiting_ > 0) continue;
      lead_ = Lead::kOwnThread;
    }
    if (options_.reception == Reception::kThread) {
      while (!stopping_.load(std::memory_order_seq_cst)) Turn(always(), true);
    } else if (Clock::now() - callers_seen < kCallersLinger) {
      const Leading leading(*this);
      bool found = false;
      bool more = true;
      while (more) {
        more = Look() || context_.poll() > 0;
        found = found || more;
        more = more && !caller_waits_.load(std::memory_order_relaxed);
        options_.flush();
      }
      nap = found ? kNap : std::min(2 * nap, kDozeMax);
    } else {
      napping_.store(false, std::memory_order_seq_cst);
      options_.flush();  // what has been left to a nap just before
      bool called = false;
      while (!called) {
        Turn(always(), true);
        called = MustNotSleep(true);
      }
      if (!stopping_.load(std::memory_order_relaxed)) callers_seen = Clock::now();
      nap = kNap;
      napping_.store(true, std::memory_order_seq_cst);
    }
    GiveLeadUp();
  }
}

void Reactor::Nap(std::chrono::microseconds time) {
  const auto until = Clock::now() + time;
  MutexLock lock(mutex_);
  while (!stopping_ && Clock::now() < until) nap_.WaitUntil(mutex_, until);
}

bool Reactor::Doze(std::chrono::microseconds time) {
  sends_in_doze_.store(0, std::memory_order_relaxed);
  dozing_.store(true, std::memory_order_seq_cst);
  napping_.store(false, std::memory_order_seq_cst);
  options_.flush();  // what has been left to a nap just before
  const auto until = Clock::now() + time;
  bool ended = false;
  {
    MutexLock lock(mutex_);
    while (!stopping_ && !doze_is_over_ && Clock::now() < until) nap_.WaitUntil(mutex_, until);
    ended = std::exchange(doze_is_over_, false);
  }
  napping_.store(true, std::memory_order_seq_cst);
  dozing_.store(false, std::memory_order_seq_cst);
  return !ended;
}

void Reactor::EndDoze() {
  MutexLock lock(mutex_);
  doze_is_over_ = true;
  nap_.NotifyAll();
}

}  // namespace heddle::kvstore::dist
