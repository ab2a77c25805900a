#include "comm/call_descriptor.h"

#include "base/planted.h"

#include <zeroth/base/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>

namespace zeroth::detail {
namespace {

MessageTag tag_of(const CallDescriptor& call) {
  return {.unit = call.unit, .label = call.label};
}

/// Peers write descriptors: a byte that is no dtype must not break the text of an error.
std::string dtype_text(std::uint8_t in, std::uint8_t out) {
  if (in > static_cast<std::uint8_t>(DType::kUInt8) || out > static_cast<std::uint8_t>(DType::kUInt8))
    return "unknown dtype";
  if (in == out) return std::string(name_of(static_cast<DType>(in)));
  return fmt::format("{}->{}", name_of(static_cast<DType>(in)), name_of(static_cast<DType>(out)));
}

/// See [Note: Names in descriptors]. One that is too long ends in three dots.
void put_name(CallDescriptor& call, const std::string& name) {
  call.counts_digest = digest64(name);
  const std::string text = name.size() <= kNameBytes ? name : name.substr(0, kNameBytes - 3) + "...";
  std::memcpy(reinterpret_cast<std::byte*>(&call) + kNameBytesAt, text.data(), text.size());
}

/// " \"before the export\"" of a barrier that has a name.
std::string quoted_name_of(const CallDescriptor& call) {
  char bytes[kNameBytes];
  std::memcpy(bytes, reinterpret_cast<const std::byte*>(&call) + kNameBytesAt, sizeof bytes);
  std::string text(bytes, ::strnlen(bytes, sizeof bytes));
  if (text.empty()) return {};
  std::ranges::replace_if(
      text, [](char letter) { return (letter >= 0 && letter < ' ') || letter == 0x7f; }, '?');  // a peer wrote it
  return " \"" + text + "\"";
}

/// " float32, 23 elements (92 B)": what follows the name of the call.
std::string shape_of(const CallDescriptor& call) {
  std::string text;
  if (call.kind == PostKind::kAllToAll) {
    text += call.op == kEqualParts ? " of equal parts" : " of parts of any size";
  } else if (call.op != static_cast<std::uint8_t>(ReduceOp::kSum)) {
    text += fmt::format(" {}", name_of(static_cast<ReduceOp>(call.op)));
  }
  if (call.kind == PostKind::kBarrier) return quoted_name_of(call);
  if (call.kind < PostKind::kBarrier) {
    const std::uint64_t element =
        call.in_dtype <= static_cast<std::uint8_t>(DType::kUInt8) ? size_of(static_cast<DType>(call.in_dtype)) : 0;
    text += fmt::format(" {}, {} elements ({} B)", dtype_text(call.in_dtype, call.out_dtype), call.elements,
                        static_cast<std::uint64_t>(call.elements) * element);
    if (call.kind != PostKind::kBroadcast && call.kind != PostKind::kAllReduce && call.kind < PostKind::kSend) {
      text += fmt::format(" in parts {:08x}", call.counts_digest & 0xffffffffU);
    }
  }
  if (call.kind == PostKind::kBroadcast || call.kind == PostKind::kGather || call.kind == PostKind::kScatter)
    text += fmt::format(", root {}", call.root);
  if (call.kind >= PostKind::kAttach) text += fmt::format(" name {:08x}", call.counts_digest & 0xffffffffU);
  if (call.kind == PostKind::kSend || call.kind == PostKind::kRecv) {
    text += other_rank(static_cast<CollectiveKind>(call.kind), call.root);
  }
  return text;
}

}  // namespace

std::string_view name_of(PostKind kind) noexcept {
  switch (kind) {
    case PostKind::kAttach:
      return "attach";
    case PostKind::kSplit:
      return "split";
    default:
      break;
  }
  return kind <= PostKind::kBarrier ? name_of(static_cast<CollectiveKind>(kind)) : "unknown call";
}

CallDescriptor describe_call(const Collective& collective, std::uint64_t sequence) {
  CallDescriptor call;
  call.sequence = sequence;
  call.kind = static_cast<PostKind>(collective.kind);
  call.in_dtype = static_cast<std::uint8_t>(collective.in_dtype);
  call.out_dtype = static_cast<std::uint8_t>(collective.out_dtype);
  call.op = collective.equal_parts ? kEqualParts : static_cast<std::uint8_t>(collective.op);
  call.root = collective.root;
  call.unit = collective.tag.unit;
  call.label = collective.tag.label;
  call.counts_digest = digest64(
      {reinterpret_cast<const char*>(collective.counts.data()), collective.counts.size() * sizeof(std::int64_t)});
  if (!collective.offsets.empty()) {
    call.counts_digest = digest64(
        {reinterpret_cast<const char*>(collective.offsets.data()), collective.offsets.size() * sizeof(std::int64_t)},
        call.counts_digest);
  }
  if (!collective.name.empty()) put_name(call, collective.name);
  call.elements = std::accumulate(collective.counts.begin(), collective.counts.end(), std::int64_t{0});
  call.whole_kind = static_cast<PostKind>(collective.step_of.kind);
  call.whole_in_dtype = static_cast<std::uint8_t>(collective.step_of.in_dtype);
  call.whole_out_dtype = static_cast<std::uint8_t>(collective.step_of.out_dtype);
  call.whole_op = collective.step_of.equal_parts ? kEqualParts : static_cast<std::uint8_t>(collective.step_of.op);
  call.whole_root = collective.step_of.root;
  call.whole_elements = collective.step_of.elements;
  call.whole_digest = collective.step_of.digest;
  return call;
}

WholeCall describe_whole(const Collective& collective) {
  CallDescriptor call = describe_call(collective, 0);
  // What each rank may give as it likes, see same_call().
  if (collective.kind == CollectiveKind::kReduceScatter) call.in_dtype = 0;
  if (collective.kind == CollectiveKind::kAllToAll) call.counts_digest = 0;
  const bool own = collective.kind == CollectiveKind::kAllToAll;
  const std::string text =
      fmt::format("{} {} {} {} {} {} {} {:x} {}", static_cast<int>(call.kind), call.in_dtype, call.out_dtype, call.op,
                  call.root, call.unit, call.label, call.counts_digest, own ? 0 : call.elements);
  return {.kind = collective.kind,
          .in_dtype = collective.in_dtype,
          .out_dtype = collective.out_dtype,
          .op = collective.op,
          .equal_parts = collective.equal_parts,
          .root = collective.root,
          .elements = call.elements,
          .digest = digest64(text) | 1U};
}

bool same_call(const CallDescriptor& a, const CallDescriptor& b) {
  if (planted("tag_compare")) return true;
  const auto is_float = [](std::uint8_t dtype) {
    return dtype == static_cast<std::uint8_t>(DType::kFloat32) || dtype == static_cast<std::uint8_t>(DType::kBFloat16);
  };
  const bool sum = a.kind == PostKind::kReduceScatter && a.op == static_cast<std::uint8_t>(ReduceOp::kSum);
  const bool mixed =
      sum && a.out_dtype == static_cast<std::uint8_t>(DType::kFloat32) && is_float(a.in_dtype) && is_float(b.in_dtype);
  const bool same_parts =
      a.kind == PostKind::kAllToAll || (a.counts_digest == b.counts_digest && a.elements == b.elements);
  return a.sequence == b.sequence && a.kind == b.kind && (a.in_dtype == b.in_dtype || mixed) &&
         a.out_dtype == b.out_dtype && a.op == b.op && a.root == b.root && a.unit == b.unit && a.label == b.label &&
         same_parts && a.whole_digest == b.whole_digest;
}

bool same_message(const CallDescriptor& sent, const CallDescriptor& wanted) {
  if (planted("tag_compare")) return true;
  return sent.kind == PostKind::kSend && sent.sequence == wanted.sequence && sent.in_dtype == wanted.in_dtype &&
         sent.elements == wanted.elements && sent.unit == wanted.unit && sent.label == wanted.label &&
         sent.whole_digest == wanted.whole_digest;
}

std::string text_of(const CallDescriptor& call, const TagNames& names) {
  std::string text = fmt::format("{}#{}{}", name_of(call.kind), call.sequence, shape_of(call));
  if (call.unit >= 0) {
    text += fmt::format(", unit {}, label {}", call.unit, call.label);
  } else if (call.label != 0 && meaning_of(call, names).empty()) {
    text += fmt::format(", tag {}", call.label);
  }
  if (call.whole_digest == 0) return text;
  CallDescriptor whole;
  whole.kind = call.whole_kind;
  whole.in_dtype = call.whole_in_dtype;
  whole.out_dtype = call.whole_out_dtype;
  whole.op = call.whole_op;
  whole.root = call.whole_root;
  whole.elements = call.whole_elements;
  whole.counts_digest = call.whole_digest;
  return text + fmt::format(", a step of {}{}", name_of(whole.kind), shape_of(whole));
}

std::string meaning_of(const CallDescriptor& call, const TagNames& names) {
  if (names.name) return names.name(tag_of(call));
  return call.unit >= 0 ? fmt::format("unit {}", call.unit) : "";
}

Error mismatch_error(const CallSide& own, const CallSide& theirs, int size, std::string where, const TagNames& names) {
  const std::string mine = meaning_of(own.call, names);
  const std::string others = meaning_of(theirs.call, names);
  const auto or_none = [](const std::string& text) { return text.empty() ? "no unit" : text; };
  const std::string hint = names.hint ? names.hint(tag_of(own.call), tag_of(theirs.call)) : "";
  return Error(
      ErrorCode::kMismatch, "ranks make different calls",
      {.where = std::move(where),
       .who = fmt::format("rank {}/{}", own.rank, size),
       .which = mine.empty() && others.empty() ? ""
                                               : fmt::format("{} on rank {}, {} on rank {}", or_none(mine), own.rank,
                                                             or_none(others), theirs.rank),
       .expected = fmt::format("{} (rank {})", text_of(own.call, names), own.rank),
       .got = fmt::format("{} (rank {})", text_of(theirs.call, names), theirs.rank),
       .hint = hint.empty()
                   ? "a rank skipped, swapped or resized a call; all ranks must make the same calls in the same order"
                   : hint});
}

Error parts_error(const CallDescriptor& call, const PartSize& part, int rank, int size, std::string where,
                  const TagNames& names) {
  return Error(
      ErrorCode::kMismatch, "two ranks disagree about a part of an all_to_all",
      {.where = std::move(where),
       .who = fmt::format("rank {}/{}", rank, size),
       .which = fmt::format("{}#{} {}", name_of(call.kind), call.sequence, meaning_of(call, names)),
       .expected = fmt::format("{} elements, which rank {} takes from rank {}", part.taken, part.to, part.from),
       .got = fmt::format("{} elements, which rank {} gives to rank {}", part.given, part.from, part.to),
       .hint = "counts[to] on one rank is recv_counts[from] on the other; let ranks tell each other before"});
}

}  // namespace zeroth::detail
