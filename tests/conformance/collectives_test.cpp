// Every collective on every backend: values against an oracle in double, bits against a sum in rank order.
//
// `make test` runs rows in which any two of world, call with its dtypes, count and place meet; the whole grid, and
// large parts in every world, are of the long tier.
#include "conformance/world_runner.h"
#include "support/covering_array.h"
#include "support/sanitizer.h"

#include <zeroth/comm/decorators.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <ctime>
#include <limits>
#include <numeric>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

namespace zeroth::test {
namespace {

class Collectives : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, Collectives, ::testing::ValuesIn(matched_worlds()), name_of_param);

class CollectiveGrid : public Collectives {};
INSTANTIATE_TEST_SUITE_P(Long, CollectiveGrid, ::testing::ValuesIn(matched_worlds()), name_of_param);

class LargeParts : public Collectives {};
INSTANTIATE_TEST_SUITE_P(Backends, LargeParts, ::testing::ValuesIn(one_world_a_backend(matched_worlds())),
                         name_of_param);
INSTANTIATE_TEST_SUITE_P(Long, LargeParts, ::testing::ValuesIn(matched_worlds()), name_of_param);

/// Where the buffers of a case lie: ordinary memory is staged, attached memory is read in place.
enum class Place { kOrdinary, kAttached };

constexpr std::int64_t kCounts[] = {0, 1, 7, 64, 1023, 2049, 4099, 70'001, 300'007};

template <class T>
T value_of(int rank, std::int64_t index, std::uint64_t seed) {
  std::uint64_t bits =
      (static_cast<std::uint64_t>(index) + 1) * 0x9e3779b97f4a7c15U + seed * 77 + static_cast<std::uint64_t>(rank) * 13;
  bits ^= bits >> 29U;
  bits *= 0xbf58476d1ce4e5b9U;
  bits ^= bits >> 32U;
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bits);
  } else {
    return static_cast<T>(static_cast<float>(static_cast<std::int64_t>(bits % 20001) - 10000) / 777.0F);
  }
}

/// What each rank gives for one element.
template <class T>
class GivenValues {
 public:
  GivenValues(int size, std::int64_t index, std::uint64_t seed) : size_(static_cast<std::size_t>(size)) {
    for (std::size_t rank = 0; rank < size_; ++rank)
      values_.at(rank) = value_of<T>(static_cast<int>(rank), index, seed);
  }
  [[nodiscard]] T of(int rank) const { return values_.at(static_cast<std::size_t>(rank)); }
  [[nodiscard]] std::span<const T> all() const { return std::span(values_).first(size_); }

 private:
  std::size_t size_;
  std::array<T, 16> values_;
};

/// The promise of the header: rank order along the nodes, one rounding an addition, in the accumulation dtype; integers
/// wrap.
template <class In, class Out>
Out rank_order_sum(const GivenValues<In>& given, std::span<const int> nodes) {
  if constexpr (std::is_integral_v<In>) {
    std::make_unsigned_t<In> sum = 0;
    for (const In value : given.all()) sum = static_cast<decltype(sum)>(sum + static_cast<decltype(sum)>(value));
    return static_cast<Out>(sum);
  } else {
    using Accumulator = std::conditional_t<std::is_same_v<In, double>, double, float>;
    Accumulator sum = 0;
    int first = 0;
    for (const int ranks : nodes) {
      auto of_node = static_cast<Accumulator>(given.of(first));
      for (int rank = first + 1; rank < first + ranks; ++rank) of_node += static_cast<Accumulator>(given.of(rank));
      sum = first == 0 ? of_node : sum + of_node;
      first += ranks;
    }
    return static_cast<Out>(sum);
  }
}

template <class T>
double as_double(T value) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
    return static_cast<double>(static_cast<float>(value));
  } else {
    return static_cast<double>(value);
  }
}

template <class In, class Out>
void expect_sum(const Out& got, const Communicator& comm, std::int64_t index, std::uint64_t seed) {
  const int size = comm.size();
  const GivenValues<In> given(size, index, seed);
  const auto expected = rank_order_sum<In, Out>(given, comm.backend().node_sizes());
  const bool exactly = std::is_integral_v<In> || sums_in_rank_order(comm.backend());
  if (exactly && std::memcmp(&got, &expected, sizeof got) != 0) {
    throw std::runtime_error(fmt::format("element {}: {} instead of {}", index, as_double(got), as_double(expected)));
  }
  if constexpr (!std::is_integral_v<In>) {
    double exact = 0;
    double magnitude = 0;
    for (const In value : given.all()) {
      exact += as_double(value);
      magnitude += std::abs(as_double(value));
    }
    // One rounding an addition (2^-24 relative each, 2^-53 in double), one more to bf16 (2^-9) or fp16 (2^-12), or one
    // at each addition.
    const double unit = std::is_same_v<In, double> ? 0x1p-53 : 0x1p-24;
    const double output = std::is_same_v<Out, BFloat16> ? 0x1p-8 : (std::is_same_v<Out, Float16> ? 0x1p-11 : 0);
    const int outputs = sums_in_one_dtype(comm.backend()) ? size : 1;
    if (std::abs(as_double(got) - exact) > magnitude * (size * unit + outputs * output)) {
      throw std::runtime_error(fmt::format("element {}: {} is too far from {}", index, as_double(got), exact));
    }
  }
}

/// Two buffers of one rank, in ordinary memory or in one attached arena.
class Buffers {
 public:
  Buffers(CommBackend& backend, Place place, std::size_t bytes) : half_(align_up(bytes + 64, kPageBytes)) {
    arena_ = Arena::create(place == Place::kAttached ? backend.capabilities().window_kind : ArenaKind::kPrivate,
                           2 * half_, "test");
    if (place == Place::kAttached) window_ = backend.attach(arena_, "test");
  }
  template <class T>
  std::span<T> send(std::int64_t count) const {
    return {reinterpret_cast<T*>(arena_.data()), static_cast<std::size_t>(count)};
  }
  template <class T>
  std::span<T> recv(std::int64_t count) const {
    return {reinterpret_cast<T*>(arena_.data() + half_), static_cast<std::size_t>(count)};
  }

 private:
  std::size_t half_;
  Arena arena_;
  PeerWindow window_;
};

constexpr std::size_t kBufferBytes = std::size_t{8} * kCounts[std::size(kCounts) - 1] * 7;

/// Parts that differ between ranks, some empty, of about `total` elements.
std::vector<std::int64_t> uneven_parts(std::int64_t total, int size, std::uint64_t seed) {
  std::vector<std::int64_t> parts(static_cast<std::size_t>(size), total / size);
  parts[seed % parts.size()] += total % size;
  if (size > 2) {
    parts[(seed + 1) % parts.size()] += parts[(seed + 2) % parts.size()];
    parts[(seed + 2) % parts.size()] = 0;
  }
  return parts;
}

/// uneven_parts(), and where this rank's begins and how long it is.
struct RankParts {
  std::vector<std::int64_t> counts;
  std::int64_t first;
  std::int64_t own;
};

RankParts parts_of(const Communicator& comm, std::int64_t total, std::uint64_t seed) {
  std::vector<std::int64_t> counts = uneven_parts(total, comm.size(), seed);
  const auto begin = counts.begin() + comm.rank();
  const std::int64_t first = std::accumulate(counts.begin(), begin, std::int64_t{0});
  const std::int64_t own = *begin;
  return {std::move(counts), first, own};
}

/// Makes a reduction from In to Out; false where that is refused, as it has to be where sums are in one dtype.
template <class In, class Out, class Call>
bool reduces(const CommBackend& backend, const Call& call) {
  if (std::is_same_v<In, Out> || !sums_in_one_dtype(backend)) {
    call();
    return true;
  }
  try {
    call();
  } catch (const Error& error) {
    const bool says_why = std::string_view(error.what()).find("reductions keep the dtype") != std::string_view::npos;
    require(error.code() == ErrorCode::kUsage && says_why, error.what());
    return false;
  }
  throw std::runtime_error("a sum in another dtype than it can have was taken");
}

template <class In, class Out>
void check_all_reduce(const Communicator& comm, const Buffers& buffers, std::int64_t count, bool in_place) {
  const auto seed = static_cast<std::uint64_t>(count);
  const std::span<In> in = buffers.send<In>(count);
  for (std::int64_t i = 0; i < count; ++i) in[static_cast<std::size_t>(i)] = value_of<In>(comm.rank(), i, seed);
  std::span<Out> out = buffers.recv<Out>(count);
  if constexpr (std::is_same_v<In, Out>) {
    if (in_place) out = in;
  }
  if (!reduces<In, Out>(comm.backend(), [&] { comm.all_reduce(std::span<const In>(in), out); })) return;
  for (std::int64_t i = 0; i < count; ++i) expect_sum<In, Out>(out[static_cast<std::size_t>(i)], comm, i, seed);
}

template <class In, class Out>
void check_reduce_scatter(const Communicator& comm, const Buffers& buffers, std::int64_t total, bool in_place) {
  const auto seed = static_cast<std::uint64_t>(total);
  const auto [counts, first, own] = parts_of(comm, total, seed);
  const std::span<In> in = buffers.send<In>(total);
  for (std::int64_t i = 0; i < total; ++i) in[static_cast<std::size_t>(i)] = value_of<In>(comm.rank(), i, seed);
  std::span<Out> out = buffers.recv<Out>(own);
  if constexpr (std::is_same_v<In, Out>) {
    if (in_place) out = in.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(own));
  }
  if (!reduces<In, Out>(comm.backend(), [&] { comm.reduce_scatter(std::span<const In>(in), out, counts); })) return;
  for (std::int64_t i = 0; i < own; ++i) expect_sum<In, Out>(out[static_cast<std::size_t>(i)], comm, first + i, seed);
}

/// Parts, equal where they can be, that lie in the buffer in another order than that of the ranks.
template <class In, class Out>
void check_reduce_scatter_at_offsets(const Communicator& comm, const Buffers& buffers, std::int64_t total,
                                     bool in_place) {
  const auto seed = static_cast<std::uint64_t>(total) + 1;
  const int size = comm.size();
  Collective call{.kind = CollectiveKind::kReduceScatter,
                  .in_dtype = DTypeOf<In>::value,
                  .out_dtype = DTypeOf<Out>::value,
                  .counts = total % size == 0 ? std::vector<std::int64_t>(static_cast<std::size_t>(size), total / size)
                                              : uneven_parts(total, size, seed)};
  call.offsets.resize(call.counts.size());
  std::int64_t end = 0;
  for (int place = 0; place < size; ++place) {  // even ranks from the last one down, then odd ones
    const int evens = (size + 1) / 2;
    const auto rank = static_cast<std::size_t>(place < evens ? 2 * (evens - 1 - place) : 2 * (place - evens) + 1);
    call.offsets[rank] = end;
    end += call.counts[rank];
  }
  const auto own = static_cast<std::size_t>(comm.rank());
  const std::span<In> in = buffers.send<In>(total);
  for (std::int64_t i = 0; i < total; ++i) in[static_cast<std::size_t>(i)] = value_of<In>(comm.rank(), i, seed);
  std::span<Out> out = buffers.recv<Out>(call.counts[own]);
  if constexpr (std::is_same_v<In, Out>) {
    if (in_place) out = in.subspan(static_cast<std::size_t>(call.offsets[own]), out.size());
  }
  call.send = reinterpret_cast<const std::byte*>(in.data());
  call.recv = reinterpret_cast<std::byte*>(out.data());
  if (!reduces<In, Out>(comm.backend(), [&] { comm.backend().submit({&call, 1}, comm.stream()).wait(); })) return;
  for (std::size_t i = 0; i < out.size(); ++i) {
    expect_sum<In, Out>(out[i], comm, call.offsets[own] + static_cast<std::int64_t>(i), seed);
  }
}

/// The lowest rank's of equal values; the values hold no NaN.
template <class T>
T rank_order_extreme(int size, std::int64_t index, std::uint64_t seed, bool greatest) {
  T best = value_of<T>(0, index, seed);
  for (int rank = 1; rank < size; ++rank) {
    const T value = value_of<T>(rank, index, seed);
    if (greatest ? as_double(value) > as_double(best) : as_double(value) < as_double(best)) best = value;
  }
  return best;
}

template <class T>
void check_extremes(const Communicator& comm, const Buffers& buffers, std::int64_t total, bool in_place) {
  const auto seed = static_cast<std::uint64_t>(total);
  const auto [counts, first, own] = parts_of(comm, total, seed);
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const std::span<T> in = buffers.send<T>(total);
    const auto fill = [&] {
      for (std::int64_t i = 0; i < total; ++i) in[static_cast<std::size_t>(i)] = value_of<T>(comm.rank(), i, seed);
    };
    const auto expect = [&](std::span<const T> got, std::int64_t begin) {
      for (std::size_t i = 0; i < got.size(); ++i) {
        const std::int64_t index = begin + static_cast<std::int64_t>(i);
        const T expected = rank_order_extreme<T>(comm.size(), index, seed, op == ReduceOp::kMax);
        if (std::memcmp(&got[i], &expected, sizeof expected) != 0) {
          throw std::runtime_error(fmt::format("{} of element {}: {} instead of {}", name_of(op), index,
                                               as_double(got[i]), as_double(expected)));
        }
      }
    };
    fill();
    std::span<T> part = buffers.recv<T>(own);
    if (in_place) part = in.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(own));
    comm.reduce_scatter(std::span<const T>(in), part, counts, op);
    expect(part, first);
    fill();
    comm.all_reduce(in, op);
    expect(in, 0);
  }
}

/// Every second rank gives bf16, the others the same values in fp32; and then once more, on top of what is there.
template <class In>
void check_mixed_reduce_scatter(const Communicator& comm, const Buffers& buffers, std::int64_t total) {
  const auto seed = static_cast<std::uint64_t>(total);
  const auto [counts, first, own] = parts_of(comm, total, seed);
  const std::span<In> in = buffers.send<In>(total);
  for (std::int64_t i = 0; i < total; ++i) {
    in[static_cast<std::size_t>(i)] = static_cast<In>(static_cast<float>(value_of<BFloat16>(comm.rank(), i, seed)));
  }
  const std::span<float> out = buffers.recv<float>(own);
  if (!reduces<In, float>(comm.backend(), [&] { comm.reduce_scatter(std::span<const In>(in), out, counts); })) return;
  for (std::int64_t i = 0; i < own; ++i) {
    expect_sum<BFloat16, float>(out[static_cast<std::size_t>(i)], comm, first + i, seed);
  }
  const Collective again{.kind = CollectiveKind::kReduceScatter,
                         .in_dtype = DTypeOf<In>::value,
                         .out_dtype = DType::kFloat32,
                         .send = reinterpret_cast<const std::byte*>(in.data()),
                         .recv = reinterpret_cast<std::byte*>(out.data()),
                         .counts = counts,
                         .accumulate = comm.rank() != 0};  // each rank's own matter
  comm.backend().submit({&again, 1}, comm.stream()).wait();
  for (std::int64_t i = 0; i < own; ++i) {
    const GivenValues<BFloat16> given(comm.size(), first + i, seed);
    const auto sum = rank_order_sum<BFloat16, float>(given, comm.backend().node_sizes());
    const float expected = again.accumulate ? sum + sum : sum;
    const float got = out[static_cast<std::size_t>(i)];
    double magnitude = 0;
    for (const BFloat16 value : given.all()) magnitude += std::abs(as_double(value));
    const double apart = sums_in_rank_order(comm.backend()) ? 0 : 4 * comm.size() * magnitude * 0x1p-24;
    if (!(std::abs(static_cast<double>(got) - static_cast<double>(expected)) <= apart)) {
      throw std::runtime_error(fmt::format("element {}: {} instead of {}", i, got, expected));
    }
  }
}

template <class T>
void check_all_gather(const Communicator& comm, const Buffers& buffers, std::int64_t total, bool in_place) {
  const auto seed = static_cast<std::uint64_t>(total);
  const auto [counts, first, own] = parts_of(comm, total, seed);
  const std::span<T> out = buffers.recv<T>(total);
  std::span<T> in = buffers.send<T>(own);
  if (in_place) in = out.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(own));
  for (std::int64_t i = 0; i < own; ++i) in[static_cast<std::size_t>(i)] = value_of<T>(0, first + i, seed);
  comm.all_gather(std::span<const T>(in), out, counts);
  for (std::int64_t i = 0; i < total; ++i) {
    const T expected = value_of<T>(0, i, seed);
    if (std::memcmp(&out[static_cast<std::size_t>(i)], &expected, sizeof expected) != 0) {
      throw std::runtime_error(fmt::format("gathered element {} of {} is wrong", i, total));
    }
  }
}

template <class T>
void check_broadcast(const Communicator& comm, const Buffers& buffers, std::int64_t count) {
  const int root = static_cast<int>(count % comm.size());
  const std::span<T> data = buffers.send<T>(count);
  for (std::int64_t i = 0; i < count; ++i) data[static_cast<std::size_t>(i)] = value_of<T>(comm.rank(), i, 5);
  comm.broadcast(data, root);
  for (std::int64_t i = 0; i < count; ++i) {
    const T expected = value_of<T>(root, i, 5);
    if (std::memcmp(&data[static_cast<std::size_t>(i)], &expected, sizeof expected) != 0) {
      throw std::runtime_error(fmt::format("broadcast element {} of {} is wrong", i, count));
    }
  }
}

/// Throws unless `out` holds elements `first` and on of what `value_of(rank, ..., seed)` says.
template <class T>
void expect_values(std::span<const T> out, int rank, std::int64_t first, std::uint64_t seed, const char* what) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    const T expected = value_of<T>(rank, first + static_cast<std::int64_t>(i), seed);
    if (std::memcmp(&out[i], &expected, sizeof expected) != 0) {
      throw std::runtime_error(fmt::format("{}: element {} of {} is wrong", what, i, out.size()));
    }
  }
}

template <class T>
void check_gather(const Communicator& comm, const Buffers& buffers, std::int64_t total, bool in_place) {
  const auto seed = static_cast<std::uint64_t>(total);
  const auto [counts, first, own] = parts_of(comm, total, seed);
  const int root = static_cast<int>(total % comm.size());
  const std::span<T> out = buffers.recv<T>(comm.rank() == root ? total : 0);
  std::span<T> in = buffers.send<T>(own);
  if (in_place && comm.rank() == root) in = out.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(own));
  for (std::int64_t i = 0; i < own; ++i) in[static_cast<std::size_t>(i)] = value_of<T>(0, first + i, seed);
  comm.gather(std::span<const T>(in), out, counts, root);
  expect_values(std::span<const T>(out), 0, 0, seed, "gather");
}

template <class T>
void check_scatter(const Communicator& comm, const Buffers& buffers, std::int64_t total, bool in_place) {
  const auto seed = static_cast<std::uint64_t>(total);
  const auto [counts, first, own] = parts_of(comm, total, seed);
  const int root = static_cast<int>(total % comm.size());
  const std::span<T> in = buffers.send<T>(comm.rank() == root ? total : 0);
  std::span<T> out = buffers.recv<T>(own);
  if (in_place && comm.rank() == root) out = in.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(own));
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = value_of<T>(0, static_cast<std::int64_t>(i), seed);
  comm.scatter(std::span<const T>(in), out, counts, root);
  expect_values(std::span<const T>(out), 0, first, seed, "scatter");
}

/// What `from` gives to `to`: odd lengths, some 0, at most about `total` from each rank.
std::int64_t given(int from, int to, std::int64_t total, int size) {
  if ((from + 2 * to) % 4 == 3) return 0;
  return std::max<std::int64_t>(0, total / size - 13 * from - 7 * to);
}

template <class T>
void check_all_to_all(const Communicator& comm, const Buffers& buffers, std::int64_t total) {
  std::vector<std::int64_t> counts;
  std::vector<std::int64_t> recv_counts;
  for (int peer = 0; peer < comm.size(); ++peer) {
    counts.push_back(given(comm.rank(), peer, total, comm.size()));
    recv_counts.push_back(given(peer, comm.rank(), total, comm.size()));
  }
  const std::span<T> in = buffers.send<T>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
  const std::span<T> out = buffers.recv<T>(std::accumulate(recv_counts.begin(), recv_counts.end(), std::int64_t{0}));
  std::size_t next = 0;
  for (int peer = 0; peer < comm.size(); ++peer) {
    for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(peer)]; ++i) {
      in[next++] = value_of<T>(comm.rank(), i, static_cast<std::uint64_t>(peer));
    }
  }
  comm.all_to_all(std::span<const T>(in), out, counts, recv_counts);
  next = 0;
  for (int peer = 0; peer < comm.size(); ++peer) {
    const auto length = static_cast<std::size_t>(recv_counts[static_cast<std::size_t>(peer)]);
    expect_values(std::span<const T>(out.subspan(next, length)), peer, 0, static_cast<std::uint64_t>(comm.rank()),
                  "all_to_all");
    next += length;
  }
}

/// Ulysses and expert layers with equal shares.
template <class T>
void check_equal_all_to_all(const Communicator& comm, const Buffers& buffers, std::int64_t total) {
  const std::int64_t part = total / comm.size();
  const std::span<T> in = buffers.send<T>(part * comm.size());
  const std::span<T> out = buffers.recv<T>(part * comm.size());
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = value_of<T>(comm.rank(), static_cast<std::int64_t>(i), 3);
  comm.all_to_all(std::span<const T>(in), out);
  for (int peer = 0; peer < comm.size(); ++peer) {
    const std::span<const T> from = out.subspan(static_cast<std::size_t>(part * peer), static_cast<std::size_t>(part));
    expect_values(from, peer, part * comm.rank(), 3, "equal all_to_all");
  }
}

/// One call with its dtypes, checked against the oracle.
struct CheckedCall {
  std::string_view call;
  void (*check)(const Communicator& comm, const Buffers& buffers, std::int64_t count, bool in_place);
};

/// For calls in which a buffer cannot stand for both.
template <void (*kCheck)(const Communicator&, const Buffers&, std::int64_t)>
void never_in_place(const Communicator& comm, const Buffers& buffers, std::int64_t count, bool /*in_place*/) {
  kCheck(comm, buffers, count);
}

void check_reduce_scatter_of_own_dtypes(const Communicator& comm, const Buffers& buffers, std::int64_t count) {
  if (comm.rank() % 2 == 0 && !sums_in_one_dtype(comm.backend())) {
    check_mixed_reduce_scatter<float>(comm, buffers, count);
  } else {
    check_mixed_reduce_scatter<BFloat16>(comm, buffers, count);
  }
}

constexpr CheckedCall kCalls[] = {
    {"all_reduce", check_all_reduce<float, float>},
    {"all_reduce", check_all_reduce<double, double>},
    {"all_reduce", check_all_reduce<BFloat16, BFloat16>},
    {"all_reduce", check_all_reduce<BFloat16, float>},
    {"all_reduce", check_all_reduce<float, BFloat16>},
    {"all_reduce", check_all_reduce<Float16, Float16>},
    {"all_reduce", check_all_reduce<Float16, float>},
    {"all_reduce", check_all_reduce<float, Float16>},
    {"all_reduce", check_all_reduce<std::int64_t, std::int64_t>},
    {"all_reduce", check_all_reduce<std::int32_t, std::int32_t>},
    {"reduce_scatter", check_reduce_scatter<float, float>},
    {"reduce_scatter", check_reduce_scatter<double, double>},
    {"reduce_scatter", check_reduce_scatter<BFloat16, BFloat16>},
    {"reduce_scatter", check_reduce_scatter<BFloat16, float>},
    {"reduce_scatter", check_reduce_scatter<float, BFloat16>},
    {"reduce_scatter", check_reduce_scatter<Float16, Float16>},
    {"reduce_scatter", check_reduce_scatter<float, Float16>},
    {"reduce_scatter", check_reduce_scatter<std::int64_t, std::int64_t>},
    {"reduce_scatter", check_reduce_scatter<std::int32_t, std::int32_t>},
    {"reduce_scatter at offsets", check_reduce_scatter_at_offsets<float, float>},
    {"reduce_scatter at offsets", check_reduce_scatter_at_offsets<double, double>},
    {"reduce_scatter at offsets", check_reduce_scatter_at_offsets<BFloat16, float>},
    {"reduce_scatter of own dtypes", never_in_place<check_reduce_scatter_of_own_dtypes>},
    {"all_gather", check_all_gather<double>},
    {"all_gather", check_all_gather<float>},
    {"all_gather", check_all_gather<Float16>},
    {"all_gather", check_all_gather<BFloat16>},
    {"all_gather", check_all_gather<std::int64_t>},
    {"all_gather", check_all_gather<std::int32_t>},
    {"all_gather", check_all_gather<std::uint8_t>},
    {"broadcast", never_in_place<check_broadcast<double>>},
    {"broadcast", never_in_place<check_broadcast<BFloat16>>},
    {"broadcast", never_in_place<check_broadcast<std::uint8_t>>},
    {"extremes", check_extremes<float>},
    {"extremes", check_extremes<double>},
    {"extremes", check_extremes<Float16>},
    {"extremes", check_extremes<BFloat16>},
    {"extremes", check_extremes<std::int32_t>},
    {"extremes", check_extremes<std::int64_t>},
    {"extremes", check_extremes<std::uint8_t>},
    {"gather", check_gather<double>},
    {"gather", check_gather<BFloat16>},
    {"gather", check_gather<std::uint8_t>},
    {"scatter", check_scatter<double>},
    {"scatter", check_scatter<BFloat16>},
    {"scatter", check_scatter<std::uint8_t>},
    {"all_to_all", never_in_place<check_all_to_all<double>>},
    {"all_to_all", never_in_place<check_all_to_all<BFloat16>>},
    {"all_to_all", never_in_place<check_all_to_all<std::uint8_t>>},
    {"all_to_all", never_in_place<check_equal_all_to_all<float>>},
};

/// Under sanitizers an element costs tens of times as much: where most pieces are staged is enough of the largest.
bool takes_too_long(std::int64_t count, Place place, bool in_place) {
  return kSanitized && count == kCounts[std::size(kCounts) - 1] && (in_place || place == Place::kAttached);
}

void check_call(const CheckedCall& call, const Communicator& comm, const Buffers& buffers, Place place,
                std::int64_t count, bool in_place) {
  try {
    call.check(comm, buffers, count, in_place);
  } catch (const Error&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(fmt::format("{}, number {} of all calls, {} memory, {} elements, in place {}: {}",
                                         call.call, &call - kCalls, place == Place::kAttached ? "attached" : "ordinary",
                                         count, in_place, error.what()));
  }
}

/// The call of this name with all its dtypes, in all places, with all counts.
void expect_whole_grid(const WorldParam& param, std::string_view name) {
  const RankReport report = run_world(param, [&](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    for (const Place place : {Place::kOrdinary, Place::kAttached}) {
      if (place == Place::kAttached && !backend->capabilities().one_sided) continue;
      const Buffers buffers(*backend, place, kBufferBytes);
      for (const std::int64_t count : kCounts) {
        for (const bool in_place : {false, true}) {
          if (takes_too_long(count, place, in_place)) continue;
          for (const CheckedCall& call : kCalls) {
            if (call.call == name) check_call(call, comm, buffers, place, count, in_place);
          }
        }
      }
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// Level of each factor: world, call, count, place, in place.
const std::vector<FactorRow>& rows_of_calls() {
  static const std::vector<FactorRow> rows =
      covering_array({static_cast<int>(matched_worlds().size()), static_cast<int>(std::size(kCalls)),
                      static_cast<int>(std::size(kCounts)), 2, 2},
                     2);
  return rows;
}

TEST_P(Collectives, EveryCallMeetsEveryWorldCountAndPlace) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const std::vector<WorldParam> worlds = matched_worlds();
  const auto own = std::ranges::find_if(worlds, [](const WorldParam& world) {
    return world.backend == GetParam().backend && world.size == GetParam().size &&
           world.per_node == GetParam().per_node;
  });
  std::vector<FactorRow> rows = rows_of_calls();
  std::erase_if(rows, [&](const FactorRow& row) { return row[0] != own - worlds.begin(); });
  ASSERT_GE(rows.size(), std::size(kCalls));
  const RankReport report = run_world(GetParam(), [&](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    for (const Place place : {Place::kOrdinary, Place::kAttached}) {
      // What cannot be attached to lies in ordinary memory.
      const bool attachable = backend->capabilities().one_sided;
      if (place == Place::kAttached && !attachable) continue;
      const Buffers buffers(*backend, place, kBufferBytes);
      for (const FactorRow& row : rows) {
        if (attachable && static_cast<Place>(row[3]) != place) continue;
        const std::int64_t count = kCounts[row[2]];
        const bool in_place = row[4] == 1;
        if (takes_too_long(count, place, in_place)) continue;
        check_call(kCalls[row[1]], comm, buffers, place, count, in_place);
      }
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(CollectiveGrid, AllReduceSumsInRankOrder) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_whole_grid(GetParam(), "all_reduce");
}

TEST_P(CollectiveGrid, ReduceScatterSumsUnevenParts) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_whole_grid(GetParam(), "reduce_scatter");
}

TEST_P(CollectiveGrid, ReduceScatterSumsPartsInAnotherOrderThanTheRanks) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_whole_grid(GetParam(), "reduce_scatter at offsets");
}

TEST_P(CollectiveGrid, ReduceScatterTakesFromEachRankTheDtypeThatItHas) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_whole_grid(GetParam(), "reduce_scatter of own dtypes");
}

TEST_P(CollectiveGrid, AllGatherPutsUnevenPartsInOrder) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_whole_grid(GetParam(), "all_gather");
}

TEST_P(CollectiveGrid, BroadcastFromEveryRoot) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_whole_grid(GetParam(), "broadcast");
}

TEST_P(CollectiveGrid, MinimaAndMaximaOfEveryDtype) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_whole_grid(GetParam(), "extremes");
}

TEST_P(CollectiveGrid, GatherPutsUnevenPartsInOrderAtEveryRoot) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_whole_grid(GetParam(), "gather");
}

TEST_P(CollectiveGrid, ScatterGivesUnevenPartsFromEveryRoot) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_whole_grid(GetParam(), "scatter");
}

TEST_P(CollectiveGrid, AllToAllMovesEqualAndUnequalParts) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_whole_grid(GetParam(), "all_to_all");
}

/// Transports choose another way for parts of some sizes: none may depend on what one rank alone has.
TEST_P(LargeParts, AllGatherOfPartsOfManyMegabytes) {
  const std::int64_t total = GetParam().size * std::int64_t{kSanitized || GetParam().size > 4 ? 300'000 : 10'000'000};
  const RankReport report = run_world(GetParam(), [total](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    const Buffers buffers(*backend, Place::kOrdinary, static_cast<std::size_t>(total));
    check_all_gather<std::uint8_t>(Communicator(backend), buffers, total, false);
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(Collectives, BytesOfPartsAreThoseOfTheFormula) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const auto table = std::make_shared<TrafficTable>();
    backend->set_observer(table);
    const Communicator comm(backend);
    const auto others = static_cast<std::uint64_t>(comm.size() - 1);
    for (const std::size_t part : {std::size_t{5}, std::size_t{70'001}}) {  // beside the post, and staged
      table->reset();
      const bool root = rank == 0;
      std::vector<float> one(part);
      std::vector<float> all(part * static_cast<std::size_t>(comm.size()));
      std::vector<float> out(all.size());
      comm.gather(std::span<const float>(one), root ? std::span(all) : std::span<float>(), 0);
      comm.scatter(root ? std::span<const float>(all) : std::span<const float>(), std::span(one), 0);
      comm.all_to_all(std::span<const float>(all), std::span(out));
      const std::uint64_t bytes = part * sizeof(float);
      const auto require_bytes = [&](CollectiveKind kind, std::uint64_t expected) {
        const TrafficRow row = table->row(kind);
        require(row.calls == 1 && row.bytes == expected,
                fmt::format("{} of {}: {} bytes, expected {}", name_of(kind), part, row.bytes, expected));
      };
      require_bytes(CollectiveKind::kGather, root ? bytes * others : 0);
      require_bytes(CollectiveKind::kScatter, root ? 0 : bytes);
      require_bytes(CollectiveKind::kAllToAll, bytes * others);
    }
    backend->set_observer(nullptr);
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(Collectives, BytesBetweenNodesAreThoseOfTheFormula) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const int per_node = GetParam().per_node;
  const RankReport report = run_world(GetParam(), [&](int rank, const std::shared_ptr<CommBackend>& backend) {
    const auto table = std::make_shared<TrafficTable>();
    backend->set_observer(table);
    const Communicator comm(backend);
    const std::span<const int> nodes = backend->node_sizes();
    const int size = comm.size();
    const bool one_node = per_node == 0 || per_node >= size;
    require(nodes.size() == static_cast<std::size_t>(one_node ? 1 : (size + per_node - 1) / per_node),
            "number of nodes");
    const bool levels = backend->kind().find('+') != std::string_view::npos;
    require(levels == (has_levels(GetParam()) && !one_node && per_node > 1 && size % per_node == 0),
            "levels where there are some");
    const auto others = static_cast<std::uint64_t>(nodes.size() - 1);
    const auto far = static_cast<std::uint64_t>(
        one_node ? 0 : size - nodes[static_cast<std::size_t>(rank / per_node)]);  // ranks on other nodes
    for (const std::size_t part : {std::size_t{5}, std::size_t{170'001}}) {
      const std::uint64_t bytes = part * sizeof(float);
      std::vector<float> one(part, 1.0F);
      std::vector<float> all(part * static_cast<std::size_t>(size), 1.0F);
      const auto require_far = [&](const std::string& name, std::uint64_t expected) {
        require(table->far_bytes() == expected, fmt::format("{} of {}: {} bytes from other nodes, expected {}", name,
                                                            part, table->far_bytes(), expected));
      };
      table->reset();
      comm.all_gather(std::span<const float>(one), std::span(all));
      require_far("all_gather", bytes * (levels ? others : far));
      require(table->bytes() == bytes * static_cast<std::uint64_t>(size - 1),
              "in all an all_gather receives what it always does");
      table->reset();
      comm.reduce_scatter(std::span<const float>(all), std::span(one));
      require_far("reduce_scatter", bytes * (levels ? others : far));
      require(table->bytes() == bytes * static_cast<std::uint64_t>(size - 1),
              "in all a reduce_scatter receives what it always does");
      table->reset();
      comm.broadcast(std::span(one), 0);
      if (levels) require_far("broadcast", rank > 0 && rank % per_node == 0 ? bytes : 0);
      table->reset();
      comm.all_reduce(std::span(one));
      const bool small = bytes <= 8192;
      if (levels && small) require_far("all_reduce", bytes * others);
      if (levels && !small) {
        // A part of the sum from each other node, and of the result; parts may be one element longer.
        const std::uint64_t expected = 2 * others * (bytes / static_cast<std::uint64_t>(size));
        require(
            table->far_bytes() / 4 >= expected / 4 - 4 * others && table->far_bytes() / 4 <= expected / 4 + 4 * others,
            fmt::format("all_reduce of {}: {} bytes from other nodes, about {} expected", part, table->far_bytes(),
                        expected));
      }
    }
    backend->set_observer(nullptr);
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(Collectives, AllReduceHasTheBitsOfReduceScatterAndGather) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    for (const std::size_t part : {std::size_t{3}, std::size_t{1001}, std::size_t{50'003}}) {
      std::vector<float> in(part * static_cast<std::size_t>(comm.size()));
      for (std::size_t i = 0; i < in.size(); ++i) in[i] = value_of<float>(rank, static_cast<std::int64_t>(i), 9);
      std::vector<float> whole(in.size());
      std::vector<float> own(part);
      std::vector<float> gathered(in.size());
      comm.all_reduce(std::span<const float>(in), std::span(whole));
      comm.reduce_scatter(std::span<const float>(in), std::span(own));
      comm.all_gather(std::span<const float>(own), std::span(gathered));
      if (sums_in_rank_order(*backend)) {
        require(std::memcmp(whole.data(), gathered.data(), whole.size() * sizeof(float)) == 0, "bits differ");
        continue;
      }
      // Others may sum the two in different orders; but every rank must have the same bits.
      std::vector<float> least = whole;
      std::vector<float> greatest = whole;
      comm.all_reduce(std::span(least), ReduceOp::kMin);
      comm.all_reduce(std::span(greatest), ReduceOp::kMax);
      require(least == whole && greatest == whole, "ranks have different sums");
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(Collectives, NanAndInfinityArriveOnAllRanks) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    const bool last = rank == comm.size() - 1;
    std::vector<float> data{last ? std::numeric_limits<float>::quiet_NaN() : 1.0F,
                            last ? std::numeric_limits<float>::infinity() : 1.0F,
                            std::numeric_limits<float>::denorm_min()};
    comm.all_reduce(std::span(data));
    require(std::isnan(data[0]) && std::isinf(data[1]), "a non-finite value was lost");
    require(data[2] == static_cast<float>(comm.size()) * std::numeric_limits<float>::denorm_min(),
            "denormals were flushed");
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(Collectives, BarrierWaitsForTheLastRank) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    const auto now = [] {
      return static_cast<std::int64_t>(SteadyClock::now().time_since_epoch().count());
    };  // one clock for the host
    for (int round = 1; round <= 50; ++round) {
      if (round % 10 == rank) std::this_thread::sleep_for(Milliseconds{2});
      const std::int64_t came = now();
      comm.barrier();
      const std::int64_t left = now();
      std::vector<std::int64_t> all(static_cast<std::size_t>(comm.size()));
      comm.all_gather(std::span<const std::int64_t>(&came, 1), std::span(all));
      for (const std::int64_t theirs : all) require(theirs <= left, "a rank passed the barrier too early");
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(Collectives, SplitGroupsAreIndependent) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const int size = backend->size();
    // Keys turn the order around; the last rank stays outside in one of the rounds.
    for (const bool outsider : {false, true}) {
      const int color = outsider && rank == size - 1 ? -1 : rank % 2;
      const std::shared_ptr<CommBackend> part = backend->split(color, -rank, outsider ? "some" : "all");
      require((part == nullptr) == (color < 0), "membership is wrong");
      if (!part) continue;
      const Communicator comm(part);
      std::vector<int> expected;
      for (int peer = size - 1; peer >= 0; --peer) {
        if (peer % 2 == color && !(outsider && peer == size - 1)) expected.push_back(peer);
      }
      std::vector<std::int32_t> members(expected.size());
      const std::int32_t own = rank;
      require(comm.size() == static_cast<int>(expected.size()), "size of the part is wrong");
      comm.all_gather(std::span<const std::int32_t>(&own, 1), std::span(members));
      require(std::equal(members.begin(), members.end(), expected.begin()), "members are out of order");
      const std::shared_ptr<CommBackend> nested = part->split(0, comm.rank(), "nested");
      std::vector<float> data(5000, 1.0F);
      Communicator(nested).all_reduce(std::span(data));
      require(data.back() == static_cast<float>(comm.size()), "the nested group sums wrongly");
    }
    Communicator(backend).barrier();
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// Ranks that wait for one that comes late.
class LateRank : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, LateRank,
                         ::testing::ValuesIn(!started_worlds().empty() ? started_worlds()
                                                                       : std::vector<WorldParam>{{"inproc", 2},
                                                                                                 {"shm", 3},
                                                                                                 {"messages", 2},
                                                                                                 {"mixed", 2},
                                                                                                 {"levels", 4, 2},
                                                                                                 {"nccl", 2},
                                                                                                 {"inproc_on_gpu", 2}}),
                         name_of_param);

/// What a rank owes to others, as a test sees it.
class CountedProgress final : public Progress {
 public:
  bool advance() override { return ++advances > 0; }
  void set_awaited(int /*rank*/) override { awaits = true; }
  void clear_awaited() noexcept override { awaits = false; }

  int advances = 0;
  bool awaits = false;
};

TEST_P(LateRank, IsAwaitedByRanksThatDoWhatTheyOwe) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const auto owed = std::make_shared<CountedProgress>();
    require(backend->add_progress(owed) == rank, "the number of this rank");
    const std::shared_ptr<CommBackend> part = backend->split(0, rank, "part");
    for (const std::shared_ptr<CommBackend>& group : {backend, part}) {
      const Communicator comm(group);
      comm.barrier();
      const int before = owed->advances;
      if (rank == comm.size() - 1) std::this_thread::sleep_for(Milliseconds{100});
      comm.barrier();
      require(rank == comm.size() - 1 || owed->advances > before, "a wait without progress");
      require(!owed->awaits, "still awaits somebody after the call");
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(LateRank, CostsNobodyACore) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const bool threads = !is_started_world(GetParam()) && GetParam().backend != "shm";
  const int waiters = threads ? GetParam().size - 1 : 1;  // of a process
  const auto cpu_ms = [] {
    timespec used{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return used.tv_sec * 1000 + used.tv_nsec / 1'000'000;
  };
  // What a rank does before it waits counts, too: a sanitizer takes half a second for 64 MiB on their way to a fake
  // GPU.
  const std::size_t large = std::size_t{kSanitized ? 8 : 64} << 20U;
  for (const std::size_t bytes : {std::size_t{4}, large}) {
    const RankReport report = run_world(GetParam(), [&](int rank, const std::shared_ptr<CommBackend>& backend) {
      const Communicator comm(backend);
      std::vector<float> data(bytes / sizeof(float), 1.0F);
      comm.barrier();
      if (rank == comm.size() - 1) {
        std::this_thread::sleep_for(Milliseconds{1'000});
        return comm.broadcast(std::span(data), rank);
      }
      long used = 0;
      // Looked at long before the call has anything to do. Load on the machine only makes it smaller.
      std::jthread watcher([&, before = cpu_ms()] {
        std::this_thread::sleep_for(Milliseconds{500});
        used = cpu_ms() - before;
      });
      comm.broadcast(std::span(data), comm.size() - 1);
      watcher.join();
      require(used < 150L * waiters,
              fmt::format("{} ms of 500 ms of a processor, waiting for {} bytes that nobody sends", used, bytes));
    });
    EXPECT_TRUE(report.ok()) << report.text();
  }
}

}  // namespace
}  // namespace zeroth::test
