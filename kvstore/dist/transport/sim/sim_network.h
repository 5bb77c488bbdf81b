// A network in one process and in virtual time, with faults: the same seed gives the same run.
//
// It carries messages between nodes and wakes them at times that they ask for. Each message takes a
// time of its own, so messages overtake one another; it may be dropped or arrive twice; a link may
// be cut, which loses what is under way on it, and stands again later; a node may die. Whoever runs
// the network takes one event after another from it, and lets the nodes do with it what they do.
//
// Threads: one call at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <queue>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"

namespace heddle::kvstore::dist {

// Random numbers that are the same on all machines (SplitMix64, by Steele, Lea and Flood).
class SimRandom {
 public:
  explicit SimRandom(std::uint64_t seed) : state_(seed) {}
  std::uint64_t Next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // In [0, limit); limit > 0.
  std::uint64_t Below(std::uint64_t limit) { return Next() % limit; }
  // In [first, last].
  std::int32_t Between(std::int32_t first, std::int32_t last) {
    return first + static_cast<std::int32_t>(Below(static_cast<std::uint64_t>(last - first) + 1));
  }
  bool Chance(std::uint32_t per_1000) { return per_1000 > 0 && Below(1000) < per_1000; }

 private:
  std::uint64_t state_;
};

struct SimFaults {
  Time delay_min = std::chrono::microseconds(100);
  Time delay_max = std::chrono::milliseconds(2);
  std::uint32_t drop_per_1000 = 0;
  std::uint32_t duplicate_per_1000 = 0;
};

class SimNetwork {
 public:
  struct Event {
    enum class Kind : std::uint8_t {
      kMessage,
      kTimer,        // of `to`
      kReconnected,  // the link from `from` to `to` stands again
    };
    Kind kind = Kind::kTimer;
    NodeId from;
    NodeId to;
    Message message{};
    std::uint64_t timer = 0;
  };

  SimNetwork(std::uint64_t seed, const SimFaults& faults) : random_(seed), faults_(faults) {}

  Time now() const { return now_; }
  SimRandom& random() { return random_; }
  // From now on; of messages that are sent later.
  void set_faults(const SimFaults& faults) { faults_ = faults; }
  // Is told each thing that happens; for people. Empty: nobody.
  std::function<void(const std::string&)> trace;

  void Send(NodeId from, NodeId to, Message message);
  void SetTimer(NodeId to, Time at, std::uint64_t timer);
  // Loses what is under way between `a` and `b`, and what they send until `outage` has passed; then
  // both get a kReconnected. The link is up.
  void Cut(NodeId a, NodeId b, Time outage);
  // Nothing reaches `node` any more, nor comes from it.
  void Kill(NodeId node);
  // The opposite, for a process that takes the dead one's place.
  void Revive(NodeId node) { dead_.erase(node); }

  // The next thing that happens, at now(). False: nothing ever will.
  bool Next(Event* event);

  std::uint64_t messages_sent() const { return messages_sent_; }
  std::uint64_t bytes_sent() const { return bytes_sent_; }  // meta and payload

 private:
  struct Entry {
    Time at;
    std::uint64_t order;  // of two at the same time the older comes first
    std::size_t slot;
    friend bool operator>(const Entry& a, const Entry& b) {
      return a.at != b.at ? a.at > b.at : a.order > b.order;
    }
  };
  struct Slot {
    Event event;
    std::uint64_t epoch = 0;  // of the link, when the message was sent
  };
  struct Link {
    std::uint64_t epoch = 0;  // counts cuts
    Time down_until{0};
  };

  static std::pair<NodeId, NodeId> LinkOf(NodeId a, NodeId b) {
    return a < b ? std::pair(a, b) : std::pair(b, a);
  }
  const Link* FindLink(NodeId a, NodeId b) const;
  Time Delay();
  void Schedule(Time at, Event event, std::uint64_t epoch);
  bool Lost(const Slot& slot) const;
  void Trace(const char* what, const Event& event) const;

  SimRandom random_;
  SimFaults faults_;
  Time now_{0};
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;
  std::vector<Slot> slots_;
  std::vector<std::size_t> free_slots_;
  std::map<std::pair<NodeId, NodeId>, Link> links_;  // those that were ever cut
  std::set<NodeId> dead_;
  std::uint64_t order_ = 0;
  std::uint64_t messages_sent_ = 0;
  std::uint64_t bytes_sent_ = 0;
};

}  // namespace heddle::kvstore::dist
