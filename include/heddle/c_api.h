// heddle for C, and for every language that can call C. docs/c_api.md walks through it.
//
//   HeddleKVStore store = NULL;
//   HeddleKey key = {.text = "weight"};
//   if (HeddleKVStoreCreate("device", NULL, &store) != HEDDLE_OK ||
//       HeddleKVStoreInit(store, 1, &key, &weight) != HEDDLE_OK) {
//     fprintf(stderr, "%s\n", HeddleLastErrorMessage());
//   }
//
// The meaning of each call is that of the C++ call of the same name (heddle/kvstore.h,
// heddle/ndarray.h, heddle/engine.h): order, waits, errors of ops. Everything belongs to one
// engine, made on first use from the HEDDLE_* environment variables.
//
// Status:   every call that can fail returns HEDDLE_OK or the code of its error, and keeps the code
//           and a message for this thread. Nothing is changed by a call that fails with
//           HEDDLE_INVALID_ARGUMENT or HEDDLE_UNKNOWN_KEY; what it would have written through
//           pointers is left alone.
// Handles:  opaque, made by a call that writes one through its last argument, and given back with
//           the Free of its kind; NULL is nobody's handle. A handle that is NULL, was freed, is of
//           another kind or was never one is HEDDLE_INVALID_ARGUMENT, not a crash. Freeing is safe
//           at any time, also with operations pending or while another thread uses the handle:
//           these complete. Free of NULL does nothing. Only the last handle of a dist store waits
//           for the store's operations, and is HEDDLE_INVALID_STATE inside an op's body.
// Pointers: what a call is given is read during the call only, and stays the caller's. NULL where
//           something is needed is HEDDLE_INVALID_ARGUMENT; an array of no elements may be NULL.
// Threads:  any call from any thread. Waiting calls inside an op's body are HEDDLE_INVALID_STATE.
// Callbacks: return HEDDLE_OK, or fail by `return HeddleSetLastError(code, message)` (or by the
//           status of a call that failed inside, whose message goes along). They must not leave by
//           longjmp or by an exception.
// ABI:      while HEDDLE_ABI_VERSION stays the same, functions keep their signatures, constants
//           their values, HeddleKey its layout. Functions and constants may be added. Structs that
//           begin with struct_size may grow at their end: set struct_size to sizeof the struct and
//           the rest to zero; a field of zeros means the default. A program that was compiled with
//           a newer header meets HEDDLE_INVALID_ARGUMENT only if it uses a field that is new.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define HEDDLE_ABI_VERSION 1

#if defined(__GNUC__)
#define HEDDLE_API __attribute__((visibility("default")))
#else
#define HEDDLE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---- Versions, and what went wrong

// "0.1.0": of the library that is loaded.
HEDDLE_API const char* HeddleGetVersion(void);
// HEDDLE_ABI_VERSION of the library that is loaded: expected to equal the program's own.
HEDDLE_API int HeddleGetAbiVersion(void);

typedef int HeddleStatus;
enum {
  HEDDLE_OK = 0,
  HEDDLE_ERROR = 1,  // none of those below, such as an exception of a foreign library
  HEDDLE_INVALID_ARGUMENT = 2,
  HEDDLE_INVALID_STATE = 3,
  HEDDLE_ACCESS_ERROR = 4,
  HEDDLE_TIMEOUT = 5,
  HEDDLE_OUT_OF_MEMORY = 6,
  HEDDLE_IO_ERROR = 7,
  HEDDLE_OP_ERROR = 8,
  HEDDLE_NETWORK_ERROR = 9,
  HEDDLE_UNKNOWN_KEY = 10,
  HEDDLE_CUDA_ERROR = 11,
  HEDDLE_NCCL_ERROR = 12,
  // From here on: codes for the program's own callbacks. They come back unchanged from the calls
  // and waits that their errors reach.
  HEDDLE_USER_ERROR = 1000
};

// Of the last call that failed on this thread; calls that succeed leave them alone. HEDDLE_OK and
// "" if none did. The text is valid until the next failure on this thread.
HEDDLE_API HeddleStatus HeddleLastError(void);
HEDDLE_API const char* HeddleLastErrorMessage(void);
// For callbacks: makes this the thread's last error, and returns `status`. NULL: no message.
HEDDLE_API HeddleStatus HeddleSetLastError(HeddleStatus status, const char* message);

// Called once with the `context` of a callback when that is not needed any more, on any thread; may
// be NULL. If the call that was given them fails, `context` stays the caller's and is not
// destroyed.
typedef void (*HeddleDestroyContext)(void* context);

// ---- Arrays

typedef struct HeddleArrayHandle* HeddleArray;  // dense, or row-sparse
typedef struct HeddleVarHandle* HeddleVar;

// dtypes. A bool takes one byte, 0 or 1.
enum {
  HEDDLE_FLOAT32 = 0,
  HEDDLE_FLOAT64 = 1,
  HEDDLE_FLOAT16 = 2,
  HEDDLE_BFLOAT16 = 3,
  HEDDLE_INT8 = 4,
  HEDDLE_UINT8 = 5,
  HEDDLE_INT32 = 6,
  HEDDLE_INT64 = 7,
  HEDDLE_BOOL = 8
};

// Types of devices; with an id they name one: cpu(0), gpu(1).
enum { HEDDLE_CPU = 0, HEDDLE_CPU_PINNED = 1, HEDDLE_GPU = 2 };

// Kinds of arrays.
enum { HEDDLE_DENSE = 0, HEDDLE_ROW_SPARSE = 1 };

// A time that never passes, for `timeout_ms` of waits. Other negative times have passed, as 0 has:
// a call that would have to wait is HEDDLE_TIMEOUT at once. So what is left until a deadline may be
// given as it is, but for -1, in whose place a program gives 0.
enum { HEDDLE_FOREVER = -1 };

// A dense array of `ndim` extents, outermost first. Its contents are undefined until written.
HEDDLE_API HeddleStatus HeddleArrayCreate(size_t ndim, const int64_t* shape, int dtype,
                                          int device_type, int device_id, HeddleArray* array);
// The same with a copy of `count` host values of values_dtype, cast to dtype.
HEDDLE_API HeddleStatus HeddleArrayFromHost(size_t count, const void* values, int values_dtype,
                                            size_t ndim, const int64_t* shape, int dtype,
                                            int device_type, int device_id, HeddleArray* array);
// A row-sparse array of which no row is there.
HEDDLE_API HeddleStatus HeddleRowSparseCreate(size_t ndim, const int64_t* shape, int dtype,
                                              int device_type, int device_id, HeddleArray* array);
// The same with the rows of `row_ids`, which need not be sorted: num_rows times the elements of a
// row, one row after another.
HEDDLE_API HeddleStatus HeddleRowSparseFromHost(size_t num_rows, const int64_t* row_ids,
                                                const void* rows, int rows_dtype, size_t ndim,
                                                const int64_t* shape, int dtype, int device_type,
                                                int device_id, HeddleArray* array);
HEDDLE_API HeddleStatus HeddleArrayFree(HeddleArray array);

// A second handle of the same array.
HEDDLE_API HeddleStatus HeddleArrayShare(HeddleArray array, HeddleArray* same);
// Views of a dense array: elements [begin, end) of the first axis; the same elements in another
// shape.
HEDDLE_API HeddleStatus HeddleArraySlice(HeddleArray array, int64_t begin, int64_t end,
                                         HeddleArray* view);
HEDDLE_API HeddleStatus HeddleArrayReshape(HeddleArray array, size_t ndim, const int64_t* shape,
                                           HeddleArray* view);

// Pointers in place of results may be NULL. `shape` is valid while the array has a handle.
HEDDLE_API HeddleStatus HeddleArrayGetShape(HeddleArray array, size_t* ndim, const int64_t** shape);
HEDDLE_API HeddleStatus HeddleArrayGetSize(HeddleArray array, int64_t* elements);
HEDDLE_API HeddleStatus HeddleArrayGetDType(HeddleArray array, int* dtype);
HEDDLE_API HeddleStatus HeddleArrayGetDevice(HeddleArray array, int* device_type, int* device_id);
HEDDLE_API HeddleStatus HeddleArrayGetKind(HeddleArray array, int* kind);
// The variable that orders work on the array and its views, for the lists of ops; to be freed.
// An op that writes a view of a part names it among its reads too.
HEDDLE_API HeddleStatus HeddleArrayGetVar(HeddleArray array, HeddleVar* var);

// Queued operations: they return at once. A higher priority runs first.

// Copies between any two kinds, dtypes and devices; equal shapes.
HEDDLE_API HeddleStatus HeddleArrayCopyTo(HeddleArray source, HeddleArray destination,
                                          int priority);
// Dense only. For a row-sparse array: HEDDLE_INVALID_ARGUMENT.
HEDDLE_API HeddleStatus HeddleArrayFill(HeddleArray array, double value, int priority);
// Dense only: `values` may be changed right after the call.
HEDDLE_API HeddleStatus HeddleArrayCopyFromHost(HeddleArray array, size_t count, const void* values,
                                                int values_dtype, int priority);

enum { HEDDLE_ADD = 0, HEDDLE_SUBTRACT = 1, HEDDLE_MULTIPLY = 2, HEDDLE_DIVIDE = 3 };

// array = array <operation> other, element by element. Equal shapes, dtypes and devices. A
// row-sparse `other` can only be added; to a row-sparse array only a row-sparse one can.
HEDDLE_API HeddleStatus HeddleArrayCombine(HeddleArray array, int operation, HeddleArray other);
// The same with a number. A row-sparse array can only be multiplied.
HEDDLE_API HeddleStatus HeddleArrayCombineScalar(HeddleArray array, int operation, double value);
// A fresh array with these values, of the same dtype and device.
HEDDLE_API HeddleStatus HeddleArrayCopy(HeddleArray array, HeddleArray* copy);
// The same of the other or the same kind.
HEDDLE_API HeddleStatus HeddleArrayCopyAsKind(HeddleArray array, int kind, HeddleArray* copy);

// Waiting: HEDDLE_TIMEOUT once timeout_ms have passed, unless that is HEDDLE_FOREVER. The error of
// an op that failed comes back from every wait on what it wrote.

// For pending writes: the array may be read. For pending reads as well: it may be overwritten.
HEDDLE_API HeddleStatus HeddleArrayWaitToRead(HeddleArray array, int64_t timeout_ms);
HEDDLE_API HeddleStatus HeddleArrayWaitToWrite(HeddleArray array, int64_t timeout_ms);
// Copies all `count` elements, cast to values_dtype, as they are when everything pushed before is
// done. Waits. A row-sparse array is copied as the dense one that it stands for.
HEDDLE_API HeddleStatus HeddleArrayCopyToHost(HeddleArray array, size_t count, void* values,
                                              int values_dtype);
// The elements of a dense array themselves, for the bodies of ops that name its variable, or after
// a wait: to write and to read, and to read only. Valid while the array has a handle.
HEDDLE_API HeddleStatus HeddleArrayGetData(HeddleArray array, void** data);
HEDDLE_API HeddleStatus HeddleArrayGetConstData(HeddleArray array, const void** data);
// The same of a row-sparse array: its rows, only to be read. Valid until it is written again.
HEDDLE_API HeddleStatus HeddleRowSparseGetRows(HeddleArray array, size_t* num_rows,
                                               const int64_t** row_ids, const void** rows);

// ---- The engine

HEDDLE_API HeddleStatus HeddleVarCreate(const char* name, HeddleVar* var);  // NULL: no name
HEDDLE_API HeddleStatus HeddleVarFree(HeddleVar var);
// Completed writes, failed and skipped ones included.
HEDDLE_API HeddleStatus HeddleVarGetVersion(HeddleVar var, uint64_t* version);
// Takes the error of a variable away, in order like a write.
HEDDLE_API HeddleStatus HeddleVarClearError(HeddleVar var);

enum { HEDDLE_LANE_NORMAL = 0, HEDDLE_LANE_COPY = 1, HEDDLE_LANE_COMM = 2 };

// What an op is. A variable in both lists is changed by using what was there; in `writes` alone it
// is overwritten whole.
typedef struct HeddleOp {
  size_t struct_size;  // sizeof(HeddleOp)
  const char* name;    // for errors and traces, from a bounded set of names; NULL: "op"
  size_t num_reads;
  const HeddleVar* reads;
  size_t num_writes;
  const HeddleVar* writes;
  int device_type;
  int device_id;
  int lane;
  int priority;             // higher first
  int run_when_poisoned;    // not 0: run although an input failed
  int64_t temporary_bytes;  // counts against the engine's bound of pending bytes
} HeddleOp;

// Runs on a thread of the engine's, or one that waits.
typedef HeddleStatus (*HeddleOpBody)(void* context);
// Queues body(context).
HEDDLE_API HeddleStatus HeddleEnginePush(const HeddleOp* op, HeddleOpBody body, void* context,
                                         HeddleDestroyContext destroy);

// How an asynchronous op says that it has finished.
typedef struct HeddleCompletionHandle* HeddleCompletion;
typedef HeddleStatus (*HeddleAsyncBody)(void* context, HeddleCompletion completion);
// Queues body(context, completion). The op finishes when the body has returned and the completion
// was called, from any thread, or when the body fails before that; what it fails with later is only
// logged. A completion that is neither called nor freed leaves its op unfinished.
HEDDLE_API HeddleStatus HeddleEnginePushAsync(const HeddleOp* op, HeddleAsyncBody body,
                                              void* context, HeddleDestroyContext destroy);
// Ends the op, with success if `status` is HEDDLE_OK, and frees the handle: a second call of it is
// HEDDLE_INVALID_ARGUMENT.
HEDDLE_API HeddleStatus HeddleCompletionCall(HeddleCompletion completion, HeddleStatus status,
                                             const char* message);
// Without a call before it, this fails the op with HEDDLE_OP_ERROR.
HEDDLE_API HeddleStatus HeddleCompletionFree(HeddleCompletion completion);

// For the writes of `var`; for its reads as well; for everything that was pushed before.
HEDDLE_API HeddleStatus HeddleWaitForVar(HeddleVar var, int64_t timeout_ms);
HEDDLE_API HeddleStatus HeddleWaitForReadsAndWrites(HeddleVar var, int64_t timeout_ms);
HEDDLE_API HeddleStatus HeddleWaitForAll(int64_t timeout_ms);

// ---- Optimizers

typedef struct HeddleOptimizerHandle* HeddleOptimizer;

// By name ("sgd"), with `count` parameters that differ from the defaults.
HEDDLE_API HeddleStatus HeddleOptimizerCreate(const char* name, size_t count,
                                              const char* const* parameters, const double* values,
                                              HeddleOptimizer* optimizer);
HEDDLE_API HeddleStatus HeddleOptimizerFree(HeddleOptimizer optimizer);
// A change counts from the next push on, in every store that has the optimizer.
HEDDLE_API HeddleStatus HeddleOptimizerSet(HeddleOptimizer optimizer, const char* parameter,
                                           double value);
HEDDLE_API HeddleStatus HeddleOptimizerGet(HeddleOptimizer optimizer, const char* parameter,
                                           double* value);

// ---- Stores

typedef struct HeddleKVStoreHandle* HeddleKVStore;

// A key: a string, or an integer if `text` is NULL. A store has keys of one kind.
typedef struct HeddleKey {
  const char* text;  // ends with a NUL
  int64_t number;
} HeddleKey;

typedef struct HeddleKVStoreOptions {
  size_t struct_size;  // sizeof(HeddleKVStoreOptions)
  int strict_init;     // not 0: a push never creates a key
} HeddleKVStoreOptions;

// `type` is any that heddle::KVStore::Create knows; NULL options are the defaults.
HEDDLE_API HeddleStatus HeddleKVStoreCreate(const char* type, const HeddleKVStoreOptions* options,
                                            HeddleKVStore* store);
HEDDLE_API HeddleStatus HeddleKVStoreFree(HeddleKVStore store);

// Calls on `count` pairs of a key and an array: arrays[i] belongs to keys[i]. A key that is to have
// several arrays (several devices) is named once for each of them; these are then its list, in
// order. The arrays of a key are of one kind.

HEDDLE_API HeddleStatus HeddleKVStoreInit(HeddleKVStore store, size_t count, const HeddleKey* keys,
                                          const HeddleArray* values);
HEDDLE_API HeddleStatus HeddleKVStorePush(HeddleKVStore store, size_t count, const HeddleKey* keys,
                                          const HeddleArray* values, int priority);
// Row-sparse outputs are left alone if ignore_sparse is not 0.
HEDDLE_API HeddleStatus HeddleKVStorePull(HeddleKVStore store, size_t count, const HeddleKey* keys,
                                          const HeddleArray* out, int priority, int ignore_sparse);
// out[i] gets the rows row_ids[i], numbers of any dtype but bool; the same array may serve many.
HEDDLE_API HeddleStatus HeddleKVStoreRowSparsePull(HeddleKVStore store, size_t count,
                                                   const HeddleKey* keys, const HeddleArray* out,
                                                   const HeddleArray* row_ids, int priority);
// Both lists name the same keys in the same order, those of several arrays without others between.
// In PushPull no outputs (0, NULL, NULL) mean the values.
HEDDLE_API HeddleStatus HeddleKVStorePushPull(HeddleKVStore store, size_t count,
                                              const HeddleKey* keys, const HeddleArray* values,
                                              size_t out_count, const HeddleKey* out_keys,
                                              const HeddleArray* out, int priority);
HEDDLE_API HeddleStatus HeddleKVStoreBroadcast(HeddleKVStore store, size_t count,
                                               const HeddleKey* keys, const HeddleArray* values,
                                               size_t out_count, const HeddleKey* out_keys,
                                               const HeddleArray* out, int priority);

HEDDLE_API HeddleStatus HeddleKVStoreReset(HeddleKVStore store, const HeddleKey* key,
                                           HeddleArray value);
HEDDLE_API HeddleStatus HeddleKVStoreRemove(HeddleKVStore store, const HeddleKey* key);
HEDDLE_API HeddleStatus HeddleKVStoreContains(HeddleKVStore store, const HeddleKey* key,
                                              int* contains);
// Calls visit(context, key) for each key, in the order of their creation; in a store of a job (the
// dist types) sorted. `key` is valid during the call. Ends at the first failure of `visit`, and
// returns it.
typedef HeddleStatus (*HeddleKeyVisitor)(void* context, const HeddleKey* key);
HEDDLE_API HeddleStatus HeddleKVStoreVisitKeys(HeddleKVStore store, HeddleKeyVisitor visit,
                                               void* context);

// Called once a key and push, on the thread that pushes, before the push returns. Changes `stored`,
// usually by queued operations. Key and handles are valid during the call, and are not freed by it;
// HeddleArrayShare makes handles that last. A failure is that of the push.
typedef HeddleStatus (*HeddleUpdater)(void* context, const HeddleKey* key, HeddleArray input,
                                      HeddleArray stored);
HEDDLE_API HeddleStatus HeddleKVStoreSetUpdater(HeddleKVStore store, HeddleUpdater updater,
                                                void* context, HeddleDestroyContext destroy);
// The same by kind: of dense values, row-sparse ones, and row-sparse pushes onto dense values. A
// push of a pair whose function is NULL is an error.
HEDDLE_API HeddleStatus HeddleKVStoreSetUpdaters(HeddleKVStore store, HeddleUpdater dense,
                                                 HeddleUpdater row_sparse,
                                                 HeddleUpdater row_sparse_on_dense, void* context,
                                                 HeddleDestroyContext destroy);
HEDDLE_API HeddleStatus HeddleKVStoreSetOptimizer(HeddleKVStore store, HeddleOptimizer optimizer);
HEDDLE_API HeddleStatus HeddleKVStoreSaveOptimizerStates(HeddleKVStore store, const char* file,
                                                         int with_optimizer);
HEDDLE_API HeddleStatus HeddleKVStoreLoadOptimizerStates(HeddleKVStore store, const char* file);
// type: "2bit" or "1bit".
HEDDLE_API HeddleStatus HeddleKVStoreSetGradientCompression(HeddleKVStore store, const char* type,
                                                            double threshold);

// `type` is valid while the store has a handle.
HEDDLE_API HeddleStatus HeddleKVStoreGetType(HeddleKVStore store, const char** type);
HEDDLE_API HeddleStatus HeddleKVStoreGetRank(HeddleKVStore store, int* rank);
HEDDLE_API HeddleStatus HeddleKVStoreGetNumWorkers(HeddleKVStore store, int* num_workers);
HEDDLE_API HeddleStatus HeddleKVStoreGetNumDeadNodes(HeddleKVStore store, int* num_dead_nodes);
HEDDLE_API HeddleStatus HeddleKVStoreIsCapable(HeddleKVStore store, const char* capability,
                                               int* is_capable);
HEDDLE_API HeddleStatus HeddleKVStoreBarrier(HeddleKVStore store);
// Returns after every server's controller ran it. `body` is `body_bytes` long.
HEDDLE_API HeddleStatus HeddleKVStoreSendCommandToServers(HeddleKVStore store, int head,
                                                          size_t body_bytes, const char* body);

#ifdef __cplusplus
}  // extern "C"
#endif
