// The public facade over EngineCore, and the process-wide parts of the API.
#include <heddle/engine.h>

#include <chrono>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_set>

#include <fmt/format.h>

#include "base/env.h"
#include "base/job_file.h"
#include "base/log.h"
#include "engine/core.h"
#include "engine/fork.h"

namespace heddle {

namespace engine {
HEDDLE_TLS ThreadContext tls_context;
}  // namespace engine

namespace internal {

NewOp BeginPush(EngineCore& core, const OpOptions& options, std::size_t body_bytes,
                BodyFunction function, bool async, PushMode mode) {
  return core.BeginPush(options, body_bytes, function, async, mode);
}
std::uint64_t CommitPush(EngineCore& core, Op* op) noexcept { return core.CommitPush(op); }
void AbandonPush(EngineCore& core, Op* op) noexcept { core.AbandonPush(op); }
NewOp BeginGpuPush(EngineCore& core, const OpOptions& options, std::size_t body_bytes,
                   BodyFunction function, PushMode mode) {
  return core.BeginGpuPush(options, body_bytes, function, mode);
}
std::uint64_t CommitGpuPush(EngineCore& core, Op* op) noexcept { return core.CommitGpuPush(op); }
GpuStream StreamOf(AsyncState* async) noexcept { return async->gpu_queue->stream(); }

RoomDeadline::RoomDeadline(const Deadline& deadline) noexcept {
  engine::tls_context.room_deadline = &deadline;
}
RoomDeadline::~RoomDeadline() { engine::tls_context.room_deadline = nullptr; }

void ThrowNullBody(const OpOptions& options) {
  throw InvalidArgument(
      fmt::format("push of op '{}': the body is null, expected a callable", options.name.c_str()));
}

}  // namespace internal

const char* OpName::Intern(std::string_view text) {
  static std::mutex mutex;
  static auto* names = new std::unordered_set<std::string>;  // nodes never move
  engine::CheckNotForked("push");
  const std::lock_guard<std::mutex> lock(mutex);
  return names->emplace(text).first->c_str();
}

std::string Var::name() const {
  return state_ != nullptr ? internal::VarName(*state_) : std::string();
}

EngineOptions EngineOptions::FromEnvironment() {
  EngineOptions options;
  EnvReader env;
  env.Read([&] { options.type = internal::EngineCore::TypeFromEnvironment(); });
  env.Read([&] {
    options.num_workers =
        static_cast<int>(EnvInt("HEDDLE_NUM_WORKERS", options.num_workers, 0, 1024));
  });
  env.Read([&] {
    options.worker_host = EnvChoice("HEDDLE_WORKER_HOST", {"tbb", "threads"}, 0) == 0
                              ? WorkerHost::kTbb
                              : WorkerHost::kThreads;
  });
  env.Read([&] { options.seed = EnvUint64("HEDDLE_SEED", options.seed); });
  env.Read([&] {
    options.max_pending_ops = EnvInt("HEDDLE_MAX_PENDING_OPS", options.max_pending_ops, 1);
  });
  env.Read([&] {
    options.max_pending_bytes = EnvInt("HEDDLE_MAX_PENDING_BYTES", options.max_pending_bytes, 1);
  });
  env.Read([&] {
    options.ageing = static_cast<int>(
        EnvInt("HEDDLE_AGEING", options.ageing, 0, std::numeric_limits<int>::max()));
  });
  env.Read([&] {
    options.watchdog =
        std::chrono::milliseconds(EnvInt("HEDDLE_WATCHDOG_MS", options.watchdog.count(), 0));
  });
  env.Read([&] { options.check_access = EnvBool("HEDDLE_CHECK_ACCESS", options.check_access); });
  env.Read([&] {
    options.gpu.issued_ahead =
        static_cast<int>(EnvInt("HEDDLE_GPU_ISSUED_AHEAD", options.gpu.issued_ahead, 1, 1 << 16));
  });
  options.trace_file = JobFileName(EnvString("HEDDLE_TRACE", options.trace_file));
  env.Read([&] {
    options.trace_bytes_max = EnvInt("HEDDLE_TRACE_BYTES_MAX", options.trace_bytes_max, 1);
  });
  env.ThrowIfAnyIsWrong();
  return options;
}

Engine::Engine(EngineOptions options) : core_(new internal::EngineCore(std::move(options))) {}

Engine::~Engine() {
  if (engine::InForkedChild()) return;  // its threads are not there to be joined
  const auto end = [core = core_] {
    // No exception may leave a destructor: this wait ends when all is done.
    const WaitCheckScope unchecked(std::chrono::milliseconds(0), nullptr);
    core->Stop(std::nullopt, /*destroying=*/true);
    core->Unref();
  };
  if (engine::tls_context.core != core_) {
    end();
    return;
  }
  // The last handle has gone with what an op of its own captures: that op cannot wait for itself.
  try {
    std::thread(end).detach();
  } catch (const std::system_error& error) {
    Log(LogLevel::kError, "an engine cannot be stopped, and stays: {}", error.what());
  }
}

Engine& Engine::Default() {
  static Engine engine(EngineOptions::FromEnvironment());
  return engine;
}

Var Engine::NewVar(std::string_view name) { return core_->NewVar(name); }
void Engine::WaitForVar(const Var& var) { core_->WaitForVar(var, std::nullopt); }
void Engine::WaitForVar(const Var& var, Deadline deadline) { core_->WaitForVar(var, deadline); }
void Engine::WaitForReadsAndWrites(const Var& var) {
  core_->WaitForReadsAndWrites(var, std::nullopt);
}
void Engine::WaitForReadsAndWrites(const Var& var, Deadline deadline) {
  core_->WaitForReadsAndWrites(var, deadline);
}
void Engine::WaitForAll() { core_->WaitForAll(std::nullopt); }
void Engine::WaitForAll(Deadline deadline) { core_->WaitForAll(deadline); }
void Engine::Stop() { core_->Stop(std::nullopt); }
void Engine::Stop(Deadline deadline) { core_->Stop(deadline); }
std::uint64_t Engine::version(const Var& var) const { return core_->version(var); }
std::optional<Failure> Engine::FailureOf(const Var& var) const { return core_->FailureOf(var); }
std::exception_ptr Engine::ErrorOf(const Var& var) const { return core_->ErrorOf(var); }
void Engine::ClearError(const Var& var) { core_->ClearError(var); }
bool Engine::AddPoller(WaitPoller& poller) { return core_->AddPoller(poller); }
void Engine::RemovePoller(WaitPoller& poller) { core_->RemovePoller(poller); }
void Engine::ParallelFor(std::int64_t count, std::int64_t grain,
                         const std::function<void(std::int64_t, std::int64_t)>& body) {
  core_->ParallelFor(count, grain, body);
}
std::string Engine::DumpState() const { return core_->DumpState(); }
EngineStats Engine::stats() const { return core_->stats(); }
const EngineOptions& Engine::options() const { return core_->options(); }
void Engine::StartTrace(const std::string& file) { core_->StartTrace(file); }
void Engine::StopTrace() { core_->StopTrace(); }

WaitCheckScope::WaitCheckScope(std::chrono::milliseconds interval, Check check)
    : interval_(interval), check_(check), outer_(engine::tls_context.wait_check) {
  engine::tls_context.wait_check = this;
}
WaitCheckScope::~WaitCheckScope() {
  engine::tls_context.wait_check = outer_;
  if (error_ != nullptr && outer_ != nullptr) outer_->error_ = std::move(error_);
}

NoWaitScope::NoWaitScope() { ++engine::tls_context.no_wait_depth; }
NoWaitScope::~NoWaitScope() { --engine::tls_context.no_wait_depth; }

}  // namespace heddle
