// What the nodes of a worker and of a server have in common: two machines, the Member and that of
// the role, which learn of each other's news.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "kvstore/dist/membership.h"
#include "kvstore/dist/node.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/member.h"

namespace heddle::kvstore::dist {

// Machine: WorkerMachine or ServerMachine, a field of the node itself.
template <class Machine>
class MemberNode : public Node {
 protected:
  explicit MemberNode(Machine& machine) : role_machine_(machine) {}

  // Connects to the scheduler and joins; what comes of it is in member_. `deadline` is that of the
  // whole start. Errors as ConnectToScheduler.
  void JoinJob(Transport& transport, const DistOptions& options,
               std::chrono::steady_clock::time_point deadline) EXCLUDES(mutex_) {
    // The scheduler, whose deadline may be the same, shall have the word: it knows who is missing.
    constexpr Time kSchedulerFirst = std::chrono::milliseconds(500);
    const Time started = deadline.time_since_epoch() - options.connect_deadline + kSchedulerFirst;
    ConnectToScheduler(transport, options, deadline);
    {
      MutexLock lock(alive_mutex_);
      alive_every_ = options.heartbeat_interval;
    }
    Drive([&](Time now, Outputs& out) REQUIRES(mutex_) {
      member_->Join(now, out, started);
      joined_ = true;
    });
  }

  // After a message of the scheduler, before the role's machine gets it.
  virtual void OnMemberChanged(Time /*now*/, Outputs& /*out*/) REQUIRES(mutex_) {}
  // After every input, which has put out what is behind the first `before` messages.
  virtual void OnInput(Time /*now*/, Outputs& /*out*/, std::size_t /*before*/) REQUIRES(mutex_) {}

  // This node has failed: the scheduler is told, and what waits here ends.
  void FailMember(Time now, const std::string& why, Outputs& out) REQUIRES(mutex_) {
    const std::size_t before = out.messages.size();
    member_->Fail(why, out);
    Follow(now, out, before);
  }

  std::string DescribeMachines() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    const Time now = Now();
    return member_->DescribeState(now) + role_machine_.DescribeState(now);
  }

  std::optional<Member> member_ GUARDED_BY(mutex_);

 private:
  void HandleMessage(Time now, NodeId from, Message&& message, Outputs& out) final
      REQUIRES(mutex_) {
    const std::size_t before = out.messages.size();
    if (from.role == Role::kScheduler) {
      member_->OnMessage(now, message, out);
      OnMemberChanged(now, out);
    }
    role_machine_.OnMessage(now, from, std::move(message), out);
    Follow(now, out, before);
  }
  void ExpectMessage(const Message& message) final REQUIRES(mutex_) {
    role_machine_.Expect(message.part);
  }
  void HandleLost(Time now, NodeId peer, const std::string& address, const std::string& why,
                  Outputs& out) final REQUIRES(mutex_) {
    const std::size_t before = out.messages.size();
    if (peer.role == Role::kScheduler) {
      member_->OnSchedulerLost(now, why);
    } else {
      role_machine_.OnLost(now, peer, address, why, out);
    }
    Follow(now, out, before);
  }
  void HandleTime(Time now, Outputs& out) final REQUIRES(mutex_) {
    const std::size_t before = out.messages.size();
    if (joined_) member_->OnTime(now, out, role_machine_.State());
    if (const auto next = role_machine_.next_time(); next && *next <= now) {
      role_machine_.OnTime(now, out);
    }
    Follow(now, out, before);
  }
  std::optional<Time> NextTime() const final REQUIRES(mutex_) {
    return Earlier(joined_ ? member_->next_time() : std::nullopt, role_machine_.next_time());
  }

  void SendSignOfLife(Time waits_since, Time now) final EXCLUDES(alive_mutex_) {
    std::optional<Message> alive;
    {
      MutexLock lock(alive_mutex_);
      // A heartbeat is due, or was sent, when the wait begins.
      if (!alive_ || now < std::max(waits_since + alive_every_ / 4, alive_said_ + alive_every_)) {
        return;
      }
      alive_said_ = now;
      alive = alive_;
    }
    transport().Send(kTheScheduler, std::move(*alive));
    transport().Flush();  // whoever would do it may be the one that is held up
  }

  void Follow(Time now, Outputs& out, std::size_t before) REQUIRES(mutex_) {
    if (member_->in_job() != says_alive_) {
      says_alive_ = !says_alive_;
      MutexLock lock(alive_mutex_);
      alive_.reset();
      if (says_alive_) alive_ = member_->SignOfLife();
    }
    if (member_->failure() && !std::exchange(told_failure_, true)) {
      Message failed{.kind = Kind::kJobFailed};
      failed.meta = Encode(*member_->failure());
      role_machine_.OnMessage(now, {Role::kScheduler, 0}, std::move(failed), out);
    }
    OnInput(now, out, before);
  }

  Machine& role_machine_ GUARDED_BY(mutex_);
  bool joined_ GUARDED_BY(mutex_) = false;        // before it, member_ knows no time
  bool told_failure_ GUARDED_BY(mutex_) = false;  // to the role's machine
  bool says_alive_ GUARDED_BY(mutex_) = false;    // whether there is an alive_

  Mutex alive_mutex_;
  std::optional<Message> alive_ GUARDED_BY(alive_mutex_);
  Time alive_every_ GUARDED_BY(alive_mutex_){0};
  Time alive_said_ GUARDED_BY(alive_mutex_){0};
};

}  // namespace heddle::kvstore::dist
