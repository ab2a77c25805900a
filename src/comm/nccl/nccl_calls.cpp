#include "comm/nccl/nccl_calls.h"

#include "comm/call_descriptor.h"
#include "comm/matched_calls.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace zeroth::detail {
namespace {

bool reduces(const Collective& call) {
  return call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduceScatter;
}

ErrorCode code_of(NcclStatus status) {
  switch (status) {
    case NcclStatus::kRemoteError:
      return ErrorCode::kPeerLost;
    case NcclStatus::kInvalidArgument:
    case NcclStatus::kInvalidUsage:
      return ErrorCode::kUsage;
    default:
      return ErrorCode::kResource;
  }
}

std::string_view hint_of(NcclStatus status) {
  switch (status) {
    case NcclStatus::kRemoteError:
      return "a process has ended or its network has failed: look at the other ranks; NCCL_DEBUG=WARN says more";
    case NcclStatus::kSystemError:
      return "a network interface, shared memory or a limit of the system: NCCL_DEBUG=WARN says which";
    case NcclStatus::kCudaError:
      return "NCCL_DEBUG=WARN says which call of CUDA; an error of an earlier kernel shows only now";
    default:
      return "NCCL_DEBUG=WARN says more";
  }
}

/// Bytes that a call reads or writes.
struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;

  Range(const std::byte* data, std::int64_t elements, DType dtype)
      : begin(reinterpret_cast<std::uintptr_t>(data)), end(begin + array_bytes(elements, dtype)) {}
  [[nodiscard]] bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
};

/// One call of NCCL each, with what all of them need.
class Giver {
 public:
  Giver(const NcclPlace& place, const Collective& call)
      : place_(place),
        call_(call),
        type_(nccl_type(call.in_dtype)),
        op_(nccl_op(call.op)),
        element_(size_of(call.in_dtype)) {}

  void give() const {
    switch (call_.kind) {
      case CollectiveKind::kAllGather:
        return all_gather();
      case CollectiveKind::kReduceScatter:
        return reduce_scatter();
      case CollectiveKind::kAllReduce:
        return all_reduce(call_.send, call_.recv, count(0), type_, op_);
      case CollectiveKind::kBroadcast:
        return broadcast(place_.rank == call_.root ? call_.send : call_.recv, call_.recv, count(0), call_.root);
      case CollectiveKind::kGather:
        return gather();
      case CollectiveKind::kScatter:
        return scatter();
      case CollectiveKind::kAllToAll:
        return all_to_all();
      case CollectiveKind::kSend:
        return send(call_.send, count(0), call_.root);
      case CollectiveKind::kRecv:
        return recv(call_.recv, count(0), call_.root);
      case CollectiveKind::kBarrier:
        return all_reduce(static_cast<const std::byte*>(place_.scratch), static_cast<std::byte*>(place_.scratch), 1,
                          NcclType::kInt32, NcclOp::kMax);
    }
  }

 private:
  [[nodiscard]] std::int64_t count(int rank) const { return call_.counts[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] bool equal_parts() const {
    return std::ranges::all_of(call_.counts, [&](std::int64_t c) { return c == call_.counts.front(); });
  }
  [[nodiscard]] std::size_t bytes(std::int64_t elements) const { return static_cast<std::size_t>(elements) * element_; }

  void check(NcclStatus status) const {
    if (is_accepted(status)) [[likely]]
      return;  // and no text is made
    check_nccl(place_.nccl, status, place_.comm, fmt::format("a step of {}", describe(call_)), place_.where,
               place_.who);
  }
  void all_reduce(const std::byte* from, std::byte* to, std::int64_t elements, NcclType type, NcclOp op) const {
    if (elements > 0)
      check(place_.nccl.all_reduce(from, to, static_cast<std::size_t>(elements), type, op, place_.comm, place_.stream));
  }
  void broadcast(const std::byte* from, std::byte* to, std::int64_t elements, int root) const {
    if (elements > 0)
      check(
          place_.nccl.broadcast(from, to, static_cast<std::size_t>(elements), type_, root, place_.comm, place_.stream));
  }
  void send(const std::byte* from, std::int64_t elements, int peer) const {
    if (elements > 0)
      check(place_.nccl.send(from, static_cast<std::size_t>(elements), type_, peer, place_.comm, place_.stream));
  }
  void recv(std::byte* to, std::int64_t elements, int peer) const {
    if (elements > 0)
      check(place_.nccl.recv(to, static_cast<std::size_t>(elements), type_, peer, place_.comm, place_.stream));
  }
  void copy(std::byte* to, const std::byte* from, std::int64_t elements) const {
    if (elements == 0 || to == from) return;
    check_cuda(place_.cuda, place_.cuda.copy(to, from, bytes(elements), kCudaCopyAnyWay, place_.stream), "a copy",
               place_.where, place_.who);
  }

  void all_gather() const {
    if (equal_parts()) {
      if (count(0) == 0) return;
      return check(place_.nccl.all_gather(call_.send, call_.recv, static_cast<std::size_t>(count(0)), type_,
                                          place_.comm, place_.stream));
    }
    const std::vector<std::int64_t> offsets = offsets_of(call_.counts);
    for (int root = 0; root < place_.size; ++root) {
      std::byte* const to = call_.recv + bytes(offsets[static_cast<std::size_t>(root)]);
      broadcast(root == place_.rank ? call_.send : to, to, count(root), root);
    }
  }

  void reduce_scatter() const {
    if (equal_parts() && call_.offsets.empty()) {
      if (count(0) == 0) return;
      return check(place_.nccl.reduce_scatter(call_.send, call_.recv, static_cast<std::size_t>(count(0)), type_, op_,
                                              place_.comm, place_.stream));
    }
    const std::vector<std::int64_t> offsets = offsets_of(call_);
    for (int root = 0; root < place_.size; ++root) {
      if (count(root) == 0) continue;
      const std::byte* const from = call_.send + bytes(offsets[static_cast<std::size_t>(root)]);
      std::byte* const to = root == place_.rank ? call_.recv : nullptr;
      check(place_.nccl.reduce(from, to, static_cast<std::size_t>(count(root)), type_, op_, root, place_.comm,
                               place_.stream));
    }
  }

  void gather() const {
    if (place_.rank != call_.root) return send(call_.send, count(place_.rank), call_.root);
    const std::vector<std::int64_t> offsets = offsets_of(call_.counts);
    for (int peer = 0; peer < place_.size; ++peer) {
      std::byte* const to = call_.recv + bytes(offsets[static_cast<std::size_t>(peer)]);
      peer == place_.rank ? copy(to, call_.send, count(peer)) : recv(to, count(peer), peer);
    }
  }

  void scatter() const {
    if (place_.rank != call_.root) return recv(call_.recv, count(place_.rank), call_.root);
    const std::vector<std::int64_t> offsets = offsets_of(call_.counts);
    for (int peer = 0; peer < place_.size; ++peer) {
      const std::byte* const from = call_.send + bytes(offsets[static_cast<std::size_t>(peer)]);
      peer == place_.rank ? copy(call_.recv, from, count(peer)) : send(from, count(peer), peer);
    }
  }

  void all_to_all() const {
    const std::vector<std::int64_t> given = offsets_of(call_.counts);
    const std::vector<std::int64_t> taken = offsets_of(call_.recv_counts);
    for (int distance = 0; distance < place_.size; ++distance) {  // every rank begins with another one
      const auto to = static_cast<std::size_t>((place_.rank + distance) % place_.size);
      const auto from = static_cast<std::size_t>((place_.rank + place_.size - distance) % place_.size);
      const std::byte* const part = call_.send + bytes(given[to]);
      std::byte* const place = call_.recv + bytes(taken[from]);
      if (distance == 0) {
        copy(place, part, call_.counts[to]);
      } else {
        send(part, call_.counts[to], static_cast<int>(to));
        recv(place, call_.recv_counts[from], static_cast<int>(from));
      }
    }
  }

  const NcclPlace& place_;
  const Collective& call_;
  NcclType type_;
  NcclOp op_;
  std::size_t element_;
};

}  // namespace

NcclType nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return NcclType::kFloat64;
    case DType::kFloat32:
      return NcclType::kFloat32;
    case DType::kBFloat16:
      return NcclType::kBFloat16;
    case DType::kFloat16:
      return NcclType::kFloat16;
    case DType::kInt64:
      return NcclType::kInt64;
    case DType::kInt32:
      return NcclType::kInt32;
    case DType::kUInt8:
      return NcclType::kUInt8;
  }
  ZR_ASSERT(false, "a dtype that NCCL is not told");
}

NcclOp nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return NcclOp::kSum;
    case ReduceOp::kMin:
      return NcclOp::kMin;
    case ReduceOp::kMax:
      return NcclOp::kMax;
  }
  ZR_ASSERT(false, "a reduction that NCCL is not told");
}

void check_nccl(const NcclTable& nccl, NcclStatus status, NcclComm comm, std::string_view call, std::string_view where,
                std::string_view who) {
  if (is_accepted(status)) [[likely]]
    return;
  const auto text_of = [](const char* text) { return std::string(text == nullptr ? "" : text); };
  const std::string last = text_of(nccl.last_error(comm));
  throw Error(code_of(status), fmt::format("NCCL refused {}", call),
              {.where = std::string(where),
               .who = std::string(who),
               .got = fmt::format("error {}, {}{}", static_cast<int>(status), text_of(nccl.error_string(status)),
                                  last.empty() ? "" : ": " + last),
               .hint = std::string(hint_of(status))});
}

void check_nccl_can(const Collective& call, int size, Reduction reduction, std::string_view where,
                    std::string_view who) {
  if (!reduces(call)) return;
  const auto context = [&](std::string expected, std::string got, std::string hint) {
    return ErrorContext{.where = std::string(where),
                        .who = std::string(who),
                        .which = describe(call),
                        .expected = std::move(expected),
                        .got = std::move(got),
                        .hint = std::move(hint)};
  };
  ZR_CHECK(call.in_dtype == call.out_dtype, ErrorCode::kUsage, "NCCL's reductions keep the dtype",
           context("in_dtype == out_dtype", fmt::format("{} to {}", name_of(call.in_dtype), name_of(call.out_dtype)),
                   "reduce in the wider dtype, or over another transport"));
  ZR_CHECK(!call.accumulate, ErrorCode::kUsage, "NCCL does not add to what is there",
           context("accumulate == false", "accumulate", "receive into a buffer of its own and add that"));
  ZR_CHECK(reduction == Reduction::kTransport || size == 1 || !is_floating(call.in_dtype), ErrorCode::kConfig,
           call.op == ReduceOp::kSum
               ? "NCCL adds floating-point numbers in an order of its own, and rank order was asked for"
               : "NCCL has rules of its own for NaN and zeros in a minimum or maximum, and those of rank order were "
                 "asked for",
           context("Reduction::kTransport", "Reduction::kRankOrder",
                   "set CommOptions::reduction to kTransport to accept NCCL's bits, or reduce over shm or mpi"));
}

void check_independent(std::span<const Collective> calls, int rank, std::string_view where, std::string_view who) {
  for (std::size_t second = 1; second < calls.size(); ++second) {
    const Collective& b = calls[second];
    const CallExtent b_extent = extent_of(b, rank);
    const Range b_reads(b.send, b_extent.send, b.in_dtype);
    const Range b_writes(b.recv, b_extent.recv, b.out_dtype);
    for (std::size_t first = 0; first < second; ++first) {
      const Collective& a = calls[first];
      const CallExtent a_extent = extent_of(a, rank);
      const Range a_reads(a.send, a_extent.send, a.in_dtype);
      const Range a_writes(a.recv, a_extent.recv, a.out_dtype);
      ZR_CHECK(!a_writes.meets(b_reads) && !a_writes.meets(b_writes) && !a_reads.meets(b_writes), ErrorCode::kUsage,
               "calls of one submit() touch each other's buffers, and NCCL runs them in any order",
               {.where = std::string(where),
                .who = std::string(who),
                .which = fmt::format("{} and {}", describe(a), describe(b)),
                .hint = "submit them one after the other"});
    }
  }
}

void give_to_nccl(const NcclPlace& place, const Collective& call) {
  Giver(place, call).give();
}

std::uint64_t received_from(const Collective& call, int rank, int size, int peer) {
  const auto of = [](const std::vector<std::int64_t>& counts, int index) {
    return counts[static_cast<std::size_t>(index)];
  };
  const auto part = [&](int index) {
    return call.counts.front() / size + (index < call.counts.front() % size ? 1 : 0);
  };
  const std::size_t element = size_of(call.in_dtype);
  const auto elements = [&]() -> std::int64_t {
    switch (call.kind) {
      case CollectiveKind::kAllGather:
        return of(call.counts, peer);
      case CollectiveKind::kReduceScatter:
        return of(call.counts, rank);
      case CollectiveKind::kAllReduce:
        if (call.counts.front() <= static_cast<std::int64_t>(kInlineBytes / element)) return call.counts.front();
        return part(rank) + part(peer);
      case CollectiveKind::kBroadcast:
      case CollectiveKind::kRecv:
        return peer == call.root ? call.counts.front() : 0;
      case CollectiveKind::kGather:
        return rank == call.root ? of(call.counts, peer) : 0;
      case CollectiveKind::kScatter:
        return peer == call.root ? of(call.counts, rank) : 0;
      case CollectiveKind::kAllToAll:
        return of(call.recv_counts, peer);
      case CollectiveKind::kSend:
      case CollectiveKind::kBarrier:
        break;
    }
    return 0;
  };
  return peer == rank ? 0 : static_cast<std::uint64_t>(elements()) * element;
}

}  // namespace zeroth::detail
