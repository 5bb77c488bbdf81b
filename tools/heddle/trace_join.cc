#include "tools/heddle/trace_join.h"

#include <heddle/error.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "kvstore/dist/protocol/message.h"

namespace heddle::tools {
namespace {

using kvstore::dist::kControlPart;
using kvstore::dist::Kind;
using kvstore::dist::NodeId;
using kvstore::dist::Role;
using kvstore::dist::TraceAction;
using kvstore::dist::TraceDirection;
using kvstore::dist::TraceMessageRecord;
using kvstore::dist::TracePartRecord;

// A request, or its answer; acknowledgements are gathered for several.
bool IsOfRequest(const TraceMessageRecord& message) {
  const auto kind = static_cast<Kind>(message.kind);
  return kind >= Kind::kInit && kind <= Kind::kError && kind != Kind::kAcks &&
         (message.key != 0 || message.part == kControlPart);
}

template <class Record>
auto IdOf(const Record& record) {
  return std::tuple(record.rank, record.store, record.key, record.part, record.sequence);
}
using Id = decltype(IdOf(TracePartRecord{}));

NodeId PlaceOf(const TraceFile& file) {
  return {static_cast<Role>(file.place->role), file.place->rank};
}

// A message as both of its ends tell of it: who sent it to whom, and what it was.
using MessageKey = std::tuple<NodeId, NodeId, std::uint8_t, std::uint64_t, Id>;

struct Place {
  std::size_t file;
  std::size_t index;  // in TraceFile::messages
};
struct MatchedMessage {
  Place sent, received;
};

std::vector<Place> SortedByTime(std::vector<Place> places, const std::vector<TraceFile>& files) {
  std::ranges::sort(places, {}, [&](const Place& place) {
    return files[place.file].messages[place.index].started_ns;
  });
  return places;
}

// The messages that both ends have recorded. What looks the same (only what is sent again does, and
// acknowledgements) is told apart by its order, if none is missing.
std::vector<MatchedMessage> MatchMessages(const std::vector<TraceFile>& files) {
  std::map<MessageKey, std::pair<std::vector<Place>, std::vector<Place>>> ends;
  for (std::size_t f = 0; f < files.size(); ++f) {
    if (!files[f].place) continue;
    const NodeId self = PlaceOf(files[f]);
    for (std::size_t i = 0; i < files[f].messages.size(); ++i) {
      const TraceMessageRecord& record = files[f].messages[i];
      const NodeId peer{static_cast<Role>(record.peer_role), record.peer_rank};
      const bool sent = record.direction == TraceDirection::kSent;
      auto& [from, to] =
          ends[{sent ? self : peer, sent ? peer : self, record.kind, record.version, IdOf(record)}];
      (sent ? from : to).push_back({f, i});
    }
  }
  std::vector<MatchedMessage> messages;
  for (auto& [key, both] : ends) {
    if (both.first.size() != both.second.size()) continue;
    const std::vector<Place> from = SortedByTime(std::move(both.first), files);
    const std::vector<Place> to = SortedByTime(std::move(both.second), files);
    for (std::size_t i = 0; i < from.size(); ++i) messages.push_back({from[i], to[i]});
  }
  return messages;
}

// --- clocks --------------------------------------------------------------------------------------

// Of two machines: the shortest that a message seemed to take, by the difference of their clocks,
// each way.
struct Ways {
  std::optional<std::int64_t> there, back;
};

// Machines are numbered; their clocks are found from the first one's on, over the pair of machines
// whose messages went to and fro the fastest.
class Clocks {
 public:
  Clocks(const std::vector<TraceFile>& files, const std::vector<MatchedMessage>& messages)
      : files_(files) {
    std::map<std::string, std::size_t> numbers;
    for (std::size_t f = 0; f < files.size(); ++f) {
      // Of an unknown machine: one of its own.
      const std::string name =
          files[f].machine.empty() ? fmt::format("file {}", f) : files[f].machine;
      machine_of_.push_back(numbers.emplace(name, numbers.size()).first->second);
    }
    clocks_.resize(numbers.size());
    for (const MatchedMessage& message : messages) Measure(message);
    Find();
  }

  std::vector<TraceClock> OfFiles() const {
    std::vector<TraceClock> clocks;
    for (const std::size_t machine : machine_of_) clocks.push_back(*clocks_[machine]);
    return clocks;
  }

 private:
  void Measure(const MatchedMessage& message) {
    const std::size_t from = machine_of_[message.sent.file];
    const std::size_t to = machine_of_[message.received.file];
    if (from == to) return;
    const std::uint64_t sent = files_[message.sent.file].messages[message.sent.index].started_ns;
    const std::uint64_t received =
        files_[message.received.file].messages[message.received.index].started_ns;
    const auto took = static_cast<std::int64_t>(received - sent);
    const auto shorten = [took](std::optional<std::int64_t>& way) {
      way = way ? std::min(*way, took) : took;
    };
    if (from < to) {
      shorten(ways_[{from, to}].there);
    } else {
      shorten(ways_[{to, from}].back);
    }
  }

  void Find() {
    clocks_[0] = TraceClock{};
    FollowMessages();
    for (std::size_t f = 0; f < files_.size(); ++f) {
      std::optional<TraceClock>& clock = clocks_[machine_of_[f]];
      if (clock) continue;
      clock = {.offset_ns = ByWall(f), .from = TraceClock::From::kWall, .error_ns = {}};
      FollowMessages();  // to others that the first machine has no way to either
    }
  }

  // Finds the clocks of all machines that messages tie to one whose clock is known.
  void FollowMessages() {
    for (;;) {
      std::optional<std::size_t> found;
      TraceClock best;
      std::int64_t least_error = std::numeric_limits<std::int64_t>::max();
      for (const auto& [pair, ways] : ways_) {
        const auto& [a, b] = pair;
        if (!ways.there || !ways.back || clocks_[a].has_value() == clocks_[b].has_value()) continue;
        // b's clock minus a's lies between -back and there, whatever the messages really took.
        const std::int64_t b_ahead = (*ways.there - *ways.back) / 2;
        const TraceClock& known = clocks_[a] ? *clocks_[a] : *clocks_[b];
        const std::int64_t error = known.error_ns.value_or(0) + (*ways.there + *ways.back) / 2;
        if (error >= least_error) continue;
        least_error = error;
        found = clocks_[a] ? b : a;
        best = known;  // also whence it comes, and that nobody knows its error
        best.offset_ns += clocks_[a] ? -b_ahead : b_ahead;
        if (best.from == TraceClock::From::kSame) best.from = TraceClock::From::kMessages;
        if (best.error_ns) best.error_ns = error;
      }
      if (!found) return;
      clocks_[*found] = best;
    }
  }

  std::int64_t ByWall(std::size_t file) const {
    const auto wall_minus_steady = [](const TraceFile& of) {
      return static_cast<std::int64_t>(of.started_unix_ns - of.started_ns);
    };
    return wall_minus_steady(files_[file]) - wall_minus_steady(files_[0]);
  }

  const std::vector<TraceFile>& files_;
  std::vector<std::size_t> machine_of_;
  std::map<std::pair<std::size_t, std::size_t>, Ways> ways_;
  std::vector<std::optional<TraceClock>> clocks_;  // of machines
};

// --- arrows --------------------------------------------------------------------------------------

template <class Slice>
TraceMoment StartOf(std::size_t file, const Slice& slice) {
  return {file, slice.thread, slice.started_ns};
}
// The last moment inside; with `by_ns`, the last one that is not after it: a thread may be kept
// from the end of its slice while another goes on with what came of it.
template <class Slice>
TraceMoment EndOf(std::size_t file, const Slice& slice,
                  std::uint64_t by_ns = std::numeric_limits<std::uint64_t>::max()) {
  const std::uint64_t last = std::max(slice.ended_ns, slice.started_ns + 1) - 1;
  return {file, slice.thread, std::max(slice.started_ns, std::min(last, by_ns))};
}

class Arrows {
 public:
  explicit Arrows(const std::vector<TraceFile>& files) : files_(files) {
    for (std::size_t f = 0; f < files.size(); ++f) {
      for (const TracedPart& part : files[f].parts) {
        if (part.action == TraceAction::kMerge) merges_.emplace(std::pair(f, IdOf(part)), &part);
        if (part.action == TraceAction::kRead) reads_.emplace(std::pair(f, IdOf(part)), &part);
      }
    }
  }

  std::vector<RequestArrow> Find(const std::vector<MatchedMessage>& messages) {
    for (const MatchedMessage& message : messages) AddMessage(message);
    for (std::size_t f = 0; f < files_.size(); ++f) {
      AddRounds(f);
      AddCalls(f);
    }
    return std::move(arrows_);
  }

 private:
  using OfRequest = std::map<std::pair<std::size_t, Id>, const TracedPart*>;

  static const TracedPart* Look(const OfRequest& in, std::size_t file, const Id& id) {
    const auto found = in.find({file, id});
    return found != in.end() ? found->second : nullptr;
  }

  // A push leads to its merge, and an answer comes of a read.
  void AddMessage(const MatchedMessage& message) {
    const auto& [from_file, from_index] = message.sent;
    const auto& [to_file, to_index] = message.received;
    const TracedMessage& sent = files_[from_file].messages[from_index];
    const TracedMessage& received = files_[to_file].messages[to_index];
    const auto kind = static_cast<Kind>(sent.kind);
    TraceMoment from = StartOf(from_file, sent), to = StartOf(to_file, received);
    if (kind == Kind::kPush || kind == Kind::kPushPull) {
      if (const TracedPart* merge = Look(merges_, to_file, IdOf(sent)))
        to = StartOf(to_file, *merge);
    } else if (kind == Kind::kValue) {
      if (const TracedPart* read = Look(reads_, from_file, IdOf(sent))) {
        from = EndOf(from_file, *read, sent.started_ns);
      }
    }
    arrows_.push_back({RequestArrow::Kind::kMessage, from, to});
  }

  void AddRounds(std::size_t file) {
    std::vector<const TracedPart*> parts;
    for (const TracedPart& part : files_[file].parts) parts.push_back(&part);
    std::ranges::stable_sort(parts, {}, &TracePartRecord::ended_ns);
    struct Round {
      std::vector<const TracedPart*> merges;
      const TracedPart* update = nullptr;
    };
    std::map<std::tuple<std::uint32_t, std::uint64_t, std::uint32_t>, Round> rounds;
    const auto add = [&](const TracedPart& from, const TracedPart& to) {
      arrows_.push_back({RequestArrow::Kind::kRound, EndOf(file, from), StartOf(file, to)});
    };
    for (const TracedPart* const part : parts) {
      Round& round = rounds[{part->store, part->key, part->part}];
      switch (part->action) {
        case TraceAction::kMerge:
          round.merges.push_back(part);
          break;
        case TraceAction::kUpdate:
          for (const TracedPart* const merge : round.merges) add(*merge, *part);
          round = {.merges = {}, .update = part};
          break;
        case TraceAction::kRead:
          if (round.update != nullptr) add(*round.update, *part);
          break;
        case TraceAction::kDrop:
          round.merges.clear();
          break;
        case TraceAction::kCreate:
        case TraceAction::kReset:
          round = {};
          break;
      }
    }
  }

  // What an op sent after its body: it had to wait for others of its key, or for credit.
  void AddCalls(std::size_t file) {
    const TraceFile& trace = files_[file];
    for (const TracedMessage& message : trace.messages) {
      if (message.direction != TraceDirection::kSent || message.op == 0) continue;
      const auto op = std::ranges::lower_bound(trace.ops, message.op - 1, {}, &TracedOp::ticket);
      if (op == trace.ops.end() || op->ticket != message.op - 1 || !op->run) continue;
      const TracedRun& run = *op->run;
      if (run.thread == message.thread && run.started_ns <= message.started_ns &&
          message.started_ns < run.ended_ns) {
        continue;  // the one slice lies in the other
      }
      arrows_.push_back({RequestArrow::Kind::kCall, EndOf(file, run, message.started_ns),
                         StartOf(file, message)});
    }
  }

  const std::vector<TraceFile>& files_;
  OfRequest merges_, reads_;
  std::vector<RequestArrow> arrows_;
};

// A process may have several, which begin at different times.
void CheckNoneTwice(const std::vector<TraceFile>& files) {
  std::map<std::tuple<std::string, std::uint32_t, std::uint64_t, std::uint64_t>, const TraceFile*>
      traces;
  for (const TraceFile& file : files) {
    const auto [other, is_new] = traces.emplace(
        std::tuple(file.machine, file.pid, file.started_ns, file.started_unix_ns), &file);
    if (is_new) continue;
    throw InvalidArgument(fmt::format("expected each trace once, got the same one as {} and as {}",
                                      other->second->path, file.path));
  }
}

void CheckOneJob(const std::vector<TraceFile>& files) {
  const TraceFile* first = nullptr;
  for (const TraceFile& file : files) {
    if (!file.place || file.place->job == 0) continue;  // not told
    if (first == nullptr) first = &file;
    if (file.place->job == first->place->job) continue;
    throw InvalidArgument(
        fmt::format("expected traces of one job, got those of two: {} of {} and "
                    "{} of {}",
                    first->path, ProcessName(*first), file.path, ProcessName(file)));
  }
}

void CheckDifferent(const std::vector<TraceFile>& files) {
  std::map<NodeId, const TraceFile*> places;
  for (const TraceFile& file : files) {
    if (!file.place) continue;
    const auto [other, is_new] = places.emplace(PlaceOf(file), &file);
    // After a pause a process goes on in another file.
    if (is_new || other->second->place->incarnation == file.place->incarnation) continue;
    throw InvalidArgument(
        fmt::format("expected traces of different processes of one job, got two of {}: {} and {}",
                    ToString(PlaceOf(file)), ProcessName(*other->second), ProcessName(file)));
  }
}

template <class Record>
std::string TextOfId(const TraceFile& names, const Record& record) {
  if (record.part == kControlPart) {
    return fmt::format("w{} s{} control #{}", record.rank, record.store, record.sequence);
  }
  return fmt::format("w{} s{} {} p{} #{}", record.rank, record.store, names.KeyName(record.key),
                     record.part, record.sequence);
}

}  // namespace

JoinedTrace JoinTraces(std::vector<TraceFile> files) {
  CheckNoneTwice(files);
  CheckOneJob(files);
  CheckDifferent(files);
  // What one process knows of keys, all do.
  std::unordered_map<std::uint64_t, std::string> keys;
  for (const TraceFile& file : files) keys.insert(file.keys.begin(), file.keys.end());
  for (TraceFile& file : files) file.keys = keys;
  const std::vector<MatchedMessage> messages = MatchMessages(files);
  JoinedTrace joined;
  joined.clocks = Clocks(files, messages).OfFiles();
  joined.arrows = Arrows(files).Find(messages);
  joined.files = std::move(files);
  return joined;
}

std::string RequestId(const TraceFile& names, const TraceMessageRecord& message) {
  return IsOfRequest(message) ? TextOfId(names, message) : std::string();
}

std::string RequestId(const TraceFile& names, const TracePartRecord& part) {
  return part.rank >= 0 ? TextOfId(names, part) : std::string();
}

std::string ProcessName(const TraceFile& file) {
  if (!file.place) return file.process;
  return fmt::format("{} ({}, process {})", ToString(PlaceOf(file)), file.process, file.pid);
}

}  // namespace heddle::tools
