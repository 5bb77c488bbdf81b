#include <pthread.h>

#include "check.h"

static void VersionsAreThoseOfTheHeader(void) {
  CHECK(HeddleGetAbiVersion() == HEDDLE_ABI_VERSION);
  int major = -1, minor = -1, patch = -1;
  char end = 0;
  CHECK(sscanf(HeddleGetVersion(), "%d.%d.%d%c", &major, &minor, &patch, &end) == 3);
}

// Every call with a handle of NULL fails, naming the argument.
static void NullHandlesAreRefused(void) {
  const int64_t shape[] = {2, 3};
  const HeddleKey key = {.number = 3};
  const HeddleArray none[] = {NULL};
  const HeddleVar no_vars[] = {NULL};
  HeddleArray array = NULL, made = NULL;
  HeddleVar var = NULL;
  HeddleKVStore store = NULL;
  HeddleOptimizer sgd = NULL;
  const int64_t* dims = NULL;
  const int64_t* ids = NULL;
  const void* data = NULL;
  void* writable = NULL;
  const char* type = NULL;
  size_t count = 0;
  uint64_t version = 0;
  int64_t size = 0;
  double number = 0;
  int flag = 0;
  float values[6] = {0};
  array = Full(1, 0);
  CHECK_OK(HeddleKVStoreCreate("local", NULL, &store));
  CHECK_OK(HeddleOptimizerCreate("sgd", 0, NULL, NULL, &sgd));
  CHECK_OK(HeddleVarCreate("x", &var));
  const HeddleArray given[] = {array};

#define REFUSED(call, part) CHECK_FAILS(call, HEDDLE_INVALID_ARGUMENT, part)
  REFUSED(HeddleArrayShare(NULL, &made), "array: expected an array, got NULL");
  REFUSED(HeddleArraySlice(NULL, 0, 1, &made), "HeddleArraySlice: array");
  REFUSED(HeddleArrayReshape(NULL, 2, shape, &made), "array");
  REFUSED(HeddleArrayGetShape(NULL, &count, &dims), "array");
  REFUSED(HeddleArrayGetSize(NULL, &size), "array");
  REFUSED(HeddleArrayGetDType(NULL, &flag), "array");
  REFUSED(HeddleArrayGetDevice(NULL, &flag, &flag), "array");
  REFUSED(HeddleArrayGetKind(NULL, &flag), "array");
  REFUSED(HeddleArrayGetVar(NULL, &var), "array");
  REFUSED(HeddleArrayCopyTo(NULL, array, 0), "source");
  REFUSED(HeddleArrayCopyTo(array, NULL, 0), "destination");
  REFUSED(HeddleArrayFill(NULL, 1, 0), "array");
  REFUSED(HeddleArrayCopyFromHost(NULL, 6, values, HEDDLE_FLOAT32, 0), "array");
  REFUSED(HeddleArrayCombine(NULL, HEDDLE_ADD, array), "array");
  REFUSED(HeddleArrayCombine(array, HEDDLE_ADD, NULL), "other");
  REFUSED(HeddleArrayCombineScalar(NULL, HEDDLE_ADD, 1), "array");
  REFUSED(HeddleArrayCopy(NULL, &made), "array");
  REFUSED(HeddleArrayCopyAsKind(NULL, HEDDLE_DENSE, &made), "array");
  REFUSED(HeddleArrayWaitToRead(NULL, HEDDLE_FOREVER), "array");
  REFUSED(HeddleArrayWaitToWrite(NULL, HEDDLE_FOREVER), "array");
  REFUSED(HeddleArrayCopyToHost(NULL, 6, values, HEDDLE_FLOAT32), "array");
  REFUSED(HeddleArrayGetData(NULL, &writable), "array");
  REFUSED(HeddleArrayGetConstData(NULL, &data), "array");
  REFUSED(HeddleRowSparseGetRows(NULL, &count, &ids, &data), "array");
  REFUSED(HeddleVarGetVersion(NULL, &version), "var: expected a variable, got NULL");
  REFUSED(HeddleVarClearError(NULL), "var");
  REFUSED(HeddleCompletionCall(NULL, HEDDLE_OK, NULL), "completion: expected a completion");
  REFUSED(HeddleWaitForVar(NULL, HEDDLE_FOREVER), "var");
  REFUSED(HeddleWaitForReadsAndWrites(NULL, HEDDLE_FOREVER), "var");
  REFUSED(HeddleOptimizerSet(NULL, "momentum", 0), "optimizer: expected an optimizer, got NULL");
  REFUSED(HeddleOptimizerGet(NULL, "momentum", &number), "optimizer");
  REFUSED(HeddleKVStoreInit(NULL, 1, &key, given), "store: expected a store, got NULL");
  REFUSED(HeddleKVStoreInit(store, 1, &key, none), "values[0]: expected an array, got NULL");
  REFUSED(HeddleKVStorePush(NULL, 1, &key, given, 0), "store");
  REFUSED(HeddleKVStorePush(store, 1, &key, none, 0), "values[0]");
  REFUSED(HeddleKVStorePull(NULL, 1, &key, given, 0, 1), "store");
  REFUSED(HeddleKVStorePull(store, 1, &key, none, 0, 1), "out[0]");
  REFUSED(HeddleKVStoreRowSparsePull(NULL, 1, &key, given, given, 0), "store");
  REFUSED(HeddleKVStoreRowSparsePull(store, 1, &key, none, given, 0), "out[0]");
  REFUSED(HeddleKVStoreRowSparsePull(store, 1, &key, given, none, 0), "row_ids[0]");
  REFUSED(HeddleKVStorePushPull(NULL, 1, &key, given, 0, NULL, NULL, 0), "store");
  REFUSED(HeddleKVStorePushPull(store, 1, &key, none, 0, NULL, NULL, 0), "values[0]");
  REFUSED(HeddleKVStorePushPull(store, 1, &key, given, 1, &key, none, 0), "out[0]");
  REFUSED(HeddleKVStoreBroadcast(NULL, 1, &key, given, 1, &key, given, 0), "store");
  REFUSED(HeddleKVStoreBroadcast(store, 1, &key, none, 1, &key, given, 0), "values[0]");
  REFUSED(HeddleKVStoreBroadcast(store, 1, &key, given, 1, &key, none, 0), "out[0]");
  REFUSED(HeddleKVStoreReset(NULL, &key, array), "store");
  REFUSED(HeddleKVStoreReset(store, &key, NULL), "value");
  REFUSED(HeddleKVStoreRemove(NULL, &key), "store");
  REFUSED(HeddleKVStoreContains(NULL, &key, &flag), "store");
  REFUSED(HeddleKVStoreVisitKeys(NULL, NULL, NULL), "store");
  REFUSED(HeddleKVStoreSetUpdater(NULL, NULL, NULL, NULL), "store");
  REFUSED(HeddleKVStoreSetUpdaters(NULL, NULL, NULL, NULL, NULL, NULL), "store");
  REFUSED(HeddleKVStoreSetOptimizer(NULL, sgd), "store");
  REFUSED(HeddleKVStoreSetOptimizer(store, NULL), "optimizer");
  REFUSED(HeddleKVStoreSaveOptimizerStates(NULL, "file", 0), "store");
  REFUSED(HeddleKVStoreLoadOptimizerStates(NULL, "file"), "store");
  REFUSED(HeddleKVStoreSetGradientCompression(NULL, "2bit", 0.5), "store");
  REFUSED(HeddleKVStoreGetType(NULL, &type), "store");
  REFUSED(HeddleKVStoreGetRank(NULL, &flag), "store");
  REFUSED(HeddleKVStoreGetNumWorkers(NULL, &flag), "store");
  REFUSED(HeddleKVStoreGetNumDeadNodes(NULL, &flag), "store");
  REFUSED(HeddleKVStoreIsCapable(NULL, "optimizer", &flag), "store");
  REFUSED(HeddleKVStoreBarrier(NULL), "store");
  REFUSED(HeddleKVStoreSendCommandToServers(NULL, 0, 0, NULL), "store");
  const HeddleOp op = {.struct_size = sizeof op, .num_reads = 1, .reads = no_vars};
  REFUSED(HeddleEnginePush(&op, NULL, NULL, NULL), "op->reads[0]: expected a variable, got NULL");
  REFUSED(HeddleEnginePushAsync(&op, NULL, NULL, NULL), "op->reads[0]");

  // Free of NULL does nothing.
  CHECK_OK(HeddleArrayFree(NULL));
  CHECK_OK(HeddleVarFree(NULL));
  CHECK_OK(HeddleCompletionFree(NULL));
  CHECK_OK(HeddleOptimizerFree(NULL));
  CHECK_OK(HeddleKVStoreFree(NULL));
  CHECK(made == NULL);

  // The refused calls have changed nothing.
  int contains = -1;
  CHECK_OK(HeddleKVStoreContains(store, &key, &contains));
  CHECK(contains == 0);
  CHECK(IsFull(array, 6, 1));
  CHECK_OK(HeddleArrayFree(array));
  CHECK_OK(HeddleVarFree(var));
  CHECK_OK(HeddleOptimizerFree(sgd));
  CHECK_OK(HeddleKVStoreFree(store));
}

// NULL where a pointer is needed.
static void NullPointersAreRefused(void) {
  const int64_t shape[] = {2, 3};
  const float values[6] = {0};
  const char* const no_names[] = {NULL};
  const double number = 1;
  HeddleArray array = Full(1, 0), made = NULL;
  HeddleKVStore store = NULL;
  HeddleOptimizer sgd = NULL;
  HeddleVar var = NULL;
  const HeddleKey key = {.number = 3};
  CHECK_OK(HeddleKVStoreCreate("local", NULL, &store));
  CHECK_OK(HeddleOptimizerCreate("sgd", 0, NULL, NULL, &sgd));
  CHECK_OK(HeddleVarCreate(NULL, &var));

  REFUSED(HeddleArrayCreate(2, shape, HEDDLE_FLOAT32, HEDDLE_CPU, 0, NULL),
          "HeddleArrayCreate: array: expected a pointer, got NULL");
  REFUSED(HeddleArrayCreate(2, NULL, HEDDLE_FLOAT32, HEDDLE_CPU, 0, &made), "shape");
  REFUSED(HeddleArrayFromHost(6, NULL, HEDDLE_FLOAT32, 2, shape, HEDDLE_FLOAT32, 0, 0, &made),
          "values: expected a pointer to 6 elements, got NULL");
  REFUSED(HeddleArrayFromHost(6, values, HEDDLE_FLOAT32, 2, shape, HEDDLE_FLOAT32, 0, 0, NULL),
          "array");
  REFUSED(HeddleRowSparseCreate(2, shape, HEDDLE_FLOAT32, HEDDLE_CPU, 0, NULL), "array");
  REFUSED(HeddleRowSparseFromHost(1, NULL, values, HEDDLE_FLOAT32, 2, shape, HEDDLE_FLOAT32, 0, 0,
                                  &made),
          "row_ids");
  REFUSED(HeddleRowSparseFromHost(1, shape, NULL, HEDDLE_FLOAT32, 2, shape, HEDDLE_FLOAT32, 0, 0,
                                  &made),
          "rows");
  REFUSED(HeddleArrayShare(array, NULL), "same");
  REFUSED(HeddleArraySlice(array, 0, 1, NULL), "view");
  REFUSED(HeddleArrayReshape(array, 2, shape, NULL), "view");
  REFUSED(HeddleArrayReshape(array, 2, NULL, &made), "shape");
  REFUSED(HeddleArrayGetSize(array, NULL), "elements");
  REFUSED(HeddleArrayGetDType(array, NULL), "dtype");
  REFUSED(HeddleArrayGetKind(array, NULL), "kind");
  REFUSED(HeddleArrayGetVar(array, NULL), "var");
  REFUSED(HeddleArrayCopyFromHost(array, 6, NULL, HEDDLE_FLOAT32, 0), "values");
  REFUSED(HeddleArrayCopy(array, NULL), "copy");
  REFUSED(HeddleArrayCopyAsKind(array, HEDDLE_DENSE, NULL), "copy");
  REFUSED(HeddleArrayCopyToHost(array, 6, NULL, HEDDLE_FLOAT32), "values");
  REFUSED(HeddleArrayGetData(array, NULL), "data");
  REFUSED(HeddleArrayGetConstData(array, NULL), "data");
  REFUSED(HeddleVarCreate("x", NULL), "var");
  REFUSED(HeddleVarGetVersion(var, NULL), "version");
  REFUSED(HeddleEnginePush(NULL, NULL, NULL, NULL), "op: expected a pointer, got NULL");
  REFUSED(HeddleEnginePushAsync(NULL, NULL, NULL, NULL), "op");
  HeddleOp op = {.struct_size = sizeof op};
  REFUSED(HeddleEnginePush(&op, NULL, NULL, NULL), "body: expected a function, got NULL");
  REFUSED(HeddleEnginePushAsync(&op, NULL, NULL, NULL), "body");
  op.num_writes = 2;
  REFUSED(HeddleEnginePush(&op, NULL, NULL, NULL), "op->writes: expected a pointer to 2 elements");
  REFUSED(HeddleOptimizerCreate(NULL, 0, NULL, NULL, &sgd), "name: expected a text, got NULL");
  REFUSED(HeddleOptimizerCreate("sgd", 0, NULL, NULL, NULL), "optimizer");
  REFUSED(HeddleOptimizerCreate("sgd", 1, NULL, &number, &sgd), "parameters");
  REFUSED(HeddleOptimizerCreate("sgd", 1, no_names, NULL, &sgd), "values");
  REFUSED(HeddleOptimizerCreate("sgd", 1, no_names, &number, &sgd), "parameters[0]");
  REFUSED(HeddleOptimizerSet(sgd, NULL, 1), "parameter");
  REFUSED(HeddleOptimizerGet(sgd, "momentum", NULL), "value");
  REFUSED(HeddleKVStoreCreate(NULL, NULL, &store), "type");
  REFUSED(HeddleKVStoreCreate("local", NULL, NULL), "store");
  REFUSED(HeddleKVStoreInit(store, 1, NULL, &array), "keys: expected a pointer to 1 elements");
  REFUSED(HeddleKVStoreInit(store, 1, &key, NULL), "values");
  REFUSED(HeddleKVStorePush(store, 1, NULL, &array, 0), "keys");
  REFUSED(HeddleKVStorePull(store, 1, &key, NULL, 0, 1), "out");
  REFUSED(HeddleKVStoreRowSparsePull(store, 1, &key, &array, NULL, 0), "row_ids");
  REFUSED(HeddleKVStorePushPull(store, 1, &key, &array, 1, NULL, &array, 0), "out_keys");
  REFUSED(HeddleKVStoreBroadcast(store, 1, &key, &array, 1, &key, NULL, 0), "out");
  REFUSED(HeddleKVStoreReset(store, NULL, array), "key");
  REFUSED(HeddleKVStoreRemove(store, NULL), "key");
  REFUSED(HeddleKVStoreContains(store, NULL, NULL), "contains");
  REFUSED(HeddleKVStoreVisitKeys(store, NULL, NULL), "visit");
  REFUSED(HeddleKVStoreSetUpdater(store, NULL, NULL, NULL), "updater");
  REFUSED(HeddleKVStoreSetUpdaters(store, NULL, NULL, NULL, NULL, NULL), "SetUpdater");
  REFUSED(HeddleKVStoreSaveOptimizerStates(store, NULL, 0), "file");
  REFUSED(HeddleKVStoreLoadOptimizerStates(store, NULL), "file");
  REFUSED(HeddleKVStoreSetGradientCompression(store, NULL, 0.5), "type");
  REFUSED(HeddleKVStoreGetType(store, NULL), "type");
  REFUSED(HeddleKVStoreGetRank(store, NULL), "rank");
  REFUSED(HeddleKVStoreGetNumWorkers(store, NULL), "num_workers");
  REFUSED(HeddleKVStoreGetNumDeadNodes(store, NULL), "num_dead_nodes");
  REFUSED(HeddleKVStoreIsCapable(store, NULL, NULL), "is_capable");
  REFUSED(HeddleKVStoreSendCommandToServers(store, 0, 4, NULL), "body");

  CHECK_OK(HeddleArrayGetShape(array, NULL, NULL));
  CHECK_OK(HeddleArrayGetDevice(array, NULL, NULL));
  CHECK(made == NULL);
  CHECK_OK(HeddleArrayFree(array));
  CHECK_OK(HeddleVarFree(var));
  CHECK_OK(HeddleOptimizerFree(sgd));
  CHECK_OK(HeddleKVStoreFree(store));
}

static void FreedForeignAndInventedHandlesAreRefused(void) {
  HeddleArray array = Full(1, 0);
  HeddleKVStore store = NULL;
  int64_t size = -1;
  CHECK_OK(HeddleKVStoreCreate("local", NULL, &store));

  // Of another kind.
  REFUSED(HeddleArrayGetSize((HeddleArray)(void*)store, &size),
          "array: expected an array, got no handle of this kind");
  REFUSED(HeddleKVStoreBarrier((HeddleKVStore)(void*)array), "got no handle of this kind");
  REFUSED(HeddleKVStoreFree((HeddleKVStore)(void*)array), "store");

  // Freed, also when others have taken the place in the table.
  CHECK_OK(HeddleArrayFree(array));
  REFUSED(HeddleArrayFree(array), "got a handle that is not valid any more");
  HeddleArray others[200];
  for (int i = 0; i < 200; ++i) others[i] = Full(i, 0);
  REFUSED(HeddleArrayGetSize(array, &size), "not valid any more");
  CHECK_OK(HeddleKVStoreFree(store));
  REFUSED(HeddleKVStoreBarrier(store), "not valid any more");
  for (int i = 0; i < 200; ++i) CHECK_OK(HeddleArrayFree(others[i]));

  // Never given out: addresses, small and large numbers.
  static int object;
  const uintptr_t invented[] = {1,
                                16,
                                17,
                                0xFFFF,
                                (uintptr_t)&object,
                                (uintptr_t)&size,
                                UINTPTR_MAX,
                                UINTPTR_MAX / 2,
                                UINTPTR_MAX - 14};
  for (size_t i = 0; i < sizeof invented / sizeof invented[0]; ++i) {
    REFUSED(HeddleArrayGetSize((HeddleArray)invented[i], &size), "array");
    REFUSED(HeddleArrayFree((HeddleArray)invented[i]), "array");
    REFUSED(HeddleVarFree((HeddleVar)invented[i]), "var");
    REFUSED(HeddleOptimizerFree((HeddleOptimizer)invented[i]), "optimizer");
    REFUSED(HeddleCompletionFree((HeddleCompletion)invented[i]), "completion");
    REFUSED(HeddleKVStoreFree((HeddleKVStore)invented[i]), "store");
  }
  CHECK(size == -1);
}

static void NumbersOutOfTheirEnumerationAreRefused(void) {
  const int64_t shape[] = {2, 3};
  const int64_t negative[] = {2, -3};
  const float values[6] = {0};
  HeddleArray array = Full(1, 0), made = NULL;
  REFUSED(HeddleArrayCreate(2, shape, 9, HEDDLE_CPU, 0, &made), "dtype: expected 0 to 8, got 9");
  REFUSED(HeddleArrayCreate(2, shape, -1, HEDDLE_CPU, 0, &made), "dtype");
  REFUSED(HeddleArrayCreate(2, shape, HEDDLE_FLOAT32, 3, 0, &made), "device_type");
  REFUSED(HeddleArrayCreate(2, shape, HEDDLE_FLOAT32, HEDDLE_CPU, 40000, &made),
          "device_id: expected 0 to 32767, got 40000");
  REFUSED(HeddleArrayCreate(2, shape, HEDDLE_FLOAT32, HEDDLE_CPU, -1, &made), "-1");
  REFUSED(HeddleArrayCreate((size_t)-1, shape, HEDDLE_FLOAT32, HEDDLE_CPU, 0, &made), "1024 axes");
  REFUSED(HeddleArrayCreate(2, negative, HEDDLE_FLOAT32, HEDDLE_CPU, 0, &made), "-3");
  REFUSED(HeddleArrayFromHost(5, values, HEDDLE_FLOAT32, 2, shape, HEDDLE_FLOAT32, 0, 0, &made),
          "expected 6");
  REFUSED(HeddleArrayFromHost(6, values, 99, 2, shape, HEDDLE_FLOAT32, 0, 0, &made),
          "values_dtype");
  REFUSED(HeddleArrayCombine(array, 4, array), "operation: expected 0 to 3, got 4");
  REFUSED(HeddleArrayCombineScalar(array, -1, 1), "operation");
  REFUSED(HeddleArrayCopyAsKind(array, 2, &made), "kind");
  REFUSED(HeddleArrayCopyToHost(array, 5, &made, HEDDLE_FLOAT32),
          "count: expected the 6 elements of the array, got 5");
  REFUSED(HeddleArrayCopyFromHost(array, 7, values, HEDDLE_FLOAT32, 0), "7");
  const HeddleOp op = {.struct_size = sizeof op, .lane = 3};
  REFUSED(HeddleEnginePush(&op, NULL, NULL, NULL), "op->lane");
  CHECK(made == NULL);
  CHECK(IsFull(array, 6, 1));
  CHECK_OK(HeddleArrayFree(array));
}

static void* SeesNoErrorOfOthers(void* unused) {
  CHECK(HeddleLastError() == HEDDLE_OK);
  CHECK(strcmp(HeddleLastErrorMessage(), "") == 0);
  CHECK(HeddleArrayFill(NULL, 1, 0) == HEDDLE_INVALID_ARGUMENT);
  return unused;
}

static void TheLastErrorIsTheThreadsOwn(void) {
  CHECK(HeddleKVStoreBarrier(NULL) == HEDDLE_INVALID_ARGUMENT);
  char message[200];
  snprintf(message, sizeof message, "%s", HeddleLastErrorMessage());
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, SeesNoErrorOfOthers, NULL) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(HeddleLastError() == HEDDLE_INVALID_ARGUMENT);
  CHECK(strcmp(HeddleLastErrorMessage(), message) == 0);

  // Calls that succeed leave it alone.
  HeddleArray array = Full(1, 0);
  CHECK_OK(HeddleArrayFree(array));
  CHECK(strcmp(HeddleLastErrorMessage(), message) == 0);

  CHECK(HeddleSetLastError(HEDDLE_USER_ERROR + 7, NULL) == HEDDLE_USER_ERROR + 7);
  CHECK(HeddleLastError() == HEDDLE_USER_ERROR + 7);
  CHECK(strcmp(HeddleLastErrorMessage(), "") == 0);
}

static HeddleStatus KeepCompletion(void* context, HeddleCompletion completion) {
  *(HeddleCompletion*)context = completion;
  return HEDDLE_OK;
}
static HeddleStatus WaitInside(void* context) {
  return HeddleWaitForVar(*(HeddleVar*)context, HEDDLE_FOREVER);
}
static HeddleStatus DropCompletion(void* context, HeddleCompletion completion) {
  (void)context;
  return HeddleCompletionFree(completion);
}

// A status for each type of error: those that C can provoke, each from where it comes naturally.
static void EveryTypeOfErrorHasItsStatus(void) {
  HeddleKVStore store = NULL;
  HeddleOptimizer sgd = NULL;
  HeddleVar var = NULL;
  HeddleCompletion completion = NULL;
  CHECK_OK(HeddleVarCreate("x", &var));
  CHECK_OK(HeddleKVStoreCreate("local", NULL, &store));
  CHECK_FAILS(HeddleKVStoreCreate("no such", NULL, &store), HEDDLE_INVALID_ARGUMENT, "no such");
  CHECK_FAILS(HeddleKVStoreSaveOptimizerStates(store, "file", 0), HEDDLE_INVALID_STATE,
              "optimizer");
  CHECK_OK(HeddleOptimizerCreate("sgd", 0, NULL, NULL, &sgd));
  CHECK_OK(HeddleKVStoreSetOptimizer(store, sgd));
  CHECK_FAILS(HeddleKVStoreLoadOptimizerStates(store, "/no/such/file"), HEDDLE_IO_ERROR,
              "/no/such/file");

  HeddleOp op = {.struct_size = sizeof op, .name = "waits", .num_writes = 1, .writes = &var};
  CHECK_OK(HeddleEnginePush(&op, WaitInside, &var, NULL));
  CHECK_FAILS(HeddleWaitForVar(var, HEDDLE_FOREVER), HEDDLE_INVALID_STATE, "waits");

  op.name = "drops";
  CHECK_OK(HeddleEnginePushAsync(&op, DropCompletion, NULL, NULL));
  CHECK_FAILS(HeddleWaitForVar(var, HEDDLE_FOREVER), HEDDLE_OP_ERROR, "drops");

  op.name = "stays";
  CHECK_OK(HeddleEnginePushAsync(&op, KeepCompletion, &completion, NULL));
  CHECK_FAILS(HeddleWaitForVar(var, 1), HEDDLE_TIMEOUT, "stays");
  CHECK_FAILS(HeddleWaitForReadsAndWrites(var, 0), HEDDLE_TIMEOUT, "stays");
  CHECK_FAILS(HeddleWaitForAll(1), HEDDLE_TIMEOUT, "stays");
  CHECK_OK(HeddleCompletionCall(completion, HEDDLE_OK, NULL));
  CHECK_OK(HeddleWaitForVar(var, INT64_MAX));
  (void)HeddleWaitForAll(HEDDLE_FOREVER);  // takes what the failed ops have left unreported
  (void)HeddleWaitForAll(HEDDLE_FOREVER);
  CHECK_OK(HeddleWaitForAll(HEDDLE_FOREVER));

  const int64_t too_large[] = {INT64_C(1) << 50};
  HeddleArray array = NULL;
  CHECK_OK(HeddleArrayCreate(1, too_large, HEDDLE_FLOAT64, HEDDLE_CPU, 0, &array));
  void* data = NULL;
  CHECK_FAILS(HeddleArrayGetData(array, &data), HEDDLE_OUT_OF_MEMORY, "bytes");
  CHECK(data == NULL);
  CHECK_OK(HeddleArrayFree(array));
  CHECK_OK(HeddleVarFree(var));
  CHECK_OK(HeddleOptimizerFree(sgd));
  CHECK_OK(HeddleKVStoreFree(store));
}

const Test kErrorTests[] = {
    {"VersionsAreThoseOfTheHeader", VersionsAreThoseOfTheHeader},
    {"NullHandlesAreRefused", NullHandlesAreRefused},
    {"NullPointersAreRefused", NullPointersAreRefused},
    {"FreedForeignAndInventedHandlesAreRefused", FreedForeignAndInventedHandlesAreRefused},
    {"NumbersOutOfTheirEnumerationAreRefused", NumbersOutOfTheirEnumerationAreRefused},
    {"TheLastErrorIsTheThreadsOwn", TheLastErrorIsTheThreadsOwn},
    {"EveryTypeOfErrorHasItsStatus", EveryTypeOfErrorHasItsStatus},
    {NULL, NULL},
};
