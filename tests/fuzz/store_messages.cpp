// Messages of the store's socket, from a client to the server and back. The first byte says what the rest is: a request
// to a server that has served others, or an answer.
#include "comm/store/store_messages.h"

#include "fuzz/fuzz_target.h"

#include <zeroth/base/error.h>

#include <exception>
#include <string>

using zeroth::detail::StoreAnswer;
using zeroth::detail::StoreRequest;
using zeroth::detail::StoreRequestKind;
using zeroth::detail::StoreStatus;
using zeroth::fuzz::expect;

namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

void check_request(std::span<const std::byte> bytes) {
  const auto request = zeroth::detail::parse_request(bytes);
  if (!request) return;  // the connection is closed
  const std::string text = zeroth::detail::bytes_of_request(*request);
  const auto again = zeroth::detail::parse_request(bytes_of(text));
  expect(again && again->number == request->number && again->kind == request->kind && again->key == request->key &&
             again->value == request->value,
         "a request that does not read back as itself");
  zeroth::detail::StoreTable table;
  table.set("counter", "41");
  table.set("text", "no number");
  const std::string answered = zeroth::detail::perform(table, *request);
  const auto answer = zeroth::detail::parse_answer(bytes_of(answered));
  expect(answer.has_value() && answer->number == request->number, "an answer that its client cannot read");
  const auto found = table.find(request->key);
  if (request->kind == StoreRequestKind::kSet && answer->status == StoreStatus::kOk) {
    expect(found == std::string(request->value), "a value that was set and is not there");
  }
  if (request->kind == StoreRequestKind::kFind) {
    expect((answer->status == StoreStatus::kOk) == found.has_value(), "an answer that is not what the table holds");
  }
  if (request->kind == StoreRequestKind::kAdd && answer->status == StoreStatus::kOk) {
    expect(found == std::string(answer->value), "a sum that is not what the table holds");
  }
}

void check_answer(std::span<const std::byte> bytes) {
  const auto answer = zeroth::detail::parse_answer(bytes);
  if (!answer) {
    return;
  }
  const std::string text = zeroth::detail::bytes_of_answer(*answer);
  const auto again = zeroth::detail::parse_answer(bytes_of(text));
  expect(again && again->number == answer->number && again->status == answer->status && again->value == answer->value,
         "an answer that does not read back as itself");
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span<const std::byte> rest = zeroth::fuzz::bytes_of(data, size).subspan(1);
  try {
    data[0] % 2 == 0 ? check_request(rest) : check_answer(rest);
  } catch (const std::exception& error) {
    expect(false, "a message of the store throws", error.what());
  }
  return 0;
}
