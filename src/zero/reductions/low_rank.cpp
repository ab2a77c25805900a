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
#include <cstring>
#include <optional>
#include <vector>

namespace zeroth {
namespace {

class LowRank final : public SegmentReduction {
 public:
  explicit LowRank(const ReductionContext& context) : SegmentReduction(context), rank_(context.options.rank) {
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
    if (shape.rank == 0) {
      mean_of(part.message, n, share);
      std::memcpy(part.result, part.message, array_bytes(n, DType::kFloat32));
      return;
    }
    const auto columns = static_cast<std::size_t>(shape.rank);
    std::vector<float> p(static_cast<std::size_t>(shape.rows) * columns);
    std::vector<float> q = first_factor(part, shape, p);
    const auto product = [&](const float* matrix, bool transposed) {
      const kernels::LowRankProductArgs args{.shape = shape,
                                             .matrix = matrix,
                                             .factor = transposed ? p.data() : q.data(),
                                             .factor_stride = transposed ? shape.rows : shape.columns,
                                             .result = transposed ? q.data() : p.data(),
                                             .result_stride = transposed ? shape.columns : shape.rows};
      transposed ? kernels::lowrank_transposed_product(args, isa()) : kernels::lowrank_product(args, isa());
    };
    product(part.message, false);
    mean_of(p.data(), static_cast<std::int64_t>(p.size()), share);
    kernels::lowrank_orthonormalize({.columns = p.data(), .rows = shape.rows, .stride = shape.rows, .rank = shape.rank},
                                    isa());
    product(part.message, true);
    const std::vector<float> own = q;
    mean_of(q.data(), static_cast<std::int64_t>(q.size()), share);
    // What this rank has given to the mean is its own projection.
    std::memcpy(part.error, part.message, array_bytes(n, DType::kFloat32));
    restore(shape, p, own, nullptr, part.error);
    restore(shape, p, q, part.result, nullptr);
  }

  void restore(const kernels::LowRankShape& shape, const std::vector<float>& p, const std::vector<float>& q,
               float* result, float* error) const {
    kernels::lowrank_restore({.shape = shape,
                              .p = p.data(),
                              .p_stride = shape.rows,
                              .q = q.data(),
                              .q_stride = shape.columns,
                              .result = result,
                              .error = error},
                             isa());
  }

  /// The same on all ranks. `p`: for what it needs in between.
  [[nodiscard]] std::vector<float> first_factor(const Part& part, const kernels::LowRankShape& shape,
                                                std::vector<float>& p) const {
    std::vector<float> q(static_cast<std::size_t>(shape.columns) * static_cast<std::size_t>(shape.rank));
    const auto column = [&](int number) { return q.data() + number * shape.columns; };
    const auto draw = [&](int number) {
      kernels::lowrank_draw(column(number), shape.columns,
                            static_cast<std::uint32_t>(part.segment.param * 64 + number));
    };
    for (int number = 0; number < shape.rank; ++number) draw(number);
    if (part.momentum == nullptr) return q;
    kernels::LowRankProductArgs args{.shape = shape,
                                     .matrix = part.momentum,
                                     .factor = q.data(),
                                     .factor_stride = shape.columns,
                                     .result = p.data(),
                                     .result_stride = shape.rows};
    kernels::lowrank_product(args, isa());
    kernels::lowrank_orthonormalize({.columns = p.data(), .rows = shape.rows, .stride = shape.rows, .rank = shape.rank},
                                    isa());
    args.factor = p.data();
    args.factor_stride = shape.rows;
    args.result = q.data();
    args.result_stride = shape.columns;
    kernels::lowrank_transposed_product(args, isa());
    for (int number = 0; number < shape.rank; ++number) {
      const float* const values = column(number);
      // A direction that the momentum has not, at the first message all of them.
      if (std::all_of(values, values + shape.columns, [](float value) { return value == 0.0F; })) draw(number);
    }
    return q;
  }

  /// In place, the mean over the ranks.
  void mean_of(float* values, std::int64_t n, float share) const {
    for (std::int64_t i = 0; i < n; ++i) values[i] *= share;
    std::vector<float> all(static_cast<std::size_t>(n) * static_cast<std::size_t>(ranks().size()));
    ranks().all_gather(std::span<const float>(values, static_cast<std::size_t>(n)), std::span(all));
    std::memcpy(values, all.data(), array_bytes(n, DType::kFloat32));
    for (int rank = 1; rank < ranks().size(); ++rank) {
      const float* const theirs = all.data() + static_cast<std::int64_t>(rank) * n;
      for (std::int64_t i = 0; i < n; ++i) values[i] += theirs[i];
    }
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
        is_exact_(context.communicator.size() == 1 || context.layout().accumulation() != DType::kFloat32) {}

  void reduce(const Message& message, const std::vector<std::optional<MessageFactors>>& factors,
              std::byte* worker_error, std::byte* server_error, std::byte* result) override {
    if (is_exact_ || message.momentum == nullptr)
      return products_.reduce(message, factors, worker_error, server_error, result);
    std::vector<std::optional<MessageFactors>> changes = factors;
    std::vector<std::vector<float>> kept(segments_.size());  // `result` may be the momentum
    for (std::size_t number = 0; number < segments_.size(); ++number) {
      if (!changes[number]) continue;
      const Segment& segment = segments_[number];
      const auto* const momentum = reinterpret_cast<const float*>(message.momentum) + segment.offset;
      kept[number].assign(momentum, momentum + segment.numel);
      changes[number]->momentum = 0.0;
    }
    products_.reduce(message, changes, worker_error, server_error, result);
    for (std::size_t number = 0; number < segments_.size(); ++number) {
      if (!factors[number]) continue;
      const auto factor = static_cast<float>(factors[number]->momentum);
      float* const sum = reinterpret_cast<float*>(result) + segments_[number].offset;
      for (std::size_t i = 0; i < kept[number].size(); ++i) sum[i] += factor * kept[number][i];
    }
  }
  [[nodiscard]] MessageWire wire() const override { return products_.wire(); }

 private:
  LowRank products_;
  const std::vector<Segment>& segments_;
  bool is_exact_;
};

}  // namespace

std::unique_ptr<MessageReduction> make_low_rank(const ReductionContext& context) {
  return std::make_unique<LowRankChanges>(context);
}

}  // namespace zeroth
