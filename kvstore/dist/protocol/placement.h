// Which parts a key is cut into, and which server has each.
//
// The same on all nodes of a job, since it follows from the key's name, shape and dtype and from
// three numbers of the roster. Parts of a dense array begin at multiples of 4096 elements (what
// norms and compression need).
#pragma once

#include <heddle/key.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/part_store.h"

namespace heddle::kvstore::dist {

struct PlacementOptions {
  std::int32_t num_servers = 1;
  // An array of more bytes than cut_bytes is cut into a shard a server; a smaller one is on one
  // server. Both are cut into parts of at most slice_bytes, or a quarter of that if the array has
  // no more than four times slice_bytes, so that there is something to overlap; but of at least
  // 4096 elements, and at most kShardPartsMax a shard. Row-sparse arrays are cut by rows, into at
  // most one part a server.
  std::int64_t cut_bytes = 4'000'000;
  std::int64_t slice_bytes = 1 << 20;
  bool whole_keys = false;  // a part a key (dist_async with norms of whole arrays)
};
inline constexpr std::int64_t kPartAlignment = 4096;  // elements
inline constexpr std::int64_t kShardPartsMax = 1 << 16;

struct PlacedPart {
  std::uint32_t part;
  std::int32_t server;
  std::int64_t begin;  // elements, or rows, as PartInfo
  std::int64_t end;
};

// The key's number on the wire, and what picks its server: of a string XXH3 (64 bits) of its bytes
// with seed 0, of an integer XXH3 of its 8 bytes, little-endian, with seed 1. Of a key that was
// removed n > 0 times it is XXH3, with seed 2, of that number and n, 8 bytes each, little-endian:
// initialised anew it is another one to the servers.
std::uint64_t KeyId(KeyRef key, std::uint64_t removals = 0);

// In order of their places. An array without elements, or without rows, has one part. Shards lie on
// consecutive servers from server key_id % num_servers on.
std::vector<PlacedPart> PlaceKey(std::uint64_t key_id, const Shape& shape, DType dtype,
                                 bool row_sparse, const PlacementOptions& options);

}  // namespace heddle::kvstore::dist
