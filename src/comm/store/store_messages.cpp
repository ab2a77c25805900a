#include "comm/store/store_messages.h"

#include <zeroth/base/error.h>

#include <array>
#include <cstring>
#include <utility>

namespace zeroth::detail {
namespace {

struct RequestHead {
  std::uint64_t number = 0;
  std::uint32_t key_bytes = 0;
  StoreRequestKind kind = StoreRequestKind::kSet;
  std::array<char, 3> unused{};
};
struct AnswerHead {
  std::uint64_t number = 0;
  StoreStatus status = StoreStatus::kOk;
  std::array<char, 7> unused{};
};
static_assert(sizeof(AnswerHead) == kStoreAnswerHeadBytes);

template <class Head>
std::string message(const Head& head, std::string_view first, std::string_view second) {
  std::string bytes(sizeof head, '\0');
  std::memcpy(bytes.data(), &head, sizeof head);
  return bytes.append(first).append(second);
}

/// The head of a message, and what follows it.
template <class Head>
std::optional<std::pair<Head, std::string_view>> split_head(std::span<const std::byte> bytes) {
  Head head;
  if (bytes.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, bytes.data(), sizeof head);
  const auto rest = bytes.subspan(sizeof head);
  return std::pair(head, std::string_view(reinterpret_cast<const char*>(rest.data()), rest.size()));
}

}  // namespace

std::string bytes_of_request(const StoreRequest& request) {
  const RequestHead head{
      .number = request.number, .key_bytes = static_cast<std::uint32_t>(request.key.size()), .kind = request.kind};
  return message(head, request.key, request.value);
}

std::string bytes_of_answer(const StoreAnswer& answer) {
  return message(AnswerHead{.number = answer.number, .status = answer.status}, answer.value, {});
}

std::optional<StoreRequest> parse_request(std::span<const std::byte> bytes) {
  const auto parts = split_head<RequestHead>(bytes);
  if (!parts) return std::nullopt;
  const RequestHead& head = parts->first;
  const std::string_view rest = parts->second;
  if (head.kind < StoreRequestKind::kSet || head.kind > StoreRequestKind::kAdd) return std::nullopt;
  if (head.key_bytes > rest.size()) return std::nullopt;
  const StoreRequest request{.number = head.number,
                             .kind = head.kind,
                             .key = rest.substr(0, head.key_bytes),
                             .value = rest.substr(head.key_bytes)};
  if (request.kind == StoreRequestKind::kAdd && request.value.size() != sizeof(std::int64_t)) return std::nullopt;
  return request;
}

std::optional<StoreAnswer> parse_answer(std::span<const std::byte> bytes) {
  const auto parts = split_head<AnswerHead>(bytes);
  if (!parts) return std::nullopt;
  const AnswerHead& head = parts->first;
  if (head.status < StoreStatus::kOk || head.status > StoreStatus::kError) return std::nullopt;
  return StoreAnswer{.number = head.number, .status = head.status, .value = parts->second};
}

std::string perform(StoreTable& table, const StoreRequest& request) {
  const auto answer = [&request](StoreStatus status, std::string_view value) {
    return bytes_of_answer({.number = request.number, .status = status, .value = value});
  };
  try {
    switch (request.kind) {
      case StoreRequestKind::kSet:
        table.set(request.key, request.value);
        return answer(StoreStatus::kOk, {});
      case StoreRequestKind::kFind:
        if (const auto found = table.find(request.key)) return answer(StoreStatus::kOk, *found);
        return answer(StoreStatus::kMissing, {});
      case StoreRequestKind::kAdd: {
        std::int64_t delta = 0;
        std::memcpy(&delta, request.value.data(), sizeof delta);
        return answer(StoreStatus::kOk, std::to_string(table.add(request.key, delta)));
      }
    }
    return answer(StoreStatus::kError, "unknown request");
  } catch (const Error& error) {
    return answer(StoreStatus::kError, error.message());
  }
}

}  // namespace zeroth::detail
