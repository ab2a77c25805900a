#include "zero/matched_sums.h"

#include <zeroth/base/failpoint.h>

#include <string>
#include <vector>

namespace zeroth {

void matched_sync(OperationId what, std::string_view name, CommBackend& backend, const Stream& stream) {
  stream.synchronize();
  const Collective barrier{.kind = CollectiveKind::kBarrier, .tag = tag_of(what), .name = std::string(name)};
  backend.submit({&barrier, 1}, stream).wait();
}

MatchedSums::MatchedSums(const ExchangeContext& context)
    : model_(context.model),
      memory_(context.memory),
      backend_(context.backend),
      reduce_stream_(context.reduce_stream),
      shards_(context.shards),
      kernels_(context.kernels),
      others_(model_, backend_, memory_.degrees().world, memory_.degrees().gradient, "groups"),
      updates_(model_, backend_, memory_, memory_.degrees().world, memory_.degrees().sums, "sums") {
  if (memory_.plan().codes.gradient_bits > 0 && others_.moves()) {
    codes_ =
        std::make_unique<CodedReduction>(model_, memory_.plan(), backend_, kernels_, reduce_stream_, context.ledger);
  }
}

void MatchedSums::combine(std::span<std::uint8_t> summed) {
  ZR_FAILPOINT("matched.combine");
  // Sub-groups may have taken different paths, and a rank whose part is empty does not know: what any of them has
  // sums of, all add up.
  const std::vector<std::uint8_t> own(summed.begin(), summed.end());
  const Collective agree{.kind = CollectiveKind::kAllReduce,
                         .in_dtype = DType::kUInt8,
                         .out_dtype = DType::kUInt8,
                         .send = reinterpret_cast<const std::byte*>(summed.data()),
                         .recv = reinterpret_cast<std::byte*>(summed.data()),
                         .counts = {static_cast<std::int64_t>(summed.size())},
                         .op = ReduceOp::kMax,
                         .tag = {.unit = -1, .label = static_cast<std::uint32_t>(CallPurpose::kCombineGradients)}};
  reduce_stream_.synchronize();
  backend_.submit({&agree, 1}, make_nested_stream("sums")).wait();  // memory of the host
  std::vector<Collective> calls;
  for (std::size_t index = 0; index < summed.size(); ++index) {
    if (summed[index] == 0) continue;
    const int flat = static_cast<int>(index);
    const FlatLayout& layout = model_.flats[index];
    const DType accumulation = layout.accumulation();
    std::byte* const sums = memory_.micro_step_sums(flat);
    if (own[index] == 0)
      kernels_.zero(sums, array_bytes(memory_.micro_step_part(flat).size(), accumulation), reduce_stream_);
    if (codes_ && has_codes(layout)) {
      const std::byte* const sum = codes_->reduce(layout, sums, accumulation, memory_.reduction_errors(flat));
      reduce_stream_.enqueue([this, flat, sum, bytes = array_bytes(layout.shard(memory_.rank()).size(), accumulation)] {
        kernels_.copy(memory_.reduced(flat), sum, bytes, reduce_stream_);
      });
      continue;
    }
    calls.push_back(
        others_.reduction(CallPurpose::kCombineGradients, layout, accumulation, sums, memory_.reduced(flat)));
  }
  if (!calls.empty()) others_.submit(calls, reduce_stream_).wait();
  if (codes_) reduce_stream_.synchronize();
  for (std::size_t index = 0; index < summed.size(); ++index) {
    if (summed[index] != 0) shards_.combined(static_cast<int>(index));
  }
}

void MatchedSums::share(std::span<const std::uint8_t> summed) {
  if (!updates_.moves()) return;
  // Every bucket is free until the next backward, but for the sums that lie in it.
  for (std::size_t index = 0; index < summed.size(); ++index) {
    if (summed[index] == 0) continue;
    const int flat = static_cast<int>(index);
    const FlatLayout& layout = model_.flats[index];
    const std::vector<Work> works = updates_.gather(CallPurpose::kShareGradients, layout, layout.accumulation(),
                                                    memory_.reduced(flat), memory_.gathered_sums(flat), reduce_stream_);
    for (const Work& work : works) work.wait();
  }
}

}  // namespace zeroth
