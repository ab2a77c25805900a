#include <zeroth/base/error.h>
#include <zeroth/comm/collective.h>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace zeroth {
namespace {

bool overlap(const std::byte* a, std::uint64_t a_bytes, const std::byte* b, std::uint64_t b_bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(a);
  const auto second = reinterpret_cast<std::uintptr_t>(b);
  return a_bytes > 0 && b_bytes > 0 && first < second + b_bytes && second < first + a_bytes;
}

std::string list_of(const std::vector<std::int64_t>& counts) {
  constexpr std::size_t kShown = 8;
  const std::size_t shown = std::min(kShown, counts.size());
  return fmt::format("[{}{}]", fmt::join(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(shown), ", "),
                     counts.size() > kShown ? ", ..." : "");
}

bool can_sum(DType in, DType out) {
  if (in == DType::kUInt8) return false;
  const auto is_half = [](DType dtype) { return dtype == DType::kBFloat16 || dtype == DType::kFloat16; };
  return in == out || (is_half(in) && out == DType::kFloat32) || (in == DType::kFloat32 && is_half(out));
}

/// Whether the parts of a call with offsets lie one after the other, in any order.
bool parts_fill(const Collective& collective) {
  if (collective.offsets.empty()) return true;
  if (collective.offsets.size() != collective.counts.size()) return false;
  std::vector<std::pair<std::int64_t, std::int64_t>> parts;
  for (std::size_t rank = 0; rank < collective.counts.size(); ++rank) {
    if (collective.counts[rank] > 0) parts.emplace_back(collective.offsets[rank], collective.counts[rank]);
  }
  std::ranges::sort(parts);
  std::int64_t end = 0;
  for (const auto& [offset, count] : parts) {
    if (offset != end) return false;
    end += count;
  }
  return true;
}

/// Whether all parts that an all_to_all gives and takes have one size.
bool is_even(const Collective& collective) {
  const auto as_first = [first = collective.counts.empty() ? 0 : collective.counts.front()](std::int64_t count) {
    return count == first;
  };
  return std::ranges::all_of(collective.counts, as_first) && std::ranges::all_of(collective.recv_counts, as_first);
}

class Check {
 public:
  Check(const Collective& collective, int rank, int size, std::string_view where)
      : collective_(collective), rank_(rank), size_(size), where_(where) {}

  void require(bool condition, std::string_view message, std::string_view expected = {}) const {
    if (condition) [[likely]]
      return;
    fail(message, std::string(expected));
  }
  void require_number(bool condition, std::string_view message, std::int64_t expected) const {
    if (condition) [[likely]]
      return;
    fail(message, std::to_string(expected));
  }
  void require_rank(int rank, std::string_view message) const {
    if (rank >= 0 && rank < size_) [[likely]]
      return;
    fail(message, fmt::format("0 to {}", size_ - 1));
  }

 private:
  [[noreturn]] void fail(std::string_view message, std::string expected) const {
    throw Error(ErrorCode::kUsage, std::string(message),
                {.where = std::string(where_),
                 .who = fmt::format("rank {}/{}", rank_, size_),
                 .which = describe(collective_),
                 .expected = std::move(expected)});
  }

  const Collective& collective_;
  int rank_;
  int size_;
  std::string_view where_;
};

}  // namespace

std::string_view name_of(CollectiveKind kind) noexcept {
  switch (kind) {
    case CollectiveKind::kAllGather:
      return "all_gather";
    case CollectiveKind::kReduceScatter:
      return "reduce_scatter";
    case CollectiveKind::kAllReduce:
      return "all_reduce";
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kGather:
      return "gather";
    case CollectiveKind::kScatter:
      return "scatter";
    case CollectiveKind::kAllToAll:
      return "all_to_all";
    case CollectiveKind::kSend:
      return "send";
    case CollectiveKind::kRecv:
      return "recv";
    case CollectiveKind::kBarrier:
      return "barrier";
  }
  return "unknown";
}

std::string_view name_of(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
  }
  return "unknown";
}

std::string other_rank(CollectiveKind kind, int rank) {
  return fmt::format(" {} rank {}", kind == CollectiveKind::kSend ? "to" : "from", rank);
}

std::string describe(const Collective& collective) {
  if (collective.kind == CollectiveKind::kBarrier) {
    const std::string name = collective.name.empty() ? "" : fmt::format(" \"{}\"", collective.name);
    return fmt::format("barrier{} unit={} label={}", name, collective.tag.unit, collective.tag.label);
  }
  return fmt::format(
      "{}{} {}{} {}{}{} unit={} label={}", name_of(collective.kind),
      collective.op == ReduceOp::kSum ? "" : fmt::format(" {}", name_of(collective.op)), name_of(collective.in_dtype),
      collective.in_dtype == collective.out_dtype ? "" : fmt::format("->{}", name_of(collective.out_dtype)),
      list_of(collective.counts),
      (collective.recv_counts.empty() ? "" : " from " + list_of(collective.recv_counts)) +
          (collective.offsets.empty() ? "" : " at " + list_of(collective.offsets)),
      is_point_to_point(collective.kind) ? other_rank(collective.kind, collective.root) : "", collective.tag.unit,
      collective.tag.label);
}

CallExtent extent_of(const Collective& collective, int rank) {
  const auto sum = [](const std::vector<std::int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  };
  const std::int64_t total = sum(collective.counts);
  const auto own = [&] { return collective.counts[static_cast<std::size_t>(rank)]; };
  const bool root = rank == collective.root;
  switch (collective.kind) {
    case CollectiveKind::kAllGather:
      return {.send = own(), .recv = total};
    case CollectiveKind::kReduceScatter:
      return {.send = total, .recv = own()};
    case CollectiveKind::kAllReduce:
      return {.send = total, .recv = total};
    case CollectiveKind::kBroadcast:
      return {.send = root ? total : 0, .recv = total};
    case CollectiveKind::kGather:
      return {.send = own(), .recv = root ? total : 0};
    case CollectiveKind::kScatter:
      return {.send = root ? total : 0, .recv = own()};
    case CollectiveKind::kAllToAll:
      return {.send = total, .recv = sum(collective.recv_counts)};
    case CollectiveKind::kSend:
      return {.send = total, .recv = 0};
    case CollectiveKind::kRecv:
      return {.send = 0, .recv = total};
    case CollectiveKind::kBarrier:
      break;
  }
  return {};
}

void validate(const Collective& collective, int rank, int size, std::string_view where) {
  const Check check(collective, rank, size, where);
  if (collective.kind == CollectiveKind::kBarrier) {
    check.require(collective.counts.empty() && collective.recv_counts.empty() && collective.offsets.empty(),
                  "a barrier has no data");
    return;
  }
  check.require(collective.name.empty(), "only a barrier has a name");
  const CollectiveKind kind = collective.kind;
  const bool reduces = kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduceScatter;
  const bool one_count =
      kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kBroadcast || is_point_to_point(kind);
  const std::size_t num_counts = one_count ? 1 : static_cast<std::size_t>(size);
  check.require_number(collective.counts.size() == num_counts, "wrong number of counts",
                       static_cast<std::int64_t>(num_counts));
  const std::size_t num_recv_counts = kind == CollectiveKind::kAllToAll ? static_cast<std::size_t>(size) : 0;
  check.require_number(collective.recv_counts.size() == num_recv_counts, "wrong number of counts to receive",
                       static_cast<std::int64_t>(num_recv_counts));
  constexpr std::int64_t kMaxElements = std::numeric_limits<std::int64_t>::max() / 64;
  for (const std::vector<std::int64_t>* counts : {&collective.counts, &collective.recv_counts}) {
    std::int64_t total = 0;
    for (const std::int64_t count : *counts) {
      check.require(count >= 0 && count <= kMaxElements - total, "a count is negative or too large");
      total += count;
    }
  }
  check.require(!collective.equal_parts || (kind == CollectiveKind::kAllToAll && is_even(collective)),
                "the parts are not equal", "one size in an all_to_all of equal parts");
  check.require(collective.offsets.empty() || kind == CollectiveKind::kReduceScatter,
                "only a reduce_scatter has offsets");
  check.require(parts_fill(collective), "the parts are not one after the other",
                "offsets of parts that fill the buffer");
  check.require_rank(collective.root,
                     is_point_to_point(kind) ? "the other rank is not in the group" : "the root is not in the group");
  check.require(!is_point_to_point(kind) || collective.root != rank, "a rank sends to itself");
  check.require(!collective.accumulate || (kind == CollectiveKind::kReduceScatter && collective.op == ReduceOp::kSum),
                "only the sum of a reduce_scatter accumulates");
  check.require(reduces || collective.op == ReduceOp::kSum, "only a reduction has a minimum or maximum");
  if (reduces && collective.op == ReduceOp::kSum) {
    check.require(can_sum(collective.in_dtype, collective.out_dtype), "no sum of these dtypes");
  } else {
    check.require(collective.in_dtype == collective.out_dtype, "data that is not summed keeps its dtype");
  }
  const CallExtent extent = extent_of(collective, rank);
  const auto in_size = static_cast<std::int64_t>(size_of(collective.in_dtype));
  const auto out_size = static_cast<std::int64_t>(size_of(collective.out_dtype));
  const std::int64_t send_bytes = extent.send * in_size;
  const std::int64_t recv_bytes = extent.recv * out_size;
  check.require(send_bytes == 0 || collective.send != nullptr, "send is null");
  check.require(recv_bytes == 0 || collective.recv != nullptr, "recv is null");
  check.require(
      send_bytes == 0 || reinterpret_cast<std::uintptr_t>(collective.send) % static_cast<std::uintptr_t>(in_size) == 0,
      "send is not aligned to its dtype");
  check.require(
      recv_bytes == 0 || reinterpret_cast<std::uintptr_t>(collective.recv) % static_cast<std::uintptr_t>(out_size) == 0,
      "recv is not aligned to its dtype");
  if (!overlap(collective.send, static_cast<std::uint64_t>(send_bytes), collective.recv,
               static_cast<std::uint64_t>(recv_bytes))) {
    return;
  }
  // In place, the smaller buffer is this rank's part of the larger one.
  std::int64_t before =
      one_count ? 0 : std::accumulate(collective.counts.begin(), collective.counts.begin() + rank, std::int64_t{0});
  if (!collective.offsets.empty()) before = collective.offsets[static_cast<std::size_t>(rank)];
  const bool gathers = kind == CollectiveKind::kAllGather || kind == CollectiveKind::kGather;
  const std::byte* expected_send = collective.send;
  const std::byte* expected_recv = collective.recv;
  (gathers ? expected_recv : expected_send) += before * in_size;
  check.require(collective.in_dtype == collective.out_dtype && expected_send == expected_recv &&
                    !collective.accumulate && kind != CollectiveKind::kAllToAll,
                "send and recv overlap", "none, or exactly in place");
}

}  // namespace zeroth
