#include "comm/rendezvous/unix_socket.h"

#include "support/fork_ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::detail {
namespace {

struct Pair {
  UniqueFd here;
  UniqueFd there;
};

Pair make_pair() {
  std::array<int, 2> ends{-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
  return {.here = UniqueFd(ends[0]), .there = UniqueFd(ends[1])};
}

/// What a caller's check() throws; no error of Zeroth, so that it cannot be confused with one.
struct GivenUp : std::runtime_error {
  GivenUp() : std::runtime_error("given up") {}
};

/// A check() that gives up at the `limit`-th call.
struct Patience {
  int limit;
  int calls = 0;
  void operator()() {
    if (++calls >= limit) throw GivenUp();
  }
};

const std::vector<std::byte> kLarge(60'000, std::byte{7});

TEST(UnixSocket, APeerThatNeverReadsEndsWithTheCallersCheck) {
  const Pair pair = make_pair();
  Patience patience{.limit = 3};
  int sent = 0;
  const auto begin = SteadyClock::now();
  EXPECT_THROW(
      {
        for (; sent < 1000; ++sent) ASSERT_TRUE(send_message(pair.here.get(), kLarge, {}, patience));
      },
      GivenUp);
  EXPECT_GT(sent, 0);
  EXPECT_EQ(patience.calls, 3);
  EXPECT_GE(SteadyClock::now() - begin, 2 * kWaitSlice) << "it must sleep between two looks";
}

TEST(UnixSocket, WithoutACheckTheSenderHasADeadlineOfItsOwn) {
  const Pair pair = make_pair();
  try {
    for (int sent = 0; sent < 1000; ++sent) ASSERT_TRUE(send_message(pair.here.get(), kLarge));
    FAIL() << "a peer that never reads took all";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    EXPECT_NE(std::string(error.what()).find("a message of 60000 bytes"), std::string::npos) << error.what();
  }
}

TEST(UnixSocket, ASlowReaderGetsEverythingInOrder) {
  Pair pair = make_pair();
  constexpr int kMessages = 40;
  std::thread reader([there = std::move(pair.there)] {
    std::this_thread::sleep_for(Milliseconds{250});  // the sender has filled the buffer and waits
    for (int number = 0; number < kMessages; ++number) {
      Patience patience{.limit = 100};
      const auto message = receive_message(there.get(), kLarge.size(), patience);
      ASSERT_TRUE(message.has_value());
      EXPECT_EQ(message->bytes.size(), kLarge.size());
      EXPECT_EQ(message->bytes.front(), static_cast<std::byte>(number));
    }
  });
  Patience patience{.limit = 100};
  std::vector<std::byte> bytes = kLarge;
  for (int number = 0; number < kMessages; ++number) {
    bytes.front() = static_cast<std::byte>(number);
    EXPECT_TRUE(send_message(pair.here.get(), bytes, {}, patience));
  }
  reader.join();
}

TEST(UnixSocket, APeerThatClosesWhileWeWaitIsNoTimeout) {
  Pair pair = make_pair();
  std::thread closer([there = std::move(pair.there)]() mutable {
    std::this_thread::sleep_for(Milliseconds{150});
    there.reset();
  });
  Patience patience{.limit = 100};
  bool open = true;
  for (int sent = 0; open && sent < 1000; ++sent) open = send_message(pair.here.get(), kLarge, {}, patience);
  EXPECT_FALSE(open);
  closer.join();
}

TEST(UnixSocket, ReceivingEndsWithTheCallersCheckToo) {
  const Pair pair = make_pair();
  Patience patience{.limit = 2};
  EXPECT_THROW((void)receive_message(pair.here.get(), 16, patience), GivenUp);
  EXPECT_EQ(patience.calls, 2);
}

TEST(UnixSocket, AListenerWhoseQueueIsFullDoesNotHoldTheCallerForever) {
  const std::string name = "zeroth-test-" + test::unique_job();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  ASSERT_LT(name.size() + 1, sizeof address.sun_path);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const UniqueFd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(listener.get(), 0), 0);
  std::vector<UniqueFd> waiting;  // nobody accepts them
  Patience patience{.limit = 3};
  EXPECT_THROW(
      {
        for (int guest = 0; guest < 10; ++guest) waiting.push_back(connect_to(name, patience));
      },
      GivenUp);
  EXPECT_FALSE(waiting.empty());
}

TEST(UnixSocket, AcceptingWhenNobodyIsThereReturnsAtOnce) {
  const std::optional<UniqueFd> listener = listen_at("zeroth-test-" + test::unique_job());
  ASSERT_TRUE(listener.has_value());
  EXPECT_FALSE(accept_from(listener->get()));
}

}  // namespace
}  // namespace zeroth::detail
