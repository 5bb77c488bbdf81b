// A seeded run of a whole job over the simulated network, with faults, and what an independent
// model says that its workers must see.
//
// The seed decides everything: workers, servers, keys, what each worker does in its rounds, which
// faults happen. From the plan alone the model knows the value of each key after each round
// (dist_sync), or what a value may be made of (dist_async); nothing of it is learnt from the
// machines. A schedule that has not ended when nothing more can happen is a failure too.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/part_store.h"
#include "kvstore/dist/protocol/server.h"

namespace heddle::kvstore::dist {

// Makes the servers of a schedule; tests put in servers with faults of their own.
using MakeServer =
    std::function<std::unique_ptr<ServerMachine>(ServerOptions, PartStore&, ServerControl&)>;
std::unique_ptr<ServerMachine> MakeRealServer(ServerOptions options, PartStore& parts,
                                              ServerControl& control);

struct ScheduleResult {
  std::string failure;  // what went wrong; empty: nothing
  std::string plan;     // what the seed decided
  std::uint64_t messages = 0;
  int faults = 0;  // that were planned
};

// `trace` is told each message, for people.
ScheduleResult RunSchedule(std::uint64_t seed, const MakeServer& make_server = MakeRealServer,
                           const std::function<void(const std::string&)>& trace = nullptr);

}  // namespace heddle::kvstore::dist
