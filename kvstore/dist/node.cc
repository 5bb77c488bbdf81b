#include "kvstore/dist/node.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/pause.h"
#include "engine/completion_batch.h"

namespace heddle::kvstore::dist {

namespace {

constexpr Time kLookAgain = std::chrono::seconds(60);

}  // namespace

Node::~Node() { CHECK(!clock_.joinable()); }

void Node::Start(Transport& transport) {
  transport_ = &transport;
  clock_ = std::thread([this] { RunClock(); });
}

void Node::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  CallClock();
  if (clock_.joinable()) clock_.join();
  while (performing_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  transport_->Close();
}

void Node::OnConnected(NodeId peer, Incarnation incarnation, const std::string& address) {
  HandleSmall();
  MutexLock lock(mutex_);
  HandleConnected(peer, incarnation, address);
  NoteTimeLocked();
}

void Node::OnMessage(NodeId from, Message&& message) {
  // A trace shows when each message was handled, and for how long.
  if (message.body_bytes() <= kSmallBytes && trace_.Writer() == nullptr) {
    std::size_t together = 0;
    {
      MutexLock lock(small_mutex_);
      small_.push_back({from, std::move(message)});
      together = small_.size();
      any_small_.store(true, std::memory_order_relaxed);
    }
    if (together >= kTogetherMax) HandleSmall();
    return;
  }
  HandleSmall();
  const MessageSlice slice(trace_, TraceDirection::kReceived, from, message);
  Drive([&](Time now, Outputs& out)
            REQUIRES(mutex_) { HandleMessage(now, from, std::move(message), out); });
}

void Node::OnTurnEnd() { HandleSmall(); }

void Node::HandleSmall() {
  // relaxed: of what another thread has brought that thread sees the turn's end
  if (!any_small_.load(std::memory_order_relaxed)) return;
  Drive([&](Time now, Outputs& out) REQUIRES(mutex_) {
    {
      MutexLock lock(small_mutex_);
      handled_.swap(small_);
      any_small_.store(false, std::memory_order_relaxed);
    }
    if (handled_.size() > 1) {
      for (const Arrived& each : handled_) ExpectMessage(each.message);
    }
    for (Arrived& each : handled_) HandleMessage(now, each.from, std::move(each.message), out);
    handled_.clear();
  });
}

void Node::OnLost(NodeId peer, const std::string& address, const std::string& why) {
  HandleSmall();
  Drive([&](Time now, Outputs& out) REQUIRES(mutex_) { HandleLost(now, peer, address, why, out); });
}

void Node::NoteTimeLocked() {
  if (MayBeAwaited()) changed_.NotifyAll();
  const std::optional<Time> next = NextTime();
  // relaxed: both are written with the lock held, but for the 0 of a clock that is awake
  if (next && *next < clock_next_.load(std::memory_order_relaxed)) CallClock();
}

void Node::Perform(Outputs& out) {
  for (const auto& [from, to] : out.renames) transport_->Rename(from, to);
  SendAll(out.messages);
  for (const Raised& raised : out.raised) RaisePriority(raised);
  for (const NodeId& peer : out.disconnects) transport_->Disconnect(peer);
  for (const auto& [level, text] : out.log) Log(level, "{}", text);  // may be held up
  out.given_back.clear();
  if (out.answers.empty()) return;
  const engine::CompletionBatch together;
  for (Answer& answer : out.answers) GiveAnswer(std::move(answer));
}

// Runs of small messages to one peer go together; but a trace shows when each was sent.
void Node::SendAll(std::span<Outgoing> messages) {
  const bool traced = trace_.Writer() != nullptr;
  const auto is_small = [](const Outgoing& each) {
    return each.message.body_bytes() <= Transport::kCopiedMax;
  };
  for (auto next = messages.begin(); next != messages.end();) {
    const auto first = next++;
    if (!traced && is_small(*first)) {
      next = std::find_if(next, messages.end(), [&](const Outgoing& each) {
        return each.to != first->to || !is_small(each);
      });
    }
    if (next - first > 1) {
      transport_->SendTogether({first, next});
      // Copied: the answers must not find the program's memory still held here.
      for (Outgoing& each : std::span(first, next)) each.message.payload = {};
      continue;
    }
    const MessageSlice slice(trace_, TraceDirection::kSent, first->to, first->message);
    SendMessage(std::move(*first));
  }
}

// Tries, since it has more to do than to wait.
void Node::LockAsClock() {
  constexpr int kLooks = 1500;  // as SpinningLock
  constexpr Time kNap = std::chrono::milliseconds(1);
  const Time waits_since = Now();
  for (int looks = 0; !mutex_.TryLock(); ++looks) {
    if (looks < kLooks) {
      Pause();
      continue;
    }
    std::this_thread::sleep_for(kNap);
    SendSignOfLife(waits_since, Now());
  }
}

void Node::CallClock() {
  MutexLock lock(clock_mutex_);
  clock_called_ = true;
  clock_wakes_.NotifyOne();
}

void Node::SleepUntil(Time next) {
  {
    MutexLock lock(clock_mutex_);
    while (!clock_called_ && Now() < next) {
      clock_wakes_.WaitUntil(clock_mutex_, std::chrono::steady_clock::time_point(next));
    }
    clock_called_ = false;
  }
  clock_next_.store(Time{0}, std::memory_order_relaxed);
}

void Node::RunClock() {
  for (;;) {
    {
      Outputs out;
      LockAsClock();
      const bool ends = stopping_;
      if (!ends) {
        const Time now = Now();
        if (const auto next = NextTime(); next && *next <= now) {
          HandleTime(now, out);
          if (MayBeAwaited()) changed_.NotifyAll();
        }
      }
      mutex_.Unlock();
      if (ends) return;
      Perform(out);
    }
    const std::optional<Time> own = OnClock(Now());

    LockAsClock();
    const Time next =
        std::min({NextTime().value_or(Time::max()), own.value_or(Time::max()), Now() + kLookAgain});
    clock_next_.store(next, std::memory_order_relaxed);
    mutex_.Unlock();
    SleepUntil(next);
  }
}

}  // namespace heddle::kvstore::dist
