#include "storage/safetensors.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/utf8.h"

namespace heddle::storage {
namespace {

static_assert(std::endian::native == std::endian::little,
              "arrays are written as they lie in memory");

constexpr std::string_view kMetadataKey = "__metadata__";

struct DTypeName {
  DType dtype;
  std::string_view name;
};
constexpr std::array kDTypeNames = {
    DTypeName{DType::kFloat32, "F32"}, DTypeName{DType::kFloat64, "F64"},
    DTypeName{DType::kFloat16, "F16"}, DTypeName{DType::kBFloat16, "BF16"},
    DTypeName{DType::kInt8, "I8"},     DTypeName{DType::kUInt8, "U8"},
    DTypeName{DType::kInt32, "I32"},   DTypeName{DType::kInt64, "I64"},
    DTypeName{DType::kBool, "BOOL"}};
static_assert(kDTypeNames.size() == kAllDTypes.size());

std::string_view FileNameOf(DType dtype) {
  return std::ranges::find(kDTypeNames, dtype, &DTypeName::dtype)->name;
}

// Takes the header from the JSON parser's events. Knows where it is, so anything else than
// {name: {"dtype": text, "shape": [n...], "data_offsets": [n, n]}..., "__metadata__": {text:
// text...}} stops at once; no document tree is built from what a hostile file says.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  TensorHeader Take() && { return std::move(header_); }

  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kNames;
        return true;
      case Place::kName:
        place_ = in_metadata_ ? Place::kMetadata : Place::kFields;
        return true;
      default:
        Reject("an object");
    }
  }

  bool key(string_t& text) override {
    switch (place_) {
      case Place::kNames:
        CheckNew(names_, text);
        in_metadata_ = text == kMetadataKey;
        if (!in_metadata_) {
          header_.tensors.emplace_back().name = text;
          dtype_.reset();
          shape_.reset();
          offsets_.reset();
        }
        place_ = Place::kName;
        return true;
      case Place::kMetadata:
        if (header_.metadata.contains(text)) Fail("a metadata key once", Quoted(text) + " twice");
        metadata_key_ = text;
        place_ = Place::kMetadataText;
        return true;
      case Place::kFields:
        return Field(text);
      default:
        Reject("a key");
    }
  }

  bool string(string_t& text) override {
    if (place_ == Place::kMetadataText) {
      header_.metadata.emplace(std::move(metadata_key_), std::move(text));
      place_ = Place::kMetadata;
      return true;
    }
    if (place_ != Place::kDType) Reject("text " + Quoted(text));
    const auto* known = std::ranges::find(kDTypeNames, std::string_view(text), &DTypeName::name);
    if (known == kDTypeNames.end()) {
      Fail("a dtype of heddle (F32, F64, F16, BF16, I8, U8, I32, I64, BOOL)", Quoted(text));
    }
    dtype_ = known->dtype;
    place_ = Place::kFields;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::kShape) {
      shape_.emplace();
      place_ = Place::kShapeNumbers;
    } else if (place_ == Place::kOffsets) {
      offsets_.emplace();
      place_ = Place::kOffsetNumbers;
    } else {
      Reject("a list");
    }
    return true;
  }

  bool number_unsigned(number_unsigned_t number) override {
    if (number > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max())) {
      Fail("a number below 2^63", fmt::format("{}", number));
    }
    if (place_ == Place::kShapeNumbers) {
      shape_->push_back(static_cast<std::int64_t>(number));
    } else if (place_ == Place::kOffsetNumbers && offsets_->size() < 2) {
      offsets_->push_back(static_cast<std::int64_t>(number));
    } else {
      Reject(fmt::format("number {}", number));
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::kOffsetNumbers && offsets_->size() != 2) {
      Fail("two data_offsets", fmt::format("{}", offsets_->size()));
    }
    place_ = Place::kFields;
    return true;
  }

  bool end_object() override {
    switch (place_) {
      case Place::kFields:
        FinishTensor();
        place_ = Place::kNames;
        return true;
      case Place::kMetadata:
        place_ = Place::kNames;
        return true;
      default:
        place_ = Place::kEnd;
        return true;
    }
  }

  bool null() override { Reject("null"); }
  bool boolean(bool) override { Reject("a boolean"); }
  bool number_integer(number_integer_t number) override {
    Reject(fmt::format("number {}", number));
  }
  bool number_float(number_float_t, const string_t& text) override {
    Reject("number " + Quoted(text));
  }
  bool binary(binary_t&) override { Reject("binary data"); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    throw IoError(
        fmt::format("{}: header: expected JSON, found something else at byte {}", file_, position));
  }

 private:
  // Where the parser is: what may come next.
  enum class Place {
    kStart,          // the outermost object
    kNames,          // an array's name, "__metadata__" or the end
    kName,           // that name's object
    kMetadata,       // a key of the metadata or its end
    kMetadataText,   // its text
    kFields,         // "dtype", "shape", "data_offsets" or the array's end
    kDType,          // the dtype's text
    kShape,          // the list of extents
    kShapeNumbers,   // an extent or the list's end
    kOffsets,        // the list of offsets
    kOffsetNumbers,  // an offset or the list's end
    kEnd,
  };

  [[noreturn]] void Fail(const std::string& expected, const std::string& found) const {
    const std::string where = header_.tensors.empty() || in_metadata_ || place_ == Place::kNames
                                  ? std::string("header")
                                  : fmt::format("array {}", Quoted(header_.tensors.back().name));
    throw IoError(fmt::format("{}: {}: expected {}, found {}", file_, where, expected, found));
  }

  [[noreturn]] void Reject(const std::string& found) const {
    switch (place_) {
      case Place::kStart:
      case Place::kName:
        Fail("an object", found);
      case Place::kMetadataText:
        Fail("text in the metadata", found);
      case Place::kDType:
        Fail("text as dtype", found);
      case Place::kShape:
      case Place::kShapeNumbers:
        Fail("a list of sizes of at least 0 as shape", found);
      case Place::kOffsets:
      case Place::kOffsetNumbers:
        Fail("a list of two offsets of at least 0 as data_offsets", found);
      default:
        Fail("a key", found);
    }
  }

  void CheckNew(std::set<std::string, std::less<>>& seen, const std::string& text) {
    if (!seen.insert(text).second) Fail("a name once", Quoted(text) + " twice");
  }

  bool Field(const std::string& name) {
    if (name == "dtype" && !dtype_) {
      place_ = Place::kDType;
    } else if (name == "shape" && !shape_) {
      place_ = Place::kShape;
    } else if (name == "data_offsets" && !offsets_) {
      place_ = Place::kOffsets;
    } else {
      Fail("dtype, shape and data_offsets, each once", Quoted(name));
    }
    return true;
  }

  void FinishTensor() {
    if (!dtype_) Fail("a dtype", "none");
    if (!shape_) Fail("a shape", "none");
    if (!offsets_) Fail("data_offsets", "none");
    TensorEntry& tensor = header_.tensors.back();
    tensor.dtype = *dtype_;
    try {
      tensor.shape = Shape(*shape_);
    } catch (const InvalidArgument& error) {
      Fail("a possible shape", Shown(error.what()));
    }
    tensor.begin = offsets_->front();
    tensor.end = offsets_->back();
  }

  const std::string& file_;
  TensorHeader header_;
  std::set<std::string, std::less<>> names_;
  Place place_ = Place::kStart;
  bool in_metadata_ = false;
  std::string metadata_key_;
  std::optional<DType> dtype_;
  std::optional<std::vector<std::int64_t>> shape_;
  std::optional<std::vector<std::int64_t>> offsets_;
};

// The arrays fill [0, data_bytes) exactly.
void CheckPlaces(const TensorHeader& header, std::int64_t data_bytes, const std::string& file) {
  std::vector<const TensorEntry*> by_place;
  for (const TensorEntry& tensor : header.tensors) {
    std::int64_t bytes = 0;
    const auto element = static_cast<std::int64_t>(SizeOf(tensor.dtype));
    if (tensor.end < tensor.begin || tensor.end > data_bytes ||
        __builtin_mul_overflow(tensor.shape.size(), element, &bytes) ||
        bytes != tensor.end - tensor.begin) {
      throw IoError(fmt::format(
          "{}: array {}: expected {} elements of {} bytes within {} bytes of data, found [{}, {})",
          file, Quoted(tensor.name), tensor.shape.size(), element, data_bytes, tensor.begin,
          tensor.end));
    }
    by_place.push_back(&tensor);
  }
  std::ranges::sort(by_place, {}, [](const TensorEntry* tensor) {
    return std::pair(tensor->begin, tensor->end);
  });
  std::int64_t end = 0;
  for (const TensorEntry* tensor : by_place) {
    if (tensor->begin != end) {
      throw IoError(
          fmt::format("{}: array {}: expected its data at {}, right after the array "
                      "before it, found it at {}",
                      file, Quoted(tensor->name), end, tensor->begin));
    }
    end = tensor->end;
  }
  if (end != data_bytes) {
    throw IoError(fmt::format("{}: expected {} bytes of data, found {}", file, end, data_bytes));
  }
}

}  // namespace

std::string Shown(std::string_view text) {
  constexpr std::size_t kShown = 80;
  return fmt::format("{}{}", CutAtLetter(text, kShown), text.size() <= kShown ? "" : "...");
}

std::string Quoted(std::string_view text) { return fmt::format("'{}'", Shown(text)); }

std::string EncodeHeader(const TensorHeader& header) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) json[std::string(kMetadataKey)] = header.metadata;
  // push_back without the search for an equal key, which would make this quadratic.
  auto& members = json.get_ref<nlohmann::ordered_json::object_t&>();
  for (const TensorEntry& tensor : header.tensors) {
    nlohmann::ordered_json entry;
    entry["dtype"] = FileNameOf(tensor.dtype);
    entry["shape"] = std::vector<std::int64_t>(tensor.shape.begin(), tensor.shape.end());
    entry["data_offsets"] = {tensor.begin, tensor.end};
    members.emplace_back(tensor.name, std::move(entry));
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const nlohmann::json::type_error& error) {
    throw InvalidArgument(
        fmt::format("save arrays: expected names and metadata in UTF-8: {}", error.what()));
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > static_cast<std::size_t>(kHeaderBytesMax)) {
    throw InvalidArgument(fmt::format("save arrays: expected a header of at most {} bytes, got {}",
                                      kHeaderBytesMax, text.size()));
  }
  std::string encoded(kHeaderLengthBytes, '\0');
  for (std::size_t i = 0; i < encoded.size(); ++i) {
    encoded[i] = static_cast<char>((text.size() >> (8 * i)) & 0xFF);
  }
  return encoded + text;
}

TensorHeader ParseHeader(std::string_view json, std::int64_t data_bytes, const std::string& file) {
  if (!json.starts_with('{')) {
    throw IoError(
        fmt::format("{}: expected a safetensors header ({{...}}), found something else", file));
  }
  // The parser would take a NUL for the end of its input.
  if (const std::size_t nul = json.find('\0'); nul != json.npos) {
    throw IoError(fmt::format("{}: header: expected JSON, found a NUL at byte {}", file, nul));
  }
  HeaderReader reader(file);
  nlohmann::json::sax_parse(json.begin(), json.end(), &reader);
  TensorHeader header = std::move(reader).Take();
  CheckPlaces(header, data_bytes, file);
  return header;
}

}  // namespace heddle::storage
