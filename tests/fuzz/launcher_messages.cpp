// What the head of a job and its agents say to each other: frames are the same however their bytes come in, and what
// they hold is refused or encodes to the same bytes; no length that lies allocates memory. The first byte says how long
// the pieces are, whether a banner may come before the preface, and whether a stranger speaks.
#include "fuzz/fuzz_target.h"
#include "launcher/frames.h"
#include "launcher/messages.h"

#include <zeroth/base/error.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <vector>

using zeroth::Error;
using zeroth::ErrorCode;
using zeroth::fuzz::expect;
using zeroth::launcher::encode;  // of a vector, too
using zeroth::launcher::Frame;
using zeroth::launcher::FrameParser;
using zeroth::launcher::FrameType;
using zeroth::launcher::PayloadReader;

namespace {

std::size_t largest_allocation = 0;

void* allocate(std::size_t bytes) noexcept {
  largest_allocation = std::max(largest_allocation, bytes);
  return std::malloc(std::max<std::size_t>(1, bytes));
}

}  // namespace

void* operator new(std::size_t bytes) {
  if (void* const place = allocate(bytes)) return place;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return allocate(bytes);
}
void operator delete(void* place) noexcept {
  std::free(place);
}
void operator delete(void* place, std::size_t) noexcept {
  std::free(place);
}
void operator delete(void* place, const std::nothrow_t&) noexcept {
  std::free(place);
}

namespace {

struct Limits {
  std::size_t banner_bytes = 0;
  std::size_t frame_bytes = 0;
};

/// What a parser makes of a stream.
struct Cut {
  std::vector<Frame> frames{};
  std::string encoded{};  ///< the frames once more
  std::string banner{};
  bool refused = false;
};

void check_refusal(const Error& error) {
  expect(error.code() == ErrorCode::kLaunch, "refused with another code", error.what());
  expect(zeroth::fuzz::is_printable(error.what()), "a refusal with control characters", error.what());
}

Cut cut(std::string_view bytes, std::size_t piece, const Limits& limits) {
  FrameParser parser(limits.banner_bytes, limits.frame_bytes);
  Cut result;
  try {
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
      parser.feed(bytes.substr(at, piece));
      while (auto frame = parser.next()) {
        result.encoded += encode_frame(frame->type, frame->payload);
        result.frames.push_back(std::move(*frame));
      }
    }
  } catch (const Error& error) {
    check_refusal(error);
    result.refused = true;
  }
  result.banner = parser.banner();
  return result;
}

enum class Rest { kPart, kWhole, kBad };

/// What stands where a frame begins.
Rest rest_of(std::string_view bytes, const Limits& limits) {
  if (bytes.size() < 5) return Rest::kPart;
  std::size_t length = 0;
  for (std::size_t i = 4; i-- > 0;) length = length << 8 | static_cast<unsigned char>(bytes[i]);
  const int kind = bytes[4];
  const bool may_be_task = kind == 2 && limits.frame_bytes == zeroth::launcher::kMaxFrameBytes;
  if (kind < 1 || kind > 15 || length > (may_be_task ? zeroth::launcher::kMaxTaskBytes : limits.frame_bytes))
    return Rest::kBad;
  return bytes.size() < 5 + length ? Rest::kPart : Rest::kWhole;
}

void check_stream(std::string_view bytes, const Cut& cut, const Limits& limits) {
  const std::string preface = zeroth::launcher::preface();
  const std::size_t begin = bytes.find(zeroth::launcher::kMagic);
  if (begin > limits.banner_bytes || !bytes.substr(begin).starts_with(preface)) {
    expect(cut.frames.empty(), "frames without a preface");
    expect(cut.refused || bytes.size() < limits.banner_bytes + preface.size(), "a preface is waited for in vain");
    return;
  }
  expect(cut.banner == bytes.substr(0, begin), "another banner than came", cut.banner);
  const std::string_view sent = bytes.substr(begin + preface.size());
  expect(sent.starts_with(cut.encoded), "frames that do not encode to the bytes that came");
  const Rest rest = rest_of(sent.substr(cut.encoded.size()), limits);
  expect(rest == (cut.refused ? Rest::kBad : Rest::kPart), "a frame is left over, or refused for nothing");
}

/// But for control characters, which are spaces in a text for the user.
bool is_same(std::string_view encoded, std::string_view payload) {
  return std::ranges::equal(
      encoded, payload, [](char a, char b) { return a == b || (a == ' ' && !zeroth::fuzz::is_printable({&b, 1})); });
}

void check(const zeroth::launcher::Hello& hello) {
  expect(zeroth::fuzz::is_printable(hello.version + hello.host + hello.ssh_connection),
         "a hello with control characters");
  expect(hello.free_port >= 0 && hello.free_port <= 65'535, "a port that there is not");
  expect(hello.num_ranks >= 0 && hello.num_ranks <= zeroth::launcher::kMaxJobRanks,
         "a number of ranks out of its limits");
}

void check(const zeroth::launcher::HostTask& task) {
  expect(zeroth::fuzz::is_printable(task.job.job_id + task.job.master_address), "a task with control characters");
  expect(task.job.num_ranks >= 1 && task.job.num_ranks <= zeroth::launcher::kMaxJobRanks,
         "a number of ranks out of its limits");
  expect(task.first_rank >= 0 && task.num_ranks >= 1 && task.first_rank + task.num_ranks <= task.job.num_ranks,
         "ranks that are not in the job");
  const auto holds_nul = [](const std::string& text) { return text.find('\0') != std::string::npos; };
  expect(std::ranges::none_of(task.command, holds_nul) && std::ranges::none_of(task.environment, holds_nul),
         "a NUL byte in a task");
  for (const auto& [name, value] : task.extra) {
    expect(zeroth::launcher::valid_variable_name(name) && !holds_nul(value), "a variable that cannot be set", name);
  }
}

void check(const zeroth::launcher::Started& started) {
  expect(std::ranges::all_of(started.pids, [](int pid) { return pid > 0; }),
         "a process that there is not");  // kill(0) and kill(-1) reach others
  for (const std::string& note : started.notes)
    expect(zeroth::fuzz::is_printable(note), "a note with control characters");
}

void check(const zeroth::launcher::RankEnd& end) {
  expect(end.rank >= 0 && end.rank < zeroth::launcher::kMaxJobRanks && end.pid > 0,
         "the end of a rank that there is not");
}

void check(const std::vector<zeroth::EndedRank>& ranks) {
  for (const zeroth::EndedRank& rank : ranks)
    expect(rank.rank >= 0 && rank.rank < zeroth::launcher::kMaxJobRanks && rank.pid > 0 &&
               zeroth::fuzz::is_printable(rank.host),
           "the end of a rank that there is not");
}

void check(const zeroth::launcher::Output& output) {
  expect(output.rank >= 0 && output.rank < zeroth::launcher::kMaxJobRanks, "output of a rank that there is not");
}

void check(const zeroth::launcher::SignalOrder& order) {
  expect(order.number > 0 && order.number <= 64, "a signal that there is not");
}

void check(const zeroth::launcher::JobEnd& end) {
  expect(end.exit_code >= 0 && end.exit_code <= 255 && zeroth::fuzz::is_printable(end.text),
         "an end that cannot be passed on");
}

template <typename Decode>
void check_read_back(std::string_view payload, const Decode& decode) {
  const auto message = decode(payload);
  check(message);
  const std::string again = encode(message);
  expect(is_same(again, payload), "a message that does not encode to the bytes that came");
  expect(encode(decode(again)) == again, "a message that is not what was written");
}

/// A code that this version does not know is LAUNCH: the rest is the same.
void check_error(std::string_view payload) {
  const Error error = zeroth::launcher::decode_error(payload);
  expect(zeroth::fuzz::is_printable(error.what()), "an error with control characters", error.what());
  PayloadReader reader(payload);
  const auto code = zeroth::code_of_slug(reader.text(payload.size()));
  expect(error.code() == code.value_or(ErrorCode::kLaunch), "an error with another code", error.what());
  const std::string again = zeroth::launcher::encode(error);
  expect(is_same(std::string_view(again).substr(4 + slug(error.code()).size()), reader.rest()),
         "an error with another text", error.what());
  expect(zeroth::launcher::encode(zeroth::launcher::decode_error(again)) == again,
         "an error that is not what was written", error.what());
}

void check_payload(const Frame& frame) {
  namespace launcher = zeroth::launcher;
  try {
    switch (frame.type) {
      case FrameType::kHello:
        return check_read_back(frame.payload, launcher::decode_hello);
      case FrameType::kTask:
        return check_read_back(frame.payload, launcher::decode_task);
      case FrameType::kStarted:
        return check_read_back(frame.payload, launcher::decode_started);
      case FrameType::kRefused:
        return check_error(frame.payload);
      case FrameType::kOutput:
      case FrameType::kOutputEnd:
        return check_read_back(frame.payload, launcher::decode_output);
      case FrameType::kRankEnd:
        return check_read_back(frame.payload, launcher::decode_rank_end);
      case FrameType::kEndedRanks:
        return check_read_back(frame.payload, launcher::decode_ended_ranks);
      case FrameType::kSignal:
        return check_read_back(frame.payload, launcher::decode_signal);
      case FrameType::kEnd:
        return check_read_back(frame.payload, launcher::decode_job_end);
      case FrameType::kNote:
        return expect(zeroth::fuzz::is_printable(launcher::printable(frame.payload)), "a note with control characters");
      case FrameType::kGone:
      case FrameType::kCredit:
      case FrameType::kPing:
      case FrameType::kChallenge:
      case FrameType::kProof:
        return;
    }
    expect(false, "a frame of no known kind");
  } catch (const Error& error) {
    check_refusal(error);
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes = zeroth::fuzz::text_of(data, size).substr(1);
  const Limits limits{.banner_bytes = (data[0] & 0x10U) != 0 ? 64U : 0U,
                      .frame_bytes = (data[0] & 0x20U) != 0 ? 1024 : zeroth::launcher::kMaxFrameBytes};
  largest_allocation = 0;
  try {
    const Cut whole = cut(bytes, std::max<std::size_t>(1, bytes.size()), limits);
    const Cut pieces = cut(bytes, data[0] % 16U + 1U, limits);
    expect(whole.encoded == pieces.encoded && whole.banner == pieces.banner && whole.refused == pieces.refused,
           "other frames from other pieces");
    check_stream(bytes, whole, limits);
    for (const Frame& frame : whole.frames) check_payload(frame);
  } catch (const std::exception& error) {
    expect(false, "refused with something that is no Error, or not read back", error.what());
  }
  // A text takes 4 bytes of a payload, and as a string in a vector that grows by doubling 64.
  expect(largest_allocation <= 16 * size + 4096, "an allocation for bytes that did not come",
         std::to_string(largest_allocation));
  return 0;
}
