// Sends and receives that are started and asked for later, on every backend.
#include "conformance/world_runner.h"

#include <zeroth/comm/decorators.h>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;
using Pending = std::unique_ptr<PendingPoints>;
using Bytes = std::vector<std::uint8_t>;

/// Over NCCL a started message holds up the later ones of its rank: what needs more is not asked of it.
[[nodiscard]] bool goes_alone(const WorldParam& world) {
  return !world.backend.starts_with("nccl");
}

[[nodiscard]] std::vector<WorldParam> worlds_of_started() {
  std::vector<WorldParam> worlds = several_matched_ranks();
  if (started_worlds().empty()) worlds.insert(worlds.end(), {{"staged", 2}, {"mixed", 3}, {"sockets", 2}});
  std::erase_if(worlds, [](const WorldParam& world) { return !goes_alone(world); });
  return worlds;
}

class StartedPoints : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, StartedPoints, ::testing::ValuesIn(worlds_of_started()), name_of_param);

/// 1 B, what lies in a ring, what fills it, and what goes on in pieces or is read where it lies.
constexpr std::size_t kSizes[] = {1, 1'000, 65'536, 65'537, 300'001, 5 << 20U};

[[nodiscard]] std::uint8_t value_of(int from, int to, std::size_t message, std::size_t index) {
  return static_cast<std::uint8_t>(index * 31 + index / 251 + static_cast<std::size_t>(from * 7 + to) + message * 13);
}

[[nodiscard]] Bytes message_of(int from, int to, std::size_t message, std::size_t bytes) {
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = value_of(from, to, message, i);
  return data;
}

void expect_message(const Bytes& data, int from, int to, std::size_t message) {
  for (std::size_t i = 0; i < data.size(); ++i) {
    if (data[i] == value_of(from, to, message, i)) continue;
    throw std::runtime_error(
        fmt::format("byte {} of {} of message {} from rank {} is wrong", i, data.size(), message, from));
  }
}

[[nodiscard]] MessageTag tag_of(std::size_t message) {
  return {.unit = 1, .label = static_cast<std::uint32_t>(message)};
}

[[nodiscard]] Pending start_send(const Communicator& comm, const Bytes& data, int to, std::size_t message) {
  return comm.start_send(std::span<const std::uint8_t>(data), to, tag_of(message));
}

[[nodiscard]] Pending start_recv(const Communicator& comm, Bytes& data, int from, std::size_t message) {
  return comm.start_recv(std::span<std::uint8_t>(data), from, tag_of(message));
}

void poll(PendingPoints& pending) {
  for (const Deadline deadline(quick_options().timeout); !pending.done(); std::this_thread::yield())
    require(!deadline.passed(), "it was never done");
}

/// Every rank starts sends to both neighbours before anybody receives.
TEST_P(StartedPoints, SendsBeforeAnyReceiveHangNobody) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    const int next = (rank + 1) % comm.size();
    const int previous = (rank + comm.size() - 1) % comm.size();
    std::vector<Bytes> data;
    std::vector<Pending> sends;
    data.reserve(2 * std::size(kSizes));
    for (std::size_t message = 0; message < std::size(kSizes); ++message) {
      for (const int to : {next, previous}) {
        data.push_back(message_of(rank, to, message, kSizes[message]));
        sends.push_back(start_send(comm, data.back(), to, message));
      }
    }
    for (std::size_t message = 0; message < std::size(kSizes); ++message) {
      for (const int from : {previous, next}) {
        Bytes in(kSizes[message]);
        if (message % 2 == 0) {
          comm.recv(std::span(in), from, tag_of(message));
        } else {
          const Pending pending = start_recv(comm, in, from, message);
          message % 3 == 0 ? pending->wait() : poll(*pending);
        }
        expect_message(in, from, rank, message);
      }
    }
    for (const Pending& pending : sends) pending->wait();
    for (const Pending& pending : sends) require(pending->done(), "done after wait()");
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

}  // namespace
}  // namespace zeroth::test
