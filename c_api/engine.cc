// Variables, ops of the program's own, and waits: all on the default engine.
#include <heddle/c_api.h>
#include <heddle/completion.h>
#include <heddle/engine.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "c_api/call.h"
#include "c_api/context.h"
#include "c_api/handles.h"
#include "c_api/status.h"

using heddle::Completion;
using heddle::Engine;
using heddle::Lane;
using heddle::OpOptions;
using heddle::Var;
using heddle::VarList;
using heddle::c_api::Call;
using heddle::c_api::CallBack;
using heddle::c_api::Context;
using heddle::c_api::Free;
using heddle::c_api::NewHandle;
using heddle::c_api::NumberOf;
using heddle::c_api::TableOf;
using heddle::c_api::Try;
using heddle::c_api::WaitFor;

static_assert(static_cast<int>(Lane::kNormal) == HEDDLE_LANE_NORMAL &&
              static_cast<int>(Lane::kCopy) == HEDDLE_LANE_COPY &&
              static_cast<int>(Lane::kComm) == HEDDLE_LANE_COMM);

// ---- Variables

HeddleStatus HeddleVarCreate(const char* name, HeddleVar* var) {
  return Try(__func__, [&](const Call& call) {
    HeddleVar& result = call.Result("var", var);
    result = NewHandle<HeddleVar>(Engine::Default().NewVar(name != nullptr ? name : ""));
  });
}

HeddleStatus HeddleVarFree(HeddleVar var) { return Free(__func__, "var", var); }

HeddleStatus HeddleVarGetVersion(HeddleVar var, uint64_t* version) {
  return Try(__func__, [&](const Call& call) {
    call.Result("version", version) = Engine::Default().version(call.Get("var", var));
  });
}

HeddleStatus HeddleVarClearError(HeddleVar var) {
  return Try(__func__,
             [&](const Call& call) { Engine::Default().ClearError(call.Get("var", var)); });
}

// ---- Ops

namespace {

// The options of an op, and the variables that they borrow.
class Op {
 public:
  Op(const Call& call, const HeddleOp* op) {
    const HeddleOp given = call.Versioned("op", op);
    reads_ = Vars(call, "op->reads", given.num_reads, given.reads);
    writes_ = Vars(call, "op->writes", given.num_writes, given.writes);
    if (given.name != nullptr) options_.name = std::string(given.name);
    options_.reads = VarList(reads_);
    options_.writes = VarList(writes_);
    options_.device = call.ToDevice(given.device_type, given.device_id);
    options_.lane = call.OneOf<Lane>("op->lane", given.lane, 3);
    options_.priority = given.priority;
    options_.run_when_poisoned = given.run_when_poisoned != 0;
    options_.temporary_bytes = given.temporary_bytes;
  }

  const OpOptions& options() const { return options_; }

 private:
  static std::vector<Var> Vars(const Call& call, const char* argument, std::size_t count,
                               const HeddleVar* handles) {
    call.List(argument, count, handles);
    std::vector<Var> vars;
    vars.reserve(count);
    for (std::size_t i = 0; i < count; ++i) vars.push_back(call.GetAt(argument, i, handles));
    return vars;
  }

  std::vector<Var> reads_;
  std::vector<Var> writes_;
  OpOptions options_;
};

struct SyncBody {
  HeddleOpBody body;
  Context context;

  void operator()() const {
    CallBack([&] { return body(context.get()); });
  }
};

struct AsyncBody {
  HeddleAsyncBody body;
  Context context;

  void operator()(Completion completion) const {
    const auto handle = NewHandle<HeddleCompletion>(std::move(completion));
    try {
      CallBack([&] { return body(context.get(), handle); });
    } catch (...) {
      TableOf<HeddleCompletion>().Take(NumberOf(handle));  // the error has ended the op
      throw;
    }
  }
};

// Pushes by `push`; the context stays the caller's if that throws.
template <class Body, class Push>
void PushOwning(Body body, Push&& push) {
  try {
    push(std::move(body));
  } catch (...) {
    body.context.Release();
    throw;
  }
}

}  // namespace

HeddleStatus HeddleEnginePush(const HeddleOp* op, HeddleOpBody body, void* context,
                              HeddleDestroyContext destroy) {
  return Try(__func__, [&](const Call& call) {
    const Op checked(call, op);
    call.Callback("body", body);
    PushOwning(SyncBody{body, Context(context, destroy)}, [&](SyncBody&& stored) {
      Engine::Default().Push(checked.options(), std::move(stored));
    });
  });
}

HeddleStatus HeddleEnginePushAsync(const HeddleOp* op, HeddleAsyncBody body, void* context,
                                   HeddleDestroyContext destroy) {
  return Try(__func__, [&](const Call& call) {
    const Op checked(call, op);
    call.Callback("body", body);
    PushOwning(AsyncBody{body, Context(context, destroy)}, [&](AsyncBody&& stored) {
      Engine::Default().PushAsync(checked.options(), std::move(stored));
    });
  });
}

HeddleStatus HeddleCompletionCall(HeddleCompletion completion, HeddleStatus status,
                                  const char* message) {
  return Try(__func__, [&](const Call& call) {
    const Completion done = call.Take("completion", completion);
    if (status == HEDDLE_OK) {
      done();
    } else {
      done(heddle::c_api::ErrorOf(status, message != nullptr ? message : ""));
    }
  });
}

HeddleStatus HeddleCompletionFree(HeddleCompletion completion) {
  return Free(__func__, "completion", completion);
}

// ---- Waits

HeddleStatus HeddleWaitForVar(HeddleVar var, int64_t timeout_ms) {
  return Try(__func__, [&](const Call& call) {
    const Var waited = call.Get("var", var);
    WaitFor(timeout_ms,
            [&](auto... deadline) { Engine::Default().WaitForVar(waited, deadline...); });
  });
}

HeddleStatus HeddleWaitForReadsAndWrites(HeddleVar var, int64_t timeout_ms) {
  return Try(__func__, [&](const Call& call) {
    const Var waited = call.Get("var", var);
    WaitFor(timeout_ms, [&](auto... deadline) {
      Engine::Default().WaitForReadsAndWrites(waited, deadline...);
    });
  });
}

HeddleStatus HeddleWaitForAll(int64_t timeout_ms) {
  return Try(__func__, [&](const Call&) {
    WaitFor(timeout_ms, [](auto... deadline) { Engine::Default().WaitForAll(deadline...); });
  });
}
