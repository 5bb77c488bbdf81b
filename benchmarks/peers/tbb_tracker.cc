// Peer: oneTBB's task_group under the plainest hand-written dependency tracker, a mutex and a queue
// for each variable. What one writes in an afternoon when a project needs ordered tasks.

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>
#include <oneapi/tbb/task_group.h>

#include "benchmarks/peers/harness.h"

namespace heddle::bench {
namespace {

struct Op {
  int index;
  std::atomic<int> missing;  // accesses not yet granted, and one for the push itself
};

class Variable {
 public:
  // True: the access is granted. False: a later Release returns the op.
  bool Request(Op* op, bool write) {
    const std::lock_guard lock(mutex_);
    if (!waiting_.empty() || writing_ || (write && reading_ > 0)) {
      waiting_.push_back({op, write});
      return false;
    }
    Grant(write);
    return true;
  }

  // Ends an access and adds the ops whose accesses are granted now.
  void Release(bool write, std::vector<Op*>& granted) {
    const std::lock_guard lock(mutex_);
    if (write) {
      writing_ = false;
    } else {
      --reading_;
    }
    while (!waiting_.empty() && !writing_ && !(waiting_.front().write && reading_ > 0)) {
      Grant(waiting_.front().write);
      granted.push_back(waiting_.front().op);
      waiting_.pop_front();
    }
  }

 private:
  struct Access {
    Op* op;
    bool write;
  };

  void Grant(bool write) {
    if (write) {
      writing_ = true;
    } else {
      ++reading_;
    }
  }

  std::mutex mutex_;
  std::deque<Access> waiting_;
  int reading_ = 0;
  bool writing_ = false;
};

class TrackerRunner {
 public:
  TrackerRunner(int workers, bool pusher_included)
      : threads_(pusher_included ? workers : workers + 1),
        control_(tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(threads_)),
        arena_(threads_) {}

  void Prepare(Workload& workload) {
    vars_ = std::make_unique<Variable[]>(static_cast<std::size_t>(workload.num_vars()));
  }

  void Run(Workload& workload) {
    workload_ = &workload;
    arena_.execute([&] {
      for (int i = 0; i < workload.num_ops(); ++i) Push(i);
      group_.wait();
    });
  }

  void Finish() { vars_.reset(); }

 private:
  void Push(int index) {
    const OpSpec& spec = workload_->op(index);
    Op* op = new Op{index, spec.num_vars() + 1};
    int granted = 1;
    for (int i = 0; i < spec.num_vars(); ++i) {
      granted += vars_[spec.vars[i]].Request(op, i == spec.num_reads());
    }
    Granted(op, granted);
  }

  void Granted(Op* op, int accesses) {
    if (op->missing.fetch_sub(accesses) == accesses) group_.run([this, op] { Execute(op); });
  }

  void Execute(Op* op) {
    workload_->RunBody(op->index);
    const OpSpec& spec = workload_->op(op->index);
    std::vector<Op*> granted;
    for (int i = 0; i < spec.num_vars(); ++i) {
      vars_[spec.vars[i]].Release(i == spec.num_reads(), granted);
    }
    delete op;
    for (Op* next : granted) Granted(next, 1);
  }

  const int threads_;
  tbb::global_control control_;
  tbb::task_arena arena_;
  tbb::task_group group_;
  std::unique_ptr<Variable[]> vars_;
  Workload* workload_ = nullptr;
};

}  // namespace
}  // namespace heddle::bench

int main(int argc, char** argv) {
  return heddle::bench::HarnessMain<heddle::bench::TrackerRunner>("tbb_tracker", argc, argv);
}
