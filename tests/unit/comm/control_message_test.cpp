// What ranks tell each other beside the data: what is written is read again, and nothing else is.
#include "comm/control/control_message.h"

#include "comm/control/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::detail {
namespace {

using ::testing::HasSubstr;
using Outcome = Decoded::Outcome;

StatusMessage a_status() {
  return {.question = 7,
          .status = {.phase = Phase::kBackward,
                     .step = 41,
                     .unit = "block.3",
                     .place = "train.py:57 in load_batch",
                     .last_call = "all_gather#40 of world/engine0, ended 1.0 s ago",
                     .one_thread = false,
                     .calls_begun = {{"world#0", 12}, {"world/engine0#1", 40}},
                     .wait = {.id = 9,
                              .looks = 33,
                              .expired = true,
                              .lost = 2,
                              .report = {.group = "world/engine0",
                                         .call = "barrier#41",
                                         .ranks = {0, 2, 4095},
                                         .direct = false,
                                         .calls_of = "world#0",
                                         .sequence = 11,
                                         .waited = Milliseconds{3'300},
                                         .timeout = Milliseconds{300'000}}}}};
}

std::vector<ControlMessage> one_of_each() {
  ChallengeMessage challenge;
  HelloMessage hello{.rank = 3, .size = 8, .pid = 4711, .host = "h1", .host_digest = 0xfedcba9876543210};
  WelcomeMessage welcome;
  for (std::size_t byte = 0; byte < hello.nonce.size(); ++byte)
    challenge.nonce[byte] = hello.nonce[byte] = static_cast<std::uint8_t>(17 * byte);
  for (std::size_t byte = 0; byte < hello.proof.size(); ++byte)
    welcome.proof[byte] = hello.proof[byte] = static_cast<std::uint8_t>(7 * byte);
  return {challenge,
          hello,
          welcome,
          PingMessage{.action = 0xfedcba9876543210, .steps = 119},
          AskMessage{.question = 5, .with_place = true},
          a_status(),
          VerdictMessage{.code = ErrorCode::kMismatch,
                         .message = "ranks wait for each other",
                         .context = {.where = "a", .who = "b", .which = "c", .expected = "d", .got = "e", .hint = "f"},
                         .of_job = true},
          ByeMessage{a_status().status}};
}

TEST(ControlMessage, WhatIsWrittenIsRead) {
  for (const ControlMessage& message : one_of_each()) {
    const std::vector<std::byte> bytes = encode(message);
    const Decoded decoded = decode(bytes);
    ASSERT_EQ(decoded.outcome, Outcome::kMessage) << message.index() << " " << decoded.why;
    EXPECT_EQ(decoded.consumed, bytes.size());
    EXPECT_EQ(decoded.message->index(), message.index());
    EXPECT_EQ(encode(*decoded.message), bytes);  // every field that was written
  }
}

TEST(ControlMessage, FieldsOfAStatus) {
  const Decoded decoded = decode(encode(a_status()));
  const auto& status = std::get<StatusMessage>(*decoded.message).status;
  EXPECT_EQ(status.phase, Phase::kBackward);
  EXPECT_EQ(status.place, "train.py:57 in load_batch");
  EXPECT_FALSE(status.one_thread);
  EXPECT_EQ(status.wait.report.ranks, (std::vector<int>{0, 2, 4095}));
  EXPECT_EQ(status.wait.report.timeout, Milliseconds{300'000});
  EXPECT_TRUE(status.wait.expired);
  EXPECT_EQ(status.wait.lost, 2);
}

TEST(ControlMessage, EveryBeginningIsIncomplete) {
  for (const ControlMessage& message : one_of_each()) {
    const std::vector<std::byte> bytes = encode(message);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_EQ(decode(std::span(bytes).first(size)).outcome, Outcome::kIncomplete) << message.index() << " " << size;
    }
  }
}

TEST(ControlMessage, SeveralInARow) {
  std::vector<std::byte> bytes = encode(PingMessage{});
  const std::size_t first = bytes.size();
  const std::vector<std::byte> second = encode(ByeMessage{});
  bytes.insert(bytes.end(), second.begin(), second.end());
  EXPECT_EQ(decode(bytes).consumed, first);
  EXPECT_TRUE(std::holds_alternative<ByeMessage>(*decode(std::span(bytes).subspan(first)).message));
}

TEST(ControlMessage, WhatIsNoMessageIsRefused) {
  const auto refused = [](std::vector<std::byte> bytes, const char* why) {
    const Decoded decoded = decode(bytes);
    EXPECT_EQ(decoded.outcome, Outcome::kRefused);
    EXPECT_THAT(decoded.why, HasSubstr(why));
  };
  const std::string http = "GET / HTTP/1.1\r\n\r\n";
  std::vector<std::byte> bytes(http.size());
  std::ranges::transform(http, bytes.begin(), [](char c) { return static_cast<std::byte>(c); });
  refused(bytes, "not Zeroth's");
  refused(std::vector<std::byte>(1'000'000), "not Zeroth's");
  bytes = encode(PingMessage{});
  bytes[8] = std::byte{99};
  refused(bytes, "no such kind");
  bytes = encode(PingMessage{});
  bytes[6] = std::byte{1};  // 64 KiB and more
  bytes[4] = std::byte{1};
  refused(bytes, "too long");
  bytes = encode(AskMessage{});
  bytes.back() = std::byte{2};  // neither true nor false
  refused(bytes, "do not fit");
  bytes = encode(WelcomeMessage{});
  bytes[4] = std::byte{static_cast<std::uint8_t>(std::to_integer<int>(bytes[4]) + 1)};
  bytes.push_back(std::byte{0});  // a field too many
  refused(bytes, "do not fit");
  VerdictMessage verdict;
  bytes = encode(verdict);
  bytes[11] = std::byte{'?'};  // the code's first letter
  refused(bytes, "do not fit");
}

TEST(ControlMessage, AnotherVersionIsNamed) {
  std::vector<std::byte> bytes = encode(PingMessage{});
  bytes[0] = std::byte{1};
  EXPECT_THAT(decode(bytes).why, HasSubstr("it speaks version 1 of the control plane, this process version 4: all "
                                           "ranks must run the same build of Zeroth"));
}

TEST(ControlMessage, AStrangersFrameIsSmall) {
  for (const ControlMessage& message :
       {ControlMessage{ChallengeMessage{}}, ControlMessage{HelloMessage{.host = std::string(255, 'h')}},
        ControlMessage{WelcomeMessage{}}}) {
    EXPECT_EQ(decode(encode(message), kLargestStrangersFrameBytes).outcome, Outcome::kMessage);
  }
  const std::vector<std::byte> bytes = encode(HelloMessage{.host = std::string(600, 'h')});
  EXPECT_EQ(decode(bytes).outcome, Outcome::kMessage);
  EXPECT_THAT(decode(bytes, kLargestStrangersFrameBytes).why, HasSubstr("too long"));
}

TEST(ControlMessage, LongTextsAndListsAreCut) {
  StatusMessage message = a_status();
  message.status.place.assign(100'000, 'x');
  message.status.wait.report.ranks.assign(10'000, 1);
  const std::vector<std::byte> bytes = encode(message);
  EXPECT_LE(bytes.size(), kFrameHeaderBytes + kLargestFrameBytes);
  const Decoded decoded = decode(bytes);
  ASSERT_EQ(decoded.outcome, Outcome::kMessage);
  EXPECT_EQ(std::get<StatusMessage>(*decoded.message).status.place.size(), kLongestText);
  EXPECT_EQ(std::get<StatusMessage>(*decoded.message).status.wait.report.ranks.size(), kMostWaitedRanks);
}

TEST(ControlMessage, FlippedBytesNeverReadPastTheEnd) {
  std::mt19937 random(20'261);
  for (const ControlMessage& message : one_of_each()) {
    const std::vector<std::byte> bytes = encode(message);
    for (int round = 0; round < 2'000; ++round) {
      std::vector<std::byte> flipped = bytes;
      for (int flip = 0; flip < 3; ++flip)
        flipped[random() % flipped.size()] = static_cast<std::byte>(random() & 0xffU);
      flipped.shrink_to_fit();  // so that the address sanitizer sees a read past it
      const Decoded decoded = decode(flipped);
      if (decoded.outcome == Outcome::kMessage) {
        EXPECT_LE(decoded.consumed, flipped.size());
      }
    }
  }
}

/// The inputs of fuzz_control_messages: a number of ranks, less one, and messages.
std::map<std::string, std::vector<std::byte>> corpus() {
  std::map<std::string, std::vector<std::byte>> files;
  const auto add = [&](const std::string& name, int ranks, const std::vector<ControlMessage>& messages) {
    std::vector<std::byte>& bytes = files[name];
    bytes.push_back(static_cast<std::byte>(ranks - 1));
    for (const ControlMessage& message : messages) std::ranges::copy(encode(message), std::back_inserter(bytes));
  };
  const std::array names{"challenge", "hello", "welcome", "ping", "ask", "status", "verdict", "bye"};
  const std::vector<ControlMessage> every = one_of_each();
  for (std::size_t kind = 0; kind < names.size(); ++kind) add(names.at(kind), 3, {every.at(kind)});
  add("messages", 3, every);
  add("long-hello", 1, {HelloMessage{.host = std::string(600, 'h')}});
  add("older", 1, {PingMessage{}});
  files["older"][1] = static_cast<std::byte>(kControlVersion - 1);
  const auto waiting = [](std::vector<int> ranks, std::uint64_t looks, bool expired) {
    StatusMessage status = a_status();
    status.question = static_cast<std::uint32_t>(looks);
    status.status.one_thread = true;
    status.status.wait.id = ranks.empty() ? 0 : 9;
    status.status.wait.lost = -1;
    status.status.wait.looks = looks;
    status.status.wait.expired = expired;
    status.status.wait.report.ranks = std::move(ranks);
    status.status.wait.report.direct = true;
    return status;
  };
  std::vector<ControlMessage> circle;
  std::vector<ControlMessage> late;
  for (std::uint64_t round = 0; round < 6; ++round) {
    for (int rank = 0; rank < 3; ++rank) circle.emplace_back(waiting({(rank + 1) % 3}, 4 * round, false));
    late.emplace_back(waiting({1}, 4 * round, round > 2));
    late.emplace_back(waiting({}, 4 * round, false));
  }
  add("circle", 3, circle);
  add("late", 2, late);
  return files;
}

/// What the coordinator makes of the statuses of ranks that speak in turn, as the fuzz target asks it.
std::optional<ErrorCode> verdict_of(int ranks, const std::vector<StatusMessage>& statuses) {
  SteadyClock::time_point now{std::chrono::hours{1}};
  Coordinator coordinator(ranks, {});
  for (int rank = 0; rank < ranks; ++rank) coordinator.joined(rank, "h", 1, now);
  int sender = 0;
  for (const StatusMessage& status : statuses) {
    coordinator.answered(std::exchange(sender, (sender + 1) % ranks), status, now);
    now += std::chrono::milliseconds{400};
    for (const auto& action : coordinator.tick(now)) {
      if (const auto* verdict = std::get_if<VerdictAction>(&action)) return verdict->error.code();
    }
  }
  return std::nullopt;
}

// ZEROTH_WRITE_CORPUS=1 writes the files anew, after a change of the messages.
TEST(ControlMessage, TheCorpusOfTheFuzzTargetSpeaksThisVersionAndHasEveryKind) {
  const std::filesystem::path folder = ZEROTH_CORPUS;
  if (std::getenv("ZEROTH_WRITE_CORPUS") != nullptr) {
    for (const auto& [name, bytes] : corpus())
      std::ofstream(folder / name, std::ios::binary)
          .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
  std::set<std::size_t> kinds;
  std::map<std::string, std::optional<ErrorCode>> verdicts;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    ASSERT_FALSE(text.empty()) << entry.path();
    std::span<const std::byte> bytes = std::as_bytes(std::span(text)).subspan(1);
    std::vector<StatusMessage> statuses;
    for (Decoded decoded = decode(bytes); decoded.message; decoded = decode(bytes)) {
      kinds.insert(decoded.message->index());
      if (const auto* status = std::get_if<StatusMessage>(&*decoded.message)) statuses.push_back(*status);
      bytes = bytes.subspan(decoded.consumed);
    }
    const std::string name = entry.path().filename();
    const bool refused = !bytes.empty();
    EXPECT_EQ(refused, name == "http" || name == "older")
        << name << ": " << decode(bytes).why << "; ZEROTH_WRITE_CORPUS=1 writes the files anew";
    verdicts[name] = verdict_of(static_cast<unsigned char>(text[0]) % 5 + 1, statuses);
  }
  EXPECT_EQ(kinds.size(), std::variant_size_v<ControlMessage>);
  EXPECT_EQ(verdicts["circle"], ErrorCode::kMismatch);
  EXPECT_EQ(verdicts["late"], ErrorCode::kTimeout);
}

}  // namespace
}  // namespace zeroth::detail
