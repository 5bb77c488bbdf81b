// A simulated NCCL on simulated GPUs: its kernels wait for each other as NCCL's do, for ever if one
// of them does not come.
#pragma once

#include <heddle/dtype.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kvstore/nccl/nccl_api.h"
#include "tests/engine/sim_gpu.h"

namespace heddle::kvstore_test {

// Checks, and ends the process otherwise, what NCCL asks of its callers: groups for several
// devices, one call at a time, an end for every communicator; and that all of a group are ended at
// a time.
//
// One for each simulated process. Those of a job share a network.
class SimNccl final : public kvstore::Nccl {
 public:
  class Network;

  explicit SimNccl(std::shared_ptr<engine_test::SimGpu> gpu)
      : SimNccl(std::move(gpu), NewNetwork()) {}
  SimNccl(std::shared_ptr<engine_test::SimGpu> gpu, std::shared_ptr<Network> network);
  static std::shared_ptr<Network> NewNetwork();
  ~SimNccl() override;

  // What goes wrong.
  // The kernels of `device` never meet the others. `running`, if not null, is called in each.
  void LoseDevice(int device, std::function<void()> running = nullptr) {
    running_ = std::move(running);
    lost_device_ = device;
  }
  void FailNextReduce() { fail_next_reduce_ = true; }
  void ReportError() { report_error_ = true; }  // when communicators are asked
  void NeverReady() { never_ready_ = true; }    // new communicators
  void NeverEnds() { never_ends_ = true; }      // what is finalized
  // Kernels of communicators that are made from now on fill their devices: of different
  // communicators one at a time runs on each.
  void FillDevices() { fill_devices_ = true; }
  // Called when the calls of a group are issued, and when a communicator is aborted; they may wait.
  void CallInGroups(std::function<void()> in_groups) { in_groups_ = std::move(in_groups); }
  void CallInAborts(std::function<void()> in_aborts) { in_aborts_ = std::move(in_aborts); }
  // This process is gone: its ends wait for nobody, and nobody hears of them.
  void Crash() { crashed_ = true; }
  // Called, with the number of the communicator, by each set-up of one; may throw.
  void CallInInits(std::function<void(int number)> in_inits) { in_inits_ = std::move(in_inits); }

  int inits() const { return inits_; }
  // What a communicator's first collective does: the others are counted below.
  int connects() const { return connects_; }
  int groups() const { return groups_; }  // with collectives in them
  int reductions() const { return reductions_; }
  int all_reductions() const { return all_reductions_; }
  int broadcasts() const { return broadcasts_; }
  int finalizes() const { return finalizes_; }
  int destroys() const { return destroys_; }
  int aborts() const { return aborts_; }
  int comms_left() const { return comms_left_; }

  std::string Describe() const override { return "simulated"; }
  Id NewId() override;
  void GroupStart() override;
  bool GroupEnd() override;
  void Init(Comm* comm, int ranks, const Id& id, int rank) override;
  State Ask(Comm comm) noexcept override;
  void Reduce(const void* in, void* out, std::size_t count, DType dtype, int root, Comm comm,
              Stream stream) override;
  void AllReduce(const void* in, void* out, std::size_t count, DType dtype, Comm comm,
                 Stream stream) override;
  void Broadcast(void* data, std::size_t bytes, int root, Comm comm, Stream stream) override;
  void Abort(Comm comm) noexcept override;
  bool Finalize(Comm comm) override;
  void Destroy(Comm comm) noexcept override;

 private:
  struct SimComm;
  struct World;
  struct Process;
  struct Kernel;
  struct OneCall;

  void AddSum(SimComm* comm, Kernel kernel);
  void Add(Kernel kernel);
  void Launch(const Kernel& kernel);
  bool IsOver(const SimComm& comm) const;
  void Leave(SimComm* comm);

  const std::shared_ptr<engine_test::SimGpu> gpu_;
  std::atomic<int> lost_device_{-1};
  std::function<void()> running_;
  std::function<void(int number)> in_inits_;
  std::function<void()> in_groups_, in_aborts_;
  std::atomic<bool> fail_next_reduce_{false}, report_error_{false}, never_ready_{false};
  std::atomic<bool> never_ends_{false}, crashed_{false}, fill_devices_{false};
  std::atomic<int> inits_{0}, connects_{0}, groups_{0}, reductions_{0}, all_reductions_{0},
      broadcasts_{0};
  std::atomic<int> finalizes_{0}, destroys_{0}, aborts_{0}, comms_left_{0};
  const std::shared_ptr<Network> network_;
  std::mutex processes_mutex_;
  std::map<World*, std::weak_ptr<Process>> processes_;  // this one's part in each
  std::map<int, std::mutex> devices_;                   // held by a kernel that fills one
};

}  // namespace heddle::kvstore_test
