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
  // An array of more bytes than cut_bytes is cut into a shard a server, and shards into parts of
  // about slice_bytes; a smaller one into parts of about slice_bytes on one server. Row-sparse
  // arrays are cut by rows, into at most one part a server.
  std::int64_t cut_bytes = 4'000'000;
  std::int64_t slice_bytes = 1 << 20;
  bool whole_keys = false;  // never over several servers (dist_async with norms of whole arrays)
};

struct PlacedPart {
  std::uint32_t part;
  std::int32_t server;
  std::int64_t begin;  // elements, or rows, as PartInfo
  std::int64_t end;
};

// XXH3 of the key's kind and text: its number on the wire, and what picks its server.
std::uint64_t KeyId(KeyRef key);

// In order of their places. An array without elements has one part.
std::vector<PlacedPart> PlaceKey(std::uint64_t key_id, const Shape& shape, DType dtype,
                                 bool row_sparse, const PlacementOptions& options);

}  // namespace heddle::kvstore::dist
