#include "kvstore/dist/protocol/placement.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/check.h"
#include "kvstore/dist/protocol/codec.h"

namespace heddle::kvstore::dist {
namespace {

std::int64_t DivideRoundUp(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Where share `index` of `count` nearly equal shares of `total` begins. (index * total could
// overflow.)
std::int64_t ShareBegin(std::int64_t total, std::int64_t count, std::int64_t index) {
  return total / count * index + std::min(index, total % count);
}

// Whether `elements` take more bytes than `bytes`, which may be fewer than they can count.
bool LargerThan(std::int64_t elements, DType dtype, std::int64_t bytes) {
  return elements > bytes / static_cast<std::int64_t>(SizeOf(dtype));
}

class Placer {
 public:
  Placer(std::uint64_t key_id, std::int32_t num_servers)
      : first_server_(static_cast<std::int64_t>(key_id % static_cast<std::uint64_t>(num_servers))),
        num_servers_(num_servers) {}

  // Units of elements or rows, `unit` each; the last may be shorter, so that all end at `places`.
  void Place(std::int64_t places, std::int64_t unit, std::int64_t shards,
             std::int64_t part_units_max) {
    const std::int64_t units = DivideRoundUp(places, unit);
    shards = std::clamp<std::int64_t>(units, 1, shards);
    for (std::int64_t shard = 0; shard < shards; ++shard) {
      const std::int64_t begin = ShareBegin(units, shards, shard);
      const std::int64_t shard_units = ShareBegin(units, shards, shard + 1) - begin;
      const std::int64_t count =
          std::clamp<std::int64_t>(DivideRoundUp(shard_units, part_units_max), 1, kShardPartsMax);
      for (std::int64_t i = 0; i < count; ++i) {
        // Only the end of the last unit may lie beyond `places`, and beyond 64 bits.
        const std::int64_t end_unit = begin + ShareBegin(shard_units, count, i + 1);
        parts_.push_back(
            {.part = static_cast<std::uint32_t>(parts_.size()),
             .server = static_cast<std::int32_t>((first_server_ + shard) % num_servers_),
             .begin = (begin + ShareBegin(shard_units, count, i)) * unit,
             .end = end_unit == units ? places : end_unit * unit});
      }
    }
  }

  std::vector<PlacedPart> Take() { return std::move(parts_); }

 private:
  const std::int64_t first_server_;
  const std::int64_t num_servers_;
  std::vector<PlacedPart> parts_;
};

}  // namespace

std::uint64_t KeyId(KeyRef key, std::uint64_t removals) {
  std::uint64_t id = 0;
  if (key.is_string()) {
    id = XXH3_64bits_withSeed(key.text().data(), key.text().size(), 0);
  } else {
    const std::int64_t bytes = SwapToLittleEndian(key.number());
    id = XXH3_64bits_withSeed(&bytes, sizeof(bytes), 1);
  }
  if (removals == 0) return id;
  // Not by the seed: of short keys XXH3 adds it to the text, and neighbours would meet.
  const std::array<std::uint64_t, 2> life = {SwapToLittleEndian(id), SwapToLittleEndian(removals)};
  return XXH3_64bits_withSeed(life.data(), sizeof(life), 2);
}

std::vector<PlacedPart> PlaceKey(std::uint64_t key_id, const Shape& shape, DType dtype,
                                 bool row_sparse, const PlacementOptions& options) {
  CHECK(options.num_servers > 0 && options.slice_bytes > 0 && options.cut_bytes >= 0);
  CHECK(!row_sparse || shape.ndim() > 0);
  const std::int64_t elements = shape.size();
  const bool cut = LargerThan(elements, dtype, options.cut_bytes);
  const std::int64_t shards = cut && !options.whole_keys ? options.num_servers : 1;
  Placer placer(key_id, options.num_servers);
  if (row_sparse) {
    placer.Place(shape[0], 1, shards, std::max<std::int64_t>(shape[0], 1));
  } else if (options.whole_keys) {
    placer.Place(elements, std::max<std::int64_t>(elements, 1), 1, 1);
  } else {
    const bool small = !LargerThan(DivideRoundUp(elements, 4), dtype, options.slice_bytes);
    const std::int64_t part_bytes = small ? options.slice_bytes / 4 : options.slice_bytes;
    const std::int64_t part_blocks =
        part_bytes / static_cast<std::int64_t>(SizeOf(dtype)) / kPartAlignment;
    placer.Place(elements, kPartAlignment, shards, std::max<std::int64_t>(part_blocks, 1));
  }
  return placer.Take();
}

}  // namespace heddle::kvstore::dist
