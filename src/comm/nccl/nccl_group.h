// One group's calls over NCCL, and the waits for them.
#pragma once

#include "comm/call_descriptor.h"
#include "comm/control/watched.h"
#include "comm/first_error.h"
#include "comm/function_ref.h"
#include "comm/matched_calls.h"
#include "comm/nccl/call_board.h"
#include "comm/nccl/call_gate.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_table.h"
#include "comm/progress_list.h"
#include "device/cuda/cuda_table.h"
#include "device/cuda/event_cache.h"
#include "device/stream_runtime.h"

#include <zeroth/comm/backend.h>
#include <zeroth/comm/factory.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::detail {

class NcclGroup;

/// What all groups of the rank share: its device, one stream for all calls, and whether the job was stopped.
class NcclJob {
 public:
  /// Makes the stream; throws kResource.
  NcclJob(const NcclTable& nccl, const CudaTable& cuda, int device, int world_rank, const CommOptions& options);
  NcclJob(const NcclJob&) = delete;
  NcclJob& operator=(const NcclJob&) = delete;
  ~NcclJob();

  const NcclTable& nccl;
  const CudaTable& cuda;
  const int device;
  const int world_rank;
  const CommOptions options;
  const Watched watched;
  const std::shared_ptr<EventCache> events;
  ProgressList progress{};  ///< done in every wait of the host

  [[nodiscard]] void* stream() const { return stream_; }
  /// 4 bytes of the device.
  [[nodiscard]] void* scratch() const { return scratch_; }
  /// How long the end of a communicator is waited for.
  [[nodiscard]] Milliseconds end_time() const { return std::min(options.timeout, Milliseconds{5'000}); }

  void add(const std::shared_ptr<NcclGroup>& group);
  /// The first text stays. Ends the communicators of all groups, in bounded time. Any thread.
  void abort(std::string_view text) noexcept;
  [[nodiscard]] bool aborted() const { return aborted_.load(); }
  /// After abort().
  [[noreturn]] void throw_aborted(std::string_view where, std::string_view who) const;
  /// Something may still run on the device for ever: nothing may wait for it any more.
  void leave_device() noexcept { leaves_device_.store(true); }

 private:
  void* stream_ = nullptr;
  void* scratch_ = nullptr;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> leaves_device_{false};
  mutable std::mutex mutex_;
  std::string abort_text_;
  std::vector<std::weak_ptr<NcclGroup>> groups_;
};

/// One thread at a time, but for end().
class NcclGroup final : public CompletionSource, public std::enable_shared_from_this<NcclGroup> {
 public:
  /// Collective over `base`, which stays until leave().
  NcclGroup(std::shared_ptr<NcclJob> job, CommBackend& base);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] const std::string& where() const { return where_; }
  [[nodiscard]] const std::string& who() const { return who_; }
  [[nodiscard]] NcclJob& job() const { return *job_; }
  [[nodiscard]] const std::shared_ptr<NcclJob>& share_job() const { return job_; }
  void set_observer(std::shared_ptr<TrafficObserver> observer);
  void set_tag_names(TagNames names);
  /// Of board and gate.
  [[nodiscard]] std::size_t host_bytes() const {
    return (board_ ? CallBoard::bytes() : 0) + (gate_ ? gate_->memory_bytes() : 0);
  }

  /// Joins the others; blocks.
  void open(const NcclId& id);
  /// Makes `part` the group of this one's ranks of one color, or with a negative color (`part` null) lets the others
  /// make theirs; blocks.
  void open_part(int color, int key, NcclGroup* part);

  /// Before a collective of the base, "attach" or "split": ranks compare it with what others give to NCCL. Does
  /// nothing without a gate.
  void pass_gate(std::string_view call, std::string_view name);
  /// Throws kUsage for calls of the base with memory that only the device can read.
  void check_host_pointers(std::span<const Collective> calls) const;
  /// Gives the calls to NCCL, after what `stream` holds and before what it gets from now on. What goes wrong is in the
  /// completion. With a gate it blocks until all ranks are at the same calls.
  [[nodiscard]] std::shared_ptr<Completion> submit(std::span<const Collective> calls, void* stream);
  /// Blocks until all that was submitted is done.
  void finish();
  void register_buffer(const Arena& arena);

  /// For who does not wait for it: throws, and ends the group, where it never will be done.
  void look(Completion& completion);

  void run_until(Completion& completion) override;
  [[nodiscard]] bool ready(Completion& completion) override;

  /// This rank gives the group up.
  void leave() noexcept;
  /// Any thread.
  void end(const Deadline& deadline) noexcept;

 private:
  struct Point;  // the Completion of a submit()

  /// What a wait is for.
  struct Awaited {
    std::string what{};
    MessageTag tag{};
    std::uint64_t through = 0;  ///< collectives that this rank has made then
    int peer = -1;              ///< of a message between two ranks
    bool opens = false;         ///< the communicator, not a call
  };

  void check_calls(std::span<const Collective> calls) const;
  void launch(std::span<const Collective> calls, void* stream, Point& point);
  void launch_run(std::span<const Collective> calls, bool points, Awaited& awaited);
  void report(const Collective& call) noexcept;

  /// Blocks until done(slice) is true: throws what done() throws, kPeerLost and kAborted of the base, kMismatch of the
  /// board, and at the deadline kTimeout.
  void await(FunctionRef<bool(Milliseconds)> done, const Awaited& awaited);
  [[nodiscard]] bool settled(NcclCommunicator& communicator, Milliseconds slice);
  void look_up(const Awaited& awaited);
  /// Throws kAborted if this rank has stopped the job, with the cause of the rank that was the first to do so where the
  /// base knows it.
  void throw_if_aborted(std::string_view what) const;
  [[nodiscard]] std::vector<int> missing(const Awaited& awaited) const;
  /// Number in the job of one of them; Progress::kAnyRank if none is known.
  [[nodiscard]] int awaited_rank(const Awaited& awaited) const;
  [[nodiscard]] WaitReport report_of(const Deadline& deadline, const Awaited& awaited) const;
  [[noreturn]] void throw_timeout(const Deadline& deadline, const Awaited& awaited) const;
  /// With an error that is being handled: ends the communicator, and throws that error.
  [[noreturn]] void fail();
  template <class Body>
  void guarded(const Body& body) {
    const auto unless_aborted = [&] {
      throw_if_aborted("");
      body();
    };
    first_error_.guard(unless_aborted, [this] { fail(); });
  }

  std::shared_ptr<NcclJob> job_;
  CommBackend* base_;
  std::string name_;
  std::string where_;
  std::string who_;
  int rank_;
  int size_;
  std::vector<std::int32_t> world_ranks_;
  NodeMap nodes_;
  std::shared_ptr<NcclCommunicator> communicator_;
  std::unique_ptr<CallBoard> board_;  ///< null: the base has no windows
  MemoryHold board_hold_;
  std::unique_ptr<CallGate> gate_;  ///< null: calls are not compared before they are made
  std::shared_ptr<TrafficObserver> observer_;
  TagNames tag_names_;
  std::shared_ptr<std::atomic<std::uint64_t>> begun_;  ///< next_sequence_, for others to see
  std::uint64_t next_sequence_ = 0;
  std::shared_ptr<Completion> last_;
  FirstError first_error_;
  bool left_quietly_ = false;  ///< all was done when this rank gave the group up
};

}  // namespace zeroth::detail
