// The elements of greatest magnitude, as places and values, to all ranks: CompressionOptions::ratio of a parameter's,
// at least one. The others stay in the error of their rank. Ref: Stich et al., "Sparsified SGD with Memory", NeurIPS
// 2018.
#include "zero/reductions/table.h"

#include <kernels/topk/topk.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

namespace zeroth {
namespace {

class TopK final : public SegmentReduction {
 public:
  explicit TopK(const ReductionContext& context)
      : SegmentReduction(context, Runs::kOnAnyDevice), ratio_(context.options.ratio) {
    ZR_CHECK(ratio_ > 0.0 && ratio_ <= 1.0, ErrorCode::kConfig, "such a share of elements cannot travel",
             {.where = "zero.reductions",
              .which = "optimizer.params.compression_ratio",
              .expected = "a number above 0, at most 1",
              .got = std::to_string(ratio_)});
  }

 private:
  [[nodiscard]] std::int64_t taken_of(const Segment& segment) const {
    const auto share = static_cast<std::int64_t>(std::ceil(static_cast<double>(segment.numel) * ratio_));
    return std::clamp<std::int64_t>(share, 1, segment.numel);
  }

  void reduce_part(const Part& part) override {
    const std::int64_t n = part.segment.numel;
    const std::int64_t k = taken_of(part.segment);
    const int world = ranks().size();
    const std::int64_t room = kernels().on_host() ? kernels::topk_room(n, k) : k;
    const std::span<std::int32_t> places = memory<std::int32_t>(room);
    const std::span<float> values = memory<float>(room);
    kernels().topk({.places = places.data(),
                    .values = values.data(),
                    .src = part.message,
                    .error = part.error,
                    .n = n,
                    .k = k,
                    .room = room},
                   stream());
    const std::span<std::int32_t> all_places = memory<std::int32_t>(k * world);
    const std::span<float> all_values = memory<float>(k * world);
    const auto taken = static_cast<std::size_t>(k);
    ranks().all_gather(std::span<const std::int32_t>(places.first(taken)), all_places);
    ranks().all_gather(std::span<const float>(values.first(taken)), all_values);
    std::vector<kernels::TopkSource> sources;
    for (int rank = 0; rank < world; ++rank)
      sources.push_back({.places = all_places.data() + rank * k, .values = all_values.data() + rank * k, .k = k});
    kernels().zero(part.result, array_bytes(n, DType::kFloat32), stream());
    kernels().topk_add({.dst = part.result,
                        .sources = sources.data(),
                        .num_sources = world,
                        .n = n,
                        .factor = 1.0F / static_cast<float>(world)},
                       stream());
  }

  MessageWire wire_of(const Segment& segment) const override {
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(std::int32_t) + sizeof(float));
    return {.all_gather = kBytes * taken_of(segment) * (ranks().size() - 1)};
  }

  double ratio_;
};

}  // namespace

std::unique_ptr<MessageReduction> make_top_k(const ReductionContext& context) {
  return std::make_unique<TopK>(context);
}

}  // namespace zeroth
