#include <heddle/error.h>
#include <heddle/files.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "engine/may_wait.h"
#include "storage/array_checks.h"
#include "storage/array_ops.h"
#include "storage/file_io.h"
#include "storage/safetensors.h"

namespace heddle {

namespace {

using storage::kHeaderBytesMax;
using storage::kHeaderLengthBytes;
using storage::Quoted;
using storage::Shown;
using storage::TensorEntry;
using storage::TensorHeader;

// A row-sparse array takes two names, and its rows of the whole shape go into the metadata.
constexpr std::string_view kRowIdsSuffix = ".row_ids";
constexpr std::string_view kRowsSuffix = ".rows";
constexpr std::string_view kRowSparsePrefix = "heddle.row_sparse.";

std::string Joined(std::string_view a, std::string_view b) { return std::string(a).append(b); }

// Everything that the op which writes the file needs.
struct SaveJob {
  std::string file;
  std::vector<NamedArray> arrays;
  std::vector<NamedRowSparseArray> row_sparse;
  FileMetadata metadata;
  std::exception_ptr failure;

  // How many rows are there is known only now, inside the op.
  void Write() const;
};

// One array of the file.
struct Piece {
  TensorEntry entry;
  const void* data;
  std::int64_t bytes;
};

// A bool that is neither 0 nor 1 would be undefined behaviour wherever it is read.
template <class E>
void CheckBools(const std::string& file, const TensorEntry& tensor, const void* data,
                std::int64_t bytes) {
  if (tensor.dtype != DType::kBool) return;
  const auto* const begin = static_cast<const std::uint8_t*>(data);
  const auto* const bad =
      std::find_if(begin, begin + bytes, [](std::uint8_t value) { return value > 1; });
  if (bad == begin + bytes) return;
  throw E(fmt::format("{}: array {}: expected bools of 0 or 1, found {}", file, Quoted(tensor.name),
                      *bad));
}

std::vector<Piece> PiecesOf(const SaveJob& job) {
  std::vector<Piece> pieces;
  for (const auto& [name, array] : job.arrays) {
    pieces.push_back({{.name = name, .dtype = array.dtype(), .shape = array.shape()},
                      array.const_data(),
                      array.bytes()});
  }
  for (const auto& [name, array] : job.row_sparse) {
    const std::int64_t rows = array.num_rows();
    std::vector<std::int64_t> shape(array.shape().begin(), array.shape().end());
    shape[0] = rows;
    pieces.push_back(
        {{.name = Joined(name, kRowIdsSuffix), .dtype = DType::kInt64, .shape = Shape{rows}},
         array.row_ids().data(),
         static_cast<std::int64_t>(array.row_ids().size_bytes())});
    pieces.push_back(
        {{.name = Joined(name, kRowsSuffix), .dtype = array.dtype(), .shape = Shape(shape)},
         array.const_rows(),
         rows * array.row_size() * static_cast<std::int64_t>(SizeOf(array.dtype()))});
  }
  return pieces;
}

void SaveJob::Write() const {
  std::vector<Piece> pieces = PiecesOf(*this);
  for (const Piece& piece : pieces) {
    CheckBools<InvalidArgument>(file, piece.entry, piece.data, piece.bytes);
  }
  // The data of larger elements comes first, so that every array lies aligned in the file for
  // readers that map it.
  std::vector<std::size_t> order(pieces.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::greater<>(),
                           [&](std::size_t i) { return SizeOf(pieces[i].entry.dtype); });
  std::int64_t end = 0;
  for (const std::size_t i : order) {
    pieces[i].entry.begin = std::exchange(end, end + pieces[i].bytes);
    pieces[i].entry.end = end;
  }
  TensorHeader header{{}, metadata};
  for (const Piece& piece : pieces) header.tensors.push_back(piece.entry);
  for (const auto& [name, array] : row_sparse) {
    header.metadata[Joined(kRowSparsePrefix, name)] = std::to_string(array.shape()[0]);
  }
  const std::string encoded = storage::EncodeHeader(header);

  storage::AtomicFile out(file);
  out.Write(encoded.data(), static_cast<std::int64_t>(encoded.size()));
  for (const std::size_t i : order) out.Write(pieces[i].data, pieces[i].bytes);
  out.Commit();
}

constexpr std::size_t kSavedMax = 65'000;  // one op reads them all

// Arrays that are not empty, of one engine, under names that differ. Returns the engine.
Engine* CheckSaved(const SaveJob& job) {
  if (const std::size_t count = job.arrays.size() + job.row_sparse.size(); count > kSavedMax) {
    throw InvalidArgument(
        fmt::format("save arrays: expected at most {} arrays in a file, got {}", kSavedMax, count));
  }
  Engine* engine = nullptr;
  std::set<std::string> names;
  const auto check_name = [&](std::string name) {
    const bool reserved = name == "__metadata__";
    if (reserved || !names.insert(name).second) {
      throw InvalidArgument(fmt::format(
          "save arrays: expected names that differ and are not __metadata__, got '{}'{}", name,
          reserved ? "" : " twice"));
    }
  };
  const auto check_array = [&](const auto& array) {
    if (array.empty()) storage::ThrowEmpty("save arrays");
    if (engine == nullptr) engine = &array.engine();
    if (engine != &array.engine()) storage::ThrowOtherEngine("save arrays", array.shape());
  };
  for (const auto& [name, array] : job.arrays) {
    check_array(array);
    check_name(name);
  }
  for (const auto& [name, array] : job.row_sparse) {
    check_array(array);
    check_name(Joined(name, kRowIdsSuffix));
    check_name(Joined(name, kRowsSuffix));
  }
  for (const auto& [name, text] : job.metadata) {
    if (name.starts_with(kRowSparsePrefix)) {
      throw InvalidArgument(fmt::format(
          "save arrays: expected metadata under names that do not start with '{}', got '{}'",
          kRowSparsePrefix, name));
    }
  }
  return engine;
}

// Arrays of a file by their names. Those that are taken leave empty handles until they are dropped.
class Parts {
 public:
  Parts(const std::string& file, std::vector<NamedArray>* arrays) : file_(file), arrays_(*arrays) {
    for (NamedArray& named : arrays_) by_name_.emplace(named.name, &named.array);
  }

  NDArray Take(const std::string& name) {
    const auto found = by_name_.find(name);
    if (found == by_name_.end() || found->second->empty()) {
      throw IoError(fmt::format("{}: expected an array {} of a row-sparse one, found none", file_,
                                Quoted(name)));
    }
    return std::exchange(*found->second, NDArray());
  }
  void DropTaken() {
    by_name_.clear();
    std::erase_if(arrays_, [](const NamedArray& named) { return named.array.empty(); });
  }

 private:
  const std::string& file_;
  std::vector<NamedArray>& arrays_;
  std::unordered_map<std::string_view, NDArray*> by_name_;
};

RowSparseNDArray JoinOne(const std::string& file, const std::string& name, const std::string& rows,
                         Device device, Engine& engine, Parts* parts) {
  const NDArray ids = parts->Take(Joined(name, kRowIdsSuffix));
  const NDArray values = parts->Take(Joined(name, kRowsSuffix));
  std::vector<std::int64_t> shape(values.shape().begin(), values.shape().end());
  std::int64_t num_rows = -1;
  const char* const end = rows.data() + rows.size();
  const auto [stop, error] = std::from_chars(rows.data(), end, num_rows);
  if (error != std::errc() || stop != end || num_rows < 0) {
    throw IoError(fmt::format("{}: row-sparse array {}: expected a number of rows, found {}", file,
                              Quoted(name), Quoted(rows)));
  }
  if (ids.dtype() != DType::kInt64 || ids.shape().ndim() != 1 || shape.empty() ||
      shape[0] != ids.size()) {
    throw IoError(fmt::format(
        "{}: row-sparse array {}: expected int64 ids and as many rows, found {} of shape {} and "
        "rows of shape {}",
        file, Quoted(name), Name(ids.dtype()), Shown(ToString(ids.shape())),
        Shown(ToString(values.shape()))));
  }
  shape[0] = num_rows;
  try {
    // Nobody else has the array yet, so it is filled here rather than by an op.
    RowSparseNDArray array(Shape(shape), values.dtype(), device, engine);
    array.SetRowIds({ids.data<const std::int64_t>(), static_cast<std::size_t>(ids.size())});
    if (values.bytes() > 0) {
      std::memcpy(array.rows(), values.const_data(), static_cast<std::size_t>(values.bytes()));
    }
    return array;
  } catch (const InvalidArgument& problem) {
    throw IoError(
        fmt::format("{}: row-sparse array {}: {}", file, Quoted(name), Shown(problem.what())));
  }
}

// Puts the parts of row-sparse arrays together.
void JoinRowSparse(const std::string& file, Device device, Engine& engine, ArrayFile* loaded) {
  Parts parts(file, &loaded->arrays);
  for (auto entry = loaded->metadata.begin(); entry != loaded->metadata.end();) {
    if (!entry->first.starts_with(kRowSparsePrefix)) {
      ++entry;
      continue;
    }
    const std::string name = entry->first.substr(kRowSparsePrefix.size());
    loaded->row_sparse.push_back(
        {name, JoinOne(file, name, entry->second, device, engine, &parts)});
    entry = loaded->metadata.erase(entry);
  }
  parts.DropTaken();
}

}  // namespace

NDArray ArrayFile::Find(std::string_view name) const {
  const auto found = std::ranges::find(arrays, name, &NamedArray::name);
  return found == arrays.end() ? NDArray() : found->array;
}

RowSparseNDArray ArrayFile::FindRowSparse(std::string_view name) const {
  const auto found = std::ranges::find(row_sparse, name, &NamedRowSparseArray::name);
  return found == row_sparse.end() ? RowSparseNDArray() : found->array;
}

void SaveArrays(const std::string& file, const std::vector<NamedArray>& arrays,
                const FileMetadata& metadata) {
  SaveArrays(file, arrays, {}, metadata);
}

void SaveArrays(const std::string& file, const std::vector<NamedArray>& arrays,
                const std::vector<NamedRowSparseArray>& row_sparse, const FileMetadata& metadata) {
  engine::CheckMayWait("SaveArrays");
  SaveJob job{file, arrays, row_sparse, metadata, {}};
  Engine* const engine = CheckSaved(job);
  if (engine == nullptr) {
    job.Write();
    return;
  }
  const Var written = engine->NewVar("file");
  std::vector<VarRef> reads;
  for (NamedArray& named : job.arrays) {
    if (storage::IsOnGpu(named.array)) named.array = named.array.Copy(Cpu());
    reads.emplace_back(named.array.var());
  }
  for (NamedRowSparseArray& named : job.row_sparse) {
    if (named.array.device().type == DeviceType::kGpu) named.array = named.array.Copy(Cpu());
    reads.emplace_back(named.array.var());
  }
  // The body keeps its failure rather than throwing it: it is this caller's alone, not
  // WaitForAll's.
  const auto shared = std::make_shared<SaveJob>(std::move(job));  // by this call and the body
  engine->Push({.name = "SaveArrays", .reads = reads, .writes = {written}}, [shared] {
    try {
      shared->Write();
    } catch (...) {
      shared->failure = std::current_exception();
    }
  });
  engine->WaitForVar(written);
  if (shared->failure) std::rethrow_exception(shared->failure);
}

void SaveArrayList(const std::string& file, const std::vector<NDArray>& arrays,
                   const FileMetadata& metadata) {
  std::vector<NamedArray> named;
  for (const NDArray& array : arrays) named.push_back({std::to_string(named.size()), array});
  SaveArrays(file, named, metadata);
}

ArrayFile LoadArrays(const std::string& file, Device device, Engine& engine) {
  storage::CheckDevice(device, engine);
  const bool on_gpu = device.type == DeviceType::kGpu;
  const storage::InputFile in(file);
  if (in.size() < kHeaderLengthBytes) {
    throw IoError(fmt::format("{}: expected a safetensors file, found {} bytes", file, in.size()));
  }
  unsigned char begin[kHeaderLengthBytes + 1] = {};
  in.Read(0, begin, std::min<std::int64_t>(in.size(), sizeof(begin)));
  std::uint64_t length = 0;
  for (int i = 0; i < kHeaderLengthBytes; ++i) {
    length |= static_cast<std::uint64_t>(begin[i]) << (8 * i);
  }
  if (in.size() > kHeaderLengthBytes && begin[kHeaderLengthBytes] != '{') {
    throw IoError(fmt::format(
        "{}: expected a safetensors file, found another format: no header begins at byte {}", file,
        kHeaderLengthBytes));
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
    const NDArray array(tensor.shape, tensor.dtype, on_gpu ? Cpu() : device, engine);
    in.Read(data_start + tensor.begin, array.data(), array.bytes());
    CheckBools<IoError>(in.path(), tensor, array.const_data(), array.bytes());
    loaded.arrays.push_back({std::move(tensor.name), array});
  }
  JoinRowSparse(file, on_gpu ? Cpu() : device, engine, &loaded);
  if (on_gpu) {
    for (NamedArray& named : loaded.arrays) named.array = named.array.Copy(device);
    for (NamedRowSparseArray& named : loaded.row_sparse) named.array = named.array.Copy(device);
  }
  return loaded;
}

std::vector<NDArray> LoadArrayList(const std::string& file, Device device, Engine& engine) {
  ArrayFile loaded = LoadArrays(file, device, engine);
  if (!loaded.row_sparse.empty()) {
    throw IoError(fmt::format("{}: expected a list of dense arrays, found row-sparse {}", file,
                              Quoted(loaded.row_sparse[0].name)));
  }
  std::vector<NDArray> list(loaded.arrays.size());
  for (auto& [name, array] : loaded.arrays) {
    std::size_t index = list.size();
    const std::errc error = std::from_chars(name.data(), name.data() + name.size(), index).ec;
    // Names differ, so each index below the count comes once; "01" is not a name that we write.
    if (error != std::errc() || index >= list.size() || std::to_string(index) != name) {
      throw IoError(fmt::format("{}: expected a list, names \"0\" to \"{}\", found {}", file,
                                static_cast<std::int64_t>(list.size()) - 1, Quoted(name)));
    }
    list[index] = std::move(array);
  }
  return list;
}

}  // namespace heddle
