// The optimizer's states of a store, saved and loaded.
#include <heddle/error.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "kvstore/dist/server/array_part.h"
#include "kvstore/optimizer/update_plan.h"
#include "ops/copy.h"

namespace heddle::kvstore::dist {

std::pair<StatesBody, Payload> ArrayParts::SaveStates(std::uint32_t store,
                                                      const std::optional<PartId>& after) const {
  std::vector<PartId> ids;
  for (const auto& [id, part] : parts_) {
    if (id.store == store && part->state != nullptr && (!after || *after < id)) ids.push_back(id);
  }
  std::ranges::sort(ids);
  StatesBody body;
  std::vector<NDArray> arrays;
  std::size_t meta_bytes = 0;
  std::uint64_t payload_bytes = 0;
  for (const PartId& id : ids) {
    if (meta_bytes > kStatesMetaBytesMax / 2 || payload_bytes > kStatesPayloadBytesMax / 2) break;
    const auto& part = parts_.at(id);
    const UpdateState& state = *part->state;
    PartStates saved;
    saved.part = id;
    saved.info = part->info;
    saved.updates = state.step;
    saved.numbers.assign(state.numbers.begin(), state.numbers.end());
    const auto save = [&](std::string name, const NDArray& array, const NDArray& restored) {
      const NDArray& source = array.empty() ? restored : array;
      if (source.empty()) return;
      NDArray copy(source.shape(), source.dtype(), Cpu(), engine_);
      ops::Copy(source.const_data(), copy.data(), static_cast<std::size_t>(source.bytes()));
      payload_bytes += static_cast<std::uint64_t>(source.bytes());
      saved.arrays.push_back({std::move(name), source.dtype(), source.size()});
      arrays.push_back(std::move(copy));
    };
    save("master", state.master, state.restored_master);
    for (std::size_t i = 0; i < state.arrays.size(); ++i) {
      save(std::to_string(i), state.arrays[i], state.restored[i]);
    }
    meta_bytes += Encode(StatesBody{.optimizer = {}, .parts = {saved}}).size();
    body.parts.push_back(std::move(saved));
  }
  auto owner = std::make_shared<const std::vector<NDArray>>(std::move(arrays));
  std::vector<std::span<const std::byte>> runs;
  for (const NDArray& array : *owner) {
    runs.emplace_back(static_cast<const std::byte*>(array.const_data()),
                      static_cast<std::size_t>(array.bytes()));
  }
  return {std::move(body), Payload(std::move(owner), std::move(runs))};
}

void ArrayParts::LoadStates(std::uint32_t store, const StatesBody& states, const Payload& arrays) {
  const auto rules = stores_.find(store);
  if (rules == stores_.end() || rules->second.rules.empty()) {
    throw InvalidState("loading the optimizer's states: expected an optimizer, got none");
  }
  const Rule& rule = std::prev(rules->second.rules.end())->second;
  std::vector<std::pair<Part*, std::unique_ptr<UpdateState>>> loaded;
  std::size_t offset = 0;
  for (const PartStates& saved : states.parts) {
    const auto found = parts_.find(saved.part);
    if (found == parts_.end() || !(found->second->info == saved.info)) {
      throw InvalidArgument(fmt::format(
          "loading the optimizer's states: key {}, part {}: expected a part of this server",
          ToString(KeyRef(saved.info.key)), saved.part.part));
    }
    auto state = std::make_unique<UpdateState>(rule.plan->multi_precision);
    state->step = saved.updates;
    if (saved.numbers.size() != state->numbers.size()) {
      throw InvalidArgument("loading the optimizer's states: a wrong count of numbers");
    }
    std::ranges::copy(saved.numbers, state->numbers.begin());
    for (const PartStates::Array& array : saved.arrays) {
      NDArray copy({array.elements}, array.dtype, Cpu(), engine_);
      if (arrays.bytes() - offset < static_cast<std::uint64_t>(copy.bytes())) {
        throw InvalidArgument("loading the optimizer's states: arrays are missing");
      }
      CopyOut(arrays, offset, copy.data(), static_cast<std::size_t>(copy.bytes()));
      offset += static_cast<std::size_t>(copy.bytes());
      if (array.name == "master") {
        state->restored_master = std::move(copy);
        continue;
      }
      const std::size_t place = array.name.size() == 1 ? array.name[0] - '0' : state->arrays.size();
      if (place >= state->arrays.size()) {
        throw InvalidArgument(
            fmt::format("loading the optimizer's states: unknown array '{}'", array.name));
      }
      state->restored[place] = std::move(copy);
    }
    loaded.emplace_back(found->second.get(), std::move(state));
  }
  for (auto& [part, state] : loaded) {
    part->state = std::move(state);
    part->generation = rule.generation;
  }
}

}  // namespace heddle::kvstore::dist
