// A PartStore whose values are 64-bit integers: sums are exact, so that whatever is lost, repeated
// or swapped shows. The updater adds the sum to the value, or replaces the value (version 0).
#pragma once

#include <heddle/error.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/protocol/part_store.h"

namespace heddle::kvstore::dist {

inline Payload PayloadOf(std::vector<std::int64_t> values) {
  auto owner = std::make_shared<const std::vector<std::int64_t>>(std::move(values));
  return {owner, std::as_bytes(std::span(*owner))};
}

inline std::vector<std::int64_t> ValuesOf(const Payload& payload) {
  std::vector<std::byte> bytes;
  for (const auto run : payload.runs()) bytes.insert(bytes.end(), run.begin(), run.end());
  std::vector<std::int64_t> values(bytes.size() / sizeof(std::int64_t));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

class IntegerParts : public PartStore {
 public:
  // Decides for each update whether it goes on elsewhere: its end is then to be told by the test.
  std::function<bool(const PartId&)> defer = [](const PartId&) { return false; };
  // Arrays whose parts are updated together, by a part: the updater adds the sum, and a number that
  // depends on the sums of all parts, in two passes before the last. None by default.
  std::function<std::optional<WholeArray>(const PartId&)> whole = [](const PartId&) {
    return std::nullopt;
  };
  // Decides for each pass whether its end is to be told by the test, with EndPass.
  std::function<bool(const PartId&)> defer_pass = [](const PartId&) { return false; };
  bool no_memory = false;  // for the next Check
  // The error of the next update of a part.
  std::unordered_map<PartId, std::string, PartIdHash> fail_update;

  struct Part {
    PartInfo info;
    std::vector<std::int64_t> value;
    std::vector<std::int64_t> sum;
    bool sum_begun = false;
    bool updating = false;
    UpdateBy by;                      // of the last update
    std::vector<std::int32_t> added;  // ranks of the last sum, in order
    std::int64_t updates = 0;
  };
  Part& At(const PartId& id) { return parts_.at(id); }

  void Create(const PartId& id, const PartInfo& info, const Payload& value) override {
    if (parts_.contains(id)) throw InvalidState("created twice");
    Part& part = parts_[id];
    part.info = info;
    part.value = ValuesOf(value);
  }
  void Remove(const PartId& id) override {
    if (Idle(id).sum_begun) throw InvalidState("removed within a round");
    removed_.insert_or_assign(id, std::move(parts_.at(id)));
    parts_.erase(id);
  }
  // As it is, or was when it was removed.
  const Part& Last(const PartId& id) const { return (Has(id) ? parts_ : removed_).at(id); }
  bool Has(const PartId& id) const { return parts_.contains(id); }
  void Reset(const PartId& id, const Payload& value) override {
    Part& part = Idle(id);
    part.value = ValuesOf(value);
  }
  void Check(const PartId& id, const Message& message) override {
    if (std::exchange(no_memory, false)) throw std::bad_alloc();
    const std::size_t expected = At(id).value.size() * sizeof(std::int64_t);
    const bool has_values = message.kind == Kind::kPush || message.kind == Kind::kPushPull ||
                            message.kind == Kind::kReset;
    if (!has_values || message.payload.bytes() == expected) return;
    throw InvalidArgument("expected " + std::to_string(expected) + " bytes, given " +
                          std::to_string(message.payload.bytes()));
  }
  void Add(const PartId& id, const Message& push, bool first) override {
    Part& part = Idle(id);
    if (first == part.sum_begun) throw InvalidState("a sum begins once");
    if (first) part.added.clear();
    if (first) part.sum.assign(part.value.size(), 0);
    part.sum_begun = true;
    part.added.push_back(push.rank);
    const std::vector<std::int64_t> values = ValuesOf(push.payload);
    for (std::size_t i = 0; i < values.size(); ++i) part.sum[i] += values[i];
  }
  void DropSum(const PartId& id) override { Idle(id).sum_begun = false; }
  bool Update(const PartId& id, const UpdateBy& by, std::exception_ptr* error) override {
    Part& part = Idle(id);
    if (!part.sum_begun) throw InvalidState("an update without a sum");
    part.sum_begun = false;
    part.by = by;
    ++part.updates;
    if (const auto failure = fail_update.find(id); failure != fail_update.end()) {
      *error = std::make_exception_ptr(InvalidState(failure->second));
      fail_update.erase(failure);
      return true;
    }
    for (std::size_t i = 0; i < part.value.size(); ++i) {
      part.value[i] = (by.version == 0 ? 0 : part.value[i]) + part.sum[i];
    }
    part.updating = defer(id);
    return !part.updating;
  }
  bool UpdatesWhole(const PartId& id, std::uint64_t version) override {
    return version != 0 && whole(id).has_value();
  }
  WholeArray WholeOf(const PartId& id) override { return *whole(id); }
  bool RunPass(std::span<const PartId> ids, const UpdateBy& by, int pass, OthersSums sums,
               PassResult* result) override {
    Passing& passing = passing_[ids.front()];
    std::uint64_t total = passing.mine;
    for (const auto& [server, payload] : sums) {
      total += static_cast<std::uint64_t>(ValuesOf(payload).at(0));
    }
    passing.result = {};
    std::uint64_t mine = 0;
    for (const PartId& id : ids) {
      Part& part = At(id);
      if (pass == 0 && (part.updating || !part.sum_begun)) throw InvalidState("not ready");
      part.updating = true;
      for (std::size_t i = 0; i < part.sum.size(); ++i) {
        const auto sum = static_cast<std::uint64_t>(part.sum[i]);
        mine += pass == 0 ? sum : sum ^ total;
        if (pass < 2) continue;
        part.value[i] =
            static_cast<std::int64_t>(static_cast<std::uint64_t>(part.value[i]) + sum + total);
      }
      if (pass < 2) continue;
      part.updating = part.sum_begun = false;
      part.by = by;
      ++part.updates;
    }
    if (const auto failure = fail_update.find(ids.front()); failure != fail_update.end()) {
      passing.result.error = std::make_exception_ptr(InvalidState(failure->second));
      fail_update.erase(failure);
    }
    passing.mine = mine;
    passing.result.last = pass == 2;
    if (pass < 2) passing.result.sums = PayloadOf({static_cast<std::int64_t>(mine)});
    if (defer_pass(ids.front())) return false;
    *result = EndPass(ids.front());
    return true;
  }
  PassResult EndPass(const PartId& id) {
    const PassResult result = passing_.at(id).result;
    if (result.last) passing_.erase(id);
    return result;
  }
  void DropPasses(const PartId& id) override {
    std::erase_if(passing_, [&](const auto& entry) { return entry.first.key == id.key; });
    for (auto& [other, part] : parts_) {
      if (other.key == id.key) part.updating = part.sum_begun = false;
    }
  }
  // An update that was deferred is over; the machine is to be told.
  void EndUpdate(const PartId& id) { At(id).updating = false; }
  Payload Read(const PartId& id, const Message& /*pull*/) override {
    return PayloadOf(Idle(id).value);
  }

 private:
  Part& Idle(const PartId& id) {
    Part& part = At(id);
    if (part.updating) throw InvalidState("called during an update");
    return part;
  }

  struct Passing {
    std::uint64_t mine = 0;  // the sum of the pass before
    PassResult result;
  };

  std::unordered_map<PartId, Part, PartIdHash> parts_;
  std::unordered_map<PartId, Part, PartIdHash> removed_;
  std::unordered_map<PartId, Passing, PartIdHash> passing_;  // by the first of the parts
};

}  // namespace heddle::kvstore::dist
