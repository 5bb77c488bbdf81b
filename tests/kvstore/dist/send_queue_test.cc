// Goal: what waits to be sent on a connection also says how many messages have come on it
// (send_queue.h, Q6). Method: a queue whose stream is read by the test.
#include "kvstore/dist/transport/tcp/send_queue.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <sys/uio.h>

#include "kvstore/dist/protocol/wire.h"
#include "tests/kvstore/dist/random_bodies.h"
#include "tests/kvstore/dist/tcp_node.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kLong = 300'000;

Message Numbered(std::uint64_t number, std::size_t bytes) {
  Message message;
  message.kind = Kind::kPush;
  message.sequence = number;
  message.payload = PayloadOf(std::string(bytes, 'x'));
  return message;
}

// The other end of a SendQueue's stream: counts messages, and what they say has come.
struct StreamEnd {
  void Take(std::span<const std::byte> bytes) {
    stream.insert(stream.end(), bytes.begin(), bytes.end());
    std::size_t at = 0;
    while (stream.size() - at >= kHeaderBytes) {
      Message message;
      std::uint32_t meta_bytes = 0;
      std::uint64_t payload_bytes = 0;
      ASSERT_EQ(
          DecodeHeader(std::span<const std::byte, kHeaderBytes>(stream.data() + at, kHeaderBytes),
                       {}, &message, &meta_bytes, &payload_bytes),
          "");
      const std::size_t whole = kHeaderBytes + meta_bytes + payload_bytes;
      if (stream.size() - at < whole) break;
      at += whole;
      told += message.arrivals;
      if (message.kind == Kind::kReceived) {
        EXPECT_GE(message.sequence, told);
        told = message.sequence;
        ++words;
      } else {
        sequences.push_back(message.sequence);
      }
    }
    stream.erase(stream.begin(), stream.begin() + static_cast<std::ptrdiff_t>(at));
  }

  std::vector<std::byte> stream;
  std::vector<std::uint64_t> sequences;  // of messages that are whole
  std::uint64_t told = 0;
  int words = 0;
};

// Writes what one Fetch gives, at most `bytes` of it.
void Write(SendQueue* queue, std::size_t bytes, StreamEnd* end) {
  std::array<iovec, 8> runs;
  const std::size_t count = queue->Fetch(runs.data(), runs.size());
  std::size_t written = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t part = std::min(runs[i].iov_len, bytes - written);
    end->Take({static_cast<const std::byte*>(runs[i].iov_base), part});
    written += part;
  }
  SendQueue::Ended ended;
  queue->Advance(written, &ended);
}

// While there is no room for what is said, it becomes no more.
TEST(SendQueue, OneWordAboutWhatHasComeStandsForAllBefore) {
  SendQueue queue(/*retains=*/true);
  StreamEnd end;
  queue.Add(1, Numbered(0, kLong), nullptr);
  Write(&queue, 10, &end);
  for (std::uint64_t arrived = 1; arrived <= 1000; ++arrived) {
    queue.Arrived(arrived);
    queue.ConfirmArrivals();
  }
  while (!queue.empty()) Write(&queue, kLong, &end);
  EXPECT_EQ(end.words, 1);
  EXPECT_EQ(end.told, 1000u);
}

TEST(SendQueue, WhatIsSentAnywaySaysWhatHasCome) {
  SendQueue queue(/*retains=*/true);
  StreamEnd end;
  for (std::uint64_t i = 0; i < 4; ++i) queue.Add(1 + i, Numbered(i, kLong), nullptr);
  queue.Arrived(1000);
  while (!queue.empty()) Write(&queue, kLong, &end);
  EXPECT_EQ(end.told, 1000u);
  EXPECT_EQ(end.words, 0);
}

// It would have what was sent be kept for ever.
TEST(SendQueue, WhatHasBecomeUrgentOvertakesWhatHasNotBegun) {
  SendQueue queue(/*retains=*/false);
  StreamEnd end;
  for (std::uint64_t i = 1; i <= 6; ++i) queue.Add(i, Numbered(i, kLong), nullptr);
  Write(&queue, 100, &end);  // of the first
  queue.Raise(5, 3);
  queue.Raise(4, -1);  // lower than it has: nothing happens
  queue.Raise(99, 7);  // sent long ago
  while (!queue.empty()) Write(&queue, kLong, &end);
  EXPECT_EQ(end.sequences, (std::vector<std::uint64_t>{1, 5, 2, 3, 4, 6}));
}

TEST(SendQueue, APeerThatDoesNotConfirmIsSentNoMore) {
  constexpr std::uint64_t kMax = 1 << 20;
  constexpr std::uint64_t kMessages = 20;
  SendQueue queue(/*retains=*/true, kMax);
  SendQueue::Ended ended;
  StreamEnd end;
  for (std::uint64_t i = 0; i < kMessages; ++i) queue.Add(1 + i, Numbered(i, kLong), nullptr);
  const auto write_all = [&] {
    while (queue.may_go()) Write(&queue, 70'000, &end);
  };
  write_all();
  const std::size_t whole = end.sequences.size();
  EXPECT_GT(whole * (kHeaderBytes + kLong), kMax);
  EXPECT_LE(whole * kLong, kMax + 2 * kLong);
  EXPECT_TRUE(end.stream.empty());  // nothing is left half said
  EXPECT_TRUE(ended.empty());
  // What the peer waits for itself goes nevertheless.
  queue.Arrived(7);
  queue.ConfirmArrivals();
  write_all();
  EXPECT_EQ(end.words, 1);
  EXPECT_EQ(end.told, 7u);
  EXPECT_EQ(end.sequences.size(), whole);
  while (!queue.empty()) {
    ASSERT_FALSE(queue.may_go());
    queue.Confirm(end.sequences.size(), &ended);
    ASSERT_TRUE(queue.may_go());
    write_all();
  }
  queue.Confirm(kMessages, &ended);
  EXPECT_EQ(ended.size(), kMessages);
  EXPECT_EQ(end.sequences.size(), kMessages);
}

// Whatever is added, overtaken, written in part, cut and sent anew: what the messages say adds up.
TEST(SendQueue, WhatMessagesSayHasComeAddsUp) {
  std::mt19937 random(static_cast<std::mt19937::result_type>(TestSeed()));
  const auto below = [&random](std::size_t n) { return random() % n; };
  SendQueue queue(/*retains=*/true, /*retained_max=*/200'000);
  SendQueue::Ended ended;
  StreamEnd end;
  std::uint64_t arrived = 0;
  std::uint64_t sent = 0;
  for (int step = 0; step < 20'000; ++step) {
    switch (below(6)) {
      case 0: {
        Message message = Numbered(sent++, 5000 + below(5000));
        message.priority = static_cast<std::int32_t>(below(3));
        queue.Add(sent, std::move(message), nullptr);
        break;
      }
      case 1: {
        const std::uint64_t until = sent + below(5);
        while (sent < until) queue.AddSmall(Numbered(sent++, below(400)));
        break;
      }
      case 2:
        arrived += below(300);
        queue.Arrived(arrived);
        break;
      case 3:
        queue.ConfirmArrivals();
        break;
      case 4:
        queue.Confirm(below(end.sequences.size() + 1), &ended);
        break;
      default:
        if (queue.may_go()) Write(&queue, 1 + below(20'000), &end);
    }
    ASSERT_LE(end.told, queue.said());
    ASSERT_LE(queue.said(), arrived);
    if (below(100) > 0) continue;
    queue.Cut();
    ASSERT_TRUE(queue.Restart(end.sequences.size(), &ended));
    end.stream.clear();
    end.told = arrived;
  }
  while (!queue.empty()) {
    queue.Confirm(end.sequences.size(), &ended);
    if (queue.may_go()) Write(&queue, 20'000, &end);
  }
  queue.ConfirmArrivals();
  if (!queue.empty()) Write(&queue, kHeaderBytes, &end);
  EXPECT_EQ(end.told, arrived);
  EXPECT_EQ(queue.said(), arrived);
  std::sort(end.sequences.begin(), end.sequences.end());
  ASSERT_EQ(end.sequences.size(), sent);
  for (std::uint64_t i = 0; i < sent; ++i) ASSERT_EQ(end.sequences[i], i);
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
