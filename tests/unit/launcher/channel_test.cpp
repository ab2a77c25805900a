#include "launcher/channel.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <csignal>
#include <optional>
#include <string>
#include <vector>

namespace zeroth::launcher {
namespace {

/// As in zeroth-run, where a pipe that breaks is an error of a write and no signal.
class WithoutPipeSignal {
 public:
  WithoutPipeSignal() : before_(std::signal(SIGPIPE, SIG_IGN)) {}
  WithoutPipeSignal(const WithoutPipeSignal&) = delete;
  WithoutPipeSignal& operator=(const WithoutPipeSignal&) = delete;
  ~WithoutPipeSignal() { std::signal(SIGPIPE, before_); }

 private:
  void (*before_)(int);
};

TEST(Channel, WhatCameBeforeTheEndIsHeardWhereAWriteFindsTheEndFirst) {
  const WithoutPipeSignal quiet;
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  Channel here(UniqueFd{ends[0]}, UniqueFd{::dup(ends[0])}, 0);
  std::optional<Channel> there(std::in_place, UniqueFd{ends[1]}, UniqueFd{::dup(ends[1])}, 0);
  there->send(FrameType::kRankEnd, "killed by signal 9");
  there->send(FrameType::kGone);
  there.reset();
  here.send(FrameType::kPing);
  EXPECT_EQ(here.pending_bytes(), 0U);
  EXPECT_FALSE(here.ended());

  std::string heard;
  for (int turn = 0; turn < 10 && !here.ended(); ++turn) {
    std::vector<pollfd> polled;
    here.add_polled(polled);
    ASSERT_GT(::poll(polled.data(), polled.size(), 20'000), 0);
    here.handle(polled[0], polled[1]);
    while (const std::optional<Frame> frame = here.next())
      heard += frame->type == FrameType::kRankEnd ? frame->payload : ", gone";
  }
  EXPECT_EQ(heard, "killed by signal 9, gone");
  EXPECT_TRUE(here.ended());
}

}  // namespace
}  // namespace zeroth::launcher
