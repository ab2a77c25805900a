// Memory is handed over by messages; what a peer of another build, or a broken one, may send must be named.
#include "comm/shm/shm_exchange.h"

#include "comm/rendezvous/unix_socket.h"
#include "support/fork_ranks.h"

#include <zeroth/device/memory.h>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::detail {
namespace {

RendezvousSpec spec_of(const std::string& job, int rank) {
  return {.job = job, .rank = rank, .size = 2, .timeout = Milliseconds{20'000}};
}

/// Rank `rank` of two exchanges an arena; the other one is `peer`, which gets the connection to it. Returns
/// the error.
Error exchange_with(int rank, const std::function<void(int connection)>& peer) {
  const std::string job = test::unique_job();
  std::thread other([&] {
    const Rendezvous meeting = meet(spec_of(job, 1 - rank), [] {});
    peer(meeting.connections[rank == 0 ? 0 : 1].get());
  });
  Error caught(ErrorCode::kUsage, "no error");
  try {
    ShmExchange exchange(spec_of(job, rank), {}, make_system_calls(), [] {});
    const Arena arena = Arena::create(ArenaKind::kShared, kPageBytes, "offer");
    const Deadline deadline(Milliseconds{20'000});
    (void)exchange.exchange(arena, [&] { ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "the peer is silent"); });
  } catch (const Error& error) {
    caught = error;
  }
  other.join();
  return caught;
}

void expect_text(const Error& error, ErrorCode code, const std::vector<std::string>& parts) {
  EXPECT_EQ(error.code(), code) << error.what();
  for (const std::string& part : parts)
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
}

/// Waits for the end of the other side, so that the connection does not close before it has read.
void wait_for_close(int connection) {
  const Deadline deadline(Milliseconds{20'000});
  while (receive_message(connection, 4096, [&] { ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "still open"); })) {
  }
}

const std::string kFromRank1 = "from rank 1 (pid " + std::to_string(::getpid()) + ")";
const std::string kFromRank0 = "from rank 0 (pid " + std::to_string(::getpid()) + ")";

TEST(ShmExchange, AnOfferOfTheWrongLengthNamesWhoSentIt) {
  const Error error = exchange_with(0, [](int connection) {
    const std::array<char, 3> nonsense{};
    EXPECT_TRUE(send_message(connection, bytes_of(nonsense)));
    wait_for_close(connection);
  });
  expect_text(error, ErrorCode::kInternal,
              {"where: comm.shm", "who: rank 0/2", kFromRank1, "expected: 8 bytes", "got: 3"});
}

TEST(ShmExchange, AnOfferWithoutItsMemoryNamesWhoSentIt) {
  const Error error = exchange_with(0, [](int connection) {
    const std::uint64_t bytes = kPageBytes;
    EXPECT_TRUE(send_message(connection, bytes_of(bytes)));
    wait_for_close(connection);
  });
  expect_text(error, ErrorCode::kInternal, {"who: rank 0/2", kFromRank1, "1 descriptors for 4096 bytes", "got: 0"});
}

TEST(ShmExchange, AListOfOffersThatIsNoneNamesWhoSentIt) {
  const auto read_offer = [](int connection) {
    const Deadline deadline(Milliseconds{20'000});
    EXPECT_TRUE(receive_message(connection, 64, [&] {
                  ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "no offer");
                }).has_value());
  };
  const Error wrong_length = exchange_with(1, [&](int connection) {
    read_offer(connection);
    const std::uint64_t one = 1;
    EXPECT_TRUE(send_message(connection, bytes_of(one)));
    wait_for_close(connection);
  });
  expect_text(wrong_length, ErrorCode::kInternal, {"who: rank 1/2", kFromRank0, "expected: 1024 bytes", "got: 8"});
  const Error no_memory = exchange_with(1, [&](int connection) {
    read_offer(connection);
    std::array<std::uint64_t, kMaxShmRanks> sizes{kPageBytes, kPageBytes};
    EXPECT_TRUE(send_message(connection, bytes_of(sizes)));
    wait_for_close(connection);
  });
  expect_text(no_memory, ErrorCode::kInternal, {"who: rank 1/2", kFromRank0, "expected: 2 descriptors", "got: 0"});
}

TEST(ShmExchange, MemoryThatCannotBeTrustedNamesItsOwner) {
  const Error error = exchange_with(0, [](int connection) {
    const UniqueFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(::ftruncate(unsealed.get(), kPageBytes), 0);
    const std::uint64_t bytes = kPageBytes;
    const int fd = unsealed.get();
    EXPECT_TRUE(send_message(connection, bytes_of(bytes), std::span<const int>(&fd, 1)));
    wait_for_close(connection);
  });
  expect_text(error, ErrorCode::kMismatch,
              {"not sealed", "who: rank 0/2", "of rank 1 (pid " + std::to_string(::getpid()) + ")", "4.00 KiB"});
}

}  // namespace
}  // namespace zeroth::detail
