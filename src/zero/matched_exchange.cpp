// Gradients where every rank makes the same calls: a published bucket is one reduce_scatter, in the order in which the unit buckets
// close, which is that of the model's backward on all ranks.
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
        sums_(model_, backend_, memory_.degrees().world, memory_.degrees().sums, "sums"),
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
    std::byte* const own = in_place ? bucket + array_bytes(layout.shard(memory_.rank()).begin, accumulation)
                                    : memory_.reduced(flat);
    Collective reduce = reduce_call(layout, dtype, bucket, own);
    reduce.accumulate = !in_place && published_[static_cast<std::size_t>(flat)];
    published_[static_cast<std::size_t>(flat)] = true;
    const Work work = backend_.submit({&reduce, 1}, reduce_stream_);
    if (layout.shard(memory_.rank()).size() == 0) return;
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

  void share_sums() override {
    if (!sums_.moves()) return;
    // Every bucket is free until the next backward, but for the sums that lie in it.
    for (std::size_t flat = 0; flat < published_.size(); ++flat) {
      if (!published_[flat]) continue;
      const int index = static_cast<int>(flat);
      const FlatLayout& layout = model_.flats[flat];
      sums_
          .gather(CallPurpose::kShareGradients,
                  layout,
                  layout.accumulation(),
                  memory_.reduced(index),
                  memory_.gathered_sums(index),
                  reduce_stream_)
          .wait();
    }
  }

  void begin_step() override { published_.assign(published_.size(), false); }
  [[nodiscard]] std::uint64_t spills() const override { return 0; }
  [[nodiscard]] std::size_t transport_bytes() const override { return sums_.transport_bytes(); }

 private:
  const ModelLayout& model_;
  ModelMemory& memory_;
  CommBackend& backend_;
  Stream reduce_stream_;
  ReducedShards& shards_;
  RowGroup sums_;                ///< whose pieces are what this rank updates
  std::vector<bool> published_;  ///< one a flat: reduced in this step
};

}  // namespace

std::unique_ptr<GradientExchange> make_matched_exchange(ExchangeContext context) {
  return std::make_unique<MatchedExchange>(std::move(context));
}

}  // namespace zeroth
