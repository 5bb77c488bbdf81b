// The meeting of the workers of a job: by a dist store of its own, whose servers add up what all
// say, and whose scheduler knows who is gone.
#pragma once

#include <heddle/kvstore.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvstore/nccl/meeting.h"

namespace heddle::kvstore {

// Errors: those of dist stores. Who does not come is waited for as long as it lives, or until their
//         deadline (HEDDLE_OP_DEADLINE_MS), and named in the log meanwhile.
class JobMeeting final : public Meeting {
 public:
  // What a worker and its job say of each other; from any thread, without waiting for anybody.
  struct Job {
    std::function<void(const std::string& why)> fail;       // this worker has failed
    std::function<std::optional<std::string>()> failure{};  // why the job cannot go on
  };

  // `store` is of type "dist_sync", and nobody else uses it.
  JobMeeting(std::unique_ptr<KVStore> store, Job job)
      : store_(std::move(store)), job_(std::move(job)) {}

  int rank() const override { return store_->rank(); }
  int processes() const override { return store_->num_workers(); }
  std::vector<NDArray> Share(const std::vector<NDArray>& values) override;
  std::optional<std::string> failure() override { return job_.failure(); }
  void Fail(const std::string& why) override { job_.fail(why); }

 protected:
  Bytes Add(const Bytes& bytes) override;

 private:
  const std::unique_ptr<KVStore> store_;
  const Job job_;
  // Each meeting has keys of its own: the servers let go of a key when all workers have removed it.
  std::int64_t meetings_ = 0;
};

}  // namespace heddle::kvstore
