// The op streams that every engine is measured with: which variables each op reads and writes, and
// what its body does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "benchmarks/peers/clock.h"

namespace heddle::bench {

inline constexpr std::string_view kPatterns[] = {"independent", "chain", "fanout", "stencil",
                                                 "random"};

// The variables of one op, all distinct. Every pattern uses one of the four shapes, so that
// interfaces that want their dependencies written out (OpenMP) need only four statements.
enum class Shape : std::uint8_t { kWrite, kRead, kRead2Write, kRead3Write };

struct OpSpec {
  Shape shape;
  std::uint16_t vars[4];  // the reads, then the write

  int num_reads() const {
    constexpr int kReads[] = {0, 1, 2, 3};
    return kReads[static_cast<int>(shape)];
  }
  bool writes() const { return shape != Shape::kRead; }
  int num_vars() const { return num_reads() + (writes() ? 1 : 0); }
};

// A stream of ops over a set of variables, in push order.
//   independent: op i writes variable i mod 1024
//   chain:       every op writes the one variable
//   fanout:      one writer, then 16 readers, of the one variable
//   stencil:     64 points, two buffers: op (step, i) reads i - 1, i, i + 1 of one, writes i of the
//   other random:      2 reads and 1 write over 256 variables
// Threads: constant once made, but for what the bodies write under the engine's ordering.
class Workload {
 public:
  enum class Body { kEmpty, kBusy, kCheck };

  Workload(std::string_view pattern, int num_ops, Body body, double body_ns)
      : body_(body), body_ticks_(static_cast<std::uint64_t>(body_ns * TicksPerNanosecond())) {
    MakeOps(pattern, num_ops);
    if (body_ == Body::kCheck) {
      values_.resize(static_cast<std::size_t>(num_vars_));
      seen_.resize(ops_.size());
    }
  }

  int num_ops() const { return static_cast<int>(ops_.size()); }
  int num_vars() const { return num_vars_; }
  const OpSpec& op(int index) const { return ops_[static_cast<std::size_t>(index)]; }

  // The body of op `index`. The engine under test calls it once, when the op's variables allow it.
  void RunBody(int index) {
    switch (body_) {
      case Body::kEmpty:
        return;
      case Body::kBusy:
        SpinTicks(body_ticks_);
        return;
      case Body::kCheck:
        Check(index);
        return;
    }
  }

  // True if the bodies ran in an order that equals running them one by one, and clears what they
  // left. Each write hashes the old value, the values read and its own index, and each pure read
  // keeps what it saw, so any two conflicting ops that swap change the outcome.
  bool Verify() {
    const std::vector<std::uint64_t> values = Take(values_), seen = Take(seen_);
    for (int i = 0; i < num_ops(); ++i) Check(i);
    return Take(values_) == values && Take(seen_) == seen;
  }

 private:
  static std::vector<std::uint64_t> Take(std::vector<std::uint64_t>& from) {
    return std::exchange(from, std::vector<std::uint64_t>(from.size()));
  }

  void MakeOps(std::string_view pattern, int num_ops) {
    constexpr int kWidth = 64;
    std::mt19937 random(20240229);
    ops_.reserve(static_cast<std::size_t>(num_ops));
    const auto add = [this](Shape shape, int a, int b = 0, int c = 0, int d = 0) {
      ops_.push_back({shape,
                      {static_cast<std::uint16_t>(a), static_cast<std::uint16_t>(b),
                       static_cast<std::uint16_t>(c), static_cast<std::uint16_t>(d)}});
    };
    for (int i = 0; i < num_ops; ++i) {
      if (pattern == "independent") {
        num_vars_ = 1024;
        add(Shape::kWrite, i % num_vars_);
      } else if (pattern == "chain") {
        num_vars_ = 1;
        add(Shape::kWrite, 0);
      } else if (pattern == "fanout") {
        num_vars_ = 1;
        add(i % 17 == 0 ? Shape::kWrite : Shape::kRead, 0);
      } else if (pattern == "stencil") {
        num_vars_ = 2 * kWidth;
        const int point = i % kWidth;
        const int from = i / kWidth % 2 * kWidth, to = kWidth - from;
        add(Shape::kRead3Write, from + (point + kWidth - 1) % kWidth, from + point,
            from + (point + 1) % kWidth, to + point);
      } else if (pattern == "random") {
        num_vars_ = 256;
        const auto pick = [&] { return static_cast<int>(random() % 256); };
        const int a = pick();
        int b = pick(), c = pick();
        while (b == a) b = pick();
        while (c == a || c == b) c = pick();
        add(Shape::kRead2Write, a, b, c);
      } else {
        throw std::invalid_argument("unknown pattern: " + std::string(pattern));
      }
    }
  }

  void Check(int index) {
    const OpSpec& spec = op(index);
    std::uint64_t hash = static_cast<std::uint64_t>(index) + 1;
    for (int i = 0; i < spec.num_vars(); ++i) {
      hash = (hash ^ values_[spec.vars[i]]) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    if (spec.writes()) {
      values_[spec.vars[spec.num_reads()]] = hash;
    } else {
      seen_[static_cast<std::size_t>(index)] = hash;
    }
  }

  const Body body_;
  const std::uint64_t body_ticks_;
  int num_vars_ = 0;
  std::vector<OpSpec> ops_;
  std::vector<std::uint64_t> values_;  // of each variable; checking only
  std::vector<std::uint64_t> seen_;    // by each op that only reads; checking only
};

}  // namespace heddle::bench
