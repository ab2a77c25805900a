// The byte stream between the head of a job and an agent: a preface, then frames. Everything is
// little-endian, has a limit, and is allocated as it arrives, so that a length that lies costs nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth::launcher {

/// "ZEROTHAG" and the version of the protocol, 4 bytes. These 12 bytes never change their form.
inline constexpr std::string_view kMagic = "ZEROTHAG";
inline constexpr std::uint32_t kProtocol = 1;
inline constexpr std::size_t kPrefaceBytes = 12;
[[nodiscard]] std::string preface(std::uint32_t protocol = kProtocol);

/// What a frame holds; messages.h has the contents. The direction is that of most of its kind.
enum class FrameType : std::uint8_t {
  kHello = 1,        ///< agent: who it is
  kTask = 2,         ///< head: what to run
  kStarted = 3,      ///< agent: the pids
  kRefused = 4,      ///< agent: nothing runs, and why
  kOutput = 5,       ///< agent: bytes of a rank
  kOutputEnd = 6,    ///< agent
  kRankEnd = 7,      ///< agent: how a rank ended
  kGone = 8,         ///< agent: no process of any rank is left
  kSignal = 9,       ///< head: for the ranks
  kCredit = 10,      ///< head: so many bytes of output have been passed on
  kPing = 11,        ///< both: alive
  kEnd = 12,         ///< head: the job has ended
  kNote = 13,        ///< agent: a line for the user
  kChallenge = 14,   ///< both, where a secret is asked for
  kProof = 15,       ///< both
  kEndedRanks = 16,  ///< head: ranks of the job that have ended well
};
inline constexpr std::uint8_t kLastFrameType = 16;

inline constexpr std::size_t kMaxTaskBytes = std::size_t{8} << 20;
inline constexpr std::size_t kMaxFrameBytes = std::size_t{128} << 10;

struct Frame {
  FrameType type{};
  std::string payload{};
};

[[nodiscard]] std::string encode_frame(FrameType type, std::string_view payload);

/// Cuts a byte stream into frames.
class FrameParser {
 public:
  /// Bytes before the preface, at most this many, are banners of a login shell. A frame has at most `max_frame_bytes`;
  /// where that is kMaxFrameBytes, a task has kMaxTaskBytes.
  explicit FrameParser(std::size_t max_banner_bytes, std::size_t max_frame_bytes = kMaxFrameBytes)
      : max_banner_bytes_(max_banner_bytes), max_frame_bytes_(max_frame_bytes) {}

  void feed(std::string_view bytes) { buffer_ += bytes; }
  /// The next whole frame, if it is there. Throws Error(kLaunch) for what is no stream of this protocol; the
  /// parser is of no use then.
  [[nodiscard]] std::optional<Frame> next();
  /// What stood before the preface.
  [[nodiscard]] const std::string& banner() const { return banner_; }
  void set_max_frame_bytes(std::size_t bytes) { max_frame_bytes_ = bytes; }

 private:
  bool find_preface();

  std::size_t max_banner_bytes_;
  std::size_t max_frame_bytes_;
  bool has_preface_ = false;
  std::string banner_;
  std::string buffer_;
  std::size_t offset_ = 0;
};

/// Appends values to a payload.
class PayloadWriter {
 public:
  PayloadWriter& number(std::int64_t value);
  PayloadWriter& text(std::string_view value);
  PayloadWriter& texts(const std::vector<std::string>& values);
  [[nodiscard]] std::string take() { return std::move(payload_); }

 private:
  std::string payload_;
};

/// Reads them back. Every call throws Error(kLaunch) if the value is not there or not in its limits.
class PayloadReader {
 public:
  explicit PayloadReader(std::string_view payload) : rest_(payload) {}

  std::int64_t number(std::int64_t low, std::int64_t high);
  int small(int low, int high) { return static_cast<int>(number(low, high)); }
  std::string text(std::size_t max_bytes);
  /// No text holds a NUL: they become arguments and variables.
  std::vector<std::string> texts(std::size_t max_count, std::size_t max_bytes);
  /// All that is left.
  std::string_view rest() { return std::exchange(rest_, {}); }
  /// There must be nothing left.
  void finish() const;

 private:
  std::string_view rest_;
};

}  // namespace zeroth::launcher
