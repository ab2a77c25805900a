// One communicator of NCCL, whose calls never block, and which ends in bounded time.
#pragma once

#include "comm/nccl/nccl_table.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace zeroth::detail {

/// Thread safe: calls of NCCL on one communicator are made one at a time, and none once it has been ended. A call that
/// NCCL has begun goes on after it has come back; settled() says when it is done.
class NcclCommunicator {
 public:
  enum class End { kClean, kAbort };

  /// `enter` makes the device of the communicator current on the thread that ends it; it may be called when everything
  /// else is gone.
  NcclCommunicator(const NcclTable& nccl, std::function<void()> enter, std::string where, std::string who);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  /// What nobody has ended is aborted, and not waited for.
  ~NcclCommunicator();

  /// Begins to join the group of all who give the same id.
  void join(int size, const NcclId& id, int rank);
  /// Begins to make the group of this one's ranks of one color, by key; with a negative color takes part and gets no
  /// group. The part is usable once this communicator has settled and then the part itself.
  void split(int color, int key, NcclCommunicator& part);

  /// Whether what was begun is done. Throws what has become of it; kAborted if the communicator has been ended.
  [[nodiscard]] bool settled();
  /// Calls body(comm), which gives calls to NCCL, inside a group of NCCL.
  template <class Body>
  void in_group(const Body& body) {
    const std::lock_guard lock(mutex_);
    require_living();
    Group group(*this);
    body(comm_.load());
    group.end();
  }

  /// For buffers of NCCL's calls, until the communicator ends. Does nothing where NCCL has no registration.
  void add_buffer(std::byte* data, std::size_t bytes, std::shared_ptr<void> keep);

  /// Ends it, at most once: kClean after everything is done on this rank, else kAbort, which also stops its kernels. A
  /// thread of its own makes the calls, since they may block for ever: then it is left behind. Waits for it until the
  /// deadline; false if it has not come back.
  bool end(End how, const Deadline& deadline) noexcept;
  [[nodiscard]] bool ended() const;

 private:
  class Group {
   public:
    explicit Group(NcclCommunicator& communicator) : communicator_(communicator) {
      communicator_.check(communicator_.nccl_.group_start(), "a group");
    }
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;
    /// A group that is not ended would swallow the calls of others of this thread.
    ~Group() {
      if (!ended_) (void)communicator_.nccl_.group_end();
    }
    void end() {
      ended_ = true;
      communicator_.check(communicator_.nccl_.group_end(), "the end of a group");
    }

   private:
    NcclCommunicator& communicator_;
    bool ended_ = false;
  };
  struct Registered {
    void* handle = nullptr;
    std::shared_ptr<void> keep;
  };
  /// How far the thread has come that ends it; outlives both.
  struct Ending {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };

  void check(NcclStatus status, std::string_view call) const;
  void require_living() const;
  static void end_now(const NcclTable& nccl, NcclComm comm, std::vector<Registered> buffers, End how,
                      const Deadline& deadline) noexcept;

  const NcclTable& nccl_;
  const std::function<void()> enter_;
  const std::string where_;
  const std::string who_;
  std::mutex mutex_;
  std::atomic<NcclComm> comm_{nullptr};
  std::atomic<bool> ended_{false};
  std::shared_ptr<NcclComm> awaited_{};  ///< where NCCL writes the communicator that a split makes
  std::vector<std::shared_ptr<NcclComm>> awaited_of_parts_{};  ///< NCCL may write it when nobody waits any more
  std::vector<Registered> buffers_;
  std::shared_ptr<Ending> ending_;
};

}  // namespace zeroth::detail
