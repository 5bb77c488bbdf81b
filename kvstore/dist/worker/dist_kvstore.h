// The stores of a distributed job, as workers see them.
#pragma once

#include <heddle/kvstore.h>

#include <memory>
#include <string>

#include "kvstore/dist/worker/worker_link.h"

namespace heddle::kvstore::dist {

// A store of the job that `link` is part of; `store` counts those of the link. `type` is one of the
// four types without aliases. Returns when the servers have opened it; InvalidArgument if another
// rank's store of that number is of another type.
std::unique_ptr<KVStore> MakeDistStore(Engine& engine, const std::string& type,
                                       std::shared_ptr<WorkerLink> link, std::uint32_t store);

}  // namespace heddle::kvstore::dist
