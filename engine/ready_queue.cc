#include "engine/ready_queue.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace heddle::engine {
namespace {

constexpr auto kLaterTicket = [](const auto& a, const auto& b) { return a.ticket > b.ticket; };

}  // namespace

void ReadyQueue::Ring::push_back(Entry entry) {
  if (size() == entries_.size()) {
    std::vector<Entry> larger(std::max<std::size_t>(16, entries_.size() * 2));
    const std::size_t count = size();
    for (std::size_t i = 0; i < count; ++i) larger[i] = (*this)[i];
    entries_ = std::move(larger);
    head_ = 0;
    tail_ = count;
  }
  entries_[tail_++ & (entries_.size() - 1)] = entry;
}

// Searches only if it is neither the level of the last Push nor the one below.
ReadyQueue::Levels::iterator ReadyQueue::LevelOf(int priority) {
  if (recent_ != levels_.end()) {
    if (recent_->first == priority) return recent_;
    const auto below = std::next(recent_);
    if (below != levels_.end() && below->first == priority) return below;
  }
  return levels_.try_emplace(priority, priority).first;
}

void ReadyQueue::Push(Op* op) {
  const auto level = LevelOf(op->priority);
  recent_ = level;
  if (level->second.count++ == 0) {
    ++levels_in_use_;
    level->second.served = takes_;
    Append(level->second);
    if (top_ == levels_.end() || size_ == 0 || op->priority > top_->first) top_ = level;
  }
  ++size_;
  Ring& entries = level->second.entries;
  if (entries.empty() || entries.back().ticket < op->ticket) {
    entries.push_back({op->ticket, op});
  } else {
    level->second.late.push_back({op->ticket, op});
    std::push_heap(level->second.late.begin(), level->second.late.end(), kLaterTicket);
  }
}

bool ReadyQueue::OldestIsLate(const Level& level) {
  return !level.late.empty() &&
         (level.entries.empty() || level.late.front().ticket < level.entries.front().ticket);
}

Op* ReadyQueue::OldestOf(const Level& level) {
  return OldestIsLate(level) ? level.late.front().op : level.entries.front().op;
}

Op* ReadyQueue::PopOldest(Level& level) {
  if (!OldestIsLate(level)) {
    Op* op = level.entries.front().op;
    do {
      level.entries.pop_front();
    } while (!level.entries.empty() && level.entries.front().op == nullptr);
    return op;
  }
  Op* op = level.late.front().op;
  std::pop_heap(level.late.begin(), level.late.end(), kLaterTicket);
  level.late.pop_back();
  return op;
}

Op* ReadyQueue::Pop() {
  DCHECK(size_ > 0);
  const Levels::iterator level = ageing_due() ? levels_.find(first_->priority) : top_;
  Op* op = PopOldest(level->second);
  ++takes_;
  if (level->second.count > 1) Serve(level->second);
  Taken(level);
  return op;
}

void ReadyQueue::CountOvertake(int priority) {
  if (size_ == 0) return;
  ++takes_;
  if (top_->first == priority) Serve(top_->second);
}

void ReadyQueue::Append(Level& level) {
  level.previous = last_;
  level.next = nullptr;
  (last_ != nullptr ? last_->next : first_) = &level;
  last_ = &level;
}

void ReadyQueue::Unlink(Level& level) {
  (level.previous != nullptr ? level.previous->next : first_) = level.next;
  (level.next != nullptr ? level.next->previous : last_) = level.previous;
}

// Nobody has been served later than now: `level` goes to the end.
void ReadyQueue::Serve(Level& level) {
  level.served = takes_;
  if (&level == last_) return;
  Unlink(level);
  Append(level);
}

void ReadyQueue::Remove(Op* op) {
  const auto level = levels_.find(op->priority);
  CHECK(level != levels_.end());
  Ring& entries = level->second.entries;
  std::size_t low = 0;
  std::size_t high = entries.size();
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (entries[middle].ticket < op->ticket) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low < entries.size() && entries[low].op == op) {
    entries[low].op = nullptr;
    while (!entries.empty() && entries.front().op == nullptr) entries.pop_front();
  } else {
    auto& late = level->second.late;
    const auto found =
        std::find_if(late.begin(), late.end(), [op](const Entry& e) { return e.op == op; });
    CHECK(found != late.end());
    late.erase(found);
    std::make_heap(late.begin(), late.end(), kLaterTicket);
  }
  Taken(level);
}

// One op has left `level`: keeps the counts and `top_` right.
void ReadyQueue::Taken(Levels::iterator level) {
  --size_;
  if (--level->second.count > 0) return;
  Unlink(level->second);
  --levels_in_use_;
  if (level == top_ && size_ > 0) {
    std::size_t passed = 0;
    for (; top_->second.count == 0; ++top_) ++passed;
    // Nobody is to pass by so many a second time.
    if (passed > kPassedMax) {
      levels_.erase(level, top_);
      recent_ = levels_.end();
    }
  }
  if (levels_.size() - levels_in_use_ > std::max(kEmptyLevelsMax, levels_in_use_)) {
    std::erase_if(levels_, [](const auto& entry) { return entry.second.count == 0; });
    recent_ = levels_.end();
    if (size_ == 0) top_ = levels_.end();
  }
}

}  // namespace heddle::engine
