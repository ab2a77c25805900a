#include "launcher/frames.h"

#include "hosts/text_cursor.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>

#include <algorithm>

namespace zeroth::launcher {
namespace {

constexpr std::size_t kHeaderBytes = 5;

void append(std::string& bytes, std::uint64_t value, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) bytes.push_back(static_cast<char>(value >> (8 * i)));
}

std::uint64_t number_at(std::string_view bytes, std::size_t count) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < count; ++i) value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return value;
}

[[noreturn]] void refuse(const std::string& message, const std::string& expected = "", const std::string& got = "") {
  throw Error(ErrorCode::kLaunch, message, {.where = "zeroth-run between hosts", .expected = expected, .got = got});
}

}  // namespace

std::string preface(std::uint32_t protocol) {
  std::string bytes(kMagic);
  append(bytes, protocol, 4);
  return bytes;
}

std::string encode_frame(FrameType type, std::string_view payload) {
  std::string bytes;
  bytes.reserve(kHeaderBytes + payload.size());
  append(bytes, payload.size(), 4);
  bytes.push_back(static_cast<char>(type));
  return bytes.append(payload);
}

bool FrameParser::find_preface() {
  const std::size_t begin = buffer_.find(kMagic);
  if (begin == std::string::npos || buffer_.size() < begin + kPrefaceBytes) {
    // All but a beginning of the magic is banner by now.
    const std::size_t banner =
        begin != std::string::npos ? begin : buffer_.size() - std::min(buffer_.size(), kMagic.size() - 1);
    const bool hopeless =
        max_banner_bytes_ == 0 && !kMagic.starts_with(std::string_view(buffer_).substr(0, kMagic.size()));
    if (banner > max_banner_bytes_ || hopeless) {
      refuse("what came is not from zeroth-run", "its preface", in_quotes(buffer_));
    }
    return false;
  }
  if (begin > max_banner_bytes_) {
    refuse("what came is not from zeroth-run", "its preface", in_quotes(buffer_));
  }
  banner_ = buffer_.substr(0, begin);
  const auto protocol = number_at(std::string_view(buffer_).substr(begin + kMagic.size()), 4);
  if (protocol != kProtocol) {
    refuse("another version of zeroth-run", fmt::format("protocol {}", kProtocol),
           fmt::format("protocol {}", protocol));
  }
  offset_ = begin + kPrefaceBytes;
  has_preface_ = true;
  return true;
}

std::optional<Frame> FrameParser::next() {
  if (!has_preface_ && !find_preface()) {
    return std::nullopt;
  }
  const std::string_view rest = std::string_view(buffer_).substr(offset_);
  if (rest.size() < kHeaderBytes) {
    return std::nullopt;
  }
  const std::size_t length = number_at(rest, 4);
  const auto type = static_cast<std::uint8_t>(rest[4]);
  if (type < 1 || type > kLastFrameType) {
    refuse("a message of no known kind", fmt::format("1 to {}", kLastFrameType), std::to_string(type));
  }
  // Only who may send long frames at all may send a task: not a stranger.
  const bool may_be_task = static_cast<FrameType>(type) == FrameType::kTask && max_frame_bytes_ >= kMaxFrameBytes;
  const std::size_t limit = may_be_task ? kMaxTaskBytes : max_frame_bytes_;
  if (length > limit) {
    refuse("a message is too long", fmt::format("at most {} bytes", limit), std::to_string(length));
  }
  if (rest.size() < kHeaderBytes + length) {
    return std::nullopt;
  }
  Frame frame{.type = static_cast<FrameType>(type), .payload = std::string(rest.substr(kHeaderBytes, length))};
  offset_ += kHeaderBytes + length;
  if (offset_ == buffer_.size() || offset_ > kMaxFrameBytes) {
    buffer_.erase(0, offset_);
    offset_ = 0;
  }
  return frame;
}

PayloadWriter& PayloadWriter::number(std::int64_t value) {
  append(payload_, static_cast<std::uint64_t>(value), 8);
  return *this;
}

PayloadWriter& PayloadWriter::text(std::string_view value) {
  append(payload_, value.size(), 4);
  payload_ += value;
  return *this;
}

PayloadWriter& PayloadWriter::texts(const std::vector<std::string>& values) {
  append(payload_, values.size(), 4);
  for (const std::string& value : values) text(value);
  return *this;
}

std::int64_t PayloadReader::number(std::int64_t low, std::int64_t high) {
  if (rest_.size() < 8) refuse("a message is cut off", "a number");
  const auto value = static_cast<std::int64_t>(number_at(rest_, 8));
  if (value < low || value > high) {
    refuse("a number in a message is out of its limits", fmt::format("{} to {}", low, high), std::to_string(value));
  }
  rest_.remove_prefix(8);
  return value;
}

std::string PayloadReader::text(std::size_t max_bytes) {
  if (rest_.size() < 4) refuse("a message is cut off", "a length");
  const std::size_t length = number_at(rest_, 4);
  rest_.remove_prefix(4);
  if (length > max_bytes || length > rest_.size()) {
    refuse("a text in a message is too long", fmt::format("at most {} bytes", std::min(max_bytes, rest_.size())),
           std::to_string(length));
  }
  std::string value(rest_.substr(0, length));
  rest_.remove_prefix(length);
  return value;
}

std::vector<std::string> PayloadReader::texts(std::size_t max_count, std::size_t max_bytes) {
  if (rest_.size() < 4) refuse("a message is cut off", "a count");
  const std::size_t count = number_at(rest_, 4);
  rest_.remove_prefix(4);
  if (count > max_count || count > rest_.size() / 4) {
    refuse("too many texts in a message", fmt::format("at most {}", std::min(max_count, rest_.size() / 4)),
           std::to_string(count));
  }
  std::vector<std::string> values;
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(text(max_bytes));
    if (values.back().find('\0') != std::string::npos)
      refuse("a NUL byte in a message", "arguments and variables without");
  }
  return values;
}

void PayloadReader::finish() const {
  if (!rest_.empty()) refuse("a message is too long", "its end", fmt::format("{} more bytes", rest_.size()));
}

}  // namespace zeroth::launcher
