// Descriptions of two calls as peers write them, over messages or in shared memory: comparing them is the same from
// both sides, and both can be printed whatever bytes they are.
#include "comm/call_descriptor.h"

#include "comm/matched_calls.h"
#include "fuzz/fuzz_target.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <type_traits>
#include <vector>

using zeroth::detail::CallDescriptor;
using zeroth::fuzz::expect;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static_assert(std::is_trivially_copyable_v<CallDescriptor>);
  CallDescriptor own;
  CallDescriptor theirs;
  if (size > 0) std::memcpy(static_cast<void*>(&own), data, std::min(size, sizeof own));
  // What the bytes leave open is as on the other side: so that sides that agree are found, too.
  theirs = own;
  if (size > sizeof own)
    std::memcpy(static_cast<void*>(&theirs), data + sizeof own, std::min(size - sizeof own, sizeof theirs));
  try {
    expect(zeroth::detail::same_call(own, own), "a call that is not the same as itself");
    expect(zeroth::detail::same_call(own, theirs) == zeroth::detail::same_call(theirs, own),
           "ranks that judge differently");
    for (const CallDescriptor& call : {own, theirs}) {
      const std::string text = zeroth::detail::text_of(call);
      expect(zeroth::fuzz::is_printable(text) && !text.empty(), "a call that cannot be printed", text);
    }
    const zeroth::Error error = zeroth::detail::mismatch_error({own, 0}, {theirs, 1}, 2, "fuzz", {});
    expect(error.code() == zeroth::ErrorCode::kMismatch, "another code", error.what());
    expect(error.context().expected.ends_with("(rank 0)") && error.context().got.ends_with("(rank 1)"),
           "sides without ranks", error.what());
    if (zeroth::detail::same_message(own, theirs)) {
      expect(own.kind == zeroth::detail::PostKind::kSend && own.elements == theirs.elements, "a message that is none",
             error.what());
    }
    const CallDescriptor* const both[] = {&own, &theirs};
    const auto of_rank = [&](int rank) -> const CallDescriptor& { return *both[rank]; };
    const std::vector<int> members = zeroth::detail::members_of(0, 2, of_rank);
    expect(members.size() == static_cast<std::size_t>((own.color == 0) + (theirs.color == 0)),
           "members of another color");
  } catch (const std::exception& error) {
    expect(false, "a description throws", error.what());
  }
  return 0;
}
