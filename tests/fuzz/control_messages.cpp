// What ranks say to rank 0 beside the data: the bytes of a connection, and what the coordinator makes of the statuses
// among them. The first byte is the number of ranks.
#include "comm/control/coordinator.h"
#include "fuzz/fuzz_target.h"

#include <algorithm>
#include <chrono>
#include <exception>

using zeroth::detail::Coordinator;
using zeroth::detail::Decoded;
using zeroth::detail::StatusMessage;
using zeroth::detail::VerdictAction;
using zeroth::fuzz::expect;

namespace {

/// Of somebody who has not shown that he has the secret only what is small is taken, and read as it is read of others.
void expect_small_of_strangers(const Decoded& decoded, std::span<const std::byte> bytes) {
  const Decoded small = zeroth::detail::decode(bytes, zeroth::detail::kLargestStrangersFrameBytes);
  const bool large = decoded.consumed > zeroth::detail::kFrameHeaderBytes + zeroth::detail::kLargestStrangersFrameBytes;
  if (large) expect(small.outcome == Decoded::Outcome::kRefused, "a stranger may say as much as a rank");
  if (decoded.consumed > 0 && !large)
    expect(small.consumed == decoded.consumed, "a small message of a stranger is read otherwise");
}

/// All messages of a stream, each checked; the rest of it is incomplete or refused.
std::vector<StatusMessage> statuses_of(std::span<const std::byte> bytes) {
  std::vector<StatusMessage> statuses;
  while (true) {
    const Decoded decoded = zeroth::detail::decode(bytes);
    expect_small_of_strangers(decoded, bytes);
    if (decoded.outcome == Decoded::Outcome::kRefused) expect(!decoded.why.empty(), "refused without a reason");
    if (decoded.outcome != Decoded::Outcome::kMessage) return statuses;
    expect(decoded.message.has_value() && decoded.consumed > 0 && decoded.consumed <= bytes.size(),
           "a message of another length");
    const std::vector<std::byte> again = zeroth::detail::encode(*decoded.message);
    expect(again.size() == decoded.consumed, "a message that is written with another length");
    const Decoded second = zeroth::detail::decode(again);
    expect(second.outcome == Decoded::Outcome::kMessage && zeroth::detail::encode(*second.message) == again,
           "a message that is not what was written");
    if (const auto* status = std::get_if<StatusMessage>(&*decoded.message)) statuses.push_back(*status);
    bytes = bytes.subspan(decoded.consumed);
  }
}

void judge(int size, const std::vector<StatusMessage>& statuses) {
  zeroth::SteadyClock::time_point now{std::chrono::hours{1}};
  Coordinator coordinator(size, {});
  for (int rank = 0; rank < size; ++rank) coordinator.joined(rank, "h", 1, now);
  int verdicts = 0;
  int sender = 0;
  for (const StatusMessage& status : statuses) {
    coordinator.answered(sender, status, now);
    sender = (sender + 1) % size;
    now += std::chrono::milliseconds{400};
    for (const auto& action : coordinator.tick(now)) {
      if (const auto* verdict = std::get_if<VerdictAction>(&action)) {
        ++verdicts;
        expect(!verdict->error.message().empty(), "a verdict without words");
      }
    }
  }
  expect(verdicts <= 1, "more than one verdict");
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  try {
    judge(data[0] % 5 + 1, statuses_of(zeroth::fuzz::bytes_of(data, size).subspan(1)));
  } catch (const std::exception& error) {
    expect(false, "a message of the control plane throws", error.what());
  }
  return 0;
}
