#include "zero/coded_calls.h"

#include <zeroth/base/error.h>
#include <zeroth/base/platform.h>
#include <zeroth/device/memory.h>

#include <algorithm>

namespace zeroth {
namespace {

std::int64_t padded(std::int64_t bytes, std::int64_t align) {
  return static_cast<std::int64_t>(align_up(static_cast<std::size_t>(bytes), static_cast<std::size_t>(align)));
}

std::size_t whole_lines(std::int64_t bytes) {
  return align_up(static_cast<std::size_t>(bytes), kSegmentAlignBytes);
}

/// Most bytes of any flat.
struct ReductionMemory {
  std::size_t sent = 0;
  std::size_t received = 0;
  std::vector<std::size_t> sums{};  ///< one a hop
  [[nodiscard]] std::size_t total() const {
    std::size_t bytes = sent + received;
    for (const std::size_t sum : sums) bytes += sum;
    return bytes;
  }
};

/// Bytes of a message of the part of each of the ranks.
std::int64_t messages_of_all(const FlatLayout& flat, const SubGroup& ranks, int from, const CodeForm& form) {
  std::int64_t bytes = 0;
  for (int index = 0; index < ranks.count; ++index) bytes += form.bytes(flat.part(ranks.rank(index), from).size());
  return bytes;
}

ReductionMemory reduction_memory(const ModelLayout& model, const ShardingPlan& plan, int rank) {
  const std::vector<CodeHop> hops = hops_of_gradients(plan.degrees(model.world));
  const CodeForm form = form_of_gradients(plan.codes);
  ReductionMemory most{.sums = std::vector<std::size_t>(hops.size())};
  for (const FlatLayout& flat : model.flats) {
    if (!flat.trainable || !has_codes(flat)) continue;
    for (std::size_t hop = 0; hop < hops.size(); ++hop) {
      const SubGroup ranks = sub_group_of(rank, hops[hop].from, hops[hop].to);
      const std::int64_t own = flat.part(rank, hops[hop].from).size();
      most.sent = std::max(most.sent, whole_lines(messages_of_all(flat, ranks, hops[hop].from, form)));
      most.received = std::max(most.received, whole_lines(ranks.count * form.bytes(own)));
      most.sums[hop] = std::max(most.sums[hop], whole_lines(own * static_cast<std::int64_t>(sizeof(float))));
    }
  }
  return most;
}

Collective of_bytes(CollectiveKind kind, CallPurpose purpose, const FlatLayout& flat, const std::byte* send,
                    std::byte* recv) {
  return {.kind = kind,
          .send = send,
          .recv = recv,
          .tag = {.unit = flat.unit, .label = static_cast<std::uint32_t>(purpose)}};
}

}  // namespace

bool has_codes(const FlatLayout& flat) {
  return !flat.vectors && flat.length > 0 && flat.accumulation() == DType::kFloat32;
}

kernels::CodeFormat code_format_named(std::string_view name) {
  if (name == "int8") return kernels::CodeFormat::kInt8;
  if (name == "int4") return kernels::CodeFormat::kInt4;
  if (name == "fp8") return kernels::CodeFormat::kE4M3;
  ZR_ASSERT(name == "fp4", "a name of a format of codes");
  return kernels::CodeFormat::kE3M0;
}

std::int64_t CodeForm::scales_at(std::int64_t elements) const {
  return padded(kernels::code_bytes(elements, format), align);
}
std::int64_t CodeForm::bytes(std::int64_t elements) const {
  const std::int64_t scales = kernels::code_blocks(elements, block) * static_cast<std::int64_t>(sizeof(float));
  return scales_at(elements) + padded(scales, align);
}

CodeForm form_of_parameters(const WireCodes& codes) {
  return {.format = kernels::CodeFormat::kInt8, .block = codes.block};
}
CodeForm form_of_gradients(const WireCodes& codes) {
  return {.format = codes.gradient_bits == 4 ? kernels::CodeFormat::kInt4 : kernels::CodeFormat::kInt8,
          .block = codes.block};
}

std::vector<CodeHop> hops_of_gradients(const Degrees& degrees) {
  if (degrees.sums_groups()) return {{.from = degrees.world, .to = degrees.gradient}};
  if (degrees.node <= 1 || degrees.node == degrees.world) return {{.from = degrees.world, .to = 1}};
  return {{.from = degrees.node, .to = 1}, {.from = degrees.world, .to = degrees.node}};
}
CodeHop hop_of_parameters(const Degrees& degrees) {
  const bool nodes = degrees.node > 1 && degrees.node < degrees.parameter;
  return {.from = degrees.parameter, .to = nodes ? degrees.node : 1};
}
bool keeps_node_parts(const ShardingPlan& plan, const Degrees& degrees) {
  return plan.codes.parameter_bits > 0 && hop_of_parameters(degrees).to > 1;
}

CodeMemory code_memory(const ModelLayout& model, const ShardingPlan& plan, int rank) {
  CodeMemory memory;
  const Degrees degrees = plan.degrees(model.world);
  if (degrees.world == 1) return memory;
  if (plan.codes.gradient_bits > 0) memory.reduction = reduction_memory(model, plan, rank).total();
  if (plan.codes.parameter_bits == 0) return memory;
  const CodeHop hop = hop_of_parameters(degrees);
  for (const FlatLayout& flat : model.flats) {
    if (!has_codes(flat)) continue;
    const std::int64_t bytes =
        messages_of_all(flat, sub_group_of(rank, hop.from, hop.to), hop.from, form_of_parameters(plan.codes));
    memory.gather = std::max(memory.gather, whole_lines(bytes));
    if (keeps_node_parts(plan, degrees))
      memory.node_parts += align_up(array_bytes(flat.part(rank, degrees.node).size(), flat.dtype), kSegmentAlignBytes);
  }
  return memory;
}

void Coder::code(std::byte* message, const std::byte* values, DType dtype, float* error, std::int64_t n) const {
  auto* const codes = reinterpret_cast<std::uint8_t*>(message);
  auto* const scales = reinterpret_cast<float*>(message + form_.scales_at(n));
  kernels_.for_ranges(kernels::code_blocks(n, form_.block), [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * form_.block;
    kernels_.quantize({.codes = codes + kernels::code_bytes(first, form_.format),
                       .scales = scales + begin,
                       .src = values + array_bytes(first, dtype),
                       .src_dtype = dtype,
                       .error = error == nullptr ? nullptr : error + first,
                       .n = std::min(end * form_.block, n) - first,
                       .block = form_.block,
                       .format = form_.format},
                      stream_);
  });
}

void Coder::value(std::byte* values, DType dtype, const std::vector<const std::byte*>& messages, std::int64_t n,
                  float factor) const {
  kernels_.for_ranges(kernels::code_blocks(n, form_.block), [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * form_.block;
    std::vector<kernels::QuantSource> sources;
    for (const std::byte* const message : messages) {
      sources.push_back(
          {.codes = reinterpret_cast<const std::uint8_t*>(message) + kernels::code_bytes(first, form_.format),
           .scales = reinterpret_cast<const float*>(message + form_.scales_at(n)) + begin});
    }
    kernels_.dequantize({.dst = values + array_bytes(first, dtype),
                         .dst_dtype = dtype,
                         .sources = sources.data(),
                         .num_sources = static_cast<int>(sources.size()),
                         .n = std::min(end * form_.block, n) - first,
                         .block = form_.block,
                         .format = form_.format,
                         .factor = factor},
                        stream_);
  });
}

CodedGather::CodedGather(const ModelLayout& model, const ShardingPlan& plan, SubGroupCalls& calls, int rank,
                         Kernels& kernels, Stream stream, MemoryLedger& ledger)
    : calls_(calls),
      rank_(rank),
      coder_(form_of_parameters(plan.codes), kernels, stream),
      stream_(std::move(stream)),
      messages_(kernels.make_arena(code_memory(model, plan, rank).gather, "codes of parameters")),
      hold_(ledger.hold({-1, MemoryState::kStaging}, code_memory(model, plan, rank).gather)) {}

void CodedGather::gather(CallPurpose purpose, const FlatLayout& flat, const std::byte* part, std::byte* whole) {
  const SubGroup& ranks = calls_.ranks();
  const CodeForm& form = coder_.form();
  Collective call = of_bytes(CollectiveKind::kAllGather, purpose, flat, nullptr, messages_.data());
  struct Source {
    const std::byte* message = nullptr;
    Range range{};
  };
  std::vector<Source> sources;
  std::byte* at = messages_.data();
  std::byte* own = at;
  for (int index = 0; index < ranks.count; ++index) {
    const int rank = ranks.rank(index);
    if (rank == rank_) own = at;
    const Range range = flat.part(rank, calls_.from());
    sources.push_back({at, range});
    call.counts.push_back(form.bytes(range.size()));
    at += call.counts.back();
  }
  call.send = own;
  stream_.enqueue([this, own, part, dtype = flat.dtype, n = flat.part(rank_, calls_.from()).size()] {
    coder_.code(own, part, dtype, nullptr, n);
  });
  const Work work = calls_.submit({&call, 1}, stream_);
  stream_.enqueue([this, work, sources = std::move(sources), whole, dtype = flat.dtype,
                   begin = flat.part(rank_, calls_.to()).begin] {
    work.wait();
    for (const auto& [message, range] : sources) {
      if (range.size() > 0)
        coder_.value(whole + array_bytes(range.begin - begin, dtype), dtype, {message}, range.size());
    }
  });
}

CodedReduction::CodedReduction(const ModelLayout& model, const ShardingPlan& plan, CommBackend& world, Kernels& kernels,
                               Stream stream, MemoryLedger& ledger)
    : rank_(world.rank()), coder_(form_of_gradients(plan.codes), kernels, stream), stream_(std::move(stream)) {
  for (const CodeHop& hop : hops_of_gradients(plan.degrees(model.world)))
    hops_.push_back(std::make_unique<SubGroupCalls>(model, world, hop.from, hop.to, "codes"));
  const ReductionMemory bytes = reduction_memory(model, plan, rank_);
  memory_ = kernels.make_arena(bytes.total(), "codes of gradients");
  hold_ = ledger.hold({-1, MemoryState::kStaging}, bytes.total());
  const auto take = [this](std::size_t size) { return memory_.reserve(size, kSegmentAlignBytes).data(); };
  sent_ = take(bytes.sent);
  received_ = take(bytes.received);
  for (const std::size_t size : bytes.sums) sums_.push_back(take(size));
}

const std::byte* CodedReduction::reduce(const FlatLayout& flat, const std::byte* bucket, DType dtype, float* error) {
  if (error != nullptr) error += flat.part(rank_, hops_.front()->to()).begin;
  for (std::size_t number = 0; number < hops_.size(); ++number) {
    hop(*hops_[number], flat, bucket, dtype, error, sums_[number]);
    bucket = sums_[number];
    dtype = DType::kFloat32;
    error = nullptr;
  }
  return bucket;
}

void CodedReduction::hop(SubGroupCalls& calls, const FlatLayout& flat, const std::byte* values, DType dtype,
                         float* error, std::byte* sum) {
  const SubGroup& ranks = calls.ranks();
  const CodeForm& form = coder_.form();
  const std::int64_t begin = flat.part(rank_, calls.to()).begin;
  const std::int64_t own = flat.part(rank_, calls.from()).size();
  Collective call = of_bytes(CollectiveKind::kAllToAll, CallPurpose::kReduceGradients, flat, sent_, received_);
  std::vector<Range> parts;
  std::vector<const std::byte*> messages;
  for (int index = 0; index < ranks.count; ++index) {
    parts.push_back(flat.part(ranks.rank(index), calls.from()));
    call.counts.push_back(form.bytes(parts.back().size()));
    call.recv_counts.push_back(form.bytes(own));
    messages.push_back(received_ + index * form.bytes(own));
  }
  stream_.enqueue([this, values, dtype, error, begin, parts = std::move(parts), counts = call.counts] {
    std::byte* message = sent_;
    for (std::size_t index = 0; index < parts.size(); ++index) {
      const std::int64_t first = parts[index].begin - begin;
      if (parts[index].size() > 0)
        coder_.code(message, values + array_bytes(first, dtype), dtype, error == nullptr ? nullptr : error + first,
                    parts[index].size());
      message += counts[index];
    }
  });
  const Work work = calls.submit({&call, 1}, stream_);
  stream_.enqueue([this, work, messages = std::move(messages), own, sum] {
    work.wait();
    if (own > 0) coder_.value(sum, DType::kFloat32, messages, own);
  });
}

std::size_t CodedReduction::transport_bytes() const {
  std::size_t bytes = 0;
  for (const auto& hop : hops_) bytes += hop->transport_bytes();
  return bytes;
}

}  // namespace zeroth
