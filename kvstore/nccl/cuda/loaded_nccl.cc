// NCCL as it is installed, found when it is first needed: programs start where there is none.
#include <heddle/error.h>

#include <cstring>
#include <utility>

#include <dlfcn.h>
#include <fmt/format.h>
#include <nccl.h>

#include "base/log.h"
#include "kvstore/nccl/nccl_api.h"

namespace heddle::kvstore {
namespace {

static_assert(sizeof(ncclUniqueId) == sizeof(Nccl::Id));

// Where the loader looks, LD_LIBRARY_PATH and the folder of a bundle included, then the file that
// heddle was built with.
constexpr const char* kFiles[] = {"libnccl.so.2", HEDDLE_NCCL_FILE};

const char* NameOf(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "ncclSuccess";
    case ncclUnhandledCudaError:
      return "ncclUnhandledCudaError";
    case ncclSystemError:
      return "ncclSystemError";
    case ncclInternalError:
      return "ncclInternalError";
    case ncclInvalidArgument:
      return "ncclInvalidArgument";
    case ncclInvalidUsage:
      return "ncclInvalidUsage";
    case ncclRemoteError:
      return "ncclRemoteError";
    case ncclInProgress:
      return "ncclInProgress";
    default:
      return "an error that this build does not know";
  }
}

ncclDataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kInt8:
      return ncclInt8;
    case DType::kInt32:
      return ncclInt32;
    case DType::kInt64:
      return ncclInt64;
    case DType::kUInt8:
    case DType::kBool:
      break;
  }
  return ncclUint8;
}

void* OpenLibrary() {
  std::string why;
  for (const char* file : kFiles) {
    // Never closed: NCCL's threads may outlive whoever used it.
    if (void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL)) return library;
    why += fmt::format("{}{}", why.empty() ? "" : "; ", dlerror());
  }
  throw NcclError(fmt::format("NCCL is not there: expected libnccl.so.2, which comes with CUDA or "
                              "from PyPI (nvidia-nccl-cu13), on LD_LIBRARY_PATH: {}",
                              why),
                  0);
}

class LoadedNccl final : public Nccl {
 public:
  LoadedNccl() {
    Dl_info info{};
    if (dladdr(reinterpret_cast<const void*>(get_version_), &info) != 0) file_ = info.dli_fname;
    int code = 0;
    Check(get_version_(&code), "ncclGetVersion");
    description_ = fmt::format("{}.{}.{}, {}", code / 10000, code / 100 % 100, code % 100, file_);
  }

  std::string Describe() const override { return description_; }

  Id NewId() override {
    ncclUniqueId unique;
    Check(get_unique_id_(&unique), "ncclGetUniqueId");
    Id id;
    std::memcpy(id.data(), &unique, sizeof(unique));
    return id;
  }
  void GroupStart() override { Check(group_start_(), "ncclGroupStart"); }
  bool GroupEnd() override { return Check(group_end_(), "ncclGroupEnd"); }
  void Init(Comm* comm, int ranks, const Id& id, int rank) override {
    ncclUniqueId unique;
    std::memcpy(&unique, id.data(), sizeof(unique));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;  // so that there can be a deadline
    Check(init_(reinterpret_cast<ncclComm_t*>(comm), ranks, unique, rank, &config),
          "ncclCommInitRankConfig");
  }
  State Ask(Comm comm) noexcept override {
    ncclResult_t state = ncclSuccess;
    ncclResult_t result = get_async_error_(As(comm), &state);
    if (result == ncclSuccess) result = state;
    if (result == ncclSuccess) return {};
    if (result == ncclInProgress) return {.in_progress = true};
    return {.error = std::make_exception_ptr(ErrorOf(result, "ncclCommGetAsyncError", As(comm)))};
  }
  void Reduce(const void* in, void* out, std::size_t count, DType dtype, int root, Comm comm,
              Stream stream) override {
    Check(reduce_(in, out, count, TypeOf(dtype), ncclSum, root, As(comm), On(stream)), "ncclReduce",
          As(comm));
  }
  void AllReduce(const void* in, void* out, std::size_t count, DType dtype, Comm comm,
                 Stream stream) override {
    Check(all_reduce_(in, out, count, TypeOf(dtype), ncclSum, As(comm), On(stream)),
          "ncclAllReduce", As(comm));
  }
  void Broadcast(void* data, std::size_t bytes, int root, Comm comm, Stream stream) override {
    Check(broadcast_(data, data, bytes, ncclUint8, root, As(comm), On(stream)), "ncclBroadcast",
          As(comm));
  }
  void Abort(Comm comm) noexcept override { LogIfFailed(abort_(As(comm)), "ncclCommAbort"); }
  bool Finalize(Comm comm) override {
    return Check(finalize_(As(comm)), "ncclCommFinalize", As(comm));
  }
  void Destroy(Comm comm) noexcept override { LogIfFailed(destroy_(As(comm)), "ncclCommDestroy"); }

 private:
  static ncclComm_t As(Comm comm) { return static_cast<ncclComm_t>(comm); }
  static cudaStream_t On(Stream stream) { return static_cast<cudaStream_t>(stream); }

  template <class Function>
  Function* Find(const char* name) {
    void* const symbol = dlsym(library_, name);
    if (symbol != nullptr) return reinterpret_cast<Function*>(symbol);
    throw NcclError(fmt::format("NCCL is too old: expected version 2.14 or newer, with {}: {}",
                                name, dlerror()),
                    0);
  }

  NcclError ErrorOf(ncclResult_t result, const char* call, ncclComm_t comm) const {
    const char* const last = get_last_error_(comm);
    return NcclError(
        fmt::format("{}: {} ({}{}{})", call, NameOf(result), get_error_string_(result),
                    last != nullptr && *last != '\0' ? ": " : "", last != nullptr ? last : ""),
        result);
  }
  // False: in progress.
  bool Check(ncclResult_t result, const char* call, ncclComm_t comm = nullptr) const {
    if (result != ncclSuccess && result != ncclInProgress) throw ErrorOf(result, call, comm);
    return result == ncclSuccess;
  }
  void LogIfFailed(ncclResult_t result, const char* call) const noexcept {
    if (result == ncclSuccess || result == ncclInProgress) return;
    Log(LogLevel::kError, "{}: {}", call, NameOf(result));
  }

  void* const library_ = OpenLibrary();
  std::string file_;
  std::string description_;

  // What has the types of nccl.h, in the library that is there.
#define HEDDLE_NCCL(function) Find<decltype(function)>(#function)
  decltype(&ncclGetVersion) get_version_ = HEDDLE_NCCL(ncclGetVersion);
  decltype(&ncclGetUniqueId) get_unique_id_ = HEDDLE_NCCL(ncclGetUniqueId);
  decltype(&ncclGetErrorString) get_error_string_ = HEDDLE_NCCL(ncclGetErrorString);
  decltype(&ncclGetLastError) get_last_error_ = HEDDLE_NCCL(ncclGetLastError);
  decltype(&ncclGroupStart) group_start_ = HEDDLE_NCCL(ncclGroupStart);
  decltype(&ncclGroupEnd) group_end_ = HEDDLE_NCCL(ncclGroupEnd);
  decltype(&ncclCommInitRankConfig) init_ = HEDDLE_NCCL(ncclCommInitRankConfig);
  decltype(&ncclCommGetAsyncError) get_async_error_ = HEDDLE_NCCL(ncclCommGetAsyncError);
  decltype(&ncclReduce) reduce_ = HEDDLE_NCCL(ncclReduce);
  decltype(&ncclAllReduce) all_reduce_ = HEDDLE_NCCL(ncclAllReduce);
  decltype(&ncclBroadcast) broadcast_ = HEDDLE_NCCL(ncclBroadcast);
  decltype(&ncclCommAbort) abort_ = HEDDLE_NCCL(ncclCommAbort);
  decltype(&ncclCommFinalize) finalize_ = HEDDLE_NCCL(ncclCommFinalize);
  decltype(&ncclCommDestroy) destroy_ = HEDDLE_NCCL(ncclCommDestroy);
#undef HEDDLE_NCCL
};

}  // namespace

std::shared_ptr<Nccl> LoadNccl() {
  // Never deleted: communicators may be dropped by destructors of static objects.
  static const auto* const nccl = [] {
    const auto* const loaded = new std::shared_ptr<Nccl>(std::make_shared<LoadedNccl>());
    Log(LogLevel::kInfo, "NCCL {}", (*loaded)->Describe());
    return loaded;
  }();
  return *nccl;
}

}  // namespace heddle::kvstore
