// What people are told: what waits, for whom, and who is slow.
#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "kvstore/dist/protocol/server_state.h"
#include "kvstore/dist/protocol/words.h"

namespace heddle::kvstore::dist {

namespace {

constexpr std::size_t kShownMax = 16;  // ranks or parts in a text for people

}  // namespace

// Who took how long from the end of the last round to its push of this one.
void ServerMachine::NoteSlow(Time now, Part& part, Outputs& out) {
  if (!part.round_ended || (now - *part.round_ended < options_.slow_min && !part.any_slow)) return;
  const std::size_t slot = part.rounds % kPushesAheadMax;
  durations_.clear();
  const auto duration = [&](const RankState& state) {
    return std::max(Time{0}, state.arrived[slot] - *part.round_ended);
  };
  for (const RankState& state : part.ranks) {
    if (state.pushes >= part.rounds) durations_.push_back(duration(state));
  }
  if (durations_.empty()) return;  // all of its pushes were missing
  const auto median = durations_.begin() + static_cast<std::ptrdiff_t>((durations_.size() - 1) / 2);
  std::nth_element(durations_.begin(), median, durations_.end());
  const Time limit = std::max(*median + options_.slow_min,
                              std::chrono::duration_cast<Time>(*median * options_.slow_factor));
  const auto round_ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(now - *part.round_ended);
  const auto slow_ms = std::chrono::duration_cast<std::chrono::milliseconds>(options_.slow_time);
  part.any_slow = false;
  for (std::int32_t rank = 0; rank < std::ssize(part.ranks); ++rank) {
    RankState& state = part.Of(rank);
    if (state.pushes < part.rounds || duration(state) < limit) {
      state.slow = 0;
      state.slow_ms = 0;
      continue;
    }
    part.any_slow = true;
    if (state.slow < options_.slow_rounds) ++state.slow;
    state.slow_ms = static_cast<std::uint32_t>(
        std::min<std::int64_t>(slow_ms.count(), state.slow_ms + round_ms.count()));
    if (state.slow < options_.slow_rounds || state.slow_ms < slow_ms.count()) continue;
    Worker& worker = WorkerOf(rank);
    if (worker.slow_named && now - *worker.slow_named < std::chrono::minutes(1)) continue;
    worker.slow_named = now;
    out.log.emplace_back(
        LogLevel::kWarning,
        fmt::format(
            "worker {} ({}) is slow: in every round of {} for {} and more it took at least {} "
            "times as long from round to push as the median of all workers, now {:.3f} s",
            rank, worker.address, NameOf(part), InSeconds(options_.slow_time), options_.slow_factor,
            std::chrono::duration<double>(duration(state)).count()));
  }
}

std::optional<Time> ServerMachine::next_time() const {
  if (workers_.empty()) return std::nullopt;
  return next_check_;
}

void ServerMachine::OnTime(Time now, Outputs& out) {
  if (workers_.empty() || now < next_check_) return;
  next_check_ = now + options_.warn_after / 2;
  std::size_t waiting = 0;
  state_.stalled = 0;
  const Part* longest = nullptr;
  for (const auto& [id, part] : parts_) {
    if (!part->waits_since) continue;
    if (now - *part->waits_since >= options_.warn_after) {
      ++state_.stalled;
      if (longest == nullptr || *part->waits_since < *longest->waits_since) longest = part.get();
    }
    if (now < part->warn_at) continue;
    part->warn_at = now + options_.warn_after;
    if (++waiting <= kShownMax) out.log.emplace_back(LogLevel::kWarning, DescribePart(now, *part));
  }
  if (waiting > kShownMax) {
    out.log.emplace_back(LogLevel::kWarning,
                         fmt::format("and {} other parts wait", waiting - kShownMax));
  }
  state_.stall = longest != nullptr ? DescribePart(now, *longest) : std::string();
}

StateBody ServerMachine::State() const {
  StateBody state = state_;
  for (const Worker& worker : workers_) state.waiting += worker.unfinished_bytes;
  return state;
}

void ServerMachine::OnStatus(Time now, NodeId from, const Message& message, Outputs& out) {
  Message answer = AnswerTo(message, Kind::kStatusReply);
  const auto found = parts_.find(message.part);
  std::string text = "it knows nothing of this part";
  if (found != parts_.end()) text = DescribePart(now, *found->second);
  answer.meta = Encode(TextBody{.text = std::move(text)});
  out.Send(from, std::move(answer));
}

std::string ServerMachine::NameOf(const Part& part) const {
  if (part.control()) return fmt::format("store {}", part.id.store);
  if (!part.created) return fmt::format("key {:016x}, part {}", part.id.key, part.id.part);
  std::string name = fmt::format("key {}", ToString(KeyRef(part.info.key)));
  if (part.info.num_parts > 1) {
    name += fmt::format(", part {} of {}", part.id.part, part.info.num_parts);
  }
  return name;
}

// The ranks that have contributed to the round in progress, or those that have not.
std::string ServerMachine::DescribeRanks(Time now, const Part& part, bool arrived) const {
  std::string text;
  std::size_t count = 0;
  for (std::int32_t rank = 0; rank < std::ssize(part.ranks); ++rank) {
    const Worker& worker = WorkerOf(rank);
    const bool here = part.Of(rank).pushes > part.rounds;
    if (here != arrived || (!here && IsGone(part, rank))) continue;
    if (++count > kShownMax) continue;
    text += fmt::format("{}{}", count == 1 ? "" : ", ", rank);
    if (here) continue;
    text += worker.heard ? fmt::format(" ({}, last request {} ago)", worker.address,
                                       InSeconds(now - *worker.heard))
                         : fmt::format(" ({}, never heard)", worker.address);
  }
  if (count > kShownMax) text += fmt::format(" and {} more", count - kShownMax);
  return text.empty() ? "none" : text;
}

std::string ServerMachine::DescribePart(Time now, const Part& part) const {
  std::string text = NameOf(part);
  if (!part.created) {
    return text + (part.control() ? ": requests in order" : ": not initialised by worker 0");
  }
  const Store* store = FindStore(part.id.store);
  const std::string since =
      part.waits_since ? fmt::format(" for {}", InSeconds(now - *part.waits_since)) : "";
  if (store->async) {
    text += fmt::format(": {} updates done{}", part.rounds,
                        part.updating ? ", one is under way" + since : "");
  } else if (part.updating) {
    text += fmt::format(": the update of round {} has been under way{}{}", part.rounds + 1, since,
                        DescribeWhole(part));
  } else {
    text += fmt::format(": round {} has waited{}; arrived: workers {}; missing: workers {}",
                        part.rounds + 1, since, DescribeRanks(now, part, /*arrived=*/true),
                        DescribeRanks(now, part, /*arrived=*/false));
  }
  for (const std::int32_t rank : part.blocked) {
    const Message& first = part.Of(rank).extra->early.begin()->second;
    if (IsPush(first.kind) && !store->Knows(first.version)) {
      text += fmt::format("; a push of worker {} waits for optimizer {}.{}", rank,
                          GenerationOf(first.version), first.version & 0xffffffff);
    }
  }
  if (part.update_error) text += "; its update failed: " + InOneLine(part.update_error->message);
  if (part.input_error) text += "; " + InOneLine(part.input_error->message);
  return text;
}

std::string ServerMachine::DescribeState(Time now) const {
  std::size_t created = 0;
  std::vector<const Part*> waiting;
  for (const auto& [id, part] : parts_) {
    created += part->created ? 1 : 0;
    if (part->waits_since) waiting.push_back(part.get());
  }
  std::string text = fmt::format("server: {} workers, {} stores, {} parts, {} of them wait",
                                 workers_.size(), stores_.size(), created, waiting.size());
  if (workers_.empty())
    text += fmt::format("; {} messages before the roster", before_roster_.size());
  if (failure_) {
    text += fmt::format("\n  failed: lost {} ({}): {}", ToString(failure_->node), failure_->address,
                        failure_->why);
  }
  for (std::int32_t rank = 0; rank < std::ssize(workers_); ++rank) {
    const Worker& worker = WorkerOf(rank);
    text += fmt::format(
        "\n  worker {} ({}): {}, {} bytes of unfinished rounds{}", rank, worker.address,
        worker.heard ? fmt::format("last request {} ago", InSeconds(now - *worker.heard))
                     : "never heard",
        worker.unfinished_bytes,
        worker.left             ? ", has left"
        : worker.closed.empty() ? ""
                                : fmt::format(", has closed {} stores", worker.closed.size()));
  }
  std::sort(waiting.begin(), waiting.end(), [](const Part* a, const Part* b) {
    return std::pair(*a->waits_since, a->id) < std::pair(*b->waits_since, b->id);
  });
  for (std::size_t i = 0; i < std::min(waiting.size(), kShownMax); ++i) {
    text += "\n  " + DescribePart(now, *waiting[i]);
  }
  if (waiting.size() > kShownMax) {
    text += fmt::format("\n  and {} more", waiting.size() - kShownMax);
  }
  return text;
}

}  // namespace heddle::kvstore::dist
