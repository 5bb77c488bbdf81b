// What the bodies of the stores' GPU ops do with arrays: array_kernels.h on a stream.
#pragma once

#include <heddle/engine.h>
#include <heddle/gpu.h>
#include <heddle/ndarray.h>

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvstore/compression/compressor.h"
#include "kvstore/optimizer/gpu_updates.h"
#include "kvstore/update_state.h"
#include "ops/gpu_kernels.h"

namespace heddle::kvstore {

// The most arrays that a sum on a GPU takes in one launch.
inline constexpr std::size_t kGpuInputsMax = ops::kGpuSumInputsMax;

// The kernels of the engine's GPUs.
const GpuUpdates& GpuUpdatesOf(const Engine& engine);

// Issues work for one op, on arrays of the op's GPU if nothing else is said. What it issues is done
// in order, later; equal shapes everywhere.
//
// What an op does to many keys goes in few launches: sums, copies out and updates are put off until
// Issue, and then all that are alike are launched together. Nothing else in the op uses what they
// write, except that an update takes a sum as its gradient.
class GpuWork {
 public:
  // What is put off.
  struct Pending {
    struct Sum {
      DType dtype;
      std::vector<const void*> inputs;
      void* out;
      std::size_t count;
      void* carry;
    };
    struct Copy {
      DType from, to;
      const void* source;
      void* out;
      std::size_t count;
    };
    struct Update {
      ArrayUpdate update;
      const void* gradient;
      std::size_t count;
    };
    std::size_t keys = 1;  // that they may be of
    std::vector<Sum> sums;
    std::vector<Copy> copies;
    std::vector<Update> updates;
  };

  // `kept` lives as long as the op; `pending`, empty at first, until after Issue.
  GpuWork(Engine& engine, GpuStream stream, std::vector<std::shared_ptr<void>>* kept,
          Pending* pending)
      : engine_(engine), stream_(stream), kept_(*kept), pending_(*pending) {}

  // There may be something to put off of so many keys.
  void Expect(std::size_t keys) const { pending_.keys = keys; }

  // --- Put off until Issue.

  // out = inputs[0] + inputs[1] + ..., in list order; one input at least. Inputs may be `out`.
  void Sum(std::span<const NDArray> inputs, const NDArray& out) const;
  // Every output becomes `from`, cast to its dtype. An output may be `from` itself.
  void CopyOut(const NDArray& from, std::span<const NDArray> out) const;
  // All passes of `update`; none for a value without elements.
  void Update(const ArrayUpdate& update, const NDArray& gradient) const;
  // At the end of the op.
  void Issue() const;

  // --- Issued at once.

  // code = what `compressor` makes of the gradient, whose rest stays in the residual.
  void Compress(const Compressor& compressor, const NDArray& gradient, const NDArray& residual,
                const NDArray& code) const;
  // out = the sum of what the codes stand for.
  void SumCodes(const Compressor& compressor, std::span<const NDArray> codes,
                const NDArray& out) const;
  // to = from, cast to its dtype.
  void Copy(const NDArray& from, const NDArray& to) const;
  void FillZero(const NDArray& array) const;
  // From memory of the CPUs that nothing writes any more, of the same dtype.
  void Upload(const NDArray& from, const NDArray& to) const;

  Engine& engine() const { return engine_; }
  GpuStream stream() const { return stream_; }
  // Memory of the op's GPU, aligned to 256 bytes, until the op is done.
  void* Temporary(std::size_t bytes) const;
  // Until the op is done on the device. So is kept what ops that were issued before may still use.
  template <class T>
  void Keep(T value) const {
    kept_.push_back(std::make_shared<T>(std::move(value)));
  }

 private:
  // Memory for a sum of so many arrays to be put aside in; null if it need not be.
  void* CarryFor(std::size_t inputs, const NDArray& out) const;
  void IssueCopies(std::span<const Pending::Copy> copies) const;
  void IssueSums() const;
  void IssueUpdates() const;

  Engine& engine_;
  const GpuStream stream_;
  std::vector<std::shared_ptr<void>>& kept_;
  Pending& pending_;
};

}  // namespace heddle::kvstore
