#include <pthread.h>
#include <stdatomic.h>

#include "check.h"

enum { kThreads = 4 };

// Starts kThreads threads and waits until they have ended.
static void OnSeveralThreads(void* (*run)(void*), void* context) {
  pthread_t threads[kThreads];
  for (int i = 0; i < kThreads; ++i) CHECK(pthread_create(&threads[i], NULL, run, context) == 0);
  for (int i = 0; i < kThreads; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
}

static void* PushOnes(void* store) {
  const HeddleKey key = {.text = "sum"};
  for (int i = 0; i < 100; ++i) {
    HeddleArray one = Full(1, 0);
    CHECK_OK(HeddleKVStorePush((HeddleKVStore)store, 1, &key, &one, 0));
    CHECK_OK(HeddleArrayFree(one));
  }
  return NULL;
}

static HeddleStatus Add(void* context, const HeddleKey* key, HeddleArray input,
                        HeddleArray stored) {
  (void)key;
  ++*(int*)context;  // one thread at a time is in the updater of a key
  return HeddleArrayCombine(stored, HEDDLE_ADD, input);
}

static void PushesOfSeveralThreadsAllCount(void) {
  HeddleKVStore store = NULL;
  int calls = 0;
  const HeddleKey key = {.text = "sum"};
  HeddleArray value = Full(0, 0);
  CHECK_OK(HeddleKVStoreCreate("local", NULL, &store));
  CHECK_OK(HeddleKVStoreInit(store, 1, &key, &value));
  CHECK_OK(HeddleKVStoreSetUpdater(store, Add, &calls, NULL));
  OnSeveralThreads(PushOnes, store);
  CHECK_OK(HeddleKVStorePull(store, 1, &key, &value, 0, 1));
  CHECK(IsFull(value, 6, 100 * kThreads));
  CHECK(calls == 100 * kThreads);
  CHECK_OK(HeddleArrayFree(value));
  CHECK_OK(HeddleKVStoreFree(store));
}

// A handle that one thread exchanges and frees while the others use it.
typedef struct Shared {
  _Atomic(HeddleArray) array;
  atomic_int turn;
  atomic_int users_done;
} Shared;

static void* UseOrExchange(void* context) {
  Shared* const shared = context;
  if (atomic_fetch_add(&shared->turn, 1) == 0) {
    while (atomic_load(&shared->users_done) < kThreads - 1) {
      HeddleArray const old = atomic_exchange(&shared->array, Full(1, 0));
      CHECK_OK(HeddleArrayFree(old));
    }
    return NULL;
  }
  for (int i = 0; i < 2000; ++i) {
    int64_t size = 6;
    HeddleArray const array = atomic_load(&shared->array);
    const HeddleStatus status = HeddleArrayGetSize(array, &size);
    CHECK(status == HEDDLE_OK || status == HEDDLE_INVALID_ARGUMENT);
    CHECK(size == 6);
    const HeddleStatus added = HeddleArrayCombineScalar(array, HEDDLE_ADD, 1);
    CHECK(added == HEDDLE_OK || added == HEDDLE_INVALID_ARGUMENT);
  }
  atomic_fetch_add(&shared->users_done, 1);
  return NULL;
}

static void AHandleMayBeFreedWhileOthersUseIt(void) {
  Shared shared;
  atomic_init(&shared.array, Full(1, 0));
  atomic_init(&shared.turn, 0);
  atomic_init(&shared.users_done, 0);
  OnSeveralThreads(UseOrExchange, &shared);
  CHECK_OK(HeddleArrayFree(atomic_load(&shared.array)));
  CHECK_OK(HeddleWaitForAll(HEDDLE_FOREVER));
}

// Of all that free one handle at a time, one succeeds.
typedef struct Contested {
  HeddleArray arrays[200];
  atomic_int freed;
} Contested;

static void* FreeAll(void* context) {
  Contested* const contested = context;
  for (int i = 0; i < 200; ++i) {
    const HeddleStatus status = HeddleArrayFree(contested->arrays[i]);
    CHECK(status == HEDDLE_OK || status == HEDDLE_INVALID_ARGUMENT);
    if (status == HEDDLE_OK) atomic_fetch_add(&contested->freed, 1);
  }
  return NULL;
}

static void OneOfSeveralFreesSucceeds(void) {
  Contested contested;
  atomic_init(&contested.freed, 0);
  for (int i = 0; i < 200; ++i) contested.arrays[i] = Full(i, 0);
  OnSeveralThreads(FreeAll, &contested);
  CHECK(atomic_load(&contested.freed) == 200);
}

const Test kThreadTests[] = {
    {"PushesOfSeveralThreadsAllCount", PushesOfSeveralThreadsAllCount},
    {"AHandleMayBeFreedWhileOthersUseIt", AHandleMayBeFreedWhileOthersUseIt},
    {"OneOfSeveralFreesSucceeds", OneOfSeveralFreesSucceeds},
    {NULL, NULL},
};
