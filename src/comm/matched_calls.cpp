#include "comm/matched_calls.h"

#include "base/planted.h"

#include <kernels/copy/copy.h>
#include <kernels/reduce/extreme.h>
#include <kernels/reduce/reduce.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace zeroth::detail {
namespace {

/// The planted fault "reduction_ulp": the sum of rank 1 is one unit in the last place off.
void plant_ulp(int rank, std::byte* sum, DType dtype) {
  if (!planted("reduction_ulp") || rank != 1 || !is_floating(dtype)) return;
  const auto raise = [sum](auto bits) {
    std::memcpy(&bits, sum, sizeof bits);
    ++bits;
    std::memcpy(sum, &bits, sizeof bits);
  };
  if (size_of(dtype) == 8) raise(std::uint64_t{0});
  if (size_of(dtype) == 4) raise(std::uint32_t{0});
  if (size_of(dtype) == 2) raise(std::uint16_t{0});
}

}  // namespace

WorkInfo validated(std::span<const Collective> calls, int rank, int size, std::string_view where) {
  WorkInfo info;
  for (const Collective& call : calls) {
    validate(call, rank, size, where);
    for (const std::int64_t count : call.counts)
      info.bytes += static_cast<std::uint64_t>(count) * size_of(call.in_dtype);
  }
  if (!calls.empty()) info.what = name_of(calls.front().kind);
  return info;
}

Collective stand_in(std::string_view call, std::string_view name) {
  return {.name = fmt::format("{} {}", call, name)};
}

std::vector<std::int64_t> even_parts(std::int64_t elements, int parts) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(parts), elements / parts);
  for (std::int64_t rest = 0; rest < elements % parts; ++rest) ++counts[static_cast<std::size_t>(rest)];
  return counts;
}

std::vector<std::int64_t> offsets_of(const std::vector<std::int64_t>& counts) {
  std::vector<std::int64_t> offsets(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
  return offsets;
}

std::vector<std::int64_t> offsets_of(const Collective& call) {
  return call.offsets.empty() ? offsets_of(call.counts) : call.offsets;
}

NodeMap::NodeMap(const std::vector<int>& nodes, std::span<const int> members) {
  for (const int member : members) {
    const int node = nodes.empty() ? 0 : nodes[static_cast<std::size_t>(member)];
    if (of_rank.empty() || of_rank.back() != node) sizes.push_back(0);
    ++sizes.back();
    of_rank.push_back(node);
  }
}

void check_nodes(const std::vector<int>& nodes, int size, std::string_view where) {
  ZR_CHECK(nodes.empty() || nodes.size() == static_cast<std::size_t>(size), ErrorCode::kUsage,
           "the nodes of the ranks are not those of the world",
           {.where = std::string(where),
            .which = "CommOptions::nodes",
            .expected = std::to_string(size) + ", or none",
            .got = std::to_string(nodes.size())});
}

void reduce_in_rank_order(const Collective& call, int rank, std::byte* to, const Summands& sources,
                          std::int64_t elements, const NodeMap& nodes, kernels::Isa isa) {
  if (elements == 0) return;
  const auto* const data = reinterpret_cast<const void* const*>(sources.data.data());
  const auto num_sources = static_cast<int>(sources.data.size());
  if (call.op != ReduceOp::kSum) {
    return kernels::extreme_sources({.dst = to,
                                     .sources = data,
                                     .num_sources = num_sources,
                                     .dtype = call.in_dtype,
                                     .greatest = call.op == ReduceOp::kMax,
                                     .n = elements});
  }
  // What each rank sums of an all_reduce the others fetch at once, from the caches where a part fits.
  const auto part_bytes = static_cast<std::int64_t>(size_of(call.out_dtype)) * (call.counts.front() / num_sources);
  const bool read_soon = call.kind == CollectiveKind::kAllReduce && part_bytes < kernels::kCopyStreamBytes;
  kernels::sum_sources({.dst = to,
                        .dst_dtype = call.out_dtype,
                        .accumulate = call.accumulate,
                        .sources = data,
                        .num_sources = num_sources,
                        .src_dtypes = sources.dtypes.data(),
                        .groups = nodes.sizes.data(),
                        .num_groups = static_cast<int>(nodes.sizes.size()),
                        .read_soon = read_soon,
                        .n = elements},
                       isa);
  plant_ulp(rank, to, call.out_dtype);
}

std::vector<int> members_of(int color, int size, FunctionRef<const CallDescriptor&(int)> call_of) {
  std::vector<std::pair<std::int64_t, int>> order;  // (key, rank)
  for (int rank = 0; rank < size; ++rank) {
    const CallDescriptor& call = call_of(rank);
    if (call.color == color) order.emplace_back(call.key, rank);
  }
  std::ranges::sort(order);
  std::vector<int> members;
  for (const auto& [unused, rank] : order) members.push_back(rank);
  return members;
}

}  // namespace zeroth::detail
