// More than 2^31 bytes in one call, on every backend: no count, offset or length may be an int.
#include "conformance/world_runner.h"

#include <zeroth/device/memory.h>

#include <algorithm>

namespace zeroth::test {
namespace {

constexpr std::int64_t kTotal = (std::int64_t{1} << 31U) + 4099;
constexpr std::uint64_t kNeeded = std::uint64_t{6} << 30U;

class Large : public ::testing::TestWithParam<WorldParam> {
 protected:
  void SetUp() override {
    if (kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: shadow memory of gigabytes";
    if (available_memory_bytes() < kNeeded) GTEST_SKIP() << "not enough memory: 6 GiB";
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, Large,
                         ::testing::ValuesIn(mpi_world_size() > 0
                                                 ? std::vector<WorldParam>{{"mpi", 2}, {"mpi_own_sums", 2}}
                                                 : std::vector<WorldParam>{{"self", 1}, {"inproc", 2}, {"shm", 2}}),
                         name_of_param);

TEST_P(Large, MoreThanTwoGibibytesInOneGather) {
  const RankReport report = run_world(
      GetParam(),
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        const Communicator comm(backend);
        const int size = comm.size();
        std::vector<std::int64_t> counts(static_cast<std::size_t>(size), 1000);
        counts.front() += kTotal - 1000 * size;
        const Arena arena = Arena::create(ArenaKind::kPrivate, static_cast<std::size_t>(kTotal), "large");
        auto* bytes = reinterpret_cast<std::uint8_t*>(arena.data());
        const auto value = [](std::int64_t index) { return static_cast<std::uint8_t>(index / 4096 * 31 + index); };
        const std::int64_t first = rank == 0 ? 0 : counts.front() + (rank - 1) * 1000;
        const std::int64_t own = counts[static_cast<std::size_t>(rank)];
        for (std::int64_t index = 0; index < own; ++index) bytes[first + index] = value(first + index);
        comm.all_gather(std::span<const std::uint8_t>(bytes + first, static_cast<std::size_t>(own)),
                        std::span(bytes, static_cast<std::size_t>(kTotal)), counts);
        for (std::int64_t index = 0; index < kTotal; ++index) {
          if (bytes[index] != value(index)) require(false, "byte " + std::to_string(index));
        }
        comm.barrier();
      },
      {.deadline = Milliseconds{200'000}});
  EXPECT_TRUE(report.ok()) << report.text();
}

/// Bytes: the type of which a call of this length has the most elements.
TEST_P(Large, MoreThanTwoBillionElementsInOneReductionAndInOneMessage) {
  const RankReport report = run_world(
      GetParam(),
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        const Communicator comm(backend);
        const Arena arena = Arena::create(ArenaKind::kPrivate, static_cast<std::size_t>(kTotal), "large");
        const std::span bytes(reinterpret_cast<std::uint8_t*>(arena.data()), static_cast<std::size_t>(kTotal));
        const auto value = [](std::size_t index, int of) {
          return static_cast<std::uint8_t>(index / 4096 * 31 + index * static_cast<std::size_t>(of));
        };
        const auto largest = [&](std::size_t index) {
          return comm.size() == 1 ? value(index, 1) : std::max(value(index, 1), value(index, 2));
        };
        for (std::size_t index = 0; index < bytes.size(); ++index) bytes[index] = value(index, rank + 1);
        comm.all_reduce(bytes, ReduceOp::kMax);
        for (std::size_t index = 0; index < bytes.size(); ++index) {
          if (bytes[index] != largest(index)) require(false, "maximum of byte " + std::to_string(index));
        }
        if (comm.size() == 1) return;
        const std::size_t before = bytes.size() - 8192;
        if (rank == 0) {
          bytes.back() = 77;
          comm.send(std::span<const std::uint8_t>(bytes), 1);
        } else {
          std::ranges::fill(bytes.last(8192), std::uint8_t{0});
          comm.recv(bytes, 0);
          require(bytes.back() == 77 && bytes[before] == largest(before), "the end of a message");
        }
        comm.barrier();
      },
      {.deadline = Milliseconds{200'000}});
  EXPECT_TRUE(report.ok()) << report.text();
}

}  // namespace
}  // namespace zeroth::test
