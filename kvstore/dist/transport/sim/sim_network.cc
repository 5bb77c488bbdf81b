#include "kvstore/dist/transport/sim/sim_network.h"

#include <fmt/format.h>

namespace heddle::kvstore::dist {

namespace {

std::string TextOf(const Message& message) {
  std::string text = fmt::format("{} rank {} incarnation {:x}", Name(message.kind), message.rank,
                                 message.incarnation);
  if (message.part.part == kControlPart) {
    text += fmt::format(" store {}", message.part.store);
  } else {
    text +=
        fmt::format(" part {}:{:x}:{}", message.part.store, message.part.key, message.part.part);
  }
  return text + fmt::format(" sequence {} version {:x} flags {} meta {} payload {}",
                            message.sequence, message.version, message.flags, message.meta.size(),
                            message.payload.bytes());
}

}  // namespace

void SimNetwork::Trace(const char* what, const Event& event) const {
  if (!trace) return;
  const double ms = std::chrono::duration<double, std::milli>(now_).count();
  std::string line = fmt::format("{:10.3f} ms  {:<9} {} -> {}", ms, what, ToString(event.from),
                                 ToString(event.to));
  if (event.kind == Event::Kind::kMessage) line += "  " + TextOf(event.message);
  trace(line);
}

const SimNetwork::Link* SimNetwork::FindLink(NodeId a, NodeId b) const {
  if (links_.empty()) return nullptr;
  const auto found = links_.find(LinkOf(a, b));
  return found == links_.end() ? nullptr : &found->second;
}

Time SimNetwork::Delay() {
  const auto span = static_cast<std::uint64_t>((faults_.delay_max - faults_.delay_min).count());
  return faults_.delay_min + Time(random_.Below(span + 1));
}

void SimNetwork::Schedule(Time at, Event event, std::uint64_t epoch) {
  std::size_t slot = slots_.size();
  if (free_slots_.empty()) {
    slots_.emplace_back();
  } else {
    slot = free_slots_.back();
    free_slots_.pop_back();
  }
  slots_[slot] = {std::move(event), epoch};
  queue_.push({at, order_++, slot});
}

void SimNetwork::Send(NodeId from, NodeId to, Message message) {
  ++messages_sent_;
  bytes_sent_ += message.body_bytes();
  Event event{.kind = Event::Kind::kMessage, .from = from, .to = to, .message = std::move(message)};
  const Link* link = FindLink(from, to);
  if ((link != nullptr && now_ < link->down_until) || random_.Chance(faults_.drop_per_1000)) {
    Trace("dropped", event);
    return;
  }
  Trace("sent", event);
  const std::uint64_t epoch = link != nullptr ? link->epoch : 0;
  if (random_.Chance(faults_.duplicate_per_1000)) {
    Trace("doubled", event);
    Schedule(now_ + Delay(), event, epoch);
  }
  Schedule(now_ + Delay(), std::move(event), epoch);
}

void SimNetwork::SetTimer(NodeId to, Time at, std::uint64_t timer) {
  Schedule(at, {.kind = Event::Kind::kTimer, .from = to, .to = to, .timer = timer}, 0);
}

void SimNetwork::Cut(NodeId a, NodeId b, Time outage) {
  Link& link = links_[LinkOf(a, b)];
  ++link.epoch;
  link.down_until = now_ + outage;
  Event event{.kind = Event::Kind::kReconnected, .from = a, .to = b};
  Trace("cut", event);
  Schedule(link.down_until, event, link.epoch);
  std::swap(event.from, event.to);
  Schedule(link.down_until, std::move(event), link.epoch);
}

void SimNetwork::Kill(NodeId node) {
  dead_.insert(node);
  Trace("killed", {.from = node, .to = node});
}

bool SimNetwork::Lost(const Slot& slot) const {
  const Event& event = slot.event;
  if (!dead_.empty() && (dead_.contains(event.from) || dead_.contains(event.to))) return true;
  if (event.kind == Event::Kind::kTimer) return false;
  const Link* link = FindLink(event.from, event.to);
  return link != nullptr && link->epoch != slot.epoch;
}

bool SimNetwork::Next(Event* event) {
  while (!queue_.empty()) {
    const Entry entry = queue_.top();
    queue_.pop();
    now_ = entry.at;
    Slot& slot = slots_[entry.slot];
    const bool lost = Lost(slot);
    *event = std::move(slot.event);
    slot = {};
    free_slots_.push_back(entry.slot);
    if (lost) {
      Trace("lost", *event);
      continue;
    }
    if (event->kind != Event::Kind::kTimer) {
      Trace(event->kind == Event::Kind::kMessage ? "received" : "connected", *event);
    }
    return true;
  }
  return false;
}

}  // namespace heddle::kvstore::dist
