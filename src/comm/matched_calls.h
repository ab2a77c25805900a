// What every backend that makes matched calls does alike: checks at the door, reductions in rank order, who belongs to
// a new group.
#pragma once

#include "comm/call_descriptor.h"
#include "comm/function_ref.h"

#include <kernels/common/dispatch.h>
#include <zeroth/comm/collective.h>
#include <zeroth/device/stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace zeroth::detail {

/// validate()s each call and says what they are, for their Work.
[[nodiscard]] WorkInfo validated(std::span<const Collective> calls, int rank, int size, std::string_view where);

/// Has the stream do `on->*run(calls)`. Where it runs tasks at once, the calls are not copied.
template <class Group>
void enqueue_calls(const Stream& stream, std::span<const Collective> calls, const std::shared_ptr<Group>& on,
                   void (Group::*run)(std::span<const Collective>)) {
  if (stream.runs_inline()) {
    const auto task = [&] { (*on.*run)(calls); };
    return stream.enqueue(std::cref(task));
  }
  stream.enqueue([on, run, copies = std::vector<Collective>(calls.begin(), calls.end())] { (*on.*run)(copies); });
}

/// A barrier that stands for a call of another kind, "split" or "attach", where ranks compare what they come to.
[[nodiscard]] Collective stand_in(std::string_view call, std::string_view name);

/// What an observer is told that a call is: a step is part of the whole, which is counted elsewhere.
struct CountedAs {
  CollectiveKind kind;
  std::uint64_t calls;
  explicit CountedAs(const Collective& call)
      : kind(call.step_of.digest == 0 ? call.kind : call.step_of.kind), calls(call.step_of.digest == 0 ? 1 : 0) {}
};

/// What each rank gives to a reduction: data, and their dtype.
struct Summands {
  std::vector<const std::byte*> data{};
  std::vector<DType> dtypes{};

  void add(const std::byte* from, DType dtype) {
    data.push_back(from);
    dtypes.push_back(dtype);
  }
};

/// Splits `elements` into `parts` as evenly as it goes.
[[nodiscard]] std::vector<std::int64_t> even_parts(std::int64_t elements, int parts);

/// Where each of the parts begins, and at last where they end.
[[nodiscard]] std::vector<std::int64_t> offsets_of(const std::vector<std::int64_t>& counts);
/// The same of the ranks' parts of a call, one for each rank at least.
[[nodiscard]] std::vector<std::int64_t> offsets_of(const Collective& call);

/// Where the ranks of a group are.
struct NodeMap {
  std::vector<int> of_rank{};  ///< node of each rank of the group
  std::vector<int> sizes{};    ///< of runs of consecutive ranks on one node

  /// `nodes` of all world ranks, or empty; `members`: world ranks of the group.
  NodeMap(const std::vector<int>& nodes, std::span<const int> members);
  NodeMap() = default;
  [[nodiscard]] bool is_far(int one, int other) const {
    return of_rank[static_cast<std::size_t>(one)] != of_rank[static_cast<std::size_t>(other)];
  }
};

/// Throws kUsage unless there is a node for each of `size` ranks, or for none.
void check_nodes(const std::vector<int>& nodes, int size, std::string_view where);

/// `elements` of the call's result to `to`, from one source a rank, in rank order along the nodes. `rank`: this one.
void reduce_in_rank_order(const Collective& call, int rank, std::byte* to, const Summands& sources,
                          std::int64_t elements, const NodeMap& nodes, kernels::Isa isa);

/// In order: `points` with every run of sends and receives, `matched` with every other call.
template <class Points, class Matched>
void for_each_run(std::span<const Collective> calls, const Points& points, const Matched& matched) {
  for (std::size_t next = 0; next < calls.size();) {
    std::size_t end = next;
    while (end < calls.size() && is_point_to_point(calls[end].kind)) ++end;
    if (end > next) {
      points(calls.subspan(next, end - next));
      next = end;
    } else {
      matched(calls[next++]);
    }
  }
}

/// Ranks of a group of `size` whose split() asked for `color`, by (key, rank). `call_of(r)`: what rank r posted.
[[nodiscard]] std::vector<int> members_of(int color, int size, FunctionRef<const CallDescriptor&(int)> call_of);

}  // namespace zeroth::detail
