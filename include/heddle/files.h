// Arrays in files, in the safetensors format: docs/files.md says what is in them.
//
//   heddle::SaveArrays("model.safetensors", {{"weight", weight}, {"bias", bias}});
//   for (auto& [name, array] : heddle::LoadArrays("model.safetensors").arrays) ...
//
// Saving is ordered by the engine like any op that reads the arrays: the file holds their values as
// they are when everything pushed before is done. It is complete or absent: written under a
// temporary name beside `file`, synced, then renamed over `file`, so a failure leaves what was
// there.
// Errors: IoError, naming the file, what was expected and what was found, for files that cannot be
//         read, written or understood. Saving throws the error of a poisoned array. InvalidArgument
//         for empty handles, arrays of several engines, names that repeat, are not UTF-8 or are
//         "__metadata__", metadata under a name of heddle's own; InvalidState when saving from
//         inside an op.
// Threads: any.
#pragma once

#include <heddle/device.h>
#include <heddle/engine.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace heddle {

struct NamedArray {
  std::string name;
  NDArray array;
};

struct NamedRowSparseArray {
  std::string name;
  RowSparseNDArray array;
};

using FileMetadata = std::map<std::string, std::string>;

struct ArrayFile {
  std::vector<NamedArray> arrays;               // in the order of the file
  std::vector<NamedRowSparseArray> row_sparse;  // by name
  FileMetadata metadata;

  // The array of its kind called `name`; empty if there is none.
  NDArray Find(std::string_view name) const;
  RowSparseNDArray FindRowSparse(std::string_view name) const;
};

// Returns when the file is in place. InvalidArgument for more than 65 000 arrays.
void SaveArrays(const std::string& file, const std::vector<NamedArray>& arrays,
                const FileMetadata& metadata = {});
void SaveArrays(const std::string& file, const std::vector<NamedArray>& arrays,
                const std::vector<NamedRowSparseArray>& row_sparse,
                const FileMetadata& metadata = {});
// Memory is bounded by the size of the file.
ArrayFile LoadArrays(const std::string& file, Device device = Cpu(),
                     Engine& engine = Engine::Default());

// A list is saved under the names "0", "1", ... and loads only from a file with exactly these.
void SaveArrayList(const std::string& file, const std::vector<NDArray>& arrays,
                   const FileMetadata& metadata = {});
std::vector<NDArray> LoadArrayList(const std::string& file, Device device = Cpu(),
                                   Engine& engine = Engine::Default());

}  // namespace heddle
