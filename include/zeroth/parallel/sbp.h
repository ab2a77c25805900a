// Sbp: how one logical tensor lies on the ranks of a group, and what it costs to lay it otherwise.
//
//   S(d)  split      rank r has slice r of dim d (slice_sizes())
//   B     broadcast  every rank has the tensor
//   P     partial    the tensor is the sum of what the ranks have
//
// The nine conversions, each with the call that receives the least. Bytes of S bytes and n ranks are those that all
// ranks together receive from others; where slices are equal, each rank receives 1/n of them:
//
//   from   to S(j)                  to B                       to P
//   S(i)   all_to_all S (n-1)/n     all_gather S (n-1)         none: own slice among zeros
//          (none for i == j)
//   B      none: own slice          none                       none: rank 0 has it, zeros on the others
//   P      reduce_scatter S (n-1)   all_reduce 2 S (n-1), or   none
//                                   n S (n-1) up to 8 KiB
//
// Ref: Yuan et al. 2021, "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", section 3.1 and
// table 2.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace zeroth {

class Sbp {
 public:
  enum class Kind : std::uint8_t { kSplit, kBroadcast, kPartial };

  [[nodiscard]] static constexpr Sbp split(int dim) { return {Kind::kSplit, dim}; }
  [[nodiscard]] static constexpr Sbp broadcast() { return {Kind::kBroadcast, 0}; }
  [[nodiscard]] static constexpr Sbp partial() { return {Kind::kPartial, 0}; }

  [[nodiscard]] constexpr Kind kind() const { return kind_; }
  [[nodiscard]] constexpr bool is_split() const { return kind_ == Kind::kSplit; }
  /// Of a split; may be negative: from the end.
  [[nodiscard]] constexpr int dim() const { return dim_; }
  bool operator==(const Sbp&) const = default;

 private:
  constexpr Sbp(Kind kind, int dim) : kind_(kind), dim_(dim) {}
  Kind kind_;
  int dim_;
};

/// "S(1)", "B", "P".
[[nodiscard]] std::string describe(const Sbp& sbp);

/// How gradients of broadcast tensors lie: each rank has a part of the gradient (every rank computed something else
/// with its copy), or all ranks have the same gradient (every rank computed the same).
enum class BroadcastGradients : std::uint8_t { kParts, kAlike };

/// How the gradient of a tensor lies: of S(d) like S(d); of P like B, for every rank's part counts fully; of B like P,
/// or like B if gradients are alike.
[[nodiscard]] Sbp gradient_of(const Sbp& sbp, BroadcastGradients gradients = BroadcastGradients::kParts);

enum class ConversionCall : std::uint8_t { kNone, kAllGather, kAllReduce, kReduceScatter, kAllToAll };

/// The call of a conversion. Dims must count from the same end to be recognised as the same.
[[nodiscard]] ConversionCall conversion_call(const Sbp& from, const Sbp& to);

/// Bytes that all ranks together receive for a tensor of this whole shape (the table above; exact, also for slices of
/// unequal size). Throws kUsage for dims that the shape does not have, sizes below 0, and fewer than 1 rank.
[[nodiscard]] std::int64_t conversion_bytes(const Sbp& from, const Sbp& to, std::span<const std::int64_t> shape,
                                            std::int64_t element_bytes, int ranks);

/// The same for `elements` elements in equal slices; the bytes of an all_to_all are rounded down.
[[nodiscard]] std::int64_t conversion_bytes(const Sbp& from, const Sbp& to, std::int64_t elements,
                                            std::int64_t element_bytes, int ranks);

}  // namespace zeroth
