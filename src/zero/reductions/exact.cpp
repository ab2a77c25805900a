// The exact mean of the messages, in rank order: nothing is missed. For flats of float64, and to see what a lossy
// reduction costs beside a frozen variance.
#include "zero/reductions/table.h"

#include <algorithm>
#include <utility>

namespace zeroth {
namespace {

class ExactReduction final : public MessageReduction {
 public:
  explicit ExactReduction(ReductionContext context)
      : context_(std::move(context)),
        messages_(context_.kernels.on_host() ? context_.communicator
                                             : Communicator(context_.communicator.shared_backend(), context_.stream)) {}

  void reduce(const Message& message, const std::vector<std::optional<MessageFactors>>& factors,
              std::byte* worker_error, std::byte* /*server_error*/, std::byte* result) override {
    const FlatLayout& flat = context_.layout();
    const DType dtype = flat.accumulation();
    Kernels& kernels = context_.kernels;
    const int world = context_.communicator.size();
    const double part = 1.0 / static_cast<double>(world);
    const std::size_t bytes = array_bytes(flat.length, dtype);
    // Messages are formed where errors are, which are zeros before and after: a mean as a sum of parts.
    for (std::size_t number = 0; number < flat.segments.size(); ++number) {
      if (!factors[number]) continue;
      const MessageFactors share{.momentum = factors[number]->momentum * part,
                                 .grad = factors[number]->grad * part,
                                 .sum = factors[number]->sum * part};
      form(message, share, flat.segments[number].range(), worker_error, dtype, kernels, context_.stream);
    }
    kernels.settle(context_.stream);
    Scratch gathered;
    const std::byte* sums = worker_error;
    if (world > 1) {
      gathered = kernels.make_scratch(bytes);
      dtype == DType::kFloat64 ? sum<double>(worker_error, gathered) : sum<float>(worker_error, gathered);
      sums = gathered.bytes.data();
    }
    std::int64_t at = 0;  // in `sums`
    for (int rank = 0; rank < world; ++rank) {
      const Range piece = world > 1 ? flat.shard(rank) : Range{0, flat.length};
      for (std::size_t number = 0; number < flat.segments.size(); ++number) {
        const Range own = intersect(flat.segments[number].range(), piece);
        if (!factors[number] || own.size() == 0) continue;
        kernels.copy(result + array_bytes(own.begin, dtype), sums + array_bytes(at + own.begin - piece.begin, dtype),
                     array_bytes(own.size(), dtype), context_.stream);
      }
      at += piece.size();
    }
    kernels.zero(worker_error, bytes, context_.stream);
    kernels.settle(context_.stream);
  }

  MessageWire wire() const override {
    const FlatLayout& flat = context_.layout();
    const auto world = static_cast<std::int64_t>(context_.communicator.size());
    if (world == 1) return {};
    const auto bytes = [&](std::int64_t elements) {
      return static_cast<std::int64_t>(array_bytes(elements, flat.accumulation()));
    };
    const std::int64_t own = flat.shard(context_.communicator.rank()).size();
    return {.all_to_all = bytes(own) * (world - 1), .all_gather = bytes(flat.length - own)};
  }

 private:
  /// The sums of all pieces, in the order of their ranks.
  template <class T>
  void sum(std::byte* messages, const Scratch& gathered) {
    const FlatLayout& flat = context_.layout();
    const Communicator& ranks = messages_;
    Collective call{.kind = CollectiveKind::kReduceScatter,
                    .in_dtype = DTypeOf<T>::value,
                    .out_dtype = DTypeOf<T>::value,
                    .send = messages};
    for (int rank = 0; rank < ranks.size(); ++rank) {
      call.counts.push_back(flat.shard(rank).size());
      call.offsets.push_back(flat.shard(rank).begin);
    }
    if (std::ranges::is_sorted(call.offsets)) call.offsets.clear();
    const Scratch own = context_.kernels.make_scratch(array_bytes(flat.shard(ranks.rank()).size(), DTypeOf<T>::value));
    call.recv = own.bytes.data();
    ranks.backend().submit({&call, 1}, context_.stream).wait();
    ranks.all_gather(std::span(reinterpret_cast<const T*>(own.bytes.data()), own.bytes.size() / sizeof(T)),
                     std::span(reinterpret_cast<T*>(gathered.bytes.data()), gathered.bytes.size() / sizeof(T)),
                     call.counts);
  }

  ReductionContext context_;
  Communicator messages_;  ///< where the kernels write them
};

}  // namespace

std::unique_ptr<MessageReduction> make_exact(const ReductionContext& context) {
  return std::make_unique<ExactReduction>(context);
}

}  // namespace zeroth
