// The table of stores that keep the contract of heddle/kvstore.h: all types, engines and networks.
// What only the stores of one process do (updaters, keys made by a push) is in
// contract_test.cc, what only several workers show in dist/.
#pragma once

#include <heddle/kvstore.h>

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/dist/worker/dist_kvstore.h"
#include "kvstore/dist/worker/worker_node.h"
#include "tests/kvstore/dist/job.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {

inline std::vector<StoreSetup> ConformanceSetups() {
  std::vector<StoreSetup> setups = AllSetups();
  for (const char* const type :
       {"dist_sync", "dist_async", "dist_device_sync", "dist_device_async"}) {
    for (const char* const network : {"sim", "tcp"})
      setups.push_back({type, "threaded", 2, network});
  }
  setups.push_back({"dist_sync", "threaded", 2, "shm"});
  return setups;
}

// A dist store is that of the only worker of a job with two servers.
class ConformanceTest : public StoreTest {
 protected:
  bool is_dist() const { return !GetParam().network.empty(); }
  kvstore::dist::Network network() const {
    if (GetParam().network == "sim") return kvstore::dist::Network::kSim;
    if (GetParam().network == "tcp") return kvstore::dist::Network::kTcp;
    return kvstore::dist::Network::kSharedMemory;
  }

  std::unique_ptr<KVStore> NewStore(const KVStoreOptions& options = {}) override {
    if (!is_dist()) return StoreTest::NewStore(options);
    if (job_ == nullptr) {
      job_ = std::make_unique<kvstore::dist::Job>(
          kvstore::dist::JobOptions{.network = network(),
                                    .num_servers = 2,
                                    .program = {.controller = [](int, std::string_view) {}}});
      worker_ = job_->Join(0);
    }
    return kvstore::dist::MakeDistStore(engine, GetParam().store, worker_, worker_->NewStore());
  }
  void TearDown() override {
    store.reset();
    engine.Stop();
    if (worker_ == nullptr) return;
    worker_->Close();
    worker_.reset();
    job_.reset();
  }

  // Stores of a job say whose input it was, too.
  void ExpectFails(const NDArray& out, const std::string& error) const {
    try {
      out.WaitToRead();
      ADD_FAILURE() << "it has a value";
    } catch (const std::exception& caught) {
      if (is_dist()) {
        EXPECT_NE(std::string(caught.what()).find(error), std::string::npos) << caught.what();
      } else {
        EXPECT_EQ(caught.what(), error);
      }
    }
  }

  // For calls that return before what they come after, but where servers have to answer.
  template <class Call>
  void ReleaseWhile(Hold& hold, const Call& call) const {
    if (!is_dist()) {
      call();
      hold.Release();
      return;
    }
    std::thread other([&] { hold.Release(); });
    call();
    other.join();
  }

 private:
  std::unique_ptr<kvstore::dist::Job> job_;
  std::shared_ptr<kvstore::dist::WorkerNode> worker_;
};

}  // namespace heddle::kvstore_test
