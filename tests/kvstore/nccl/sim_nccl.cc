#include "tests/kvstore/nccl/sim_nccl.h"

#include <heddle/error.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <utility>

#include "base/check.h"
#include "ops/sum.h"

namespace heddle::kvstore_test {

namespace {

// Where the kernels of one collective meet.
struct Meeting {
  std::vector<std::vector<std::byte>> inputs;
  std::size_t arrived = 0;
};

constexpr int kInternalError = 3;  // what NCCL numbers it
constexpr std::byte kGarbage{0xab};

}  // namespace

// A communicator, of all ranks.
struct SimNccl::World {
  explicit World(std::size_t count) : ranks(count) {}

  const std::size_t ranks;
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<int> in_call{0};
  std::size_t joined = 0, leaving = 0;
  bool aborted = false;
  std::map<int, Meeting> meetings;  // by the number of the collective
};

struct SimNccl::SimComm {
  std::shared_ptr<World> world;
  std::size_t rank;
  int device;
  int collectives = 0;
  std::atomic<int> asks_to_ready{2};  // it takes a while
};

struct SimNccl::Kernel {
  SimComm* comm;
  Stream stream;
  const void* in;
  void* out;
  std::size_t bytes;
  std::size_t root;
  bool sums;
  DType dtype;
};

// One at a time on communicators that belong together.
struct SimNccl::OneCall {
  explicit OneCall(World& world) : OneCall(world.in_call) {}
  explicit OneCall(std::atomic<int>& calls) : in_call(calls) {
    CHECK(in_call.fetch_add(1) == 0, "two calls of NCCL at a time");
  }
  ~OneCall() { --in_call; }
  std::atomic<int>& in_call;
};

namespace {
thread_local int group_depth = 0;
}  // namespace

SimNccl::SimNccl(std::shared_ptr<engine_test::SimGpu> gpu) : gpu_(std::move(gpu)) {}
SimNccl::~SimNccl() { CHECK(comms_left_ == 0, "{} communicators were left", comms_left_.load()); }

SimNccl::Id SimNccl::NewId() {
  newest_ = nullptr;
  return {};
}

void SimNccl::GroupStart() { ++group_depth; }

namespace {
// What a thread has added to its group.
template <class Kernel>
std::vector<Kernel>& Pending() {
  thread_local std::vector<Kernel> pending;
  return pending;
}
}  // namespace

bool SimNccl::GroupEnd() {
  CHECK(--group_depth == 0, "groups do not nest here");
  const std::vector<Kernel> kernels = std::exchange(Pending<Kernel>(), {});
  std::map<World*, std::size_t> calls;
  for (const Kernel& kernel : kernels) {
    const OneCall one(*kernel.comm->world);
    ++calls[kernel.comm->world.get()];
    Launch(kernel);
  }
  for (const auto& [world, count] : calls) {
    CHECK(count % world->ranks == 0, "a group with {} calls of {} ranks", count, world->ranks);
  }
  groups_ += static_cast<int>(!kernels.empty());
  return !kernels.empty();
}

void SimNccl::Init(Comm* comm, int ranks, const Id&, int rank) {
  CHECK(group_depth == 1, "several ranks of one thread need a group");
  if (newest_ == nullptr) newest_ = std::make_shared<World>(static_cast<std::size_t>(ranks));
  const OneCall one(*newest_);
  ++newest_->joined;
  ++inits_;
  ++comms_left_;
  *comm = new SimComm{newest_, static_cast<std::size_t>(rank), engine_test::SimGpu::current()};
}

SimNccl::State SimNccl::Ask(Comm comm) noexcept {
  auto* sim = static_cast<SimComm*>(comm);
  const OneCall one(*sim->world);
  if (report_error_) {
    return {.error = std::make_exception_ptr(
                NcclError("simulated: ncclInternalError (reported later)", kInternalError))};
  }
  const std::lock_guard lock(sim->world->mutex);
  return {.in_progress = never_ready_ || sim->world->joined < sim->world->ranks ||
                         sim->asks_to_ready.fetch_sub(1) > 0};
}

void SimNccl::Add(Kernel kernel) {
  CHECK(group_depth == 1, "a collective of several devices of one thread needs a group");
  CHECK(kernel.root < kernel.comm->world->ranks);
  Pending<Kernel>().push_back(kernel);
}

void SimNccl::Reduce(const void* in, void* out, std::size_t count, DType dtype, int root, Comm comm,
                     Stream stream) {
  const OneCall one(*static_cast<SimComm*>(comm)->world);
  if (fail_next_reduce_.exchange(false)) {
    throw NcclError("simulated: ncclInternalError (out of luck)", kInternalError);
  }
  ++reductions_;
  Add({static_cast<SimComm*>(comm), stream, in, out, count * SizeOf(dtype),
       static_cast<std::size_t>(root), true, dtype});
}

void SimNccl::Broadcast(void* data, std::size_t bytes, int root, Comm comm, Stream stream) {
  const OneCall one(*static_cast<SimComm*>(comm)->world);
  ++broadcasts_;
  Add({static_cast<SimComm*>(comm), stream, data, data, bytes, static_cast<std::size_t>(root),
       false, DType::kUInt8});
}

void SimNccl::Launch(const Kernel& kernel) {
  SimComm& comm = *kernel.comm;
  const int number = comm.collectives++;
  const bool writes = kernel.sums == (comm.rank == kernel.root);
  std::vector<const void*> arrays = {kernel.in};
  if (writes) arrays.push_back(kernel.out);
  std::vector<std::int64_t> bytes(arrays.size(), static_cast<std::int64_t>(kernel.bytes));
  const bool lost = lost_device_ == comm.device;
  const auto run = [this, kernel, number, lost, writes, rank = comm.rank,
                    world = comm.world](const std::vector<std::byte*>& at) {
    if (lost && running_ != nullptr) running_();
    std::unique_lock lock(world->mutex);
    Meeting& meeting = world->meetings[number];
    meeting.inputs.resize(world->ranks);
    meeting.inputs[rank].assign(at[0], at[0] + kernel.bytes);
    if (!lost) ++meeting.arrived;
    world->changed.notify_all();
    world->changed.wait(lock, [&] { return meeting.arrived == world->ranks || world->aborted; });
    if (!writes) return;
    if (meeting.arrived < world->ranks) {
      std::memset(at[1], static_cast<int>(kGarbage), kernel.bytes);
      return;
    }
    if (!kernel.sums) {
      std::memcpy(at[1], meeting.inputs[kernel.root].data(), kernel.bytes);
      return;
    }
    std::vector<const void*> inputs;
    for (const std::vector<std::byte>& input : meeting.inputs) {
      CHECK(input.size() == kernel.bytes);
      inputs.push_back(input.data());
    }
    ops::Sum(kernel.dtype, inputs, at[1], kernel.bytes / SizeOf(kernel.dtype));
  };
  const int outer = gpu_->Enter(comm.device);
  gpu_->LaunchOn({comm.device, kernel.stream}, std::move(arrays), std::move(bytes), run);
  gpu_->Leave(outer);
}

// Waits for the others, as NCCL may.
void SimNccl::Leave(SimComm* comm) {
  const std::shared_ptr<World> world = comm->world;
  std::unique_lock lock(world->mutex);
  ++world->leaving;
  world->changed.notify_all();
  world->changed.wait(lock, [&] { return world->leaving == world->joined; });
  delete comm;
  --comms_left_;
}

void SimNccl::Abort(Comm comm) noexcept {
  auto* sim = static_cast<SimComm*>(comm);
  {
    const std::lock_guard lock(sim->world->mutex);
    sim->world->aborted = true;
    sim->world->changed.notify_all();
  }
  ++aborts_;
  Leave(sim);
}

void SimNccl::Destroy(Comm comm) noexcept {
  auto* sim = static_cast<SimComm*>(comm);
  {
    const std::lock_guard lock(sim->world->mutex);
    CHECK(!sim->world->aborted);
  }
  Leave(sim);
}

}  // namespace heddle::kvstore_test
