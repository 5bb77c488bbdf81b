#include <heddle/error.h>
#include <heddle/files.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "storage/array_checks.h"
#include "storage/file_io.h"
#include "storage/safetensors.h"

namespace heddle {

namespace {

using storage::kHeaderBytesMax;
using storage::kHeaderLengthBytes;
using storage::TensorEntry;
using storage::TensorHeader;

// Everything that the op which writes the file needs.
struct SaveJob {
  std::string file;
  std::string header;
  std::vector<NDArray> arrays;  // in the order of their data
  std::exception_ptr failure;

  void Write() const {
    storage::AtomicFile out(file);
    out.Write(header.data(), static_cast<std::int64_t>(header.size()));
    for (const NDArray& array : arrays) out.Write(array.data(), array.bytes());
    out.Commit();
  }
};

void CheckArrays(const std::vector<NamedArray>& arrays) {
  std::set<std::string_view> names;
  for (const auto& [name, array] : arrays) {
    storage::CheckNotEmpty("save arrays", array);
    storage::CheckSameEngine("save arrays", arrays.front().array, array);
    if (name == "__metadata__" || !names.insert(name).second) {
      throw InvalidArgument(fmt::format(
          "save arrays: expected names that differ and are not __metadata__, got '{}'{}", name,
          name == "__metadata__" ? "" : " twice"));
    }
  }
}

// The data of larger elements comes first, so that every array lies aligned in the file for readers
// that map it.
SaveJob PlanSave(const std::string& file, const std::vector<NamedArray>& arrays,
                 const FileMetadata& metadata) {
  std::vector<std::size_t> order(arrays.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::greater<>(),
                           [&](std::size_t i) { return SizeOf(arrays[i].array.dtype()); });
  SaveJob job{file, {}, {}, {}};
  TensorHeader header{std::vector<TensorEntry>(arrays.size()), metadata};
  std::int64_t end = 0;
  for (const std::size_t i : order) {
    const NDArray& array = arrays[i].array;
    const std::int64_t begin = std::exchange(end, end + array.bytes());
    header.tensors[i] = {arrays[i].name, array.dtype(), array.shape(), begin, end};
    job.arrays.push_back(array);
  }
  job.header = storage::EncodeHeader(header);
  return job;
}

// A bool that is neither 0 nor 1 would be undefined behaviour wherever it is read.
void CheckBools(const storage::InputFile& file, const TensorEntry& tensor, const NDArray& array) {
  if (tensor.dtype != DType::kBool) return;
  const auto* bytes = static_cast<const std::uint8_t*>(array.data());
  const auto* bad =
      std::find_if(bytes, bytes + array.bytes(), [](std::uint8_t value) { return value > 1; });
  if (bad != bytes + array.bytes()) {
    throw IoError(fmt::format("{}: array '{}': expected bools of 0 or 1, found {}", file.path(),
                              tensor.name, *bad));
  }
}

}  // namespace

NDArray ArrayFile::Find(std::string_view name) const {
  const auto found = std::ranges::find(arrays, name, &NamedArray::name);
  return found == arrays.end() ? NDArray() : found->array;
}

void SaveArrays(const std::string& file, const std::vector<NamedArray>& arrays,
                const FileMetadata& metadata) {
  CheckArrays(arrays);
  SaveJob job = PlanSave(file, arrays, metadata);
  if (arrays.empty()) {
    job.Write();
    return;
  }
  Engine& engine = arrays.front().array.engine();
  std::vector<VarRef> reads;
  for (const NDArray& array : job.arrays) reads.emplace_back(array.var());
  const Var written = engine.NewVar("file");
  // Inside an op, this wait refuses before anything is queued.
  engine.WaitForVar(written);
  // The body keeps its failure rather than throwing it: it is this caller's alone, not
  // WaitForAll's.
  const auto shared = std::make_shared<SaveJob>(std::move(job));  // by this call and the body
  engine.Push({.name = "SaveArrays", .reads = reads, .writes = {written}}, [shared] {
    try {
      shared->Write();
    } catch (...) {
      shared->failure = std::current_exception();
    }
  });
  engine.WaitForVar(written);
  if (shared->failure) std::rethrow_exception(shared->failure);
}

void SaveArrayList(const std::string& file, const std::vector<NDArray>& arrays,
                   const FileMetadata& metadata) {
  std::vector<NamedArray> named;
  for (const NDArray& array : arrays) named.push_back({std::to_string(named.size()), array});
  SaveArrays(file, named, metadata);
}

ArrayFile LoadArrays(const std::string& file, Device device, Engine& engine) {
  const storage::InputFile in(file);
  if (in.size() < kHeaderLengthBytes) {
    throw IoError(fmt::format("{}: expected a safetensors file, found {} bytes", file, in.size()));
  }
  unsigned char length_bytes[kHeaderLengthBytes];
  in.Read(0, length_bytes, kHeaderLengthBytes);
  std::uint64_t length = 0;
  for (int i = 0; i < kHeaderLengthBytes; ++i) {
    length |= static_cast<std::uint64_t>(length_bytes[i]) << (8 * i);
  }
  const std::int64_t length_max = std::min(kHeaderBytesMax, in.size() - kHeaderLengthBytes);
  if (length > static_cast<std::uint64_t>(length_max)) {
    throw IoError(fmt::format("{}: expected a safetensors header of at most {} bytes, found {}",
                              file, length_max, length));
  }
  std::string json(length, '\0');
  in.Read(kHeaderLengthBytes, json.data(), static_cast<std::int64_t>(length));

  const std::int64_t data_start = kHeaderLengthBytes + static_cast<std::int64_t>(length);
  TensorHeader header = storage::ParseHeader(json, in.size() - data_start, file);
  ArrayFile loaded;
  loaded.metadata = std::move(header.metadata);
  for (TensorEntry& tensor : header.tensors) {
    // Nobody else has the array yet, so it is filled here rather than by an op.
    const NDArray array(tensor.shape, tensor.dtype, device, engine);
    in.Read(data_start + tensor.begin, array.data(), array.bytes());
    CheckBools(in, tensor, array);
    loaded.arrays.push_back({std::move(tensor.name), array});
  }
  return loaded;
}

std::vector<NDArray> LoadArrayList(const std::string& file, Device device, Engine& engine) {
  ArrayFile loaded = LoadArrays(file, device, engine);
  std::vector<NDArray> list(loaded.arrays.size());
  for (auto& [name, array] : loaded.arrays) {
    std::size_t index = list.size();
    const std::errc error = std::from_chars(name.data(), name.data() + name.size(), index).ec;
    // Names differ, so each index below the count comes once; "01" is not a name that we write.
    if (error != std::errc() || index >= list.size() || std::to_string(index) != name) {
      throw IoError(fmt::format("{}: expected a list, names \"0\" to \"{}\", found '{}'", file,
                                static_cast<std::int64_t>(list.size()) - 1, name));
    }
    list[index] = std::move(array);
  }
  return list;
}

}  // namespace heddle
