// What a connection of the control plane still says at its end.
#include "comm/control/control_link.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace zeroth::detail {
namespace {

constexpr Milliseconds kLong{20'000};

/// Two ends of one TCP connection.
class ControlLinkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    TcpAddress bound;
    const ForkClosedFd listener = listen_tcp("127.0.0.1", bound);
    std::string why;
    ForkClosedFd connected = connect_tcp(bound, Deadline(kLong), why);
    ASSERT_TRUE(connected) << why;
    TcpAddress peer;
    ForkClosedFd accepted = accept_tcp(listener, peer);
    ASSERT_TRUE(accepted);
    there_.emplace(std::move(accepted));
    link_.emplace(std::move(connected));
  }

  /// Until something is there, or the connection has ended.
  void await(const ControlLink& link) {
    pollfd watched{.fd = link.fd(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(::poll(&watched, 1, static_cast<int>(kLong.count())), 1);
  }

  std::optional<ControlLink> link_;   ///< that a test looks at
  std::optional<ControlLink> there_;  ///< the other end of it
};

TEST_F(ControlLinkTest, WhatCameBeforeTheEndIsHeardWhereAWriteFindsTheEndFirst) {
  link_->send(PingMessage{});
  await(*there_);
  there_->send(VerdictMessage{ErrorCode::kPeerLost, "rank 2 is frozen", {}});
  there_->send(ByeMessage{});
  there_.reset();  // with a ping unread: so the connection is reset
  await(*link_);
  const Deadline deadline(kLong);
  while (!link_->broken() && !deadline.passed()) link_->send(PingMessage{});
  ASSERT_TRUE(link_->broken());

  std::string heard;
  bool bye = false;
  EXPECT_FALSE(link_->receive([&](ControlMessage message) {
    if (const auto* verdict = std::get_if<VerdictMessage>(&message)) heard = verdict->message;
    bye = bye || std::holds_alternative<ByeMessage>(message);
  }));
  EXPECT_EQ(heard, "rank 2 is frozen");
  EXPECT_TRUE(bye);
  EXPECT_NE(link_->trouble(), "");
}

TEST_F(ControlLinkTest, APeerThatDoesNotReadIsLostAndStillHeard) {
  there_->send(PingMessage{});
  await(*link_);
  const Deadline deadline(kLong);
  while (!link_->broken() && !deadline.passed())
    link_->send(VerdictMessage{ErrorCode::kTimeout, std::string(4'000, 'x'), {}});
  ASSERT_TRUE(link_->broken());

  int pings = 0;
  EXPECT_FALSE(
      link_->receive([&](ControlMessage message) { pings += std::holds_alternative<PingMessage>(message) ? 1 : 0; }));
  EXPECT_EQ(pings, 1);
  EXPECT_EQ(link_->trouble(), "it does not read what it is sent");
}

}  // namespace
}  // namespace zeroth::detail
