#include <zeroth/base/error.h>
#include <zeroth/parallel/sbp.h>
#include <zeroth/parallel/slices.h>

#include <cstddef>
#include <vector>

namespace zeroth {
namespace {

constexpr std::int64_t kSmallSum = 8192;  // CommBackend::submit(): an all_reduce of up to so many bytes is one phase

std::int64_t all_reduce_bytes(std::int64_t bytes, std::int64_t ranks) {
  return (bytes <= kSmallSum ? ranks : 2) * bytes * (ranks - 1);
}

std::size_t dim_in(const Sbp& sbp, std::span<const std::int64_t> shape) {
  const auto dims = static_cast<int>(shape.size());
  ZR_CHECK(sbp.dim() >= -dims && sbp.dim() < dims, ErrorCode::kUsage, "the tensor does not have this dim",
           {.where = "parallel.sbp",
            .which = describe(sbp),
            .expected = std::to_string(-dims) + " to " + std::to_string(dims - 1)});
  return static_cast<std::size_t>(sbp.dim() < 0 ? sbp.dim() + dims : sbp.dim());
}

/// Elements that stay on their rank when slices of one dim become slices of another.
std::int64_t staying(std::size_t from, std::size_t to, std::span<const std::int64_t> shape, int ranks) {
  std::int64_t rest = 1;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) rest *= dim == from || dim == to ? 1 : shape[dim];
  const std::vector<std::int64_t> before = slice_sizes(shape[from], ranks);
  const std::vector<std::int64_t> after = slice_sizes(shape[to], ranks);
  std::int64_t elements = 0;
  for (std::size_t rank = 0; rank < before.size(); ++rank) elements += before[rank] * after[rank] * rest;
  return elements;
}

void require_sizes(std::int64_t elements, std::int64_t element_bytes, int ranks) {
  ZR_CHECK(elements >= 0 && element_bytes >= 1 && ranks >= 1, ErrorCode::kUsage, "there is no such tensor",
           {.where = "parallel.sbp",
            .expected = "elements from 0, bytes and ranks from 1",
            .got = std::to_string(elements) + " elements of " + std::to_string(element_bytes) + " bytes, " +
                   std::to_string(ranks) + " ranks"});
}

}  // namespace

std::string describe(const Sbp& sbp) {
  if (sbp.kind() == Sbp::Kind::kBroadcast) return "B";
  if (sbp.kind() == Sbp::Kind::kPartial) return "P";
  return "S(" + std::to_string(sbp.dim()) + ")";
}

Sbp gradient_of(const Sbp& sbp, BroadcastGradients gradients) {
  if (sbp.is_split()) return sbp;
  if (sbp.kind() == Sbp::Kind::kPartial || gradients == BroadcastGradients::kAlike) return Sbp::broadcast();
  return Sbp::partial();
}

ConversionCall conversion_call(const Sbp& from, const Sbp& to) {
  switch (from.kind()) {
    case Sbp::Kind::kSplit:
      if (to.is_split()) return from == to ? ConversionCall::kNone : ConversionCall::kAllToAll;
      return to.kind() == Sbp::Kind::kBroadcast ? ConversionCall::kAllGather : ConversionCall::kNone;
    case Sbp::Kind::kBroadcast:
      return ConversionCall::kNone;
    case Sbp::Kind::kPartial:
      if (to.is_split()) return ConversionCall::kReduceScatter;
      return to.kind() == Sbp::Kind::kBroadcast ? ConversionCall::kAllReduce : ConversionCall::kNone;
  }
  return ConversionCall::kNone;
}

std::int64_t conversion_bytes(const Sbp& from, const Sbp& to, std::int64_t elements, std::int64_t element_bytes,
                              int ranks) {
  require_sizes(elements, element_bytes, ranks);
  const std::int64_t bytes = elements * element_bytes;
  switch (conversion_call(from, to)) {
    case ConversionCall::kNone:
      return 0;
    case ConversionCall::kAllGather:
    case ConversionCall::kReduceScatter:
      return bytes * (ranks - 1);
    case ConversionCall::kAllReduce:
      return all_reduce_bytes(bytes, ranks);
    case ConversionCall::kAllToAll:
      return bytes * (ranks - 1) / ranks;
  }
  return 0;
}

std::int64_t conversion_bytes(const Sbp& from, const Sbp& to, std::span<const std::int64_t> shape,
                              std::int64_t element_bytes, int ranks) {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    require_sizes(size, element_bytes, ranks);
    elements *= size;
  }
  const std::size_t before = from.is_split() ? dim_in(from, shape) : 0;
  const std::size_t after = to.is_split() ? dim_in(to, shape) : 0;
  if (!from.is_split() || !to.is_split()) return conversion_bytes(from, to, elements, element_bytes, ranks);
  if (before == after) return 0;
  return (elements - staying(before, after, shape, ranks)) * element_bytes;
}

}  // namespace zeroth
