#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>

#include "check.h"

static atomic_int destroyed;
static void CountDestroyed(void* context) {
  (void)context;
  atomic_fetch_add(&destroyed, 1);
}

// An int that ops change, and what they do to it.
typedef struct Step {
  int* value;
  int factor;
  int addend;
} Step;

static HeddleStatus Run(void* context) {
  const Step* step = context;
  *step->value = *step->value * step->factor + step->addend;
  return HEDDLE_OK;
}

static void OpsOfOneVariableRunInPushOrder(void) {
  HeddleVar var = NULL;
  CHECK_OK(HeddleVarCreate("sum", &var));
  int value = 0;
  Step steps[] = {{&value, 0, 20}, {&value, 1, 1}, {&value, 2, 0}};
  const HeddleOp op = {.struct_size = sizeof op,
                       .name = "step",
                       .num_reads = 1,
                       .reads = &var,
                       .num_writes = 1,
                       .writes = &var};
  atomic_store(&destroyed, 0);
  for (int i = 0; i < 3; ++i) CHECK_OK(HeddleEnginePush(&op, Run, &steps[i], CountDestroyed));
  CHECK_OK(HeddleWaitForVar(var, HEDDLE_FOREVER));
  CHECK(value == 42);
  CHECK(atomic_load(&destroyed) == 3);  // each context once, before the wait returns
  uint64_t version = 0;
  CHECK_OK(HeddleVarGetVersion(var, &version));
  CHECK(version == 3);
  CHECK_OK(HeddleVarFree(var));
}

// An op over an array writes its elements itself, between operations on the array.
static HeddleStatus AddOneToEach(void* context) {
  void* data = NULL;
  const HeddleStatus status = HeddleArrayGetData(*(HeddleArray*)context, &data);
  if (status != HEDDLE_OK) return status;
  for (int i = 0; i < 6; ++i) ((float*)data)[i] += 1;
  return HEDDLE_OK;
}

static void OpsOfTheProgramAndOperationsOnArraysShareOneOrder(void) {
  HeddleArray array = Full(2, 0);
  HeddleVar var = NULL;
  CHECK_OK(HeddleArrayGetVar(array, &var));
  const HeddleOp op = {
      .struct_size = sizeof op, .num_reads = 1, .reads = &var, .num_writes = 1, .writes = &var};
  CHECK_OK(HeddleEnginePush(&op, AddOneToEach, &array, NULL));
  CHECK_OK(HeddleArrayCombineScalar(array, HEDDLE_MULTIPLY, 10));
  CHECK_OK(HeddleEnginePush(&op, AddOneToEach, &array, NULL));
  CHECK(IsFull(array, 6, 31));
  CHECK_OK(HeddleWaitForReadsAndWrites(var, HEDDLE_FOREVER));
  CHECK_OK(HeddleVarFree(var));
  CHECK_OK(HeddleArrayFree(array));
}

static HeddleStatus FailWithMessage(void* context) {
  (void)context;
  return HeddleSetLastError(HEDDLE_USER_ERROR + 5, "no paper");
}
static HeddleStatus FailWithoutMessage(void* context) {
  (void)context;
  return HEDDLE_USER_ERROR + 6;
}
static HeddleStatus FailLikeACall(void* context) {
  return HeddleKVStoreBarrier(*(HeddleKVStore*)context);
}
static HeddleStatus FailAsIoError(void* context) {
  (void)context;
  return HeddleSetLastError(HEDDLE_IO_ERROR, "disk full");
}

static void TheStatusOfAFailingBodyComesOutOfEveryWait(void) {
  HeddleVar var = NULL, copy = NULL;
  HeddleKVStore no_store = NULL;
  CHECK_OK(HeddleVarCreate("x", &var));
  CHECK_OK(HeddleVarCreate("copy", &copy));
  HeddleOp op = {.struct_size = sizeof op, .name = "print", .num_writes = 1, .writes = &var};
  HeddleOp reader = {.struct_size = sizeof reader,
                     .num_reads = 1,
                     .reads = &var,
                     .num_writes = 1,
                     .writes = &copy};
  int value = 0;
  Step step = {&value, 0, 1};
  atomic_store(&destroyed, 0);

  CHECK_OK(HeddleEnginePush(&op, FailWithMessage, NULL, CountDestroyed));
  CHECK_OK(HeddleEnginePush(&reader, Run, &step, CountDestroyed));
  for (int i = 0; i < 2; ++i) {
    CHECK_FAILS(HeddleWaitForVar(var, HEDDLE_FOREVER), HEDDLE_USER_ERROR + 5, "no paper");
    CHECK_FAILS(HeddleWaitForVar(copy, HEDDLE_FOREVER), HEDDLE_USER_ERROR + 5, "no paper");
  }
  CHECK(value == 0);  // skipped
  CHECK(atomic_load(&destroyed) == 2);
  CHECK_FAILS(HeddleWaitForAll(HEDDLE_FOREVER), HEDDLE_USER_ERROR + 5, "no paper");
  CHECK_OK(HeddleWaitForAll(HEDDLE_FOREVER));

  CHECK_OK(HeddleVarClearError(var));
  CHECK_OK(HeddleWaitForVar(var, HEDDLE_FOREVER));

  CHECK_OK(HeddleEnginePush(&op, FailWithoutMessage, NULL, NULL));
  CHECK_FAILS(HeddleWaitForVar(var, HEDDLE_FOREVER), HEDDLE_USER_ERROR + 6, "1006");
  CHECK_OK(HeddleEnginePush(&op, FailLikeACall, &no_store, NULL));
  CHECK_FAILS(HeddleWaitForVar(var, HEDDLE_FOREVER), HEDDLE_INVALID_ARGUMENT,
              "HeddleKVStoreBarrier: store: expected a store, got NULL");
  CHECK_OK(HeddleEnginePush(&op, FailAsIoError, NULL, NULL));
  CHECK_FAILS(HeddleWaitForVar(var, HEDDLE_FOREVER), HEDDLE_IO_ERROR, "disk full");

  // An op that looks for itself runs all the same.
  reader.run_when_poisoned = 1;
  CHECK_OK(HeddleEnginePush(&reader, Run, &step, NULL));
  CHECK_OK(HeddleWaitForVar(copy, HEDDLE_FOREVER));
  CHECK(value == 1);
  while (HeddleWaitForAll(HEDDLE_FOREVER) != HEDDLE_OK) continue;
  CHECK_OK(HeddleVarFree(var));
  CHECK_OK(HeddleVarFree(copy));
}

// A body that fails inside, and goes on, leaves no error to the thread that ran it.
static HeddleStatus FailInsideAndGoOn(void* context) {
  (void)context;
  CHECK(HeddleLastError() == HEDDLE_OK);
  CHECK(HeddleKVStoreBarrier(NULL) == HEDDLE_INVALID_ARGUMENT);
  return HEDDLE_OK;
}

static void FailAsItIsDestroyed(void* context) { FailInsideAndGoOn(context); }

static void BodiesLeaveTheLastErrorOfAWaitingThreadAlone(void) {
  HeddleVar var = NULL;
  CHECK_OK(HeddleVarCreate("x", &var));
  const HeddleOp op = {.struct_size = sizeof op, .num_writes = 1, .writes = &var};
  HeddleSetLastError(HEDDLE_USER_ERROR, "mine");
  const char* const text = HeddleLastErrorMessage();
  for (int i = 0; i < 100; ++i) {
    CHECK_OK(HeddleEnginePush(&op, FailInsideAndGoOn, NULL, FailAsItIsDestroyed));
    CHECK_OK(HeddleWaitForVar(var, HEDDLE_FOREVER));
  }
  CHECK(strcmp(text, "mine") == 0);  // where it was
  CHECK(HeddleLastError() == HEDDLE_USER_ERROR);
  CHECK(strcmp(HeddleLastErrorMessage(), "mine") == 0);
  CHECK_OK(HeddleVarFree(var));
}

static void* CallIt(void* completion) {
  CHECK_OK(HeddleCompletionCall((HeddleCompletion)completion, HEDDLE_OK, NULL));
  CHECK_FAILS(HeddleCompletionCall((HeddleCompletion)completion, HEDDLE_OK, NULL),
              HEDDLE_INVALID_ARGUMENT, "completion");
  CHECK_FAILS(HeddleCompletionFree((HeddleCompletion)completion), HEDDLE_INVALID_ARGUMENT,
              "completion");
  return NULL;
}
static HeddleStatus StartThread(void* context, HeddleCompletion completion) {
  return pthread_create(context, NULL, CallIt, completion) == 0 ? HEDDLE_OK : HEDDLE_ERROR;
}
static HeddleStatus CallWithError(void* context, HeddleCompletion completion) {
  (void)context;
  return HeddleCompletionCall(completion, HEDDLE_USER_ERROR + 9, "line is cut");
}
static HeddleCompletion kept;
static HeddleStatus FailAsync(void* context, HeddleCompletion completion) {
  (void)context;
  kept = completion;
  return HeddleSetLastError(HEDDLE_USER_ERROR + 10, "no socket");
}

static void AsyncOpsFinishWhenTheirCompletionIsCalled(void) {
  HeddleVar var = NULL;
  pthread_t thread;
  CHECK_OK(HeddleVarCreate("x", &var));
  const HeddleOp op = {.struct_size = sizeof op,
                       .name = "send",
                       .num_writes = 1,
                       .writes = &var,
                       .lane = HEDDLE_LANE_COMM};
  atomic_store(&destroyed, 0);
  CHECK_OK(HeddleEnginePushAsync(&op, StartThread, &thread, CountDestroyed));
  CHECK_OK(HeddleWaitForVar(var, HEDDLE_FOREVER));
  CHECK(atomic_load(&destroyed) == 1);
  CHECK(pthread_join(thread, NULL) == 0);

  CHECK_OK(HeddleEnginePushAsync(&op, CallWithError, NULL, CountDestroyed));
  CHECK_FAILS(HeddleWaitForVar(var, HEDDLE_FOREVER), HEDDLE_USER_ERROR + 9, "line is cut");
  // A body that fails ends its op; the completion is spent.
  CHECK_OK(HeddleEnginePushAsync(&op, FailAsync, NULL, CountDestroyed));
  CHECK_FAILS(HeddleWaitForVar(var, HEDDLE_FOREVER), HEDDLE_USER_ERROR + 10, "no socket");
  CHECK_FAILS(HeddleCompletionCall(kept, HEDDLE_OK, NULL), HEDDLE_INVALID_ARGUMENT, "completion");
  CHECK(atomic_load(&destroyed) == 3);
  while (HeddleWaitForAll(HEDDLE_FOREVER) != HEDDLE_OK) continue;
  CHECK_OK(HeddleVarFree(var));
}

typedef struct Held {
  HeddleCompletion completion;
  sem_t begun;
} Held;
static HeddleStatus Hold(void* context, HeddleCompletion completion) {
  Held* held = context;
  held->completion = completion;
  return sem_post(&held->begun) == 0 ? HEDDLE_OK : HEDDLE_ERROR;
}

// They used to be waited for without end, all of them.
static void NegativeTimesHavePassedButForForever(void) {
  HeddleArray array = Full(1, 0);
  HeddleVar var = NULL;
  CHECK_OK(HeddleArrayGetVar(array, &var));
  const HeddleOp op = {.struct_size = sizeof op, .name = "hold", .num_writes = 1, .writes = &var};
  Held held = {.completion = NULL};
  CHECK(sem_init(&held.begun, 0, 0) == 0);
  CHECK_OK(HeddleEnginePushAsync(&op, Hold, &held, NULL));
  CHECK(sem_wait(&held.begun) == 0);
  const int64_t times_ms[] = {-2, -1000, INT64_MIN};
  for (int i = 0; i < 3; ++i) {
    CHECK_FAILS(HeddleArrayWaitToRead(array, times_ms[i]), HEDDLE_TIMEOUT, "hold");
    CHECK_FAILS(HeddleArrayWaitToWrite(array, times_ms[i]), HEDDLE_TIMEOUT, "hold");
    CHECK_FAILS(HeddleWaitForVar(var, times_ms[i]), HEDDLE_TIMEOUT, "hold");
    CHECK_FAILS(HeddleWaitForReadsAndWrites(var, times_ms[i]), HEDDLE_TIMEOUT, "hold");
    CHECK_FAILS(HeddleWaitForAll(times_ms[i]), HEDDLE_TIMEOUT, "hold");
  }
  CHECK_OK(HeddleCompletionCall(held.completion, HEDDLE_OK, NULL));
  CHECK_OK(HeddleWaitForVar(var, HEDDLE_FOREVER));
  CHECK_OK(HeddleWaitForVar(var, -2));  // there is nothing to wait for
  CHECK(sem_destroy(&held.begun) == 0);
  CHECK_OK(HeddleVarFree(var));
  CHECK_OK(HeddleArrayFree(array));
}

static void ARefusedPushLeavesTheContextToItsCaller(void) {
  HeddleVar var = NULL;
  CHECK_OK(HeddleVarCreate("x", &var));
  HeddleOp op = {
      .struct_size = sizeof op, .num_writes = 1, .writes = &var, .device_type = HEDDLE_GPU};
  int value = 0;
  Step step = {&value, 1, 1};
  atomic_store(&destroyed, 0);
  op.device_id = 30000;  // no machine has it
  CHECK_FAILS(HeddleEnginePush(&op, Run, &step, CountDestroyed), HEDDLE_INVALID_ARGUMENT, "gpu");
  CHECK_FAILS(HeddleEnginePushAsync(&op, FailAsync, &step, CountDestroyed), HEDDLE_INVALID_ARGUMENT,
              "gpu");
  op.device_id = 0;
  op.device_type = HEDDLE_CPU;
  op.lane = -1;
  CHECK_FAILS(HeddleEnginePush(&op, Run, &step, CountDestroyed), HEDDLE_INVALID_ARGUMENT, "lane");
  CHECK(atomic_load(&destroyed) == 0 && value == 0);
  CHECK_OK(HeddleVarFree(var));
}

// A struct as later versions may have it.
typedef struct LaterOp {
  HeddleOp op;
  int64_t field;
} LaterOp;

static void StructsMayGrowAtTheirEnd(void) {
  HeddleVar var = NULL;
  CHECK_OK(HeddleVarCreate("x", &var));
  int value = 0;
  Step step = {&value, 1, 1};
  LaterOp later = {.op = {.struct_size = sizeof later, .num_writes = 1, .writes = &var}};
  CHECK_OK(HeddleEnginePush(&later.op, Run, &step, NULL));
  later.field = 1;  // this version does not know what it asks for
  CHECK_FAILS(HeddleEnginePush(&later.op, Run, &step, NULL), HEDDLE_INVALID_ARGUMENT,
              "a field of a later version");
  later.field = 0;
  // A shorter struct: what it lacks has the default. `lane` is beyond its end.
  later.op.struct_size = offsetof(HeddleOp, lane);
  later.op.lane = 77;
  CHECK_OK(HeddleEnginePush(&later.op, Run, &step, NULL));
  later.op.struct_size = 0;
  CHECK_FAILS(HeddleEnginePush(&later.op, Run, &step, NULL), HEDDLE_INVALID_ARGUMENT,
              "op->struct_size: expected the size of the struct, got 0");
  later.op.struct_size = SIZE_MAX;  // nothing beyond the struct is read
  CHECK_FAILS(HeddleEnginePush(&later.op, Run, &step, NULL), HEDDLE_INVALID_ARGUMENT,
              "struct_size");
  CHECK_OK(HeddleWaitForVar(var, HEDDLE_FOREVER));
  CHECK(value == 2);
  CHECK_OK(HeddleVarFree(var));
}

static void DroppedHandlesLeavePendingOpsAlone(void) {
  HeddleArray array = Full(1, 0), out = Full(0, 0);
  for (int i = 0; i < 100; ++i) CHECK_OK(HeddleArrayCombineScalar(array, HEDDLE_ADD, 1));
  CHECK_OK(HeddleArrayCopyTo(array, out, 0));
  CHECK_OK(HeddleArrayFree(array));
  CHECK(IsFull(out, 6, 101));
  CHECK_OK(HeddleArrayFree(out));
}

const Test kEngineTests[] = {
    {"OpsOfOneVariableRunInPushOrder", OpsOfOneVariableRunInPushOrder},
    {"OpsOfTheProgramAndOperationsOnArraysShareOneOrder",
     OpsOfTheProgramAndOperationsOnArraysShareOneOrder},
    {"TheStatusOfAFailingBodyComesOutOfEveryWait", TheStatusOfAFailingBodyComesOutOfEveryWait},
    {"BodiesLeaveTheLastErrorOfAWaitingThreadAlone", BodiesLeaveTheLastErrorOfAWaitingThreadAlone},
    {"AsyncOpsFinishWhenTheirCompletionIsCalled", AsyncOpsFinishWhenTheirCompletionIsCalled},
    {"NegativeTimesHavePassedButForForever", NegativeTimesHavePassedButForForever},
    {"ARefusedPushLeavesTheContextToItsCaller", ARefusedPushLeavesTheContextToItsCaller},
    {"StructsMayGrowAtTheirEnd", StructsMayGrowAtTheirEnd},
    {"DroppedHandlesLeavePendingOpsAlone", DroppedHandlesLeavePendingOpsAlone},
    {NULL, NULL},
};

// Run with HEDDLE_CHECK_ACCESS=1.
static void AnUndeclaredTouchIsAnAccessError(void) {
  HeddleArray array = Full(1, 0);
  HeddleVar result = NULL;
  CHECK_OK(HeddleArrayWaitToRead(array, HEDDLE_FOREVER));
  CHECK_OK(HeddleVarCreate("result", &result));
  const HeddleOp op = {
      .struct_size = sizeof op, .name = "secretly", .num_writes = 1, .writes = &result};
  CHECK_OK(HeddleEnginePush(&op, AddOneToEach, &array, NULL));
  CHECK_FAILS(HeddleWaitForVar(result, HEDDLE_FOREVER), HEDDLE_ACCESS_ERROR, "secretly");
  CHECK(IsFull(array, 6, 1));
  CHECK_OK(HeddleVarFree(result));
  CHECK_OK(HeddleArrayFree(array));
}

const Test kAccessTests[] = {
    {"AnUndeclaredTouchIsAnAccessError", AnUndeclaredTouchIsAnAccessError},
    {NULL, NULL},
};
