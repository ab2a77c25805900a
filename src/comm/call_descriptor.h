// Posting side of matched calls: from a Collective to what peers compare, and the error that prints both
// sides.
#pragma once

#include "comm/control_block.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/backend.h>

#include <string>
#include <string_view>

namespace zeroth::detail {

/// "all_gather", ..., "attach", "split"; "unknown call" for what is none.
[[nodiscard]] std::string_view name_of(PostKind kind) noexcept;

/// Everything that is compared; windows, color and key stay at their defaults.
[[nodiscard]] CallDescriptor describe_call(const Collective& collective, std::uint64_t sequence);

/// For the steps of a call: what all ranks must agree about.
[[nodiscard]] WholeCall describe_whole(const Collective& collective);

/// Whether two ranks mean the same call. What they give to a reduce_scatter to fp32 may be fp32 and bf16; the parts of
/// an all_to_all are compared elsewhere.
[[nodiscard]] bool same_call(const CallDescriptor& a, const CallDescriptor& b);

/// Whether a send and a recv mean the same message.
[[nodiscard]] bool same_message(const CallDescriptor& sent, const CallDescriptor& wanted);

/// "all_gather#12 float32, 23 elements (92 B), unit 3, label 0".
[[nodiscard]] std::string text_of(const CallDescriptor& call);

/// What the unit and label of a call mean: by `names`, else "unit 3", or "" without a unit.
[[nodiscard]] std::string meaning_of(const CallDescriptor& call, const TagNames& names);

/// One side of a mismatch.
struct CallSide {
  const CallDescriptor& call;
  int rank = 0;
};

/// kMismatch with both sides. `where` is "comm.shm group=world".
[[nodiscard]] Error mismatch_error(const CallSide& own, const CallSide& theirs, int size, std::string where,
                                   const TagNames& names);

/// A part of an all_to_all as its two ranks see it, in elements.
struct PartSize {
  int from = 0;
  int to = 0;
  std::int64_t given = 0;
  std::int64_t taken = 0;
};

/// kMismatch with both sides, on `rank`.
[[nodiscard]] Error parts_error(const CallDescriptor& call, const PartSize& part, int rank, int size, std::string where,
                                const TagNames& names);

}  // namespace zeroth::detail
