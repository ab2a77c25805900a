#include "zero/reductions/table.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <algorithm>
#include <utility>

namespace zeroth {

std::vector<std::string> reduction_names() {
  std::vector<std::string> names;
  for (const ReductionEntry& entry : kReductions) names.emplace_back(entry.name);
  return names;
}

std::unique_ptr<MessageReduction> make_reduction(const ReductionContext& context) {
  const std::string& name = context.options.compression;
  for (const ReductionEntry& entry : kReductions) {
    if (name == entry.name) return entry.make(context);
  }
  const std::vector<std::string> names = reduction_names();
  const std::string near = nearest_name(name, names);
  throw Error(ErrorCode::kConfig, "no such reduction of messages is built",
              {.where = "zero.reductions",
               .which = "optimizer.params.compression",
               .expected = "one of " + join(names, ", "),
               .got = name,
               .hint = near.empty() ? "" : "did you mean " + near + "?"});
}

void MessageReduction::form(const Message& message, const MessageFactors& factors, const Range& range,
                            std::byte* worker_error, DType dtype, Kernels& kernels, const Stream& stream) {
  kernels.for_ranges(range.size(), [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = range.begin + begin;
    const auto add = [&](const std::byte* state, double state_factor, double grad_factor) {
      kernels.sign_message({.error = worker_error + array_bytes(first, dtype),
                            .momentum = state == nullptr ? nullptr : state + array_bytes(first, dtype),
                            .grad = message.grad + array_bytes(first, message.grad_dtype),
                            .grad_dtype = message.grad_dtype,
                            .n = end - begin,
                            .dtype = dtype,
                            .momentum_factor = state_factor,
                            .grad_factor = grad_factor},
                           stream);
    };
    add(message.momentum, factors.momentum, factors.grad);
    if (message.sum != nullptr) add(message.sum, factors.sum, 0.0);
  });
}

void MessageReduction::add(float* to, float factor, const float* from, std::int64_t n, Kernels& kernels,
                           const Stream& stream) {
  kernels.for_ranges(n, [&](std::int64_t begin, std::int64_t end) {
    kernels.sign_message({.error = to + begin, .grad = from + begin, .n = end - begin, .grad_factor = factor}, stream);
  });
}

SegmentReduction::SegmentReduction(ReductionContext context, Runs runs)
    : context_(std::move(context)),
      ranks_(context_.kernels.on_host() ? context_.communicator
                                        : Communicator(context_.communicator.shared_backend(), context_.stream)) {
  if (runs == Runs::kOnHost) (void)context_.kernels.host(context_.options.compression);
  if (context_.communicator.size() == 1 || context_.layout().accumulation() != DType::kFloat32)
    exact_ = make_exact(context_);
}

std::vector<Range> SegmentReduction::pieces_of(const Segment& segment) const {
  std::vector<Range> pieces;
  const FlatLayout& flat = context_.layout();
  for (int rank = 0; rank < flat.world(); ++rank) {
    const Range piece = intersect(segment.range(), flat.shard(rank));
    pieces.push_back(piece.size() == 0 ? Range{} : Range{piece.begin - segment.offset, piece.end - segment.offset});
  }
  return pieces;
}

void SegmentReduction::reduce(const Message& message, const std::vector<std::optional<MessageFactors>>& factors,
                              std::byte* worker_error, std::byte* server_error, std::byte* result) {
  if (exact_) return exact_->reduce(message, factors, worker_error, server_error, result);
  const FlatLayout& flat = context_.layout();
  const std::int64_t piece_begin = flat.shard(ranks().rank()).begin;
  const auto floats = [](std::byte* array, std::int64_t element) { return reinterpret_cast<float*>(array) + element; };
  for (std::size_t number = 0; number < flat.segments.size(); ++number) {
    const Segment& segment = flat.segments[number];
    if (!factors[number] || segment.numel == 0) continue;
    const auto bytes = array_bytes(segment.numel, DType::kFloat32);
    float* const error = floats(worker_error, segment.offset);
    const std::byte* const momentum =
        message.momentum == nullptr ? nullptr : message.momentum + array_bytes(segment.offset, DType::kFloat32);
    form(message, *factors[number], segment.range(), worker_error, DType::kFloat32, kernels(), stream());
    taken_ = 0;
    const std::span<float> formed = memory<float>(segment.numel);
    kernels().copy(formed.data(), error, bytes, stream());
    kernels().zero(error, bytes, stream());
    const Range owned = pieces_of(segment)[static_cast<std::size_t>(ranks().rank())];
    reduce_part(
        {.segment = segment,
         .message = formed.data(),
         .error = error,
         .server_error = owned.size() == 0 ? nullptr : floats(server_error, segment.offset + owned.begin - piece_begin),
         .owned = owned,
         .momentum = reinterpret_cast<const float*>(momentum),
         .result = floats(result, segment.offset)});
    kernels().settle(stream());  // the next part takes its memory
  }
  memory_.clear();
}

std::byte* SegmentReduction::next_memory(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  if (taken_ == memory_.size()) memory_.emplace_back();
  Scratch& scratch = memory_[taken_++];
  if (scratch.bytes.size() < bytes) {
    scratch = {};  // before the new one is there
    scratch = kernels().make_scratch(bytes);
  }
  return scratch.bytes.data();
}

MessageWire SegmentReduction::wire() const {
  if (exact_) return exact_->wire();
  MessageWire all;
  for (const Segment& segment : context_.layout().segments) {
    if (segment.numel > 0) all += wire_of(segment);
  }
  return all;
}

}  // namespace zeroth
