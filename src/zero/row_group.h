// RowGroup: the ranks that bring a state from one degree of sharding to a lower one, and the matched call by
// which they do.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/shard/degrees.h>
#include <zeroth/zero/call_tags.h>

#include <cstddef>
#include <memory>
#include <string_view>

namespace zeroth {

class RowGroup {
 public:
  /// Those of row_of(rank, from, to). Matched over `world`, unless it is one-sided, or the row is one rank or
  /// all of them; blocks. `model` and `world` outlive the group.
  RowGroup(const ModelLayout& model, CommBackend& world, int from, int to, std::string_view name);

  [[nodiscard]] const RankRow& row() const { return row_; }
  [[nodiscard]] int from() const { return from_; }
  [[nodiscard]] int to() const { return to_; }
  /// This rank's part at degree `from` has to be joined with others'.
  [[nodiscard]] bool moves() const { return row_.count > 1; }
  /// Of the group's own seat, if there is one.
  [[nodiscard]] std::size_t transport_bytes() const { return own_ ? own_->memory_bytes() : 0; }
  /// An all_gather of parts at degree `from` into `whole`, which has this rank's part at degree `to`. Only
  /// where a group was made.
  Work gather(CallPurpose purpose,
              const FlatLayout& flat,
              DType dtype,
              const std::byte* part,
              std::byte* whole,
              const Stream& stream);

 private:
  RankRow row_;
  int from_;
  int to_;
  std::unique_ptr<CommBackend> own_;
  CommBackend* group_ = nullptr;
};

}  // namespace zeroth
