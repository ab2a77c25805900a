#include "comm/control/control_message.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace zeroth::detail {
namespace {

constexpr std::uint16_t kMagic = 0x5a43;  // "ZC"

class Writer {
 public:
  template <class T>
    requires(std::is_integral_v<T> || std::is_enum_v<T>)
  Writer& operator()(T value) {
    auto bits = static_cast<std::uint64_t>(value);
    for (std::size_t byte = 0; byte < sizeof(T); ++byte, bits >>= 8U)
      bytes_.push_back(static_cast<std::byte>(bits & 0xffU));
    return *this;
  }
  Writer& operator()(std::string_view text) {
    text = text.substr(0, kLongestText);
    (*this)(static_cast<std::uint16_t>(text.size()));
    for (const char c : text) bytes_.push_back(static_cast<std::byte>(c));
    return *this;
  }
  Writer& operator()(const std::string& text) { return (*this)(std::string_view(text)); }
  [[nodiscard]] std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

/// Every read says whether it could; after one that could not, all fail.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
    requires(std::is_integral_v<T>)
  Reader& operator()(T& value) {
    if (!has(sizeof(T))) return *this;
    std::uint64_t bits = 0;
    for (std::size_t byte = 0; byte < sizeof(T); ++byte) bits |= static_cast<std::uint64_t>(bytes_[byte]) << (8 * byte);
    if constexpr (std::is_same_v<T, bool>) {
      good_ = good_ && bits <= 1;
    }
    value = static_cast<T>(bits);
    bytes_ = bytes_.subspan(sizeof(T));
    return *this;
  }
  Reader& operator()(std::string& text) {
    std::uint16_t length = 0;
    (*this)(length);
    if (length > kLongestText || !has(length)) {
      good_ = false;
      return *this;
    }
    text.assign(reinterpret_cast<const char*>(bytes_.data()), length);
    bytes_ = bytes_.subspan(length);
    return *this;
  }
  [[nodiscard]] bool has(std::size_t count) { return good_ = good_ && bytes_.size() >= count; }
  void refuse() { good_ = false; }
  [[nodiscard]] bool good() const { return good_; }
  [[nodiscard]] bool at_end() const { return good_ && bytes_.empty(); }

 private:
  std::span<const std::byte> bytes_;
  bool good_ = true;
};

// One function a message names its fields, for both directions.
template <class Archive, class Message>
void fields(Archive& archive, Message& message) {
  using M = std::remove_const_t<Message>;
  const auto bytes = [&archive](auto& array) {
    for (auto& byte : array) archive(byte);
  };
  if constexpr (std::is_same_v<M, ChallengeMessage>) {
    bytes(message.nonce);
  } else if constexpr (std::is_same_v<M, HelloMessage>) {
    bytes(message.nonce);
    bytes(message.proof);
    archive(message.rank)(message.size)(message.pid)(message.host)(message.host_digest);
  } else if constexpr (std::is_same_v<M, WelcomeMessage>) {
    bytes(message.proof);
  } else if constexpr (std::is_same_v<M, PingMessage>) {
    archive(message.action)(message.steps);
  } else if constexpr (std::is_same_v<M, AskMessage>) {
    archive(message.question)(message.with_place);
  }
}

void write(Writer& out, const RankStatus& status) {
  out(status.phase)(status.step)(status.unit)(status.action)(status.place)(status.last_call)(status.one_thread);
  std::vector<std::pair<std::string, std::uint64_t>> begun;
  for (const auto& entry : status.calls_begun) {
    if (begun.size() < kMostGroups && entry.first.size() <= kLongestGroup) begun.push_back(entry);
  }
  out(static_cast<std::uint16_t>(begun.size()));
  for (const auto& [group, calls] : begun) out(group)(calls);
  const WaitStatus& wait = status.wait;
  out(wait.id)(wait.looks)(wait.expired)(static_cast<std::int32_t>(wait.lost))(wait.report.group)(wait.report.call)(
      wait.report.direct)(wait.report.calls_of)(wait.report.sequence);
  out(static_cast<std::uint64_t>(wait.report.waited.count()))(static_cast<std::uint64_t>(wait.report.timeout.count()));
  const auto count = static_cast<std::uint16_t>(std::min(wait.report.ranks.size(), kMostWaitedRanks));
  out(count);
  for (std::size_t index = 0; index < count; ++index) out(static_cast<std::uint32_t>(wait.report.ranks[index]));
}

void read(Reader& in, RankStatus& status) {
  std::uint8_t phase = 0;
  in(phase)(status.step)(status.unit)(status.action)(status.place)(status.last_call)(status.one_thread);
  if (phase >= kNumPhases) in.refuse();
  status.phase = static_cast<Phase>(phase);
  std::uint16_t groups = 0;
  in(groups);
  if (groups > kMostGroups) return in.refuse();
  for (std::uint16_t index = 0; index < groups; ++index) {
    std::string group;
    std::uint64_t calls = 0;
    in(group)(calls);
    if (group.size() > kLongestGroup || !status.calls_begun.emplace(std::move(group), calls).second) return in.refuse();
  }
  WaitStatus& wait = status.wait;
  std::uint64_t waited = 0;
  std::uint64_t timeout = 0;
  std::uint16_t count = 0;
  std::int32_t lost = 0;
  in(wait.id)(wait.looks)(wait.expired)(lost)(wait.report.group)(wait.report.call)(wait.report.direct)(
      wait.report.calls_of)(wait.report.sequence)(waited)(timeout)(count);
  constexpr std::uint64_t kLongestWait = std::uint64_t{1} << 40U;
  if (count > kMostWaitedRanks || waited > kLongestWait || timeout > kLongestWait || !in.has(std::size_t{count} * 4))
    return in.refuse();
  wait.lost = lost;
  wait.report.waited = Milliseconds(static_cast<std::int64_t>(waited));
  wait.report.timeout = Milliseconds(static_cast<std::int64_t>(timeout));
  for (std::uint16_t index = 0; index < count; ++index) {
    std::uint32_t rank = 0;
    in(rank);
    if (rank > 0x7fff'ffffU) return in.refuse();
    wait.report.ranks.push_back(static_cast<int>(rank));
  }
}

void write(Writer& out, const StatusMessage& message) {
  out(message.question);
  write(out, message.status);
}

void read(Reader& in, StatusMessage& message) {
  in(message.question);
  read(in, message.status);
}

void write(Writer& out, const ByeMessage& message) {
  write(out, message.status);
  out(message.status.end);
}

void read(Reader& in, ByeMessage& message) {
  read(in, message.status);
  in(message.status.end);
}

template <class Archive, class Context>
void fields_of_context(Archive& archive, Context& context) {
  archive(context.where)(context.who)(context.which)(context.expected)(context.got)(context.hint);
}

void write(Writer& out, const VerdictMessage& message) {
  out(slug(message.code))(message.message)(message.of_job);
  fields_of_context(out, message.context);
}

void read(Reader& in, VerdictMessage& message) {
  std::string code;
  in(code)(message.message)(message.of_job);
  fields_of_context(in, message.context);
  const std::optional<ErrorCode> known = code_of_slug(code);
  if (!known) return in.refuse();
  message.code = *known;
}

template <class Message>
void write(Writer& out, const Message& message) {
  fields(out, message);
}
template <class Message>
void read(Reader& in, Message& message) {
  fields(in, message);
}

template <std::size_t... Kinds>
bool read_kind(std::size_t kind, Reader& in, std::optional<ControlMessage>& message, std::index_sequence<Kinds...>) {
  const auto one = [&](auto value) {
    read(in, value);
    message = std::move(value);
  };
  return ((kind == Kinds ? (one(std::variant_alternative_t<Kinds, ControlMessage>{}), true) : false) || ...);
}

}  // namespace

std::vector<std::byte> encode(const ControlMessage& message) {
  Writer body;
  std::visit([&](const auto& value) { write(body, value); }, message);
  const std::vector<std::byte> bytes = body.take();
  Writer header;
  header(kControlVersion)(kMagic)(static_cast<std::uint32_t>(bytes.size()))(static_cast<std::uint8_t>(message.index()));
  std::vector<std::byte> frame = header.take();
  frame.insert(frame.end(), bytes.begin(), bytes.end());
  return frame;
}

Decoded decode(std::span<const std::byte> bytes, std::size_t largest) {
  const auto refused = [](std::string why) {
    return Decoded{.outcome = Decoded::Outcome::kRefused, .why = std::move(why)};
  };
  Reader header(bytes.first(std::min(bytes.size(), kFrameHeaderBytes)));
  std::uint16_t version = 0;
  std::uint16_t magic = 0;
  header(version)(magic);
  if (header.good() && magic != kMagic) return refused("the first bytes are not Zeroth's");
  if (header.good() && version != kControlVersion) {
    return refused(
        fmt::format("it speaks version {} of the control plane, this process version {}: all ranks must run the same "
                    "build of Zeroth",
                    version, kControlVersion));
  }
  std::uint32_t length = 0;
  std::uint8_t kind = 0;
  header(length)(kind);
  if (!header.good()) return {};
  if (length > largest) return refused("the message is too long");
  if (bytes.size() < kFrameHeaderBytes + length) return {};
  Reader body(bytes.subspan(kFrameHeaderBytes, length));
  Decoded decoded{.outcome = Decoded::Outcome::kMessage,
                  .consumed = kFrameHeaderBytes + length,
                  .message = std::nullopt,
                  .why = {}};
  if (!read_kind(kind, body, decoded.message, std::make_index_sequence<std::variant_size_v<ControlMessage>>{}))
    return refused("there is no such kind of message");
  if (!body.at_end()) return refused("the fields of the message do not fit its length");
  return decoded;
}

}  // namespace zeroth::detail
