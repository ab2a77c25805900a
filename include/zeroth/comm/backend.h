// CommBackend: one rank's seat in a group of ranks. Everything that ranks say to each other goes through
// here.
//
// Matched calls   submit(): every rank of the group makes the same calls in the same order; ranks compare
// what they post, and a
//                 skipped, swapped, differently sized or typed call is Error{kMismatch} on every rank, with
//                 both sides in it. Messages between two ranks: on the receiver, and on a sender that still waits.
// One-sided       attach(): every rank's arena becomes readable and writable for all. Writers use seq_cst
// stores or RMW on lock-free
//                 atomics inside the window, then notify(); readers wait_until() and copy. Nobody else has to
//                 take part.
//
// Every wait ends: at success, at the deadline (kTimeout), when an awaited rank died, left or froze
// (kPeerLost, with rank, pid, and signal or exit code where the system tells), or when a rank calls abort()
// (kAborted with the first cause). After an error the seat is broken: every later matched call throws the
// same error again.
//
// Threads: one thread at a time; abort() and notify() may be called from any thread. Matched calls of one rank
// run in the order of their submission, also across streams and groups.
#pragma once

#include <zeroth/comm/collective.h>
#include <zeroth/comm/traffic.h>
#include <zeroth/device/memory.h>
#include <zeroth/device/stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

struct Capabilities {
  bool one_sided = false;                       ///< attach() and wait_until() are there
  bool one_sided_on_nodes = false;              ///< they are there in groups of ranks of one node that are split off
  ArenaKind window_kind = ArenaKind::kPrivate;  ///< kind of arena that attach() takes
  bool separate_processes = false;              ///< a rank can die without the others
};

/// Memory of every rank's attached arena, mapped here; own included. Rank r's bytes are ranks[r], with the
/// capacity that r attached. The mappings live as long as this object or a copy of it.
struct PeerWindow {
  std::vector<std::span<std::byte>> ranks{};
  std::vector<std::shared_ptr<void>> keep{};
};

/// What a wait is for; read only when it fails.
struct WaitContext {
  std::string what{};        ///< "parameters of unit block.3"
  bool names_ranks = false;  ///< `what` says from or to whom
  std::vector<int> ranks{};  ///< ranks awaited; empty: any of the others
  /// Which of them have not come at this moment; called on the waiting thread once the wait is long. Empty: as `ranks`
  /// says.
  std::function<std::vector<int>()> missing{};
  std::string unit{};                       ///< name of the unit, if any
  std::function<std::string()> progress{};  ///< expected and got at the moment of failure: "epoch 7, rank 1 is at 6"
};

/// What tags mean, for errors and traces; empty: nobody says.
struct TagNames {
  /// "the gradients of unit block.3"; empty for one that means nothing.
  std::function<std::string(const MessageTag&)> name{};
  /// What to do where one rank makes a call with this tag and another one with that tag; empty: what is said of any
  /// mismatch.
  std::function<std::string(const MessageTag&, const MessageTag&)> hint{};
};

class CommBackend {
 public:
  CommBackend() = default;
  CommBackend(const CommBackend&) = delete;
  CommBackend& operator=(const CommBackend&) = delete;
  /// Leaves the group: a state that peers see. Never waits for them, never throws.
  virtual ~CommBackend() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  /// "world", "world/dp", ...
  [[nodiscard]] virtual const std::string& group_name() const = 0;
  /// "self", "inproc", "shm", "mpi", "nccl", ...
  [[nodiscard]] virtual std::string_view kind() const = 0;
  [[nodiscard]] virtual Capabilities capabilities() const = 0;
  /// Ranks of each run of consecutive ranks that are on one node: {size()} on a single one. Sums are formed along
  /// these: first inside each run, in rank order, then over the runs. So what crosses from node to node may be a sum,
  /// with the same bits.
  [[nodiscard]] virtual std::span<const int> node_sizes() const = 0;
  /// Bytes of this seat's own control block and staging (not of attached arenas), counted as
  /// MemoryState::kControl.
  [[nodiscard]] virtual std::size_t memory_bytes() const = 0;

  /// Enqueues the calls on `stream`, in order. Buffers must live until the Work is done. Throws kUsage at
  /// once for what validate() sees; all else rests in the Work. Wire: all_gather receives S(n-1)/n,
  /// reduce_scatter S(n-1)/n, broadcast S, all_reduce 2S(n-1)/n, or S(n-1) if S is at most 8 KiB; the
  /// others what comes for this rank.
  virtual Work submit(std::span<const Collective> collectives, const Stream& stream) = 0;

  /// Matched, blocks. Ranks with the same color form a new group, ordered by (key, rank); a negative color
  /// gives nullptr. The new seat shares liveness and abort with this one and may outlive it. `name` is
  /// appended to this group's name.
  [[nodiscard]] virtual std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) = 0;

  /// Matched, blocks: all ranks attach an arena (of capabilities().window_kind, sizes may differ, also 0)
  /// under the same name. Buffers of later matched calls that lie inside an attached arena are read by peers
  /// in place, without staging; for this the seat keeps the arena alive. Throws kUsage for an arena of the
  /// wrong kind, kResource if the system refuses.
  [[nodiscard]] virtual PeerWindow attach(const Arena& arena, std::string_view name) = 0;

  /// Blocks until predicate() is true. The predicate may do work, and is called again after each notify() of a
  /// peer and at least every 100 ms; it should read windows with seq_cst loads. Spins shortly, then sleeps.
  /// Throws as described above, and what the predicate throws.
  virtual void wait_until(const std::function<bool()>& predicate, const WaitContext& context) = 0;
  /// Wakes peers that sleep in a wait. N loads when nobody sleeps. Call after the stores that peers may be
  /// waiting for.
  virtual void notify() = 0;

  /// Throws kAborted if a rank has stopped the job, and kPeerLost if one of `context.ranks` (empty: any other one) is
  /// lost, as far as the seat sees that without waiting. Never blocks. For who waits for something else than the seat:
  /// a device.
  virtual void check_peers(const WaitContext& context) = 0;

  /// Everybody who waits, now or later, in any group of this job throws kAborted with the text of the first
  /// abort. Idempotent.
  virtual void abort(const Error& error) noexcept = 0;

  /// Bytes that the caller copied out of the window of rank `peer`, for the observer.
  virtual void count_one_sided(CollectiveKind kind, int peer, std::uint64_t bytes) = 0;
  virtual void set_observer(std::shared_ptr<TrafficObserver> observer) = 0;
  /// How the tags of this group's calls read in errors; without it, and in groups split from this one, numbers.
  virtual void set_tag_names(TagNames names) = 0;
};

}  // namespace zeroth
