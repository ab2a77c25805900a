#include <zeroth/base/error.h>
#include <zeroth/comm/collective.h>

#include <fmt/format.h>

#include <limits>
#include <numeric>

namespace zeroth {
namespace {

bool overlap(const std::byte* a, std::uint64_t a_bytes, const std::byte* b, std::uint64_t b_bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(a);
  const auto second = reinterpret_cast<std::uintptr_t>(b);
  return a_bytes > 0 && b_bytes > 0 && first < second + b_bytes && second < first + a_bytes;
}

bool can_sum(DType in, DType out) {
  if (in == DType::kUInt8) return false;
  if (in == out) return true;
  return (in == DType::kBFloat16 && out == DType::kFloat32) ||
         (in == DType::kFloat32 && out == DType::kBFloat16);
}

class Check {
 public:
  Check(const Collective& collective, int rank, int size, std::string_view where)
      : collective_(collective), rank_(rank), size_(size), where_(where) {}

  void require(bool condition, std::string_view message, const std::string& expected = {}) const {
    if (condition) [[likely]]
      return;
    throw Error(ErrorCode::kUsage,
                std::string(message),
                {.where = std::string(where_),
                 .who = fmt::format("rank {}/{}", rank_, size_),
                 .which = describe(collective_),
                 .expected = expected});
  }

 private:
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
    case CollectiveKind::kBarrier:
      return "barrier";
  }
  return "unknown";
}

std::string describe(const Collective& collective) {
  if (collective.kind == CollectiveKind::kBarrier) {
    return fmt::format("barrier unit={} label={}", collective.tag.unit, collective.tag.label);
  }
  constexpr std::size_t kShown = 8;
  const std::size_t shown = std::min(kShown, collective.counts.size());
  return fmt::format(
      "{} {}{} [{}{}] unit={} label={}",
      name_of(collective.kind),
      name_of(collective.in_dtype),
      collective.in_dtype == collective.out_dtype ? "" : fmt::format("->{}", name_of(collective.out_dtype)),
      fmt::join(
          collective.counts.begin(), collective.counts.begin() + static_cast<std::ptrdiff_t>(shown), ", "),
      collective.counts.size() > kShown ? ", ..." : "",
      collective.tag.unit,
      collective.tag.label);
}

void validate(const Collective& collective, int rank, int size, std::string_view where) {
  const Check check(collective, rank, size, where);
  if (collective.kind == CollectiveKind::kBarrier) {
    check.require(collective.counts.empty(), "a barrier has no data");
    return;
  }
  const bool parts =
      collective.kind == CollectiveKind::kAllGather || collective.kind == CollectiveKind::kReduceScatter;
  const bool sums =
      collective.kind == CollectiveKind::kAllReduce || collective.kind == CollectiveKind::kReduceScatter;
  const std::size_t num_counts = parts ? static_cast<std::size_t>(size) : 1;
  check.require(
      collective.counts.size() == num_counts, "wrong number of counts", fmt::format("{}", num_counts));
  constexpr std::int64_t kMaxElements = std::numeric_limits<std::int64_t>::max() / 64;
  std::int64_t total = 0;
  for (const std::int64_t count : collective.counts) {
    check.require(count >= 0 && count <= kMaxElements - total, "a count is negative or too large");
    total += count;
  }
  check.require(collective.root >= 0 && collective.root < size,
                "the root is not in the group",
                fmt::format("0 to {}", size - 1));
  check.require(!collective.accumulate || collective.kind == CollectiveKind::kReduceScatter,
                "only a reduce_scatter accumulates");
  if (sums) {
    check.require(can_sum(collective.in_dtype, collective.out_dtype), "no sum of these dtypes");
  } else {
    check.require(collective.in_dtype == collective.out_dtype, "data that is not summed keeps its dtype");
  }
  const std::int64_t own = parts ? collective.counts[static_cast<std::size_t>(rank)] : total;
  const bool gathers = collective.kind == CollectiveKind::kAllGather;
  const bool sends = collective.kind != CollectiveKind::kBroadcast || rank == collective.root;
  const auto in_size = static_cast<std::int64_t>(size_of(collective.in_dtype));
  const auto out_size = static_cast<std::int64_t>(size_of(collective.out_dtype));
  const std::int64_t send_bytes = sends ? (gathers ? own : total) * in_size : 0;
  const std::int64_t recv_bytes =
      (collective.kind == CollectiveKind::kReduceScatter ? own : total) * out_size;
  check.require(send_bytes == 0 || collective.send != nullptr, "send is null");
  check.require(recv_bytes == 0 || collective.recv != nullptr, "recv is null");
  check.require(
      send_bytes == 0 ||
          reinterpret_cast<std::uintptr_t>(collective.send) % static_cast<std::uintptr_t>(in_size) == 0,
      "send is not aligned to its dtype");
  check.require(
      recv_bytes == 0 ||
          reinterpret_cast<std::uintptr_t>(collective.recv) % static_cast<std::uintptr_t>(out_size) == 0,
      "recv is not aligned to its dtype");
  if (!overlap(collective.send,
               static_cast<std::uint64_t>(send_bytes),
               collective.recv,
               static_cast<std::uint64_t>(recv_bytes))) {
    return;
  }
  const std::int64_t before =
      parts ? std::accumulate(collective.counts.begin(), collective.counts.begin() + rank, std::int64_t{0})
            : 0;
  const std::byte* expected_send = collective.send;
  const std::byte* expected_recv = collective.recv;
  if (gathers) expected_recv += before * in_size;
  if (collective.kind == CollectiveKind::kReduceScatter) expected_send += before * in_size;
  check.require(collective.in_dtype == collective.out_dtype && expected_send == expected_recv && !collective.accumulate,
                "send and recv overlap",
                "none, or exactly in place");
}

}  // namespace zeroth
