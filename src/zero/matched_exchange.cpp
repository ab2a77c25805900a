// Gradients where every rank makes the same calls: a published bucket is one reduce_scatter, in the order in which the unit buckets
// close, which is that of the model's backward on all ranks.
#include <cstring>
#include <utility>
#include <vector>

#include <zeroth/base/failpoint.h>
#include <zeroth/zero/call_tags.h>

#include "zero/gradient_exchange.h"
#include "zero/row_group.h"

namespace zeroth {
namespace {

class MatchedExchange final : public GradientExchange {
 public:
  explicit MatchedExchange(ExchangeContext context)
      : model_(context.model),
        memory_(context.memory),
        backend_(context.backend),
        reduce_stream_(std::move(context.reduce_stream)),
        shards_(context.shards),
        run_(model_, backend_, memory_.degrees().gradient, 1, "gradients"),
        others_(model_, backend_, memory_.degrees().world, memory_.degrees().gradient, "groups"),
        sums_(model_, backend_, memory_.degrees(), memory_.degrees().world, memory_.degrees().sums, "sums"),
        published_(model_.flats.size(), false) {}

  void await_slot(int /*unit*/, const std::function<bool(int)>& /*skip*/) override { reduce_stream_.synchronize(); }

  void publish(int flat, DType dtype) override {
    ZR_FAILPOINT("matched.reduce");
    const FlatLayout& layout = model_.flat(flat);
    const DType accumulation = layout.accumulation();
    std::byte* bucket = memory_.bucket(flat, dtype);
    // A bucket of the sums' dtype has room for the sum. Another one has not, and its sums have memory of
    // their own.
    const bool in_place = memory_.bucket_dtype(flat) == accumulation;
    const Range part = memory_.micro_step_part(flat);
    if (!run_.moves()) {
      published_[static_cast<std::size_t>(flat)] = true;
      reduce_stream_.enqueue([this, flat, bucket, dtype, part] {
        const Summand sum{.data = bucket + array_bytes(part.begin, dtype), .dtype = dtype, .rank = memory_.rank()};
        shards_.add(flat, {&sum, 1});
      });
      return;
    }
    std::byte* const own = in_place ? bucket + array_bytes(part.begin, accumulation) : memory_.micro_step_sums(flat);
    Collective reduce = run_.reduction(CallPurpose::kReduceGradients, layout, dtype, bucket, own);
    reduce.accumulate = !in_place && published_[static_cast<std::size_t>(flat)];
    published_[static_cast<std::size_t>(flat)] = true;
    const Work work = run_.submit({&reduce, 1}, reduce_stream_);
    if (part.size() == 0) return;
    reduce_stream_.enqueue([this, flat, accumulation, in_place, own, work] {
      work.wait();
      const Summand sum{.data = own, .dtype = accumulation};
      in_place ? shards_.add(flat, {&sum, 1}) : shards_.arrived(flat);
    });
    if (reduce_stream_.runs_inline()) reduce_stream_.synchronize();  // an error, if there is one, here and not at the step
  }

  void progress() override {}
  void close_backward(std::uint64_t /*next*/) override {}

  void meet(Meeting what, std::string_view name) override {
    reduce_stream_.synchronize();
    const Collective barrier{.kind = CollectiveKind::kBarrier, .tag = tag_of(what), .name = std::string(name)};
    backend_.submit({&barrier, 1}, reduce_stream_).wait();
  }

  void await_sums(std::uint64_t /*next*/) override { reduce_stream_.synchronize(); }

  void combine_sums(std::uint64_t /*next*/) override {
    if (!others_.moves()) return;
    ZR_FAILPOINT("matched.combine");
    // Runs of ranks may have taken different paths: what any of them has sums of, all of them add up.
    std::vector<std::uint8_t> summed(published_.begin(), published_.end());
    const Collective agree{.kind = CollectiveKind::kAllReduce,
                           .in_dtype = DType::kUInt8,
                           .out_dtype = DType::kUInt8,
                           .send = reinterpret_cast<const std::byte*>(summed.data()),
                           .recv = reinterpret_cast<std::byte*>(summed.data()),
                           .counts = {static_cast<std::int64_t>(summed.size())},
                           .op = ReduceOp::kMax,
                           .tag = {.unit = -1, .label = static_cast<std::uint32_t>(CallPurpose::kCombineGradients)}};
    others_.submit({&agree, 1}, reduce_stream_).wait();
    std::vector<Collective> calls;
    for (std::size_t index = 0; index < published_.size(); ++index) {
      if (summed[index] == 0) continue;
      const int flat = static_cast<int>(index);
      const FlatLayout& layout = model_.flats[index];
      const DType accumulation = layout.accumulation();
      std::byte* const sums = memory_.micro_step_sums(flat);
      if (!published_[index]) std::memset(sums, 0, array_bytes(memory_.micro_step_part(flat).size(), accumulation));
      calls.push_back(others_.reduction(CallPurpose::kCombineGradients, layout, accumulation, sums, memory_.reduced(flat)));
      published_[index] = true;
    }
    if (!calls.empty()) others_.submit(calls, reduce_stream_).wait();
    for (std::size_t index = 0; index < published_.size(); ++index) {
      if (published_[index]) shards_.combined(static_cast<int>(index));
    }
  }

  void share_sums() override {
    if (!sums_.moves()) return;
    // Every bucket is free until the next backward, but for the sums that lie in it.
    for (std::size_t flat = 0; flat < published_.size(); ++flat) {
      if (!published_[flat]) continue;
      const int index = static_cast<int>(flat);
      const FlatLayout& layout = model_.flats[flat];
      const std::vector<Work> works = sums_.gather(CallPurpose::kShareGradients,
                                                   layout,
                                                   layout.accumulation(),
                                                   memory_.reduced(index),
                                                   memory_.gathered_sums(index),
                                                   reduce_stream_);
      for (const Work& work : works) work.wait();
    }
  }

  void begin_step() override { published_.assign(published_.size(), false); }
  [[nodiscard]] std::uint64_t spills() const override { return 0; }
  [[nodiscard]] std::size_t transport_bytes() const override {
    return run_.transport_bytes() + others_.transport_bytes() + sums_.transport_bytes();
  }

 private:
  const ModelLayout& model_;
  ModelMemory& memory_;
  CommBackend& backend_;
  Stream reduce_stream_;
  ReducedShards& shards_;
  RowGroup run_;                 ///< whose gradients this rank sums: all, or those of its run
  RowGroup others_;              ///< one rank of each run, with the same part
  RowPath sums_;                 ///< whose pieces are what this rank updates
  std::vector<bool> published_;  ///< one a flat: reduced in this step
};

}  // namespace

std::unique_ptr<GradientExchange> make_matched_exchange(ExchangeContext context) {
  return std::make_unique<MatchedExchange>(std::move(context));
}

}  // namespace zeroth
