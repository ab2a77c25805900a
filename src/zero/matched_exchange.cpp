// Gradients where every rank makes the same calls: a published bucket is one reduce_scatter, in the order in which the
// unit buckets close, which is that of the model's backward on all ranks.
#include "zero/call_tags.h"
#include "zero/coded_calls.h"
#include "zero/gradient_exchange.h"
#include "zero/landing_sums.h"
#include "zero/matched_sums.h"

#include <zeroth/base/failpoint.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

class MatchedExchange final : public GradientExchange {
 public:
  explicit MatchedExchange(const ExchangeContext& context)
      : model_(context.model),
        memory_(context.memory),
        backend_(context.backend),
        reduce_stream_(context.reduce_stream),
        shards_(context.shards),
        sub_group_(model_, backend_, memory_.degrees().gradient, 1, "gradients"),
        sums_(context),
        published_(model_.flats.size()),
        final_(model_.flats.size()) {
    if (memory_.sums_leave_device()) landing_.emplace(model_, memory_, shards_, reduce_stream_);
    if (memory_.plan().codes.gradient_bits > 0 && sub_group_.moves() && !memory_.degrees().sums_groups()) {
      codes_ = std::make_unique<CodedReduction>(model_, memory_.plan(), backend_, context.kernels, reduce_stream_,
                                                context.ledger);
    }
  }

  void await_slot(int /*unit*/, const std::function<bool(int)>& /*skip*/) override {
    if (landing_) landing_->await_copies();
    reduce_stream_.synchronize();
  }

  void publish(int flat, DType dtype, bool last) override {
    ZR_FAILPOINT("matched.reduce");
    reduce(flat, dtype);
    if (last) final_[static_cast<std::size_t>(flat)] = reduce_stream_.record();
  }

  [[nodiscard]] bool are_final(int flat) override {
    // Sums of other ranks travel in a call of all ranks, which no rank makes before the vote.
    const Range own = model_.flat(flat).shard(memory_.rank());
    const Range updated = memory_.update_range(flat);
    if (updated.begin < own.begin || updated.end > own.end || memory_.degrees().sums_groups()) return false;
    const std::optional<Event>& reduced = final_[static_cast<std::size_t>(flat)];
    return reduced && reduced->ready() && (!landing_ || landing_->has_landed(flat));
  }

  void set_before_wait(std::function<void()> /*hook*/) override {}
  void progress() override {
    if (landing_) landing_->progress();
  }
  void close_backward(std::uint64_t /*next*/) override {}

  void sync(OperationId what, std::string_view name) override { matched_sync(what, name, backend_, reduce_stream_); }

  void await_sums(std::uint64_t /*next*/) override {
    reduce_stream_.synchronize();
    if (landing_) landing_->finish();
  }

  void combine_sums(std::uint64_t /*next*/) override {
    if (sums_.combines()) sums_.combine(published_);
  }
  void share_sums() override { sums_.share(published_); }

  void begin_step() override {
    published_.assign(published_.size(), 0);
    final_.assign(final_.size(), std::nullopt);
    if (landing_) landing_->begin_step();
  }
  void restored(int flat) override { published_[static_cast<std::size_t>(flat)] = 1; }
  [[nodiscard]] std::uint64_t spills() const override { return 0; }
  [[nodiscard]] std::size_t transport_bytes() const override {
    return sub_group_.transport_bytes() + sums_.transport_bytes() + (codes_ ? codes_->transport_bytes() : 0);
  }

 private:
  void reduce(int flat, DType dtype) {
    const FlatLayout& layout = model_.flat(flat);
    const DType accumulation = layout.accumulation();
    std::byte* bucket = memory_.bucket(flat, dtype);
    // A bucket of the sums' dtype has room for the sum. Another one has not, and its sums have memory of
    // their own.
    const bool in_place = memory_.bucket_dtype(flat) == accumulation;
    const Range part = memory_.micro_step_part(flat);
    if (!sub_group_.moves()) {
      published_[static_cast<std::size_t>(flat)] = 1;
      reduce_stream_.enqueue([this, flat, bucket, dtype, part] {
        const Summand sum{.data = bucket + array_bytes(part.begin, dtype), .dtype = dtype, .rank = memory_.rank()};
        add(flat, sum);
      });
      return;
    }
    if (codes_ && has_codes(layout)) {
      published_[static_cast<std::size_t>(flat)] = 1;
      const std::byte* const values = codes_->reduce(layout, bucket, dtype, memory_.reduction_errors(flat));
      if (part.size() == 0) return;
      reduce_stream_.enqueue([this, flat, values] { add(flat, {.data = values, .dtype = DType::kFloat32}); });
      if (reduce_stream_.runs_inline()) reduce_stream_.synchronize();
      return;
    }
    std::byte* const own = in_place ? bucket + array_bytes(part.begin, accumulation) : memory_.micro_step_sums(flat);
    Collective reduce = sub_group_.reduction(CallPurpose::kReduceGradients, layout, dtype, bucket, own);
    reduce.accumulate = !in_place && published_[static_cast<std::size_t>(flat)] != 0;
    published_[static_cast<std::size_t>(flat)] = 1;
    const Work work = sub_group_.submit({&reduce, 1}, reduce_stream_);
    if (part.size() == 0) return;
    reduce_stream_.enqueue([this, flat, accumulation, in_place, own, work] {
      work.wait();
      const Summand sum{.data = own, .dtype = accumulation};
      in_place ? add(flat, sum) : shards_.arrived(flat);
    });
    if (reduce_stream_.runs_inline())
      reduce_stream_.synchronize();  // an error, if there is one, here and not at the step
  }

  /// A new sum, in the flat's bucket.
  void add(int flat, const Summand& sum) {
    if (landing_) return landing_->start(flat, static_cast<const std::byte*>(sum.data), sum.dtype);
    shards_.add(flat, {&sum, 1});
  }

  const ModelLayout& model_;
  ModelMemory& memory_;
  CommBackend& backend_;
  Stream reduce_stream_;
  ReducedShards& shards_;
  SubGroupCalls sub_group_;  ///< whose gradients this rank sums: all, or those of its sub-group
  MatchedSums sums_;
  std::vector<std::uint8_t> published_;      ///< one a flat: reduced in this step
  std::vector<std::optional<Event>> final_;  ///< one a flat: its last reduction of this step
  std::optional<LandingSums> landing_;       ///< of sums that rest beside the device
  std::unique_ptr<CodedReduction> codes_;    ///< null: gradients travel as they are
};

}  // namespace

std::unique_ptr<GradientExchange> make_matched_exchange(const ExchangeContext& context) {
  return std::make_unique<MatchedExchange>(context);
}

}  // namespace zeroth
