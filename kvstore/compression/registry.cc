// The one list of compressors, and compressors by name.
#include "kvstore/registry.h"

#include <heddle/error.h>

#include <cmath>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "kvstore/compression/compressor.h"

namespace heddle {

namespace kvstore {

const CompressorType& OneBitType();  // one_bit.cc
const CompressorType& TwoBitType();  // two_bit.cc

namespace {

struct CompressorEntry {
  std::string_view name;
  const CompressorType& (*type)();
};

// Sorted by name.
constexpr CompressorEntry kCompressors[] = {{"1bit", &OneBitType}, {"2bit", &TwoBitType}};

}  // namespace

std::shared_ptr<const Compressor> MakeCompressor(const CompressionOptions& options) {
  CompressionOptions resolved = options;
  resolved.type = LowerCase(options.type);
  for (const CompressorEntry& entry : kCompressors) {
    if (entry.name != resolved.type) continue;
    if (!std::isfinite(static_cast<float>(options.threshold))) {
      throw InvalidArgument(
          fmt::format("gradient compression {}: threshold: expected a finite number, got {}",
                      entry.name, options.threshold));
    }
    return entry.type().make(resolved);
  }
  throw InvalidArgument(fmt::format("gradient compression: unknown type '{}': expected one of {}",
                                    options.type, fmt::join(CompressionTypes(), ", ")));
}

bool IsCompressible(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

}  // namespace kvstore

std::vector<std::string_view> CompressionTypes() {
  std::vector<std::string_view> names;
  for (const kvstore::CompressorEntry& entry : kvstore::kCompressors) names.push_back(entry.name);
  return names;
}

}  // namespace heddle
