// Who is let in, and what a link between two threads measures.
#include "doctor/wire.h"

#include "doctor/probes.h"
#include "hosts/sockets.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/factory.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::doctor {
namespace {

using ::testing::HasSubstr;

const std::string kSecret = "a secret of enough bytes";
constexpr Milliseconds kPatience{20'000};

Endpoint here(int port) {
  return {.host = "127.0.0.1", .port = port};
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Wire, CarriesMessagesAndRefusesHugeOnes) {
  auto [a, b] = make_wires();
  a.send("hello", Deadline(kPatience));
  a.send("", Deadline(kPatience));
  EXPECT_EQ(b.receive(Deadline(kPatience)), "hello");
  EXPECT_EQ(b.receive(Deadline(kPatience)), "");
  EXPECT_THAT(message_of([&] { (void)b.receive(Deadline(Milliseconds{50})); }), HasSubstr("[TIMEOUT] nothing for 0 s"));
  ASSERT_EQ(::send(a.fd(), "\xFF\xFF\xFF\xFF", 4, 0), 4);
  EXPECT_THAT(message_of([&] { (void)b.receive(Deadline(kPatience)); }), HasSubstr("a message is too large"));
  a.close();
  EXPECT_THAT(message_of([&] { (void)b.receive(Deadline(kPatience)); }), HasSubstr("[PEER_LOST]"));
}

TEST(Door, LetsInWhoKnowsTheSecretAndSaysWhichRankItIs) {
  Door door(here(0), kSecret);
  auto visit =
      std::async(std::launch::async, [&] { return knock({here(door.port())}, kSecret, 7, Deadline(kPatience)); });
  int rank = -1;
  Wire ours = door.admit(Deadline(kPatience), rank);
  Wire theirs = visit.get();
  EXPECT_EQ(rank, 7);
  ours.send("in", Deadline(kPatience));
  EXPECT_EQ(theirs.receive(Deadline(kPatience)), "in");
  EXPECT_EQ(peer_address(theirs), "127.0.0.1");
}

TEST(Door, StrangersNeitherComeInNorHoldItUp) {
  Door door(here(0), kSecret);
  std::string why;
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 70; ++i) silent.push_back(connect_once(here(door.port()), kPatience, why));
  const UniqueFd babbling = connect_once(here(door.port()), kPatience, why);
  const std::string noise(4096, 'x');
  ASSERT_GT(::send(babbling.get(), noise.data(), noise.size(), MSG_NOSIGNAL), 0);
  auto guess = std::async(std::launch::async, [&] {
    return message_of(
        [&] { (void)knock({here(door.port())}, "another secret, quite wrong", 3, Deadline(Milliseconds{500})); });
  });
  auto visit =
      std::async(std::launch::async, [&] { return knock({here(door.port())}, kSecret, 1, Deadline(kPatience)); });
  int rank = -1;
  const auto begin = SteadyClock::now();
  const Wire ours = door.admit(Deadline(kPatience), rank);
  EXPECT_EQ(rank, 1);
  EXPECT_LT(SteadyClock::now() - begin, kPatience / 2);
  (void)visit.get();
  (void)door.admit(Deadline(Milliseconds{1500}), rank);
  EXPECT_EQ(rank, -1);
  EXPECT_THAT(guess.get(), HasSubstr("[TIMEOUT] nobody of this job answers"));
  EXPECT_GT(door.strangers(), 6);
}

TEST(Door, AnotherHeadIsNotObeyed) {
  // Somebody else has the port: it does not know the secret.
  Door other(here(0), "another secret, quite wrong");
  auto wait = std::async(std::launch::async, [&] {
    int rank = 0;
    (void)other.admit(Deadline(Milliseconds{1000}), rank);
    return rank;
  });
  const std::string message =
      message_of([&] { (void)knock({here(other.port())}, kSecret, 1, Deadline(Milliseconds{500})); });
  EXPECT_THAT(message, HasSubstr("nobody of this job answers"));
  EXPECT_EQ(wait.get(), -1);
}

TEST(Door, EveryAddressIsTriedAndNamed) {
  Door door(here(0), kSecret);
  const int port = door.port();
  auto visit = std::async(std::launch::async, [&] {
    return knock({{.host = "no such name", .port = port}, here(port)}, kSecret, 2, Deadline(kPatience));
  });
  int rank = -1;
  (void)door.admit(Deadline(kPatience), rank);
  (void)visit.get();
  EXPECT_EQ(rank, 2);
  const std::string message = message_of(
      [&] { (void)knock({{.host = "no such name", .port = 1}, here(1)}, kSecret, 2, Deadline(Milliseconds{100})); });
  EXPECT_THAT(message, HasSubstr("no such name:1: "));
  EXPECT_THAT(message, HasSubstr("127.0.0.1:1: Connection refused"));
}

TEST(Probes, TcpIsMeasuredInBothDirections) {
  Door door(here(0), kSecret);
  auto other = std::async(std::launch::async, [&] { serve_tcp(door, 0, Deadline(kPatience)); });
  const LinkFigures figures = measure_tcp({here(door.port())}, kSecret, 0, Deadline(kPatience));
  other.get();
  EXPECT_GT(figures.latency_us, 0);
  EXPECT_GT(figures.there_bytes_per_s, 0);
  EXPECT_GT(figures.back_bytes_per_s, 0);
}

TEST(Probes, APeerThatDoesNotComeIsMissedInTime) {
  Door door(here(0), kSecret);
  EXPECT_THAT(message_of([&] { serve_tcp(door, 3, Deadline(Milliseconds{200})); }), HasSubstr("rank 3 did not come"));
}

TEST(Probes, MessagesAreMeasuredOverAGroupAndASlowLinkShows) {
  for (const double slow : {0.0, 50e6}) {
    const std::shared_ptr<InprocHub> hub = make_inproc_hub(2);
    const auto group = [&hub](int rank) {
      CommOptions options;
      options.timeout = kPatience;
      return Communicator(make_backend("inproc", {.rank = rank, .size = 2, .hub = hub, .options = options}));
    };
    auto other = std::async(std::launch::async, [&] { serve_messages(group(1), 0, slow); });
    const LinkFigures figures = measure_messages(group(0), 1, slow);
    other.get();
    EXPECT_GT(figures.latency_us, 0);
    EXPECT_GT(figures.there_bytes_per_s, 0);
    if (slow > 0) {
      EXPECT_LE(figures.there_bytes_per_s, slow * 1.05);
      EXPECT_LE(figures.back_bytes_per_s, slow * 1.05);
    }
  }
}

}  // namespace
}  // namespace zeroth::doctor
