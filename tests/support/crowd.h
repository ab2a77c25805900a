// Many ranks on one host without a transport: processes with a control plane, and between them a mapping in which they
// say how far they have come. For what depends on the number of ranks and not on what they send.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/comm/backend.h>
#include <zeroth/comm/rank_activity.h>

#include <memory>

namespace zeroth::test {

/// Made before the ranks are forked, and used by all of them.
class Crowd {
 public:
  static constexpr int kPlaces = 8;
  static constexpr int kNotes = 8;

  /// Throws std::runtime_error where the system gives no memory.
  explicit Crowd(int size);
  ~Crowd();
  Crowd(const Crowd&) = delete;
  Crowd& operator=(const Crowd&) = delete;

  [[nodiscard]] int size() const { return size_; }
  /// What ControlPlane::join() needs of a transport: all_gather and broadcast of at most 4 KiB a rank, for which every
  /// rank must be there.
  [[nodiscard]] std::unique_ptr<CommBackend> group(int rank);
  /// Waits, watched, until all ranks are at this place; each place serves once. Throws what the activity throws, and
  /// kTimeout.
  void meet(int rank, RankActivity& activity, int place, Milliseconds timeout);
  /// Whether all but `absent` wait at the place.
  [[nodiscard]] bool all_at(int place, int absent) const;
  /// Numbers of each rank, which the others can read; 0 at first. `which` is below kNotes.
  [[nodiscard]] double& note(int rank, int which = 0);

 private:
  struct Shared;
  class Group;
  Shared* shared_ = nullptr;
  int size_;
};

}  // namespace zeroth::test
