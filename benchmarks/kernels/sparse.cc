// Row-sparse pushes and pulls of a key of 1 000 000 rows of 64 float32: push of 10 000 rows from
// each of 4 devices, by the default updater and by SGD, and row_sparse_pull of 10 000 rows, until
// done. At least 60% of the speed of hand-written loops over the same rows on as many threads: a
// merge of the four sorted lists into memory that lies ready, and a sort of the ids with a copy of
// their rows. Then the same push and pull of 10^12 rows, of which as many are there as of 10^6: no
// slower than by a quarter, since no step may cost what all rows cost.
#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/kernels/sections.h"
#include "benchmarks/support/roofline.h"
#include "benchmarks/support/team.h"

namespace heddle::bench {
namespace {

constexpr std::int64_t kRows = 1'000'000;
constexpr std::size_t kRowSize = 64;
constexpr std::size_t kDevices = 4;
constexpr std::size_t kTouched = 10'000;  // rows a device, and a pull
// Several sets of inputs in turn, so that caches do not hold what a training step would bring anew.
constexpr std::size_t kSets = 8;
constexpr float kRate = 1e-6F;
constexpr double kBar = 0.6;

using Ids = std::vector<std::int64_t>;

Ids RandomIds(std::mt19937_64& random, std::int64_t rows) {
  std::set<std::int64_t> ids;
  while (ids.size() < kTouched) {
    ids.insert(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows)));
  }
  return {ids.begin(), ids.end()};
}

// What the loops read: the same rows as the arrays of the store have.
struct Source {
  Ids ids;
  std::vector<float> rows;
};

struct InputSet {
  std::vector<RowSparseNDArray> gradients;  // one a device
  std::vector<Source> sources;
  Ids wanted;  // of a pull, not sorted
  NDArray wanted_array;
};

InputSet MakeInputs(std::mt19937_64& random, std::int64_t rows, Engine& engine) {
  InputSet set;
  for (std::size_t k = 0; k < kDevices; ++k) {
    Source source{RandomIds(random, rows), std::vector<float>(kTouched * kRowSize)};
    for (float& value : source.rows) {
      value = std::uniform_real_distribution<float>(-1, 1)(random);
    }
    set.gradients.push_back(RowSparseNDArray::FromVectors<float>(
        source.ids, source.rows, {rows, static_cast<std::int64_t>(kRowSize)}, DType::kFloat32,
        Cpu(static_cast<int>(k)), engine));
    set.sources.push_back(std::move(source));
  }
  set.wanted = RandomIds(random, rows);
  std::shuffle(set.wanted.begin(), set.wanted.end(), random);
  set.wanted_array = NDArray::FromVector<std::int64_t>(
      set.wanted, {static_cast<std::int64_t>(kTouched)}, DType::kInt64, Cpu(), engine);
  return set;
}

// ---- The hand-written loops

struct Output {
  Ids ids;
  std::vector<float> rows;
};

// Calls take(id, rows) for the ids in [begin, end), `rows` being the sources' rows of the id.
template <class Take>
void Merge(const std::vector<Source>& sources, std::int64_t begin, std::int64_t end,
           const Take& take) {
  std::array<std::size_t, kDevices> next;
  std::array<std::size_t, kDevices> stop;
  for (std::size_t k = 0; k < kDevices; ++k) {
    const Ids& ids = sources[k].ids;
    next[k] =
        static_cast<std::size_t>(std::lower_bound(ids.begin(), ids.end(), begin) - ids.begin());
    stop[k] = static_cast<std::size_t>(std::lower_bound(ids.begin(), ids.end(), end) - ids.begin());
  }
  std::array<const float*, kDevices> rows;
  for (;;) {
    std::int64_t id = std::numeric_limits<std::int64_t>::max();
    for (std::size_t k = 0; k < kDevices; ++k) {
      if (next[k] < stop[k]) id = std::min(id, sources[k].ids[next[k]]);
    }
    if (id == std::numeric_limits<std::int64_t>::max()) return;
    std::size_t found = 0;
    for (std::size_t k = 0; k < kDevices; ++k) {
      if (next[k] < stop[k] && sources[k].ids[next[k]] == id) {
        rows[found++] = sources[k].rows.data() + kRowSize * next[k]++;
      }
    }
    take(id, rows.data(), found);
  }
}

void SumLoop(const std::vector<Source>& sources, Output& out, Team& team) {
  const std::int64_t step = kRows / team.size();
  team.Run([&](int i) {
    // Each thread has a part of the output that is large enough for anything.
    std::size_t at = static_cast<std::size_t>(i) * kDevices * kTouched;
    const std::int64_t end = i + 1 == team.size() ? kRows : (i + 1) * step;
    Merge(sources, i * step, end, [&](std::int64_t id, const float* const* rows, std::size_t n) {
      float* const to = out.rows.data() + at * kRowSize;
      out.ids[at++] = id;
      std::memcpy(to, rows[0], kRowSize * sizeof(float));
      for (std::size_t k = 1; k < n; ++k) {
        for (std::size_t j = 0; j < kRowSize; ++j) to[j] += rows[k][j];
      }
    });
  });
}

void SgdLoop(const std::vector<Source>& sources, float* weight, Team& team) {
  const std::int64_t step = kRows / team.size();
  team.Run([&](int i) {
    const std::int64_t end = i + 1 == team.size() ? kRows : (i + 1) * step;
    Merge(sources, i * step, end, [&](std::int64_t id, const float* const* rows, std::size_t n) {
      float* const w = weight + static_cast<std::size_t>(id) * kRowSize;
      std::array<float, kRowSize> sum;
      std::memcpy(sum.data(), rows[0], sizeof(sum));
      for (std::size_t k = 1; k < n; ++k) {
        for (std::size_t j = 0; j < kRowSize; ++j) sum[j] += rows[k][j];
      }
      for (std::size_t j = 0; j < kRowSize; ++j) w[j] -= kRate * sum[j];
    });
  });
}

void PullLoop(const Ids& wanted, const float* weight, Output& out, Team& team) {
  std::copy(wanted.begin(), wanted.end(), out.ids.begin());
  std::sort(out.ids.begin(), out.ids.begin() + kTouched);
  const auto last = std::unique(out.ids.begin(), out.ids.begin() + kTouched);
  const auto count = static_cast<std::size_t>(last - out.ids.begin());
  const auto parts = static_cast<std::size_t>(team.size());
  team.Run([&](int i) {
    const auto part = static_cast<std::size_t>(i);
    for (std::size_t row = count * part / parts; row < count * (part + 1) / parts; ++row) {
      std::memcpy(out.rows.data() + row * kRowSize,
                  weight + static_cast<std::size_t>(out.ids[row]) * kRowSize,
                  kRowSize * sizeof(float));
    }
  });
}

// ---- Measuring

// On one thread the time that it has run: what other processes did in between does not count.
double Seconds(bool one_thread, const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  const auto now = [one_thread] {
    return one_thread ? ThreadSeconds()
                      : std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  };
  const double start = now();
  call();
  return now() - start;
}

// For each of the sets, on average.
double SecondsEach(int threads, const std::vector<InputSet>& sets,
                   const std::function<void(const InputSet&)>& run) {
  return Seconds(threads == 1,
                 [&] {
                   for (const InputSet& set : sets) run(set);
                 }) /
         static_cast<double>(sets.size());
}

// The engine's workers have gone to sleep before the team measures, and the other way round.
double LoopSecondsEach(int threads, const std::vector<InputSet>& sets,
                       const std::function<void(const InputSet&, Team&)>& loop) {
  Team team(threads);
  return SecondsEach(threads, sets, [&](const InputSet& set) { loop(set, team); });
}

// Two contenders in turn, each of which tells its seconds; ours may take at most 1 / bar times as
// long.
void Compare(const std::string& what, const std::string& against, double bar, int rounds,
             const std::function<double()>& ours, const std::function<double()>& limit,
             BarReport& report) {
  const std::array<std::function<double()>, 2> contenders = {ours, limit};
  const std::vector<std::vector<double>> seconds = MeasureInTurn(contenders, rounds);
  std::vector<double> ratios;
  for (std::size_t r = 0; r < seconds[0].size(); ++r) {
    ratios.push_back(seconds[1][r] / seconds[0][r]);
  }
  const double ratio = Median(ratios);
  report.Add({{"what", what},
              {"ours", Median(seconds[0]) * 1e6},
              {"unit", "us"},
              {"against", against},
              {"limit", Median(seconds[1]) * 1e6},
              {"ratio", ratio},
              {"spread", Spread(ratios)},
              {"bar", fmt::format(">= {:g}", bar)},
              {"holds", ratio >= bar}});
}

// A store of its own with a value of all rows, or with the rows of one push.
struct Store {
  Store(Engine& engine, std::int64_t rows)
      : shape{rows, static_cast<std::int64_t>(kRowSize)},
        kv(KVStore::Create("local", engine)),
        out(shape, DType::kFloat32, Cpu(), engine) {}

  void Push(const InputSet& set) {
    kv->Push("k", set.gradients);
    kv->engine().WaitForAll();
  }
  void Pull(const InputSet& set) {
    kv->RowSparsePull("k", out, set.wanted_array);
    out.WaitToRead();
  }

  const Shape shape;
  std::unique_ptr<KVStore> kv;
  RowSparseNDArray out;
};

void MeasureThreads(int threads, bool quick, BarReport& report) {
  EngineOptions options;
  if (threads == 1) {
    options.type = "serial";
  } else {
    options.num_workers = threads;
  }
  Engine engine(options);
  const std::string on = threads == 1 ? ", 1 thread" : fmt::format(", {} threads", threads);
  const int rounds = quick ? 1 : 9;
  std::mt19937_64 random(1);
  std::vector<InputSet> sets;
  for (std::size_t i = 0; i < kSets; ++i) sets.push_back(MakeInputs(random, kRows, engine));

  const NDArray weight = NDArray::Full({kRows, kRowSize}, 0.01, DType::kFloat32, Cpu(), engine);
  weight.WaitToRead();
  {
    const auto parts = static_cast<std::size_t>(threads);
    Output out{Ids(parts * kDevices * kTouched),
               std::vector<float>(parts * kDevices * kTouched * kRowSize)};
    const auto push_seconds = [&](Store& store) {
      return
          [&] { return SecondsEach(threads, sets, [&](const InputSet& set) { store.Push(set); }); };
    };
    {
      Store store(engine, kRows);
      store.kv->Init("k", RowSparseNDArray(store.shape, DType::kFloat32, Cpu(), engine));
      Compare(
          "push of 4 x 10 000 rows of 64" + on, "merge loop", kBar, rounds, push_seconds(store),
          [&] {
            return LoopSecondsEach(threads, sets, [&](const InputSet& set, Team& team) {
              SumLoop(set.sources, out, team);
            });
          },
          report);
    }
    for (const bool row_sparse : {false, true}) {
      Store store(engine, kRows);
      if (row_sparse) {
        store.kv->Init("k", RowSparseNDArray::FromDense(weight));
      } else {
        store.kv->Init("k", weight);
      }
      store.kv->SetOptimizer(Sgd({.learning_rate = kRate}));
      const char* const kind = row_sparse ? "row-sparse" : "dense";
      Compare(
          fmt::format("the same with SGD, {} weight{}", kind, on), "merge loop", kBar, rounds,
          push_seconds(store),
          [&] {
            return LoopSecondsEach(threads, sets, [&](const InputSet& set, Team& team) {
              SgdLoop(set.sources, weight.data<float>(), team);
            });
          },
          report);
      if (!row_sparse) continue;
      Compare(
          "row_sparse_pull of 10 000 rows of 64" + on, "sort and copy loop", kBar, rounds,
          [&] { return SecondsEach(threads, sets, [&](const InputSet& set) { store.Pull(set); }); },
          [&] {
            return LoopSecondsEach(threads, sets, [&](const InputSet& set, Team& team) {
              PullLoop(set.wanted, weight.data<float>(), out, team);
            });
          },
          report);
    }
  }
  // As many rows are touched, and are there, of many more.
  constexpr std::int64_t kManyRows = 1'000'000'000'000;
  std::vector<InputSet> many_sets;
  for (std::size_t i = 0; i < kSets; ++i)
    many_sets.push_back(MakeInputs(random, kManyRows, engine));
  Store few(engine, kRows);
  Store many(engine, kManyRows);
  few.Push(sets[0]);
  many.Push(many_sets[0]);
  const auto push_and_pull_seconds = [&](Store& store, const std::vector<InputSet>& of) {
    return [&] {
      return SecondsEach(threads, of, [&](const InputSet& set) {
        store.Push(set);
        store.Pull(set);
      });
    };
  };
  Compare("push and pull of 10^12 rows" + on, "10^6 rows", 0.8, rounds,
          push_and_pull_seconds(many, many_sets), push_and_pull_seconds(few, sets), report);
}

}  // namespace

void MeasureSparse(BarReport& report, bool quick) {
  MeasureThreads(1, quick, report);
  const int workers = Engine(EngineOptions{}).options().num_workers;
  if (workers > 1) MeasureThreads(workers, quick, report);
}

}  // namespace heddle::bench
