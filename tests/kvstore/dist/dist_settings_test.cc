// Goal: what several threads of a worker set on all servers at once counts if one of their calls
// succeeds, whichever does.
// Method: a store whose requests go nowhere: the test answers them, in any order.
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/optimizer.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/dist/worker/dist_kvstore.h"
#include "kvstore/dist/worker/worker_link.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore::dist {
namespace {

class AnsweredByTheTest final : public WorkerLink {
 public:
  AnsweredByTheTest() { placement_.num_servers = 2; }

  using WorkerLink::Submit;
  void Submit(std::span<const std::span<Request>> calls, Outputs* out) override {
    const std::lock_guard lock(mutex_);
    for (const std::span<Request> requests : calls) {
      for (Request& request : requests) {
        const bool opens = request.kind == Kind::kOpenStore;
        if (opens || (request.flags & kFlagFailed) != 0) {
          out->answers.push_back({request.token, nullptr, {.kind = Kind::kDone}});
        }
        if (!opens) requests_.push_back(std::move(request));
      }
    }
    changed_.notify_all();
  }
  void Carry(Outputs& out) override {
    for (Answer& answer : out.answers) Give(std::move(answer));
  }

  // The next request, once there is one.
  Request Next() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(
        changed_.wait_for(lock, std::chrono::seconds(60), [&] { return !requests_.empty(); }));
    Request next = std::move(requests_.at(0));
    requests_.erase(requests_.begin());
    return next;
  }
  // Those that nobody has taken.
  std::vector<Request> Rest() {
    const std::lock_guard lock(mutex_);
    return std::exchange(requests_, {});
  }
  static void End(const Request& request) { Give({request.token, nullptr, {.kind = Kind::kDone}}); }
  static void GiveUp(const Request& request) {
    Give({request.token, std::make_exception_ptr(TimeoutError("too late")), {}});
  }

  std::int32_t rank() const override { return 0; }
  std::int32_t num_workers() const override { return 1; }
  const PlacementOptions& placement() const override { return placement_; }
  std::int32_t num_dead() override { return 0; }
  void Fail(const std::string& /*why*/) override {}
  Time deadline() const override { return Time{0}; }
  void Serve(Engine& /*engine*/, UnsentCalls& /*calls*/) override {}
  void Leave(Engine& /*engine*/, UnsentCalls& /*calls*/) override {}
  void WillRequest(std::int32_t /*server*/, const PartId& /*part*/,
                   std::uint64_t /*requests*/) override {}
  void WontRequest(std::int32_t /*server*/, const PartId& /*part*/) override {}
  void CloseStore(std::uint32_t /*store*/) override {}
  void CorrectClose(std::uint32_t /*store*/) override {}
  void StoreClosed(std::uint32_t /*store*/) override {}
  void DropStore() override {}
  void Supply(std::int32_t /*server*/, const PartId& /*part*/, std::uint64_t /*token*/,
              PushValue&& /*value*/, Outputs* /*out*/) override {}
  bool Barrier(AnswerSink& /*sink*/, Outputs* /*out*/) override { return false; }
  void OpenBarrier(Outputs* /*out*/) override {}
  void TakeAnswers(std::size_t /*requests*/) override {}

 private:
  static void Give(Answer&& answer) {
    reinterpret_cast<AnswerSink*>(static_cast<std::uintptr_t>(answer.token))
        ->OnAnswer(std::move(answer));
  }

  PlacementOptions placement_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Request> requests_;
};

// Two threads make the same call; both have asked server 0, and been answered, when server 1 is.
void CheckSettings(const std::function<void(KVStore&)>& set) {
  for (const int succeeds : {0, 1, 2}) {  // 2: neither
    for (const int ends_first : {0, 1}) {
      SCOPED_TRACE(::testing::Message()
                   << succeeds << " succeeds, " << ends_first << " ends first");
      Engine engine(EngineOptions::FromEnvironment());
      const auto link = std::make_shared<AnsweredByTheTest>();
      const auto store = MakeDistStore(engine, "dist_sync", link, 0);
      std::vector<std::future<bool>> calls;
      std::vector<Request> second;
      for (int i = 0; i < 2; ++i) {
        calls.push_back(std::async(std::launch::async, [&] {
          try {
            set(*store);
            return true;
          } catch (const TimeoutError&) {
            return false;
          }
        }));
        const Request first = link->Next();
        EXPECT_EQ(first.server, 0);
        AnsweredByTheTest::End(first);
        second.push_back(link->Next());
        EXPECT_EQ(second.back().server, 1);
      }
      for (const int i : {ends_first, 1 - ends_first}) {
        const Request& request = second[static_cast<std::size_t>(i)];
        if (i == succeeds) {
          AnsweredByTheTest::End(request);
        } else {
          AnsweredByTheTest::GiveUp(request);
        }
        EXPECT_EQ(calls[static_cast<std::size_t>(i)].get(), i == succeeds);
      }
      const std::vector<Request> taken_back = link->Rest();
      ASSERT_EQ(taken_back.size(), succeeds == 2 ? 2U : 0U);
      for (std::size_t i = 0; i < taken_back.size(); ++i) {
        EXPECT_EQ(taken_back[i].server, static_cast<std::int32_t>(i));
        EXPECT_EQ(taken_back[i].flags, kFlagFailed);
        EXPECT_EQ(taken_back[i].meta, second[0].meta);
        EXPECT_EQ(taken_back[i].version, second[0].version);
      }
    }
  }
}

TEST(DistSettings, ACompressionThatOneOfSeveralThreadsHasSetIsNotTakenBack) {
  CheckSettings([](KVStore& store) { store.SetGradientCompression({.type = "2bit"}); });
}

TEST(DistSettings, AnOptimizerThatOneOfSeveralThreadsHasSetIsNotTakenBack) {
  CheckSettings([](KVStore& store) { store.SetOptimizer(MakeOptimizer("sgd", {})); });
}

}  // namespace
}  // namespace heddle::kvstore::dist
