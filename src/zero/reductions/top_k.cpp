// The elements of greatest magnitude, as places and values, to all ranks: CompressionOptions::ratio of a parameter's,
// at least one. The others stay in the error of their rank. Ref: Stich et al., "Sparsified SGD with Memory", NeurIPS
// 2018.
#include "zero/reductions/table.h"

#include <kernels/topk/topk.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace zeroth {
namespace {

class TopK final : public SegmentReduction {
 public:
  explicit TopK(const ReductionContext& context) : SegmentReduction(context), ratio_(context.options.ratio) {
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
    const auto k = static_cast<std::size_t>(taken_of(part.segment));
    const auto world = static_cast<std::size_t>(ranks().size());
    const std::int64_t room = kernels::topk_room(n, static_cast<std::int64_t>(k));
    std::vector<std::int32_t> places(static_cast<std::size_t>(room));
    std::vector<float> values(static_cast<std::size_t>(room));
    kernels::topk({.places = places.data(),
                   .values = values.data(),
                   .src = part.message,
                   .error = part.error,
                   .n = n,
                   .k = static_cast<std::int64_t>(k),
                   .room = room},
                  isa());
    places.resize(k);
    values.resize(k);
    std::vector<std::int32_t> all_places(k * world);
    std::vector<float> all_values(k * world);
    ranks().all_gather(std::span<const std::int32_t>(places), std::span(all_places));
    ranks().all_gather(std::span<const float>(values), std::span(all_values));
    std::vector<kernels::TopkSource> sources;
    for (std::size_t rank = 0; rank < world; ++rank) {
      sources.push_back({.places = all_places.data() + rank * k,
                         .values = all_values.data() + rank * k,
                         .k = static_cast<std::int64_t>(k)});
    }
    std::memset(part.result, 0, array_bytes(n, DType::kFloat32));
    kernels::topk_add({.dst = part.result,
                       .sources = sources.data(),
                       .num_sources = static_cast<int>(world),
                       .n = n,
                       .factor = 1.0F / static_cast<float>(world)});
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
