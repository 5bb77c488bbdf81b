// The header of a safetensors file: names, types and places of arrays. docs/files.md describes the
// format.
#pragma once

#include <heddle/dtype.h>
#include <heddle/files.h>
#include <heddle/shape.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace heddle::storage {

// A file starts with the length of its JSON header: 8 bytes, little-endian.
inline constexpr std::int64_t kHeaderLengthBytes = 8;
// The bound that other readers have too.
inline constexpr std::int64_t kHeaderBytesMax = 100'000'000;

struct TensorEntry {
  std::string name;
  DType dtype = DType::kFloat32;
  Shape shape;
  std::int64_t begin = 0;  // bytes, from the end of the header
  std::int64_t end = 0;
};

struct TensorHeader {
  std::vector<TensorEntry> tensors;
  FileMetadata metadata;
};

// What a file says, in messages: hostile names and shapes are cut.
std::string Shown(std::string_view text);
std::string Quoted(std::string_view text);

// The bytes before the data, the length included; padded with spaces to a multiple of 8.
// InvalidArgument if a name or a text of the metadata is not UTF-8, or if the JSON exceeds
// kHeaderBytesMax.
std::string EncodeHeader(const TensorHeader& header);

// Reads and checks the JSON of a header that `data_bytes` of data follow. IoError, naming `file`,
// what was expected and what was found, unless the arrays lie in the data without gap or overlap.
// Cost: memory in proportion to the JSON, whatever it says.
TensorHeader ParseHeader(std::string_view json, std::int64_t data_bytes, const std::string& file);

}  // namespace heddle::storage
