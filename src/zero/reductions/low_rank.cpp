// Matrices as products of two thin ones, CompressionOptions::rank columns each; vectors, and matrices that would not
// get smaller, exactly. What the product misses stays in the error of each rank.
//
// Products are of errors and gradients. Momenta do not travel: every rank has them, adds the product, and so keeps
// the directions of all products before. Those of the whole momentum would have one product's alone.
//
// The paper keeps Q from step to step. Here it is made of the momentum, which every rank has and checkpoints keep: one
// step of a power iteration on it, from a drawn start, gives the columns that the last messages had.
// Ref: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithm 1.
#include "zero/reductions/table.h"

#include <kernels/lowrank/lowrank.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

namespace zeroth {
namespace {

class LowRank final : public SegmentReduction {
 public:
  explicit LowRank(const ReductionContext& context)
      : SegmentReduction(context, Runs::kOnAnyDevice), rank_(context.options.rank) {
    ZR_CHECK(rank_ >= 1 && rank_ <= kernels::kMostRank, ErrorCode::kConfig, "factors cannot have so many columns",
             {.where = "zero.reductions",
              .which = "optimizer.params.compression_rank",
              .expected = "1 to " + std::to_string(kernels::kMostRank),
              .got = std::to_string(rank_)});
  }

 private:
  /// Rows and columns; rank 0: it travels as it is.
  [[nodiscard]] kernels::LowRankShape shape_of(const Segment& segment) const {
    const std::vector<std::int64_t>& shape = context().model.params[static_cast<std::size_t>(segment.param)].shape;
    kernels::LowRankShape matrix{.rows = 1, .columns = segment.numel, .stride = segment.numel, .rank = 0};
    if (shape.size() < 2 || shape.front() == 0) return matrix;
    matrix.rows = shape.front();
    matrix.columns = matrix.stride = segment.numel / shape.front();
    const auto rank = static_cast<int>(std::min<std::int64_t>({rank_, matrix.rows, matrix.columns}));
    if ((matrix.rows + matrix.columns) * rank < segment.numel) matrix.rank = rank;
    return matrix;
  }

  void reduce_part(const Part& part) override {
    const std::int64_t n = part.segment.numel;
    const float share = 1.0F / static_cast<float>(ranks().size());
    const kernels::LowRankShape shape = shape_of(part.segment);
    const auto bytes = array_bytes(n, DType::kFloat32);
    if (shape.rank == 0) {
      mean_of({part.message, static_cast<std::size_t>(n)}, share);
      kernels().copy(part.result, part.message, bytes, stream());
      return;
    }
    const std::span<float> p = memory<float>(shape.rows * shape.rank);
    const std::span<float> q = memory<float>(shape.columns * shape.rank);
    first_factor(part, shape, p, q);
    multiply(shape, part.message, q, p);
    mean_of(p, share);
    orthonormalize(shape, p);
    multiply_transposed(shape, part.message, p, q);
    const std::span<float> own = memory<float>(shape.columns * shape.rank);
    kernels().copy(own.data(), q.data(), own.size_bytes(), stream());
    mean_of(q, share);
    // What this rank has given to the mean is its own projection.
    kernels().copy(part.error, part.message, bytes, stream());
    restore(shape, p, own, nullptr, part.error);
    restore(shape, p, q, part.result, nullptr);
  }

  /// P = M Q.
  void multiply(const kernels::LowRankShape& shape, const float* matrix, std::span<float> q, std::span<float> p) {
    kernels().lowrank_product({.shape = shape,
                               .matrix = matrix,
                               .factor = q.data(),
                               .factor_stride = shape.columns,
                               .result = p.data(),
                               .result_stride = shape.rows},
                              stream());
  }
  /// Q = M^T P.
  void multiply_transposed(const kernels::LowRankShape& shape, const float* matrix, std::span<float> p,
                           std::span<float> q) {
    kernels().lowrank_transposed_product({.shape = shape,
                                          .matrix = matrix,
                                          .factor = p.data(),
                                          .factor_stride = shape.rows,
                                          .result = q.data(),
                                          .result_stride = shape.columns},
                                         stream());
  }
  void orthonormalize(const kernels::LowRankShape& shape, std::span<float> p) {
    kernels().lowrank_orthonormalize(
        {.columns = p.data(), .rows = shape.rows, .stride = shape.rows, .rank = shape.rank}, stream());
  }
  void restore(const kernels::LowRankShape& shape, std::span<float> p, std::span<float> q, float* result,
               float* error) {
    kernels().lowrank_restore({.shape = shape,
                               .p = p.data(),
                               .p_stride = shape.rows,
                               .q = q.data(),
                               .q_stride = shape.columns,
                               .result = result,
                               .error = error},
                              stream());
  }

  /// The same Q on all ranks. `p`: for what it needs in between.
  void first_factor(const Part& part, const kernels::LowRankShape& shape, std::span<float> p, std::span<float> q) {
    const kernels::LowRankDrawArgs missing{.columns = q.data(),
                                           .n = shape.columns,
                                           .stride = shape.columns,
                                           .rank = shape.rank,
                                           .seed = static_cast<std::uint32_t>(part.segment.param * 64)};
    kernels().zero(q.data(), q.size_bytes(), stream());
    kernels().lowrank_draw_missing(missing, stream());
    if (part.momentum == nullptr) return;
    multiply(shape, part.momentum, q, p);
    orthonormalize(shape, p);
    multiply_transposed(shape, part.momentum, p, q);
    // A direction that the momentum has not, at the first message all of them.
    kernels().lowrank_draw_missing(missing, stream());
  }

  /// In place, the mean over the ranks.
  void mean_of(std::span<float> values, float share) {
    const auto n = static_cast<std::int64_t>(values.size());
    const std::span<float> all = memory<float>(n * ranks().size());
    ranks().all_gather(std::span<const float>(values), all);
    kernels().zero(values.data(), values.size_bytes(), stream());
    for (int rank = 0; rank < ranks().size(); ++rank)
      add(values.data(), share, all.data() + rank * n, n, kernels(), stream());
  }

  MessageWire wire_of(const Segment& segment) const override {
    const kernels::LowRankShape shape = shape_of(segment);
    const std::int64_t elements = shape.rank == 0 ? segment.numel : (shape.rows + shape.columns) * shape.rank;
    return {.all_gather = elements * static_cast<std::int64_t>(sizeof(float)) * (ranks().size() - 1)};
  }

  int rank_;
};

/// Products of what is new: the momentum stays on the ranks.
class LowRankChanges final : public MessageReduction {
 public:
  explicit LowRankChanges(const ReductionContext& context)
      : products_(context),
        segments_(context.layout().segments),
        kernels_(context.kernels),
        stream_(context.stream),
        is_exact_(context.communicator.size() == 1 || context.layout().accumulation() != DType::kFloat32) {}

  void reduce(const Message& message, const std::vector<std::optional<MessageFactors>>& factors,
              std::byte* worker_error, std::byte* server_error, std::byte* result) override {
    if (is_exact_ || message.momentum == nullptr)
      return products_.reduce(message, factors, worker_error, server_error, result);
    std::vector<std::optional<MessageFactors>> changes = factors;
    std::vector<Scratch> kept(segments_.size());  // `result` may be the momentum
    for (std::size_t number = 0; number < segments_.size(); ++number) {
      if (!changes[number] || segments_[number].numel == 0) continue;
      const std::size_t bytes = array_bytes(segments_[number].numel, DType::kFloat32);
      kept[number] = kernels_.make_scratch(bytes);
      kernels_.copy(kept[number].bytes.data(), message.momentum + at(number), bytes, stream_);
      changes[number]->momentum = 0.0;
    }
    products_.reduce(message, changes, worker_error, server_error, result);
    for (std::size_t number = 0; number < segments_.size(); ++number) {
      if (kept[number].bytes.empty()) continue;
      add(reinterpret_cast<float*>(result + at(number)), static_cast<float>(factors[number]->momentum),
          reinterpret_cast<const float*>(kept[number].bytes.data()), segments_[number].numel, kernels_, stream_);
    }
    kernels_.settle(stream_);
  }
  [[nodiscard]] MessageWire wire() const override { return products_.wire(); }

 private:
  [[nodiscard]] std::size_t at(std::size_t number) const {
    return array_bytes(segments_[number].offset, DType::kFloat32);
  }

  LowRank products_;
  const std::vector<Segment>& segments_;
  Kernels& kernels_;
  Stream stream_;
  bool is_exact_;
};

}  // namespace

std::unique_ptr<MessageReduction> make_low_rank(const ReductionContext& context) {
  return std::make_unique<LowRankChanges>(context);
}

}  // namespace zeroth
