// What ranks say of a matched call, from a Collective to what peers compare, and the error that prints both sides.
#pragma once

#include <zeroth/base/error.h>
#include <zeroth/comm/backend.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zeroth::detail {

/// Which entry point posted a call. Values are those of CollectiveKind, then our own.
enum class PostKind : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll,
  kSend,
  kRecv,
  kBarrier,
  kAttach,
  kSplit,
};

/// A matched call as its rank describes it to the others.
struct CallDescriptor {
  std::uint64_t sequence = 0;
  PostKind kind = PostKind::kBarrier;
  std::uint8_t in_dtype = 0;
  std::uint8_t out_dtype = 0;
  std::uint8_t op = 0;  ///< ReduceOp; of an all_to_all kEqualParts where Collective::equal_parts is
  std::int32_t root = 0;
  std::int32_t unit = -1;
  std::uint32_t label = 0;
  std::uint64_t counts_digest = 0;  ///< of the counts, or of the name of an attached arena or a new group
  std::int64_t elements = 0;        ///< sum of the counts; in an all_to_all this and the digest are each rank's own
  std::uint64_t whole_digest = 0;   ///< of the call that this is a step of, 0: none
  std::int64_t whole_elements = 0;
  std::int32_t whole_root = 0;
  PostKind whole_kind = PostKind::kBarrier;
  std::uint8_t whole_in_dtype = 0;
  std::uint8_t whole_out_dtype = 0;
  std::uint8_t whole_op = 0;
  // The rest differs between ranks and is not compared.
  std::int32_t send_window =
      -1;  ///< index of the attached arena that holds the send buffer, -1: none, or kPrivateMemory
  std::int32_t recv_window = -1;
  std::uint64_t send_offset = 0;
  std::uint64_t recv_offset = 0;
  std::int64_t given = 0;  ///< kAllToAll over messages: elements for the rank that this goes to
  std::int64_t taken = 0;  ///< and from it
  std::int64_t color = 0;  ///< kSplit
  std::int64_t key = 0;
};

inline constexpr std::uint8_t kEqualParts = 1;

/// [Note: Names in descriptors] A barrier has neither buffers nor parts: what describes those of other calls holds the
/// beginning of its name, for the text of an error on other ranks. Its digest is what is compared. So names cost no
/// bytes.
inline constexpr std::size_t kNameBytesAt = offsetof(CallDescriptor, send_offset);
inline constexpr std::size_t kNameBytes = sizeof(CallDescriptor) - kNameBytesAt;
static_assert(kNameBytes == 48);

/// In place of the index of an arena: the buffer is in memory of the rank's own, and its offset is an address there.
inline constexpr std::int32_t kPrivateMemory = -2;

inline constexpr std::size_t kInlineBytes = 8192;

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
[[nodiscard]] std::string text_of(const CallDescriptor& call, const TagNames& names = {});

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
