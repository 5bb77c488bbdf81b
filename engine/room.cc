#include "engine/room.h"

#include "engine/core.h"

namespace heddle::engine {

void AwaitRoom(const Var& var, OpName name) { var.state()->core->AwaitRoom({.name = name}); }

void RunPending(const Var& var) { var.state()->core->RunPending(); }

}  // namespace heddle::engine
