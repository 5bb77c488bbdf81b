// The ready ops of one device, in the order in which workers take them.
//
// Highest priority first, among equals the one pushed first. Ageing: when ops have been taken from
// other priorities `ageing` times in a row while a priority had ops ready, the oldest op of the
// priority that has waited longest goes next. So an op with k older ops of its priority before it
// is overtaken at most (k + 1) * (ageing + number of priorities) times.
//
// Threads: none of its own; the tracker's lock guards it. Allocates only while it grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "engine/op.h"

namespace heddle::engine {

class ReadyQueue {
 public:
  explicit ReadyQueue(int ageing) : ageing_(static_cast<std::uint64_t>(ageing)) {}
  ReadyQueue(const ReadyQueue&) = delete;
  ReadyQueue& operator=(const ReadyQueue&) = delete;

  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  // The highest priority that is ready. Requires !empty().
  int top_priority() const { return top_->first; }
  // What Pop gives unless an aged op's turn has come. Requires !empty().
  Op* top() const { return OldestOf(top_->second); }

  void Push(Op* op);
  // The op to run next. Requires !empty().
  Op* Pop();
  // Takes out an op that is in the queue.
  void Remove(Op* op);
  // True: Pop might serve an aged op rather than the most urgent one.
  bool ageing_due() const {
    return ageing_ != 0 && levels_in_use_ > 1 && takes_ - first_->served >= ageing_;
  }
  // Says that an op of `priority`, at least top_priority(), was taken past the queue.
  void CountOvertake(int priority);

  template <class Visit>
  void ForEach(Visit&& visit) const {
    for (const auto& [priority, level] : levels_) {
      for (std::size_t i = 0; i < level.entries.size(); ++i) {
        if (level.entries[i].op != nullptr) visit(level.entries[i].op);
      }
      for (const Entry& entry : level.late) visit(entry.op);
    }
  }
  // Of each priority.
  template <class Visit>
  void ForEachOldest(Visit&& visit) const {
    for (const Level* level = first_; level != nullptr; level = level->next) {
      visit(OldestOf(*level));
    }
  }

 private:
  struct Entry {
    std::uint64_t ticket;
    Op* op;  // null: removed
  };

  // A queue in an array that grows by doubling and never shrinks.
  class Ring {
   public:
    bool empty() const { return head_ == tail_; }
    std::size_t size() const { return tail_ - head_; }
    Entry& operator[](std::size_t i) { return entries_[(head_ + i) & (entries_.size() - 1)]; }
    const Entry& operator[](std::size_t i) const {
      return entries_[(head_ + i) & (entries_.size() - 1)];
    }
    Entry& front() { return (*this)[0]; }
    const Entry& front() const { return (*this)[0]; }
    Entry& back() { return (*this)[size() - 1]; }
    void pop_front() { ++head_; }
    void push_back(Entry entry);

   private:
    std::vector<Entry> entries_;
    std::size_t head_ = 0, tail_ = 0;
  };

  struct Level {
    explicit Level(int its_priority) : priority(its_priority) {}

    const int priority;
    Ring entries;             // rising tickets; the front is never a removed one
    std::vector<Entry> late;  // a min-heap by ticket of ops that became ready out of push order
    std::size_t count = 0;
    std::uint64_t served = 0;  // takes_ when this level was last served, or became non-empty
    // The non-empty ones are listed in the order of `served`: the first has waited longest.
    Level* previous = nullptr;
    Level* next = nullptr;
  };
  using Levels = std::map<int, Level, std::greater<>>;

  Levels::iterator LevelOf(int priority);
  void Taken(Levels::iterator level);
  void Append(Level& level);
  void Unlink(Level& level);
  void Serve(Level& level);
  static bool OldestIsLate(const Level& level);
  static Op* OldestOf(const Level& level);
  static Op* PopOldest(Level& level);

  const std::uint64_t ageing_;
  std::size_t size_ = 0;
  std::size_t levels_in_use_ = 0;
  std::uint64_t takes_ = 0;
  Level* first_ = nullptr;  // see Level::next
  Level* last_ = nullptr;
  Levels levels_;                         // emptied ones are kept, see kEmptyLevelsMax
  Levels::iterator top_ = levels_.end();  // the highest non-empty one
  // The one of the last Push: layers of a network are pushed one after another, in the order of
  // their priorities.
  Levels::iterator recent_ = levels_.end();
  // More than the layers of most networks, each with a priority of its own. Beyond that many, as
  // many as are not empty: to look for them all costs no more, an op, than a few steps.
  static constexpr std::size_t kEmptyLevelsMax = 512;
  static constexpr std::size_t kPassedMax = 16;  // empty levels that one call walks past and keeps
};

}  // namespace heddle::engine
