// The optimizer's states of a dist store: gathered from the servers' parts, and cut for them.
#pragma once

#include <heddle/engine.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/worker/dist_key.h"
#include "kvstore/optimizer_states.h"

namespace heddle::kvstore::dist {

// The states of whole keys, in the order of the keys, from those of what the servers answered to
// kSaveStates that are `wanted`: parts of one value of a key. `updates` and the optimizer are left
// to the caller, whose `rule` says which of them have a number a row. NetworkError if an answer
// cannot be read.
std::vector<KeyStates> JoinStates(const std::vector<Message>& answers,
                                  const std::function<bool(const PartStates&)>& wanted,
                                  const internal::UpdateRule& rule, Engine& engine);

// What the servers get of `states`, in messages that are not too long; `key_of` knows where the
// parts of a key are. InvalidArgument if a key is cut whose state is in one piece.
struct ServerStates {
  std::int32_t server = 0;
  StatesBody body;
  Payload arrays;
};
std::vector<ServerStates> CutStates(const std::vector<KeyStates>& states,
                                    const std::function<DistKey&(const KeyStates&)>& key_of);

}  // namespace heddle::kvstore::dist
