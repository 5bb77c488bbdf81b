// A server that has no memory for a part.
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/dist/server/array_parts.h"
#include "kvstore/optimizer/foreign.h"
#include "tests/kvstore/dist/counted_memory.h"

namespace heddle::kvstore::dist {
namespace {

// Goal: a key that could not be created is none. Method: each allocation fails once; an optimizer
// of the server's own is told to forget a key when a second life of it begins, and when the last
// one ends.
TEST(NoMemory, APartThatCannotBeCreatedIsNoLifeOfItsKey) {
  EngineOptions options;
  options.type = "serial";
  Engine engine(options);
  bool created = false;
  for (std::int64_t allocations = 0; !created; ++allocations) {
    SCOPED_TRACE(::testing::Message() << allocations << " allocations");
    int forgotten = 0;
    const auto forgotten_now = [&] {
      engine.WaitForAll();
      return std::exchange(forgotten, 0);
    };
    ArrayParts parts(
        engine, [](const PartId&, std::exception_ptr) {}, [](const PartId&, PassResult) {});
    parts.SetOptimizer(
        0, std::uint64_t{1} << 32, MakeForeignOptimizer("own", {}), false,
        {.update = [](const ServerUpdate&) {}, .forget = [&](KeyRef) { ++forgotten; }});
    const auto create = [&](std::uint64_t life) {
      auto value = std::make_shared<std::vector<std::byte>>(8);
      const PartInfo info{Key("w"), Shape{2}, DType::kFloat32, false, 1, 0, 2};
      const Payload payload(value, {value->data(), value->size()});
      if (life == 1) GiveAllocations(allocations);
      parts.Create({0, 0, life}, info, payload);
      GiveAllocations(-1);
    };
    try {
      create(1);
      created = true;
    } catch (...) {
      GiveAllocations(-1);
      create(2);
      EXPECT_EQ(forgotten_now(), 0) << "as if it was beside another life";
      parts.Remove({0, 0, 2});
      EXPECT_EQ(forgotten_now(), 1);
    }
    create(3);
    EXPECT_EQ(forgotten_now(), created ? 1 : 0);
  }
}

}  // namespace
}  // namespace heddle::kvstore::dist
