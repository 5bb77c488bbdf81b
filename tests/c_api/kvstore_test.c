#include <unistd.h>

#include "check.h"

enum { kDevices = 4 };

static HeddleKVStore NewStore(const char* type) {
  HeddleKVStore store = NULL;
  CHECK_OK(HeddleKVStoreCreate(type, NULL, &store));
  return store;
}

// The same key `count` times, for a list of arrays.
static void Repeat(HeddleKey key, int count, HeddleKey* keys) {
  for (int i = 0; i < count; ++i) keys[i] = key;
}
static void FillAll(int count, double value, HeddleArray* arrays) {
  for (int i = 0; i < count; ++i) arrays[i] = Full(value, i % kDevices);
}
static void FreeAll(int count, HeddleArray* arrays) {
  for (int i = 0; i < count; ++i) CHECK_OK(HeddleArrayFree(arrays[i]));
}
static void InitFull(HeddleKVStore store, HeddleKey key, double value) {
  HeddleArray array = Full(value, 0);
  CHECK_OK(HeddleKVStoreInit(store, 1, &key, &array));
  CHECK_OK(HeddleArrayFree(array));
}
static void PushFull(HeddleKVStore store, HeddleKey key, double value) {
  HeddleArray array = Full(value, 0);
  CHECK_OK(HeddleKVStorePush(store, 1, &key, &array, 0));
  CHECK_OK(HeddleArrayFree(array));
}
static int Holds(HeddleKVStore store, HeddleKey key, float value) {
  HeddleArray array = Full(-999, 0);
  CHECK_OK(HeddleKVStorePull(store, 1, &key, &array, 0, 1));
  const int same = IsFull(array, 6, value);
  CHECK_OK(HeddleArrayFree(array));
  return same;
}

typedef struct Updates {
  int calls;
  HeddleKey keys[16];
  char texts[16][8];
  int destroyed;
} Updates;

// stored += input * 2
static HeddleStatus AddTwice(void* context, const HeddleKey* key, HeddleArray input,
                             HeddleArray stored) {
  Updates* const updates = context;
  if (key->text != NULL) {
    snprintf(updates->texts[updates->calls], sizeof updates->texts[0], "%s", key->text);
  }
  updates->keys[updates->calls++] = *key;
  HeddleArray twice = NULL;
  HeddleStatus status = HeddleArrayCopy(input, &twice);
  if (status == HEDDLE_OK) status = HeddleArrayCombineScalar(twice, HEDDLE_MULTIPLY, 2);
  if (status == HEDDLE_OK) status = HeddleArrayCombine(stored, HEDDLE_ADD, twice);
  HeddleArrayFree(twice);
  return status;
}
static void CountDestroyed(void* context) { ++((Updates*)context)->destroyed; }

// The published session, on both types; with integer keys and with strings.
static void PublishedSession(const char* type, const HeddleKey* keys) {
  HeddleKVStore store = NewStore(type);
  const HeddleKey three = keys[0];
  InitFull(store, three, 2);
  CHECK(Holds(store, three, 2));
  PushFull(store, three, 8);
  CHECK(Holds(store, three, 8));

  HeddleKey repeated[kDevices];
  HeddleArray on_four[kDevices];
  Repeat(three, kDevices, repeated);
  FillAll(kDevices, 1, on_four);
  CHECK_OK(HeddleKVStorePush(store, kDevices, repeated, on_four, 0));
  CHECK(Holds(store, three, 4));

  Updates updates = {0};
  CHECK_OK(HeddleKVStoreSetUpdater(store, AddTwice, &updates, CountDestroyed));
  CHECK(Holds(store, three, 4));
  PushFull(store, three, 1);
  CHECK(updates.calls == 1);
  CHECK(Holds(store, three, 6));
  CHECK_OK(HeddleKVStorePull(store, kDevices, repeated, on_four, 0, 1));
  for (int i = 0; i < kDevices; ++i) CHECK(IsFull(on_four[i], 6, 6));
  FreeAll(kDevices, on_four);

  // One device.
  HeddleArray b[3];
  FillAll(3, 1, b);
  CHECK_OK(HeddleKVStoreInit(store, 3, keys + 1, b));
  CHECK_OK(HeddleKVStorePush(store, 3, keys + 1, b, 0));
  CHECK_OK(HeddleKVStorePull(store, 3, keys + 1, b, 0, 1));
  CHECK(IsFull(b[1], 6, 3));
  FreeAll(3, b);

  // Four devices.
  HeddleKey each_four[3 * kDevices];
  HeddleArray lists[3 * kDevices];
  for (int i = 0; i < 3; ++i) Repeat(keys[1 + i], kDevices, each_four + (ptrdiff_t)i * kDevices);
  FillAll(3 * kDevices, 1, lists);
  CHECK_OK(HeddleKVStorePush(store, 3 * kDevices, each_four, lists, 0));
  CHECK_OK(HeddleKVStorePull(store, 3 * kDevices, each_four, lists, 0, 1));
  for (int i = 0; i < 3 * kDevices; ++i) CHECK(IsFull(lists[i], 6, 11));
  FreeAll(3 * kDevices, lists);

  CHECK(updates.calls == 7);  // once a key and push
  for (int i = 0; i < 7; ++i) {
    const HeddleKey* expected = &keys[i == 0 ? 0 : 1 + (i - 1) % 3];
    if (expected->text != NULL) {
      CHECK(strcmp(updates.texts[i], expected->text) == 0);
    } else {
      CHECK(updates.keys[i].text == NULL && updates.keys[i].number == expected->number);
    }
  }
  CHECK(updates.destroyed == 0);
  CHECK_OK(HeddleKVStoreFree(store));
  CHECK(updates.destroyed == 1);
}

static void PublishedSessions(void) {
  const HeddleKey numbers[] = {{.number = 3}, {.number = 5}, {.number = 7}, {.number = 9}};
  const HeddleKey texts[] = {{.text = "3"}, {.text = "5"}, {.text = "7"}, {.text = "9"}};
  PublishedSession("local", numbers);
  PublishedSession("device", numbers);
  PublishedSession("Local", texts);
  PublishedSession("device", texts);
}

static void PushPullAndBroadcast(void) {
  HeddleKVStore store = NewStore("device");
  const HeddleKey a = {.text = "a"}, b = {.text = "b"};
  const HeddleKey keys[] = {a, b};
  const HeddleKey twice[] = {a, a, b, b};
  const HeddleKey crossed[] = {b, a};
  HeddleArray values[4], out[4];
  FillAll(4, 5, values);
  FillAll(4, 0, out);

  CHECK_OK(HeddleKVStoreBroadcast(store, 2, keys, values, 4, twice, out, 0));
  for (int i = 0; i < 4; ++i) CHECK(IsFull(out[i], 6, 5));
  // Two values a key, one output a key.
  CHECK_OK(HeddleKVStorePushPull(store, 4, twice, values, 2, keys, out, 0));
  CHECK(IsFull(out[0], 6, 10) && IsFull(out[1], 6, 10) && IsFull(out[2], 6, 5));
  // Without outputs: to the values.
  CHECK_OK(HeddleKVStorePushPull(store, 4, twice, values, 0, NULL, NULL, 0));
  for (int i = 0; i < 4; ++i) CHECK(IsFull(values[i], 6, 10));
  CHECK_OK(HeddleKVStorePushPull(store, 1, &a, values, 2, twice, out, 0));
  CHECK(IsFull(out[0], 6, 10) && IsFull(out[1], 6, 10));

  CHECK_FAILS(HeddleKVStorePushPull(store, 2, keys, values, 2, crossed, out, 0),
              HEDDLE_INVALID_ARGUMENT, "out_keys: expected the keys of the values");
  CHECK_FAILS(HeddleKVStorePushPull(store, 2, keys, values, 1, keys, out, 0),
              HEDDLE_INVALID_ARGUMENT, "out_keys");
  CHECK_FAILS(HeddleKVStoreBroadcast(store, 1, &a, values, 0, NULL, NULL, 0),
              HEDDLE_INVALID_ARGUMENT, "out_keys");
  CHECK_FAILS(HeddleKVStoreBroadcast(store, 1, &a, values, 1, &a, out, 0), HEDDLE_INVALID_ARGUMENT,
              "'a' is in the store already");
  CHECK(Holds(store, a, 10) && Holds(store, b, 10));
  FreeAll(4, values);
  FreeAll(4, out);
  CHECK_OK(HeddleKVStoreFree(store));
}

static void BadInputChangesNothing(void) {
  HeddleKVStore store = NewStore("local");
  const HeddleKey five = {.number = 5}, seven = {.number = 7}, text = {.text = "five"};
  const HeddleKey keys[] = {seven, five};
  const HeddleKey same[] = {five, five};
  const int64_t row[] = {3};
  HeddleArray good = Full(1, 0), wrong = NULL, sparse = NULL;
  CHECK_OK(HeddleArrayCreate(1, row, HEDDLE_FLOAT32, HEDDLE_CPU, 0, &wrong));
  CHECK_OK(HeddleArrayCopyAsKind(good, HEDDLE_ROW_SPARSE, &sparse));
  const HeddleArray pair[] = {good, wrong};
  const HeddleArray mixed[] = {good, sparse};
  InitFull(store, five, 2);

  CHECK_FAILS(HeddleKVStoreInit(store, 1, &five, &good), HEDDLE_INVALID_ARGUMENT, "key 5");
  CHECK_FAILS(HeddleKVStoreInit(store, 1, &text, &good), HEDDLE_INVALID_ARGUMENT, "'five'");
  CHECK_FAILS(HeddleKVStorePush(store, 2, keys, pair, 0), HEDDLE_INVALID_ARGUMENT, "(3,)");
  CHECK_FAILS(HeddleKVStorePush(store, 1, &five, &wrong, 0), HEDDLE_INVALID_ARGUMENT, "(3,)");
  CHECK_FAILS(HeddleKVStorePull(store, 1, &seven, &good, 0, 1), HEDDLE_UNKNOWN_KEY, "key 7");
  CHECK_FAILS(HeddleKVStorePush(store, 2, same, mixed, 0), HEDDLE_INVALID_ARGUMENT,
              "values[1]: expected arrays of one kind for key 5");
  CHECK_FAILS(HeddleKVStoreRowSparsePull(store, 1, &five, &sparse, &wrong, 0),
              HEDDLE_INVALID_ARGUMENT, "row-sparse value");
  CHECK_FAILS(HeddleKVStoreRemove(store, &seven), HEDDLE_UNKNOWN_KEY, "key 7");
  CHECK_FAILS(HeddleKVStoreReset(store, &seven, good), HEDDLE_UNKNOWN_KEY, "key 7");
  CHECK(Holds(store, five, 2));
  int contains = 1;
  CHECK_OK(HeddleKVStoreContains(store, &seven, &contains));
  CHECK(contains == 0);

  const HeddleKVStoreOptions strict = {.struct_size = sizeof strict, .strict_init = 1};
  HeddleKVStore strict_store = NULL;
  CHECK_OK(HeddleKVStoreCreate("local", &strict, &strict_store));
  CHECK_FAILS(HeddleKVStorePush(strict_store, 1, &five, &good, 0), HEDDLE_UNKNOWN_KEY,
              "strict_init");
  CHECK_OK(HeddleKVStorePush(store, 1, &seven, &good, 0));  // creates the key
  CHECK(Holds(store, seven, 1));

  // No pairs: nothing to do.
  CHECK_OK(HeddleKVStorePush(store, 0, NULL, NULL, 0));
  CHECK_OK(HeddleArrayFree(good));
  CHECK_OK(HeddleArrayFree(wrong));
  CHECK_OK(HeddleArrayFree(sparse));
  CHECK_OK(HeddleKVStoreFree(store));
  CHECK_OK(HeddleKVStoreFree(strict_store));
}

static HeddleStatus CollectKey(void* context, const HeddleKey* key) {
  char* const text = context;
  strcat(strcat(text, key->text != NULL ? key->text : "?"), " ");
  return strcmp(text, "b a c ") == 0 ? HeddleSetLastError(HEDDLE_USER_ERROR, "enough") : HEDDLE_OK;
}
static HeddleStatus SumKeys(void* context, const HeddleKey* key) {
  *(int64_t*)context += key->text == NULL ? key->number : 1000;
  return HEDDLE_OK;
}

static void KeysAreVisitedRemovedAndReset(void) {
  HeddleKVStore store = NewStore("local");
  const HeddleKey a = {.text = "a"}, b = {.text = "b"}, c = {.text = "c"}, d = {.text = ""};
  InitFull(store, b, 1);
  InitFull(store, a, 2);
  InitFull(store, c, 3);
  InitFull(store, d, 4);
  char seen[32] = "";
  CHECK_FAILS(HeddleKVStoreVisitKeys(store, CollectKey, seen), HEDDLE_USER_ERROR, "enough");
  CHECK(strcmp(seen, "b a c ") == 0);
  CHECK_OK(HeddleKVStoreRemove(store, &b));
  CHECK_OK(HeddleKVStoreRemove(store, &d));
  HeddleArray nine = Full(9, 0);
  CHECK_OK(HeddleKVStoreReset(store, &a, nine));
  CHECK_OK(HeddleArrayFree(nine));
  CHECK(Holds(store, a, 9));
  int contains = 1;
  CHECK_OK(HeddleKVStoreContains(store, &b, &contains));
  CHECK(contains == 0);
  CHECK_OK(HeddleKVStoreContains(store, &a, &contains));
  CHECK(contains == 1);
  CHECK_OK(HeddleKVStoreFree(store));

  // Integers of 64 bits.
  HeddleKVStore numbered = NewStore("local");
  const HeddleKey large = {.number = INT64_MAX}, small = {.number = INT64_MIN};
  InitFull(numbered, large, 1);
  InitFull(numbered, small, 2);
  CHECK(Holds(numbered, large, 1) && Holds(numbered, small, 2));
  int64_t sum = 0;
  CHECK_OK(HeddleKVStoreVisitKeys(numbered, SumKeys, &sum));
  CHECK(sum == -1);
  CHECK_OK(HeddleKVStoreFree(numbered));
}

static HeddleArray Ids(size_t count, const int64_t* ids) {
  const int64_t shape[] = {(int64_t)count};
  HeddleArray array = NULL;
  CHECK_OK(
      HeddleArrayFromHost(count, ids, HEDDLE_INT64, 1, shape, HEDDLE_INT64, HEDDLE_CPU, 0, &array));
  return array;
}

static HeddleStatus AddSparse(void* context, const HeddleKey* key, HeddleArray input,
                              HeddleArray stored) {
  (void)key;
  int kind = -1;
  HeddleStatus status = HeddleArrayGetKind(input, &kind);
  if (status == HEDDLE_OK && kind != HEDDLE_ROW_SPARSE) {
    status = HeddleSetLastError(HEDDLE_USER_ERROR, "expected a row-sparse input");
  }
  ++*(int*)context;
  return status == HEDDLE_OK ? HeddleArrayCombine(stored, HEDDLE_ADD, input) : status;
}

static void RowSparseValues(void) {
  HeddleKVStore store = NewStore("local");
  const int64_t shape[] = {3, 3};
  const int64_t all_ids[] = {0, 1, 2}, first_last[] = {0, 2}, two_two[] = {2, 2}, bad[] = {3};
  const float ones[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
  const HeddleKey key = {.text = "3"};
  const HeddleKey repeated[] = {key, key};
  HeddleArray value = NULL, out[2] = {NULL, NULL};
  CHECK_OK(HeddleRowSparseFromHost(3, all_ids, ones, HEDDLE_FLOAT32, 2, shape, HEDDLE_FLOAT32,
                                   HEDDLE_CPU, 0, &value));
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(HeddleRowSparseCreate(2, shape, HEDDLE_FLOAT32, HEDDLE_CPU, 0, &out[i]));
  }
  CHECK_OK(HeddleKVStoreInit(store, 1, &key, &value));
  const HeddleArray ids[] = {Ids(2, first_last), Ids(2, two_two)};
  const HeddleArray shared_ids[] = {ids[0], ids[0]};
  const HeddleArray bad_ids = Ids(1, bad);
  const float rows_first_last[] = {1, 1, 1, 0, 0, 0, 1, 1, 1};
  const float rows_last[] = {0, 0, 0, 0, 0, 0, 1, 1, 1};
  CHECK_OK(HeddleKVStoreRowSparsePull(store, 2, repeated, out, ids, 0));
  CHECK(HasValues(out[0], 9, rows_first_last) && HasValues(out[1], 9, rows_last));
  CHECK_OK(HeddleKVStoreRowSparsePull(store, 2, repeated, out, shared_ids, 0));
  CHECK(HasValues(out[0], 9, rows_first_last) && HasValues(out[1], 9, rows_first_last));
  CHECK_OK(HeddleKVStoreRowSparsePull(store, 1, &key, out, &bad_ids, 0));
  CHECK_FAILS(HeddleArrayWaitToRead(out[0], HEDDLE_FOREVER), HEDDLE_INVALID_ARGUMENT, "3");
  CHECK_OK(HeddleKVStorePull(store, 1, &key, &out[1], 0, 1));  // left alone
  CHECK(HasValues(out[1], 9, rows_first_last));
  CHECK_OK(HeddleKVStorePull(store, 1, &key, &out[1], 0, 0));
  CHECK(HasValues(out[1], 9, ones));

  int calls = 0;
  CHECK_OK(HeddleKVStoreSetUpdaters(store, NULL, AddSparse, NULL, &calls, NULL));
  CHECK_OK(HeddleKVStorePush(store, 1, &key, &value, 0));
  CHECK_OK(HeddleKVStorePull(store, 1, &key, &out[1], 0, 0));
  CHECK(calls == 1 && IsFull(out[1], 9, 2));
  const HeddleKey dense_key = {.text = "dense"};
  HeddleArray dense = NULL;
  CHECK_OK(HeddleArrayCreate(2, shape, HEDDLE_FLOAT32, HEDDLE_CPU, 0, &dense));
  CHECK_OK(HeddleArrayFill(dense, 1, 0));
  CHECK_OK(HeddleKVStoreInit(store, 1, &dense_key, &dense));
  CHECK_FAILS(HeddleKVStorePush(store, 1, &dense_key, &dense, 0), HEDDLE_INVALID_ARGUMENT,
              "updater for dense");
  CHECK_FAILS(HeddleKVStorePush(store, 1, &dense_key, &value, 0), HEDDLE_INVALID_ARGUMENT,
              "updater for row-sparse");
  CHECK_OK(HeddleKVStoreSetUpdaters(store, NULL, AddSparse, AddSparse, &calls, NULL));
  CHECK_OK(HeddleKVStorePush(store, 1, &dense_key, &value, 0));
  CHECK_OK(HeddleKVStorePull(store, 1, &dense_key, &dense, 0, 1));
  CHECK(calls == 2 && IsFull(dense, 9, 2));

  CHECK_OK(HeddleArrayFree(dense));
  CHECK_OK(HeddleArrayFree(value));
  CHECK_OK(HeddleArrayFree(out[0]));
  CHECK_OK(HeddleArrayFree(out[1]));
  CHECK_OK(HeddleArrayFree(ids[0]));
  CHECK_OK(HeddleArrayFree(ids[1]));
  CHECK_OK(HeddleArrayFree(bad_ids));
  CHECK_OK(HeddleKVStoreFree(store));
}

static HeddleArray leaked_input;
static HeddleStatus RefuseToUpdate(void* context, const HeddleKey* key, HeddleArray input,
                                   HeddleArray stored) {
  (void)context;
  (void)key;
  (void)stored;
  leaked_input = input;
  return HeddleSetLastError(HEDDLE_USER_ERROR + 1, "I refuse");
}
static HeddleStatus KeepHandles(void* context, const HeddleKey* key, HeddleArray input,
                                HeddleArray stored) {
  (void)key;
  HeddleArray* const kept = context;
  const HeddleStatus status = HeddleArrayShare(stored, &kept[0]);
  return status == HEDDLE_OK ? HeddleArrayCopyTo(input, stored, 0) : status;
}

static void Updaters(void) {
  HeddleKVStore store = NewStore("local");
  const HeddleKey key = {.number = 1};
  InitFull(store, key, 1);
  Updates updates = {0};
  HeddleArray one = Full(1, 0);

  // A failure leaves the push, as it is.
  CHECK_OK(HeddleKVStoreSetUpdater(store, RefuseToUpdate, &updates, CountDestroyed));
  CHECK_FAILS(HeddleKVStorePush(store, 1, &key, &one, 0), HEDDLE_USER_ERROR + 1, "I refuse");
  CHECK(Holds(store, key, 1));
  int64_t size = 0;  // the handles are valid during the call only
  CHECK_FAILS(HeddleArrayGetSize(leaked_input, &size), HEDDLE_INVALID_ARGUMENT, "not valid");

  // Another one comes in its place, and the context of the first goes; a refused one stays.
  HeddleArray kept[1] = {NULL};
  CHECK_FAILS(HeddleKVStoreSetUpdater(store, NULL, &updates, CountDestroyed),
              HEDDLE_INVALID_ARGUMENT, "updater");
  CHECK_FAILS(HeddleKVStoreSetUpdaters(store, NULL, NULL, NULL, &updates, CountDestroyed),
              HEDDLE_INVALID_ARGUMENT, "SetUpdater");
  CHECK(updates.destroyed == 0);
  CHECK_OK(HeddleKVStoreSetUpdater(store, KeepHandles, kept, NULL));
  CHECK(updates.destroyed == 1);
  PushFull(store, key, 6);
  CHECK(IsFull(kept[0], 6, 6));
  CHECK_OK(HeddleArrayFree(kept[0]));
  CHECK_OK(HeddleArrayFree(one));
  CHECK_OK(HeddleKVStoreFree(store));
}

static void OptimizersAndTheirStates(void) {
  const char* const names[] = {"learning_rate", "momentum"};
  const double values[] = {0.5, 0.5};
  const HeddleKey key = {.number = 1};
  HeddleOptimizer sgd = NULL;
  CHECK_FAILS(HeddleOptimizerCreate("sgdd", 0, NULL, NULL, &sgd), HEDDLE_INVALID_ARGUMENT, "'sgd'");
  CHECK_FAILS(HeddleOptimizerCreate("sgd", 1, (const char* const[]){"lr"}, values, &sgd),
              HEDDLE_INVALID_ARGUMENT, "learning_rate");
  CHECK_OK(HeddleOptimizerCreate("SGD", 2, names, values, &sgd));
  HeddleKVStore store = NewStore("local"), second = NewStore("device");
  InitFull(store, key, 0);
  CHECK_OK(HeddleKVStoreSetOptimizer(store, sgd));
  PushFull(store, key, 4);  // m = -2
  CHECK(Holds(store, key, -2));
  PushFull(store, key, 4);  // m = -3
  CHECK(Holds(store, key, -5));

  char file[64];
  snprintf(file, sizeof file, "c_api_test.%d.states", (int)getpid());
  CHECK_OK(HeddleKVStoreSaveOptimizerStates(store, file, 0));
  InitFull(second, key, -5);
  CHECK_OK(HeddleKVStoreSetOptimizer(second, sgd));
  CHECK_OK(HeddleKVStoreLoadOptimizerStates(second, file));
  remove(file);

  // A change counts from the next push on, in every store that has it.
  double rate = 0;
  CHECK_OK(HeddleOptimizerSet(sgd, "learning_rate", 0.25));
  CHECK_OK(HeddleOptimizerGet(sgd, "learning_rate", &rate));
  CHECK(rate == 0.25);
  CHECK_FAILS(HeddleOptimizerSet(sgd, "momentum", 2), HEDDLE_INVALID_ARGUMENT, "momentum");
  CHECK_OK(HeddleOptimizerFree(sgd));  // the stores keep it
  PushFull(store, key, 4);             // m = -2.5
  PushFull(second, key, 4);
  CHECK(Holds(store, key, -7.5F));
  CHECK(Holds(second, key, -7.5F));
  CHECK_OK(HeddleKVStoreFree(store));
  CHECK_OK(HeddleKVStoreFree(second));
}

static void GradientCompression(void) {
  HeddleKVStore store = NewStore("local");
  const HeddleKey key = {.number = 1};
  InitFull(store, key, 0);
  CHECK_FAILS(HeddleKVStoreSetGradientCompression(store, "3bit", 0.5), HEDDLE_INVALID_ARGUMENT,
              "3bit");
  CHECK_OK(HeddleKVStoreSetGradientCompression(store, "2bit", 0.5));
  PushFull(store, key, 0.3);
  CHECK(Holds(store, key, 0));
  PushFull(store, key, 0.3);  // with the residual above the threshold
  CHECK(Holds(store, key, 0.5F));
  CHECK_OK(HeddleKVStoreFree(store));
}

static void TheStoreAndItsJob(void) {
  HeddleKVStore store = NewStore("Device");
  const char* type = NULL;
  int rank = -1, workers = -1, dead = -1, capable = -1;
  CHECK_OK(HeddleKVStoreGetType(store, &type));
  CHECK(strcmp(type, "device") == 0);
  CHECK_OK(HeddleKVStoreGetRank(store, &rank));
  CHECK_OK(HeddleKVStoreGetNumWorkers(store, &workers));
  CHECK_OK(HeddleKVStoreGetNumDeadNodes(store, &dead));
  CHECK(rank == 0 && workers == 1 && dead == 0);
  CHECK_OK(HeddleKVStoreIsCapable(store, "OPTIMIZER", &capable));
  CHECK(capable == 1);
  CHECK_OK(HeddleKVStoreIsCapable(store, "flying", &capable));
  CHECK(capable == 0);
  CHECK_OK(HeddleKVStoreBarrier(store));
  CHECK_OK(HeddleKVStoreSendCommandToServers(store, 1, 4, "body"));
  CHECK_OK(HeddleKVStoreSendCommandToServers(store, 1, 0, NULL));
  CHECK_OK(HeddleKVStoreFree(store));

  // A type that lacks a call says so.
  HeddleKVStore test = NewStore("teststore");
  CHECK_FAILS(HeddleKVStoreVisitKeys(test, SumKeys, NULL), HEDDLE_INVALID_STATE, "teststore");
  CHECK_OK(HeddleKVStoreFree(test));
}

static void AStoreMayBeFreedWithWorkPending(void) {
  HeddleArray out = Full(0, 0);
  const HeddleKey key = {.number = 1};
  for (int i = 0; i < 20; ++i) {
    HeddleKVStore store = NewStore(i % 2 == 0 ? "local" : "device");
    InitFull(store, key, i);
    PushFull(store, key, i + 1);
    CHECK_OK(HeddleKVStorePull(store, 1, &key, &out, 0, 1));
    CHECK_OK(HeddleKVStoreFree(store));
    CHECK(IsFull(out, 6, (float)(i + 1)));
  }
  CHECK_OK(HeddleArrayFree(out));
}

const Test kKVStoreTests[] = {
    {"PublishedSessions", PublishedSessions},
    {"PushPullAndBroadcast", PushPullAndBroadcast},
    {"BadInputChangesNothing", BadInputChangesNothing},
    {"KeysAreVisitedRemovedAndReset", KeysAreVisitedRemovedAndReset},
    {"RowSparseValues", RowSparseValues},
    {"Updaters", Updaters},
    {"OptimizersAndTheirStates", OptimizersAndTheirStates},
    {"GradientCompression", GradientCompression},
    {"TheStoreAndItsJob", TheStoreAndItsJob},
    {"AStoreMayBeFreedWithWorkPending", AStoreMayBeFreedWithWorkPending},
    {NULL, NULL},
};
