#include "tests/kvstore/nccl/sim_nccl.h"

#include <heddle/error.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <utility>

#include "base/check.h"
#include "ops/sum.h"

namespace heddle::kvstore_test {

namespace {

// What a collective does; those of all ranks have to be alike.
struct Form {
  enum Kind { kReduce, kAllReduce, kBroadcast } kind;
  std::size_t bytes;
  std::size_t root;
  DType dtype;
  bool operator==(const Form&) const = default;
};

// Where the kernels of one collective meet. One of another form than the first never does.
struct Meeting {
  std::optional<Form> form;
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
  std::size_t joined = 0, finalized = 0;
  std::map<int, Meeting> meetings;  // by the number of the collective
};

// Whoever has an id finds its communicator here.
class SimNccl::Network {
 public:
  Id NewId() {
    const std::lock_guard lock(mutex_);
    ++ids_;
    Id id{};
    std::memcpy(id.data(), &ids_, sizeof(ids_));
    std::memcpy(id.data() + sizeof(ids_), &salt_, sizeof(salt_));
    return id;
  }
  std::shared_ptr<World> Find(const Id& id, int ranks) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<World>& world = worlds_[id];
    if (world == nullptr) world = std::make_shared<World>(static_cast<std::size_t>(ranks));
    CHECK(world->ranks == static_cast<std::size_t>(ranks));
    return world;
  }

 private:
  std::mutex mutex_;
  std::uint64_t ids_ = 0;
  const std::uint32_t salt_ = std::random_device()();  // other test programs have other ids
  std::map<Id, std::shared_ptr<World>> worlds_;
};

// The ranks of one process. Guarded by the world's mutex.
struct SimNccl::Process {
  std::atomic<int> in_call{0};
  std::size_t ranks = 0, leaving = 0;
  bool aborted = false;
};

struct SimNccl::SimComm {
  std::shared_ptr<World> world;
  std::shared_ptr<Process> process;
  std::size_t rank;
  int device;
  std::mutex* fills;  // null: its kernels leave room for others
  Comm* written;      // where it is written once more when its set-up ends
  int collectives = 0;
  bool finalizing = false;
  std::atomic<int> asks_to_ready{2};  // it takes a while
};

struct SimNccl::Kernel {
  SimComm* comm;
  Stream stream;
  const void* in;
  void* out;
  Form form;

  bool connects() const { return comm->collectives == 0; }
};

// One at a time on the communicators of a process that belong together.
struct SimNccl::OneCall {
  explicit OneCall(Process& process) : in_call(process.in_call) {
    CHECK(in_call.fetch_add(1) == 0, "two calls of NCCL at a time");
  }
  ~OneCall() { --in_call; }
  std::atomic<int>& in_call;
};

namespace {
thread_local int group_depth = 0;
}  // namespace

SimNccl::SimNccl(std::shared_ptr<engine_test::SimGpu> gpu, std::shared_ptr<Network> network)
    : gpu_(std::move(gpu)), network_(std::move(network)) {}
SimNccl::~SimNccl() { CHECK(comms_left_ == 0, "{} communicators were left", comms_left_.load()); }

std::shared_ptr<SimNccl::Network> SimNccl::NewNetwork() { return std::make_shared<Network>(); }

SimNccl::Id SimNccl::NewId() { return network_->NewId(); }

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
  const bool counts =
      std::ranges::any_of(kernels, [](const Kernel& kernel) { return !kernel.connects(); });
  if (counts && in_groups_ != nullptr) in_groups_();
  std::map<Process*, std::size_t> calls;
  for (const Kernel& kernel : kernels) {
    const OneCall one(*kernel.comm->process);
    ++calls[kernel.comm->process.get()];
    Launch(kernel);
  }
  for (const auto& [process, count] : calls) {
    CHECK(count % process->ranks == 0, "a group with {} calls of {} ranks", count, process->ranks);
  }
  groups_ += static_cast<int>(counts);
  return !kernels.empty();
}

void SimNccl::Init(Comm* comm, int ranks, const Id& id, int rank) {
  CHECK(group_depth == 1, "several ranks of one thread need a group");
  if (in_inits_ != nullptr) in_inits_(inits_);
  const std::shared_ptr<World> world = network_->Find(id, ranks);
  const std::scoped_lock lock(processes_mutex_, world->mutex);
  std::shared_ptr<Process> process = processes_[world.get()].lock();
  if (process == nullptr) {
    process = std::make_shared<Process>();
    processes_[world.get()] = process;
  }
  const OneCall one(*process);
  const int device = engine_test::SimGpu::current();
  std::mutex* const fills = fill_devices_ ? &devices_[device] : nullptr;
  ++world->joined;
  ++process->ranks;
  world->changed.notify_all();
  ++inits_;
  ++comms_left_;
  *comm = new SimComm{world, process, static_cast<std::size_t>(rank), device, fills, comm};
}

SimNccl::State SimNccl::Ask(Comm comm) noexcept {
  auto* sim = static_cast<SimComm*>(comm);
  const OneCall one(*sim->process);
  if (report_error_) {
    return {.error = std::make_exception_ptr(
                NcclError("simulated: ncclInternalError (reported later)", kInternalError))};
  }
  const std::lock_guard lock(sim->world->mutex);
  return {.in_progress = never_ready_ || sim->world->joined < sim->world->ranks ||
                         sim->asks_to_ready.fetch_sub(1) > 0 || (sim->finalizing && !IsOver(*sim))};
}

void SimNccl::Add(Kernel kernel) {
  CHECK(group_depth == 1, "a collective of several devices of one thread needs a group");
  CHECK(kernel.form.root < kernel.comm->world->ranks);
  ++(kernel.connects()                      ? connects_
     : kernel.form.kind == Form::kReduce    ? reductions_
     : kernel.form.kind == Form::kAllReduce ? all_reductions_
                                            : broadcasts_);
  Pending<Kernel>().push_back(kernel);
}

void SimNccl::AddSum(SimComm* comm, Kernel kernel) {
  const OneCall one(*comm->process);
  if (fail_next_reduce_.exchange(false)) {
    throw NcclError("simulated: ncclInternalError (out of luck)", kInternalError);
  }
  Add(kernel);
}

void SimNccl::Reduce(const void* in, void* out, std::size_t count, DType dtype, int root, Comm comm,
                     Stream stream) {
  auto* const sim = static_cast<SimComm*>(comm);
  AddSum(sim, {sim,
               stream,
               in,
               out,
               {Form::kReduce, count * SizeOf(dtype), static_cast<std::size_t>(root), dtype}});
}

void SimNccl::AllReduce(const void* in, void* out, std::size_t count, DType dtype, Comm comm,
                        Stream stream) {
  auto* const sim = static_cast<SimComm*>(comm);
  AddSum(sim, {sim, stream, in, out, {Form::kAllReduce, count * SizeOf(dtype), 0, dtype}});
}

void SimNccl::Broadcast(void* data, std::size_t bytes, int root, Comm comm, Stream stream) {
  auto* const sim = static_cast<SimComm*>(comm);
  const OneCall one(*sim->process);
  Add({sim,
       stream,
       data,
       data,
       {Form::kBroadcast, bytes, static_cast<std::size_t>(root), DType::kUInt8}});
}

void SimNccl::Launch(const Kernel& kernel) {
  SimComm& comm = *kernel.comm;
  const Form form = kernel.form;
  const int number = comm.collectives++;
  const bool is_root = comm.rank == form.root;
  const bool writes = form.kind == Form::kAllReduce || (form.kind == Form::kReduce) == is_root;
  std::vector<const void*> arrays = {kernel.in};
  if (writes) arrays.push_back(kernel.out);
  std::vector<std::int64_t> bytes(arrays.size(), static_cast<std::int64_t>(form.bytes));
  const bool lost = lost_device_ == comm.device;
  const auto run = [this, form, number, lost, writes, rank = comm.rank, world = comm.world,
                    process = comm.process, fills = comm.fills](const std::vector<std::byte*>& at) {
    std::unique_lock<std::mutex> device;
    if (fills != nullptr) device = std::unique_lock(*fills);
    if (lost && running_ != nullptr) running_();
    std::unique_lock lock(world->mutex);
    Meeting& meeting = world->meetings[number];
    if (!meeting.form) meeting.form = form;
    meeting.inputs.resize(world->ranks);
    if (!lost && *meeting.form == form) {
      meeting.inputs[rank].assign(at[0], at[0] + form.bytes);
      ++meeting.arrived;
    }
    world->changed.notify_all();
    world->changed.wait(lock, [&] { return meeting.arrived == world->ranks || process->aborted; });
    if (!writes) return;
    if (meeting.arrived < world->ranks) {
      std::memset(at[1], static_cast<int>(kGarbage), form.bytes);
      return;
    }
    if (form.kind == Form::kBroadcast) {
      std::memcpy(at[1], meeting.inputs[form.root].data(), form.bytes);
      return;
    }
    std::vector<const void*> inputs;
    for (const std::vector<std::byte>& input : meeting.inputs) inputs.push_back(input.data());
    ops::Sum(form.dtype, inputs, at[1], form.bytes / SizeOf(form.dtype));
  };
  const internal::GpuDriver::Context outer = gpu_->Enter(comm.device);
  gpu_->LaunchOn({comm.device, kernel.stream}, std::move(arrays), std::move(bytes), run);
  gpu_->Leave(outer);
}

// Waits for the others of this process, as NCCL may.
void SimNccl::Leave(SimComm* comm) {
  const std::shared_ptr<World> world = comm->world;
  const std::shared_ptr<Process> process = comm->process;
  std::unique_lock lock(world->mutex);
  ++process->leaving;
  world->changed.notify_all();
  world->changed.wait(lock, [&] { return process->leaving == process->ranks; });
  delete comm;
  --comms_left_;
}

void SimNccl::Abort(Comm comm) noexcept {
  auto* sim = static_cast<SimComm*>(comm);
  if (in_aborts_ != nullptr) in_aborts_();
  {
    const std::lock_guard lock(sim->world->mutex);
    const bool is_ready =
        !never_ready_ && sim->world->joined == sim->world->ranks && sim->asks_to_ready <= 0;
    if (!is_ready) *sim->written = comm;
    sim->process->aborted = true;
    sim->world->changed.notify_all();
  }
  ++aborts_;
  Leave(sim);
}

// Is its end over? Guarded by the world's mutex. As with NCCL, all ranks have to come to theirs.
bool SimNccl::IsOver(const SimComm& comm) const {
  return crashed_ || comm.world->finalized == comm.world->ranks;
}

bool SimNccl::Finalize(Comm comm) {
  auto* sim = static_cast<SimComm*>(comm);
  const OneCall one(*sim->process);
  const std::lock_guard lock(sim->world->mutex);
  CHECK(!sim->process->aborted && !std::exchange(sim->finalizing, true));
  if (!never_ends_ && !crashed_) ++sim->world->finalized;
  sim->world->changed.notify_all();
  ++finalizes_;
  return IsOver(*sim);
}

// NCCL finalizes what has not been, and waits for that without end.
void SimNccl::Destroy(Comm comm) noexcept {
  auto* sim = static_cast<SimComm*>(comm);
  {
    std::unique_lock lock(sim->world->mutex);
    CHECK(!sim->process->aborted);
    if (!std::exchange(sim->finalizing, true) && !never_ends_ && !crashed_) {
      ++sim->world->finalized;
      sim->world->changed.notify_all();
    }
    sim->world->changed.wait(lock, [&] { return IsOver(*sim); });
  }
  ++destroys_;
  Leave(sim);
}

}  // namespace heddle::kvstore_test
