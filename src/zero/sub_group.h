// The ranks that bring a state from one degree of sharding to a lower one, or sums to a higher one, and the matched
// calls by which they do.
#pragma once

#include "zero/call_tags.h"
#include "zero/model_memory.h"

#include <zeroth/comm/backend.h>
#include <zeroth/shard/degrees.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace zeroth {

/// A sub-group and its calls.
class SubGroupCalls {
 public:
  /// Those of sub_group_of(rank, from, to). Collective over `world`, unless the sub-group is one rank or all of them;
  /// blocks. `model` and `world` outlive the group.
  SubGroupCalls(const ModelLayout& model, CommBackend& world, int from, int to, std::string_view name);

  [[nodiscard]] const SubGroup& ranks() const { return sub_group_; }
  [[nodiscard]] int from() const { return from_; }
  [[nodiscard]] int to() const { return to_; }
  /// This rank's part at degree `from` has to be joined with others'.
  [[nodiscard]] bool moves() const { return sub_group_.count > 1; }
  /// Of the sub-group's own group, if it has one.
  [[nodiscard]] std::size_t transport_bytes() const { return own_ ? own_->memory_bytes() : 0; }
  /// An all_gather of parts at degree `from` into `whole`, which has this rank's part at degree `to`. No degree of the
  /// model lies between the two. Only if it moves(), as the next two.
  Work gather(CallPurpose purpose, const FlatLayout& flat, DType dtype, const std::byte* part, std::byte* whole,
              const Stream& stream);
  /// The other way, over any degrees: `whole`, this rank's part at degree `to`, of `dtype`, on every rank of it;
  /// their sum, along the nodes, into parts at degree `from`, in the flat's accumulation dtype: this rank's at `part`,
  /// which may be its own place in `whole`.
  [[nodiscard]] Collective reduction(CallPurpose purpose, const FlatLayout& flat, DType dtype, const std::byte* whole,
                                     std::byte* part) const;
  Work submit(std::span<const Collective> calls, const Stream& stream) { return group_->submit(calls, stream); }

 private:
  SubGroup sub_group_;
  int from_;
  int to_;
  std::unique_ptr<CommBackend> own_;
  CommBackend* group_ = nullptr;
};

/// From one degree of parameters down to a lower one over those between: a sub-group for each step, far ranks first.
class SubGroupPath {
 public:
  /// Over Degrees::path(from, to). Without groups where all of them are local peers whose parts lie in memory; else as
  /// for a SubGroupCalls.
  SubGroupPath(const ModelLayout& model, CommBackend& world, const ModelMemory& memory, int from, int to,
               std::string_view name);

  /// All of them: sub_group_of(rank, from, to).
  [[nodiscard]] const SubGroup& sub_group() const { return sub_group_; }
  [[nodiscard]] int from() const { return from_; }
  [[nodiscard]] int to() const { return to_; }
  [[nodiscard]] bool moves() const { return sub_group_.count > 1; }
  /// Ranks read each other's parts, and gather() is not there.
  [[nodiscard]] bool one_sided() const { return one_sided_; }
  [[nodiscard]] std::size_t transport_bytes() const;
  /// Of each step; none where it is one_sided().
  [[nodiscard]] std::span<const std::unique_ptr<SubGroupCalls>> steps() const { return steps_; }
  /// SubGroupCalls::gather() for each step; what one brings the next one gives on. One work a step.
  std::vector<Work> gather(CallPurpose purpose, const FlatLayout& flat, DType dtype, const std::byte* part,
                           std::byte* whole, const Stream& stream);

 private:
  SubGroup sub_group_;
  int from_;
  int to_;
  int rank_;
  bool one_sided_;
  std::vector<std::unique_ptr<SubGroupCalls>> steps_;
};

}  // namespace zeroth
