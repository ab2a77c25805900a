// Messages of the rendezvous. The first byte says what the rest is: a hello to rank 0, or rank 0's answer.
#include "comm/rendezvous/rendezvous_messages.h"

#include "fuzz/fuzz_target.h"

#include <cstring>
#include <exception>
#include <string>

using zeroth::detail::Hello;
using zeroth::detail::Welcome;
using zeroth::fuzz::expect;

namespace {

void check_hello(std::span<const std::byte> bytes, std::uint8_t kind) {
  const auto hello = zeroth::detail::parse_hello(bytes);
  if (!hello) return;
  expect(bytes.size() == sizeof(Hello) && std::memcmp(&*hello, bytes.data(), sizeof(Hello)) == 0,
         "a hello that is not what was sent");
  const int size = kind % 4 + 1;
  const std::string problem = zeroth::detail::problem_of(*hello, {.pid = kind / 8, .host_pid = 1, .size = size});
  expect(zeroth::fuzz::is_printable(problem), "a problem with control characters", problem);
  if (!problem.empty()) return;
  expect(hello->rank >= 1 && hello->rank < size && hello->size == size, "a rank that is not in the world was let in");
  const zeroth::Error refusal = zeroth::detail::refusal_error(hello->refused, hello->rank, size);
  expect(refusal.code() == zeroth::ErrorCode::kResource, "a refusal with another code", refusal.what());
}

void check_welcome(std::span<const std::byte> bytes) {
  const auto answer = zeroth::detail::parse_welcome(bytes);
  if (!answer) return;
  expect(std::memcmp(&*answer, bytes.data(), sizeof(Welcome)) == 0, "an answer that is not what was sent");
  const auto refusal = zeroth::detail::refusal_in(*answer, {.where = "fuzz"});
  expect(refusal.has_value() == (answer->code >= 0), "a welcome and a refusal at once");
  if (!refusal) return;
  expect(zeroth::code_of_slug(zeroth::slug(refusal->code())) == refusal->code(), "a code that there is not",
         refusal->what());
  expect(refusal->message().size() <= answer->text.size(), "a text that is longer than its field", refusal->what());
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span<const std::byte> rest = zeroth::fuzz::bytes_of(data, size).subspan(1);
  try {
    data[0] % 2 == 0 ? check_hello(rest, data[0]) : check_welcome(rest);
  } catch (const std::exception& error) {
    expect(false, "a message of the rendezvous throws", error.what());
  }
  return 0;
}
