// The rings by themselves: what goes in comes out, nobody sleeps through what it waits for, and
// whatever the other side makes of the memory, nothing is touched beyond it.
#include "kvstore/dist/transport/shm/shared_rings.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <semaphore>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "tests/kvstore/dist/random_bodies.h"
#include "tests/small_files.h"

namespace heddle::kvstore::dist_test {
namespace {

using dist::SharedRings;
using testing::HasSubstr;

constexpr std::size_t kRing = SharedRings::kRingBytesMin;

struct RingEnds {
  explicit RingEnds(std::size_t ring_bytes = kRing)
      : maker(SharedRings::Make(ring_bytes, &memory)), taker(SharedRings::Take(memory)) {}

  UniqueFd memory;
  std::unique_ptr<SharedRings> maker, taker;
};

// The runs of a text, cut at random; some are empty.
std::vector<iovec> Cut(Random& random, std::string& text) {
  std::vector<iovec> runs;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t bytes = std::min<std::size_t>(text.size() - at, random() % 30'000);
    runs.push_back({text.data() + at, bytes});
    at += bytes;
  }
  return runs;
}

std::string RandomBytes(Random& random, std::size_t bytes) {
  std::string text(bytes, '\0');
  for (std::size_t i = 0; i < bytes; i += 1 + random() % 50) text[i] = static_cast<char>(random());
  return text;
}

// One direction as it should be: bytes in the ring, and the wishes of both sides, as bytes that are
// there or room that there is.
struct Model {
  std::deque<char> bytes;
  std::optional<std::size_t> wanted_bytes, wanted_room;
};

// In one thread everything has one right outcome.
TEST(SharedRings, BytesRoomAndWishesAreThoseOfAQueue) {
  Random random(TestSeed());
  for (int round = 0; round < 20; ++round) {
    RingEnds ends;
    // From the maker to the taker, and back.
    std::array<Model, 2> models;
    for (int step = 0; step < 400; ++step) {
      const std::size_t way = random() % 2;
      Model& model = models[way];
      SharedRings& writer = way == 0 ? *ends.maker : *ends.taker;
      SharedRings& reader = way == 0 ? *ends.taker : *ends.maker;
      const std::size_t room = kRing - model.bytes.size();
      const std::size_t bytes = 1 + random() % (kRing / (1 + random() % 8));
      switch (random() % 4) {
        case 0: {
          std::string text = RandomBytes(random, bytes);
          const auto runs = Cut(random, text);
          const auto moved = writer.Write(runs.data(), runs.size());
          ASSERT_TRUE(moved);
          ASSERT_EQ(moved->bytes, std::min(bytes, room));
          model.bytes.insert(model.bytes.end(), text.begin(),
                             text.begin() + static_cast<std::ptrdiff_t>(moved->bytes));
          const bool wake =
              moved->bytes > 0 && model.wanted_bytes && model.bytes.size() >= *model.wanted_bytes;
          EXPECT_EQ(moved->wake_peer, wake);
          if (wake) model.wanted_bytes.reset();
          break;
        }
        case 1: {
          std::string text(bytes, '\0');
          const auto runs = Cut(random, text);
          const std::size_t there = model.bytes.size();
          const auto mode =
              random() % 2 == 0 ? ops::StoreMode::kCached : ops::StoreMode::kStreaming;
          const auto moved = reader.Read(runs.data(), runs.size(), mode);
          ASSERT_TRUE(moved);
          ASSERT_EQ(moved->bytes, std::min(bytes, there));
          ASSERT_TRUE(std::equal(text.begin(),
                                 text.begin() + static_cast<std::ptrdiff_t>(moved->bytes),
                                 model.bytes.begin()));
          model.bytes.erase(model.bytes.begin(),
                            model.bytes.begin() + static_cast<std::ptrdiff_t>(moved->bytes));
          // A wish for bytes is one for a position, which reading does not move.
          if (model.wanted_bytes)
            *model.wanted_bytes -= std::min(*model.wanted_bytes, moved->bytes);
          const bool wake = moved->bytes > 0 && model.wanted_room &&
                            kRing - model.bytes.size() >= *model.wanted_room;
          EXPECT_EQ(moved->wake_peer, wake);
          if (wake) model.wanted_room.reset();
          break;
        }
        case 2:
          EXPECT_EQ(reader.AwaitBytes(bytes), model.bytes.size() < bytes);
          model.wanted_bytes.reset();
          if (model.bytes.size() < bytes) model.wanted_bytes = bytes;
          break;
        case 3:
          EXPECT_EQ(writer.HasRoom(bytes), room >= bytes);
          // As the transport has it: who waits for room does not write meanwhile.
          if (room < bytes) {
            EXPECT_TRUE(writer.AwaitRoom(bytes));
            while (!writer.HasRoom(bytes)) {
              std::array<char, 1000> text;
              const iovec run{text.data(), std::min(text.size(), model.bytes.size())};
              const auto moved = reader.Read(&run, 1);
              ASSERT_TRUE(moved);
              model.bytes.erase(model.bytes.begin(),
                                model.bytes.begin() + static_cast<std::ptrdiff_t>(moved->bytes));
              if (model.wanted_bytes) {
                *model.wanted_bytes -= std::min(*model.wanted_bytes, moved->bytes);
              }
              EXPECT_EQ(moved->wake_peer, kRing - model.bytes.size() >= bytes);
            }
          } else {
            EXPECT_FALSE(writer.AwaitRoom(bytes));
          }
          break;
      }
      EXPECT_EQ(reader.HasBytes(), !model.bytes.empty());
    }
  }
}

// Each side sleeps until it is woken: a wake-up that is lost would be the end.
TEST(SharedRings, NobodySleepsThroughWhatItWaitsFor) {
  Random random(TestSeed());
  RingEnds ends;
  constexpr std::uint64_t kBytes = 30 << 20;
  const std::uint64_t seed = random();
  std::counting_semaphore<> reader_bell(0), writer_bell(0);
  std::thread writer([&] {
    Random mine(seed);
    std::string text(40'000, '\0');
    for (std::uint64_t written = 0; written < kBytes;) {
      const std::size_t bytes = std::min<std::uint64_t>(1 + mine() % text.size(), kBytes - written);
      for (std::size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>((written + i) % 251);
      const iovec run{text.data(), bytes};
      const auto moved = ends.maker->Write(&run, 1);
      ASSERT_TRUE(moved);
      if (moved->wake_peer) reader_bell.release();
      written += moved->bytes;
      if (moved->bytes == 0 && ends.maker->AwaitRoom(1 + mine() % kRing)) writer_bell.acquire();
    }
  });
  std::vector<char> text(50'000);
  std::uint64_t read = 0;
  bool right = true;
  while (read < kBytes) {
    const iovec run{text.data(), 1 + random() % text.size()};
    const auto moved = ends.taker->Read(&run, 1);
    ASSERT_TRUE(moved);
    if (moved->wake_peer) writer_bell.release();
    for (std::size_t i = 0; i < moved->bytes; ++i) {
      right = right && text[i] == static_cast<char>((read + i) % 251);
    }
    read += moved->bytes;
    // At most half of the ring, so that the writer never waits for room meanwhile.
    const std::uint64_t wanted = std::min<std::uint64_t>(1 + random() % (kRing / 2), kBytes - read);
    // The writer may wait for all of the room there is.
    if (moved->bytes == 0 && ends.taker->AwaitBytes(wanted) && random() % 4 != 0) {
      if (!ends.taker->HasBytes()) reader_bell.acquire();
    }
  }
  writer.join();
  EXPECT_TRUE(right);
}

// ---- The other side is an enemy

// The memory as the other process sees it.
struct Tampered : RingEnds {
  Tampered() : RingEnds(kRing) {
    bytes = 4096 + 2 * kRing;
    void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
    EXPECT_NE(mapped, MAP_FAILED);
    words = static_cast<std::uint64_t*>(mapped);
  }
  ~Tampered() { munmap(words, bytes); }

  std::size_t bytes = 0;
  std::uint64_t* words = nullptr;
};

// docs/wire.md
constexpr std::size_t kWrittenAt = 0, kWantedWrittenAt = 64, kReadAt = 128, kWantedReadAt = 192;
constexpr std::size_t kSecondStreamAt = 256;

// What a reader that is awake would see while a short message is written: some of the runs are the
// writer's own position and the reader's wish, so that what arrives is what they were when their
// turn came.
TEST(SharedRings, ShortMessagesAreShownInPiecesAndWishesWaitForTheWhole) {
  constexpr std::size_t kMessage = 8 << 10;  // the longest that is shown so
  constexpr std::size_t kPiece = 2 << 10;
  constexpr std::size_t kSightBytes = kReadAt;  // the first two lines of the stream
  constexpr std::size_t kTextBytes = kPiece / 4 - kSightBytes;
  Random random(TestSeed());
  for (int round = 0; round < 100; ++round) {
    Tampered ends;
    // Messages begin at any place, so that some go over the ring's end.
    const std::size_t before = random() % kRing;
    std::string text(kRing, 'b');
    iovec run{text.data(), before};
    ASSERT_TRUE(ends.maker->Write(&run, 1));
    ASSERT_TRUE(ends.taker->Read(&run, 1));

    // A wish that the first piece would fulfil.
    ASSERT_TRUE(ends.taker->AwaitBytes(1));
    std::vector<iovec> runs;
    for (std::size_t at = 0; at < kMessage; at += kTextBytes + kSightBytes) {
      runs.push_back({text.data() + at, kTextBytes});
      runs.push_back({ends.words, kSightBytes});
    }
    const auto moved = ends.maker->Write(runs.data(), runs.size());
    ASSERT_TRUE(moved);
    ASSERT_EQ(moved->bytes, kMessage);
    EXPECT_TRUE(moved->wake_peer);

    std::string got(kMessage, '\0');
    run = {got.data(), got.size()};
    ASSERT_TRUE(ends.taker->Read(&run, 1));
    bool some_shown = false;
    for (std::size_t at = kTextBytes; at < kMessage; at += kTextBytes + kSightBytes) {
      SCOPED_TRACE(at);
      std::uint64_t written = 0, wish = 0;
      // One that goes over the end is copied in two parts, between which more may be shown.
      if ((before + at) % kRing + kSightBytes > kRing) continue;
      std::memcpy(&written, got.data() + at + kWrittenAt, sizeof written);
      std::memcpy(&wish, got.data() + at + kWantedWrittenAt, sizeof wish);
      EXPECT_LE(written, before + at) << "shown before it was there";
      EXPECT_LT(before + at - written, kPiece) << "a piece that was there was not shown";
      EXPECT_EQ(wish, before + 1) << "taken before the whole was there";
      some_shown = some_shown || written > before;
    }
    EXPECT_TRUE(some_shown);
  }
}

TEST(SharedRings, PositionsThatCannotBeAreFoundOut) {
  std::array<char, 100> text{};
  const iovec run{text.data(), text.size()};
  for (const std::uint64_t ahead :
       {std::uint64_t{kRing + 1}, std::uint64_t{1} << 63, ~std::uint64_t{kRing}}) {
    Tampered ends;
    // The taker reads what the maker has written, and writes what it reads.
    ends.words[kWrittenAt / 8] = ahead;
    EXPECT_TRUE(ends.taker->HasBytes());
    EXPECT_FALSE(ends.taker->AwaitBytes(1));
    EXPECT_FALSE(ends.taker->Read(&run, 1));
    ends.words[(kSecondStreamAt + kReadAt) / 8] = ahead;
    EXPECT_TRUE(ends.taker->HasRoom(kRing));
    EXPECT_FALSE(ends.taker->AwaitRoom(kRing));
    // It is looked at when there is too little room otherwise.
    std::vector<char> much(kRing + 1);
    const iovec more{much.data(), much.size()};
    EXPECT_FALSE(ends.taker->Write(&more, 1));
  }
}

TEST(SharedRings, WhatThisSideHasReadIsKnownWhateverTheMemorySays) {
  Tampered ends;
  std::string text = "first second";
  iovec run{text.data(), 6};
  ASSERT_TRUE(ends.maker->Write(&run, 1));
  std::string got(6, '\0');
  const iovec into{got.data(), got.size()};
  ASSERT_TRUE(ends.taker->Read(&into, 1));
  ends.words[kReadAt / 8] = 3;  // its own position
  ends.words[kWrittenAt / 8] = 12;
  std::memcpy(reinterpret_cast<char*>(ends.words) + 4096 + 6, "second", 6);
  ASSERT_TRUE(ends.taker->Read(&into, 1));
  EXPECT_EQ(got, "second");
}

// Noise over positions, wishes and bytes, while both directions are used: each call says that the
// rules are broken, or moves no more than was asked for, all of it inside its memory.
TEST(SharedRings, NoiseHarmsNobody) {
  Random random(TestSeed());
  for (int round = 0; round < 300; ++round) {
    Tampered ends;
    const std::array<std::size_t, 8> places = {kWrittenAt,
                                               kWantedWrittenAt,
                                               kReadAt,
                                               kWantedReadAt,
                                               kSecondStreamAt,
                                               kSecondStreamAt + kWantedWrittenAt,
                                               kSecondStreamAt + kReadAt,
                                               kSecondStreamAt + kWantedReadAt};
    for (int step = 0; step < 40; ++step) {
      if (random() % 3 == 0) {
        const std::uint64_t values[] = {0,     random() % (2 * kRing), random(),
                                        kRing, ~std::uint64_t{0},      random() % 10};
        std::atomic_ref(ends.words[places[random() % places.size()] / 8])
            .store(values[random() % std::size(values)]);
      }
      std::string text(1 + random() % kRing, 'x');
      const auto runs = Cut(random, text);
      SharedRings& end = random() % 2 == 0 ? *ends.maker : *ends.taker;
      const auto moved = random() % 2 == 0 ? end.Write(runs.data(), runs.size())
                                           : end.Read(runs.data(), runs.size());
      if (moved) {
        EXPECT_LE(moved->bytes, std::min(text.size(), kRing));
      }
      std::ignore = end.HasBytes();
      std::ignore = end.AwaitBytes(1 + random() % kRing);
      std::ignore = end.HasRoom(1 + random() % kRing);
    }
  }
}

// Memory counts as a file there; the transport takes TCP then.
TEST(SharedRings, WhereFilesMayNotGrowThereIsNoMemory) {
  EXPECT_EQ(WithSmallFiles(4096,
                           [] {
                             UniqueFd memory;
                             try {
                               SharedRings::Make(kRing, &memory);
                             } catch (const NetworkError&) {
                               return 7;
                             }
                             return 8;
                           }),
            7);
}

UniqueFd MemoryOf(std::size_t bytes, int seals) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

void ExpectRefused(const UniqueFd& memory, const char* why) {
  try {
    SharedRings::Take(memory);
    FAIL();
  } catch (const NetworkError& error) {
    EXPECT_THAT(error.what(), HasSubstr(why));
  }
}

TEST(SharedRings, OnlyMemoryThatCannotShrinkIsTaken) {
  constexpr std::size_t kRight = 4096 + 2 * kRing;
  ExpectRefused(MemoryOf(kRight, 0), "may shrink");
  ExpectRefused(MemoryOf(kRight, F_SEAL_SHRINK), "may shrink");
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{100}, std::size_t{4096}, kRight - 1,
                                  kRight + 2, 4096 + kRing, 4096 + (std::size_t{64} << 20)}) {
    ExpectRefused(MemoryOf(bytes, kSeals), ("of " + std::to_string(bytes) + " bytes").c_str());
  }
  ExpectRefused(UniqueFd(open("/dev/null", O_RDWR | O_CLOEXEC)), "shared memory");
  ExpectRefused(UniqueFd(), "Bad file descriptor");
  EXPECT_NE(SharedRings::Take(MemoryOf(kRight, kSeals)), nullptr);
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
