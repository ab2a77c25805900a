// What every backend that makes matched calls does alike: checks at the door, sums in rank order, who belongs to a new group.
#pragma once

#include "comm/control_block.h"
#include "comm/function_ref.h"

#include <kernels/common/dispatch.h>
#include <zeroth/comm/collective.h>
#include <zeroth/device/stream.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace zeroth::detail {

/// validate()s each call and says what they are, for their Work.
[[nodiscard]] WorkInfo validated(std::span<const Collective> calls, int rank, int size, std::string_view where);

/// What each rank gives to a sum: data, and their dtype.
struct Summands {
  std::vector<const std::byte*> data{};
  std::vector<DType> dtypes{};

  void add(const std::byte* from, DType dtype) {
    data.push_back(from);
    dtypes.push_back(dtype);
  }
};

/// `elements` of the call's sum to `to`, from one source a rank, in rank order. `rank`: this one.
void sum_in_rank_order(const Collective& call,
                       int rank,
                       std::byte* to,
                       const Summands& sources,
                       std::int64_t elements,
                       kernels::Isa isa);

/// Ranks of a group of `size` whose split() asked for `color`, by (key, rank). `call_of(r)`: what rank r posted.
[[nodiscard]] std::vector<int> members_of(int color, int size, FunctionRef<const CallDescriptor&(int)> call_of);

}  // namespace zeroth::detail
