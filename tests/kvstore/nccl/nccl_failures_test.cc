// What becomes of the processes of a store "nccl" when one of them cannot go on.
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/optimizer.h>

#include <chrono>
#include <functional>
#include <latch>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/nccl/fake_clock.h"
#include "tests/kvstore/nccl/sim_processes.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Waits for what needs no call; false: it did not come.
bool Comes(const std::function<bool()>& has_come) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!has_come() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return has_come();
}

TEST(NcclProcessesFailures, TheSameGpuInTwoProcessesIsRefusedBeforeNcclIsCalled) {
  SimProcesses processes({.processes = 3, .devices = 2});
  processes.gpu->MakeAlias(5, 0);  // of process 2, and of process 0
  processes.Run([](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    ExpectInvalid([&] { process.store->Push("k", process.OnDevices(1)); },
                  {"simulated GPU 0", "process 0", "process 2", "CUDA_VISIBLE_DEVICES"});
    EXPECT_EQ(process.nccl->inits(), 0);
    process.store->Barrier();
  });
}

TEST(NcclProcessesFailures, AProcessThatDiesMidwayIsNamedAndNothingHangs) {
  SimProcesses processes({.processes = 3, .devices = 2, .fails = true});
  std::latch pulled(3), in_flight(2);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(9));
    pulled.arrive_and_wait();
    if (process.rank == 1) {
      in_flight.wait();
      process.Die();
      return;
    }
    const int groups = process.nccl->groups();
    process.store->Push("k", process.OnDevices(1));
    const NDArray out = process.Full(0, process.devices[0]);
    process.store->Pull("k", out);
    std::thread watcher([&] {
      while (process.nccl->groups() == groups) std::this_thread::yield();
      in_flight.count_down();
    });
    EXPECT_THAT(MessageOf<NetworkError>([&] { out.WaitToRead(); }),
                AllOf(HasSubstr("worker 1"), HasSubstr("kvstore.nccl.reduce of key 'k'"),
                      HasSubstr(fmt::format("process {} of 3", process.rank))));
    watcher.join();
    EXPECT_TRUE(Comes([&] { return process.nccl->aborts() == 2; }));
    // Later ones at once.
    EXPECT_THROW(process.store->Push("k", process.OnDevices(1)), NetworkError);
    EXPECT_THROW(process.store->Barrier(), NetworkError);
    EXPECT_EQ(process.store->NumDeadNodes(), 1);
    EXPECT_EQ((process.Full(1, process.devices[0]) + 1).ToVector<float>(), Six(2));
  });
}

// The sum that an aborted NCCL leaves was added to the value, which then looked as good as any.
TEST(NcclProcessesFailures, AnUpdatersValueIsSpoiltByAPushThatAProcessDiesIn) {
  SimProcesses processes({.processes = 2, .devices = 2, .fails = true});
  std::latch pulled(2), issued(1);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->SetUpdater(
        [](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(7));
    pulled.arrive_and_wait();
    if (process.rank == 1) {
      issued.wait();
      process.Die();
      return;
    }
    const NDArray out = process.Full(0, process.devices[0]);
    process.store->Push("k", process.OnDevices(1));
    process.store->Push("k", process.OnDevices(1));
    process.store->Pull("k", out);
    process.engine->PushGpu({.name = "issued",
                             .reads = {out.var()},
                             .writes = {process.engine->NewVar()},
                             .device = Gpu(process.devices[0]),
                             .run_when_poisoned = true},
                            [&](GpuStream) { issued.count_down(); });
    EXPECT_THAT(MessageOf<NetworkError>([&] { out.WaitToRead(); }), HasSubstr("worker 1"));
    EXPECT_THROW(process.store->Push("k", process.OnDevices(1)), NetworkError);
    process.store->Pull("k", out);
    EXPECT_THROW(out.WaitToRead(), NetworkError);
  });
}

// Whose next call is long in coming: its GPUs do not wait for the others' until then.
TEST(NcclProcessesFailures, AnIdleProcessNoticesThatAnotherIsGone) {
  SimProcesses processes({.processes = 3, .devices = 2, .fails = true});
  std::latch pulled(3);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(9));
    pulled.arrive_and_wait();
    if (process.rank == 1) {
      process.Die();
      return;
    }
    EXPECT_TRUE(Comes([&] { return process.nccl->aborts() == 2; }));
    EXPECT_THAT(
        MessageOf<NetworkError>([&] { process.store->Push("k", process.OnDevices(1)); }),
        AllOf(HasSubstr("worker 1"), HasSubstr(fmt::format("process {} of 3", process.rank))));
  });
}

TEST(NcclProcessesFailures, AProcessThatDiesBeforeTheFirstPushIsNamed) {
  SimProcesses processes({.processes = 2, .devices = 1, .fails = true});
  std::latch initialised(2);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    initialised.arrive_and_wait();
    if (process.rank == 1) {
      process.Die();
      return;
    }
    EXPECT_THAT(MessageOf<NetworkError>([&] { process.store->Push("k", process.OnDevices(1)); }),
                HasSubstr("worker 1"));
  });
}

// Process 2 lives, and goes on without pushing.
TEST(NcclProcessesFailures, AProcessThatNeverPushesEndsTheOthersAtTheirDeadline) {
  FakeClock clock;
  SimProcesses processes(
      {.processes = 3, .devices = 1, .fails = true, .group = clock.WithDeadline()});
  std::latch failed(2), pulled(3);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(3));
    pulled.arrive_and_wait();
    if (process.rank == 2) {
      clock.Run();
      failed.wait();
      EXPECT_THROW(process.store->Barrier(), NetworkError);  // it has been told
      return;
    }
    // The first to give up tells the other one.
    EXPECT_THAT(process.MessageOfPush<Error>("k", process.OnDevices(1)),
                AllOf(HasSubstr("kvstore.nccl.reduce of key 'k'"), HasSubstr("50 ms"),
                      HasSubstr(fmt::format("process {} of 3", process.rank))));
    failed.count_down();
  });
}

TEST(NcclProcessesFailures, AFailedInputOfOneProcessEndsTheStoresOfAll) {
  SimProcesses processes({.processes = 2, .devices = 2, .fails = true});
  std::latch pulled(2);
  processes.Run([&](SimProcess& process) {
    process.store->Init({"k", "l"},
                        {process.Full(1, process.devices[0]), process.Full(1, process.devices[0])});
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(6));
    pulled.arrive_and_wait();
    std::vector<NDArray> gradients = process.OnDevices(1);
    if (process.rank == 1) gradients[1] = process.Poisoned(process.devices[1], "no gradient");
    const NDArray out = process.Full(0, process.devices[0]);
    const auto push = [&] {
      process.store->Push({"l", "k"}, {process.OnDevices(1), gradients});
      process.store->Pull("k", out);
      out.WaitToRead();
    };
    if (process.rank == 1) {
      EXPECT_THAT(MessageOf<std::runtime_error>(push), HasSubstr("no gradient"));
    } else {
      EXPECT_THAT(MessageOf<NetworkError>(push),
                  AllOf(HasSubstr("worker 1"), HasSubstr("key 'k'"), HasSubstr("no gradient")));
    }
    EXPECT_ANY_THROW(process.store->Barrier());
  });
}

TEST(NcclProcessesFailures, AGpuThatFailsInOneProcessEndsTheStoresOfAll) {
  SimProcesses processes({.processes = 2, .devices = 2, .fails = true});
  processes.gpu->set_patience(std::chrono::milliseconds(50));
  std::latch pulled(2);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(6));
    pulled.arrive_and_wait();
    if (process.rank == 1) process.nccl->LoseDevice(process.devices[1], [] { throw 1; });
    const std::string message = process.MessageOfPush<Error>("k", process.OnDevices(1));
    EXPECT_THAT(message, HasSubstr("cudaErrorIllegalAddress"));
    if (process.rank == 0) {
      EXPECT_THAT(message, HasSubstr("worker 1"));
    }
  });
}

TEST(NcclProcessesFailures, ACallOfNcclThatFailsIsToldToTheOthers) {
  SimProcesses processes({.processes = 2, .devices = 1, .fails = true});
  std::latch pulled(2);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(2));
    pulled.arrive_and_wait();
    if (process.rank == 0) process.nccl->FailNextReduce();
    const std::string message = process.MessageOfPush<Error>("k", process.OnDevices(1));
    EXPECT_THAT(message, HasSubstr("out of luck"));
    if (process.rank == 1) {
      EXPECT_THAT(message, HasSubstr("worker 0"));
    }
  });
}

// Only then: what it had heard of before, it would not have begun.
TEST(NcclProcessesFailures, AProcessThatDiesWhileOthersDropTheirStoresHoldsNobodyUp) {
  SimProcesses processes({.processes = 2, .devices = 2, .fails = true});
  std::latch ends(1);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(6));
    if (process.rank == 1) {
      ends.wait();
      process.Die();
      return;
    }
    std::thread watcher([&] {
      while (process.nccl->finalizes() < 2) std::this_thread::yield();
      ends.count_down();
    });
    process.store.reset();
    watcher.join();
    EXPECT_EQ(process.nccl->aborts(), 2);
  });
}

// Process 1 would miss a part of the call that process 0 makes, and take the next one for it.
TEST(NcclProcessesFailures, ACallThatIsInterruptedMidwayEndsTheStoresOfAll) {
  SimProcesses processes({.processes = 2, .devices = 2, .fails = true});
  std::latch interrupted(1);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(6));
    process.engine->WaitForAll();
    const auto midway =
        AllOf(HasSubstr("Barrier: process 1 of 2 has left it midway"), HasSubstr("interrupted"));
    if (process.rank == 1) {
      {
        const WaitCheckScope checked(std::chrono::milliseconds(1), [] { throw Interrupted(); });
        EXPECT_THROW(process.store->Barrier(), Interrupted);
      }
      EXPECT_EQ(process.nccl->aborts(), 2);
      EXPECT_THAT(MessageOf<InvalidState>([&] { process.store->Barrier(); }), midway);
      EXPECT_THAT(MessageOf<InvalidState>([&] { process.store->Push("k", process.OnDevices(1)); }),
                  midway);
      interrupted.count_down();
      return;
    }
    interrupted.wait();
    EXPECT_THAT(MessageOf<NetworkError>([&] { process.store->Barrier(); }),
                AllOf(HasSubstr("worker 1"), midway));
    EXPECT_THAT(MessageOf<NetworkError>([&] { process.store->Push("k", process.OnDevices(1)); }),
                AllOf(HasSubstr("worker 1"), midway));
    EXPECT_TRUE(Comes([&] { return process.nccl->aborts() == 2; }));
    EXPECT_EQ(process.Pulled("k"), Six(6));  // to be saved
  });
}

TEST(NcclProcessesFailures, ASetUpThatFailsInOneProcessEndsTheStoresOfAll) {
  SimProcesses processes({.processes = 2, .devices = 2, .fails = true});
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    const auto push = [&] { process.store->Push("k", process.OnDevices(1)); };
    if (process.rank == 1) {
      process.nccl->CallInInits([](int) { throw NcclError("no set-up", 3); });
      EXPECT_EQ(MessageOf<NcclError>(push), "no set-up");
      process.nccl->CallInInits(nullptr);
      EXPECT_THAT(MessageOf<NetworkError>(push),  // of the job, which this process has failed
                  AllOf(HasSubstr("Push: process 1 of 2"), HasSubstr("no set-up")));
    } else {
      const auto told = AllOf(HasSubstr("worker 1"), HasSubstr("no set-up"));
      EXPECT_THAT(MessageOf<NetworkError>(push), told);
      EXPECT_THAT(MessageOf<NetworkError>(push), told);
    }
  });
}

TEST(NcclProcessesFailures, AnUpdaterThatThrowsInOneProcessEndsTheStoresOfAll) {
  SimProcesses processes({.processes = 2, .devices = 1, .fails = true});
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    int updates = 0;
    process.store->SetUpdater([&](KeyRef, const NDArray& input, const NDArray& stored) {
      if (process.rank == 1 && ++updates == 2) throw InvalidArgument("no update");
      NDArray value = stored;
      value += input;
    });
    const auto push = [&] { process.store->Push("k", process.OnDevices(1)); };
    push();
    EXPECT_EQ(process.Pulled("k"), Six(3));
    process.store->Barrier();
    const auto midway = AllOf(HasSubstr("the updater of key 'k': process 1 of 2"),
                              HasSubstr("has left it midway"), HasSubstr("no update"));
    if (process.rank == 1) {
      EXPECT_EQ(MessageOf<InvalidArgument>(push), "no update");
      EXPECT_THAT(MessageOf<InvalidState>(push), midway);
    } else {
      EXPECT_TRUE(Comes([&] { return process.nccl->aborts() == 1; }));
      EXPECT_THAT(MessageOf<NetworkError>(push), AllOf(HasSubstr("worker 1"), midway));
    }
  });
}

// --- without a scheduler -------------------------------------------------------------------------

TEST(NcclProcessesFailures, WithoutASchedulerAGpuThatAnotherProcessUsesIsRefused) {
  SimProcesses processes({.means = Means::kNccl, .processes = 2, .devices = 1});
  const kvstore::DeviceClaim other(processes.id(), 0, processes.gpu->UniqueName(0));
  processes.Run([](SimProcess& process) {
    if (process.rank == 1) return;
    ExpectInvalid([&] { process.store->Init("k", process.Full(1, process.devices[0])); },
                  {"gpu(0)", "simulated GPU 0", "another process", "HEDDLE_NCCL_ID"});
    EXPECT_EQ(process.nccl->inits(), 0);
  });
}

TEST(NcclProcessesFailures, WithoutASchedulerAProcessThatNeverComesEndsTheSetUp) {
  FakeClock clock;
  clock.Run();
  SimProcesses processes(
      {.means = Means::kNccl, .processes = 2, .devices = 1, .group = clock.WithDeadline()});
  processes.Run([](SimProcess& process) {
    if (process.rank == 1) return;
    EXPECT_THAT(MessageOf<TimeoutError>(
                    [&] { process.store->Init("k", process.Full(1, process.devices[0])); }),
                AllOf(HasSubstr("process 0 of 2"), HasSubstr("the set-up")));
    EXPECT_EQ(process.nccl->aborts(), 1);
  });
}

// Process 1 keeps its store.
TEST(NcclProcessesFailures, WithoutASchedulerAStoreIsDroppedAtTheDeadline) {
  FakeClock clock;
  SimProcesses processes(
      {.means = Means::kNccl, .processes = 2, .devices = 1, .group = clock.WithDeadline()});
  std::latch pulled(2), dropped(1);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(2));
    pulled.arrive_and_wait();
    if (process.rank == 1) {
      dropped.wait();
      return;
    }
    clock.Run();
    process.store.reset();
    EXPECT_EQ(process.nccl->aborts(), 2);  // of the store and of its meeting
    dropped.count_down();
  });
}

TEST(NcclProcessesFailures, WithoutASchedulerAnInterruptedCallEndsTheStoresOfAll) {
  FakeClock clock;
  SimProcesses processes(
      {.means = Means::kNccl, .processes = 2, .devices = 1, .group = clock.WithDeadline()});
  std::latch interrupted(1);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(2));
    process.engine->WaitForAll();
    if (process.rank == 1) {
      {
        const WaitCheckScope checked(std::chrono::milliseconds(1), [] { throw Interrupted(); });
        EXPECT_THROW(process.store->Barrier(), Interrupted);
      }
      EXPECT_EQ(process.nccl->aborts(), 2);  // of the store and of its meeting
      EXPECT_THAT(MessageOf<InvalidState>([&] { process.store->Barrier(); }),
                  HasSubstr("Barrier: process 1 of 2 has left it midway"));
      interrupted.count_down();
      return;
    }
    interrupted.wait();
    clock.Run();
    EXPECT_THAT(MessageOf<TimeoutError>([&] { process.store->Barrier(); }),
                HasSubstr("kvstore.nccl.meet"));
    EXPECT_EQ(process.nccl->aborts(), 2);
    EXPECT_THROW(process.store->Push("k", process.OnDevices(1)), Error);
  });
}

TEST(NcclProcessesFailures, WithoutASchedulerMeetingNeedsAGpu) {
  SimProcesses({.means = Means::kNccl, .processes = 2, .devices = 1}).Run([](SimProcess& process) {
    EXPECT_THAT(MessageOf<InvalidState>([&] { process.store->Barrier(); }), HasSubstr("gpu(i)"));
    process.store->SetOptimizer(Sgd({.learning_rate = 1}));  // nobody to compare it with yet
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Barrier();
  });
}

}  // namespace
}  // namespace heddle::kvstore_test
