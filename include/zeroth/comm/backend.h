// CommBackend: a group of ranks, as the object that each of its ranks holds. All communication between ranks goes
// through such objects.
//
// Matched calls   submit(): every rank of the group makes the same calls in the same order. Ranks compare the calls: a
//                 skipped or swapped call, or one of another size or type, is Error{kMismatch} on every rank, with both
//                 sides. For a message between two ranks the error is on the receiver, and on a sender that still
//                 waits.
// Started         start(): sends and receives that go on while the rank does something else.
// One-sided       attach(): every rank's arena becomes readable and writable for all ranks. A writer uses seq_cst
// stores
//                 or RMW on lock-free atomics inside the window and then calls ring(). A reader calls wait_until() and
//                 copies. No other rank takes part.
//
// Every wait ends in one of these ways: success; the deadline (kTimeout); an awaited rank died, left or froze
// (kPeerLost, with rank, pid, and signal or exit code if the system tells them); a rank called abort() (kAborted with
// the first cause). After an error the group is broken: every later matched call throws the same error.
//
// Threads: one thread at a time, over all groups that a rank has from one world, except abort() and ring(), which any
// thread may call. Matched calls of one rank run in the order of their submission, also across streams and groups.
#pragma once

#include <zeroth/comm/collective.h>
#include <zeroth/comm/pending_points.h>
#include <zeroth/comm/progress.h>
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
  bool one_sided = false;                       ///< attach() and wait_until() work in this group
  bool one_sided_on_nodes = false;              ///< they work in split groups of ranks of one node
  ArenaKind window_kind = ArenaKind::kPrivate;  ///< kind of arena that attach() takes
  bool separate_processes = false;              ///< a rank can die without the others
  /// Sums on streams of a device may have 16-bit elements and fp32 results, and be added to what is there.
  bool widens_device_sums = true;
};

/// The attached arenas of all ranks, mapped in this process, own included. ranks[r] are the bytes of rank r, with the
/// capacity that rank r attached. The mappings live as long as this object or a copy of it.
struct PeerWindow {
  std::vector<std::span<std::byte>> ranks{};
  std::vector<std::shared_ptr<void>> keep{};
};

/// Description of a wait, for errors; read only when the wait fails.
struct WaitContext {
  std::string what{};        ///< "parameters of unit block.3"
  bool names_ranks = false;  ///< `what` already names the awaited ranks
  std::vector<int> ranks{};  ///< ranks awaited; empty: any of the others
  /// Returns the ranks that have not come at this moment. Called on the waiting thread when the wait is long. Unset:
  /// all of `ranks`.
  std::function<std::vector<int>()> missing{};
  std::string unit{};                       ///< name of the unit, if any
  std::function<std::string()> progress{};  ///< expected and got at the moment of failure: "epoch 7, rank 1 is at 6"
};

/// Texts of tags, for errors and traces; unset: numbers.
struct TagNames {
  /// "the gradients of unit block.3"; empty for a tag without meaning.
  std::function<std::string(const MessageTag&)> name{};
  /// The hint of a mismatch between a call with the first tag and a call with the second; empty: the general hint.
  std::function<std::string(const MessageTag&, const MessageTag&)> hint{};
};

class CommBackend {
 public:
  CommBackend() = default;
  CommBackend(const CommBackend&) = delete;
  CommBackend& operator=(const CommBackend&) = delete;
  /// Leaves the group; the other ranks see this. Never waits for them, never throws.
  virtual ~CommBackend() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  /// "world", "world/dp", ...
  [[nodiscard]] virtual const std::string& group_name() const = 0;
  /// "self", "inproc", "shm", "mpi", "nccl", ...
  [[nodiscard]] virtual std::string_view kind() const = 0;
  [[nodiscard]] virtual Capabilities capabilities() const = 0;
  /// Number of ranks on each node, for runs of consecutive ranks; {size()} on a single node. Sums are formed along the
  /// nodes: first inside each node, in rank order, then over the nodes. So a transport may send the sum of a node to
  /// another node, with the same bits.
  [[nodiscard]] virtual std::span<const int> node_sizes() const = 0;
  /// Bytes of this group's control block and staging (not of attached arenas), counted as MemoryState::kControl.
  [[nodiscard]] virtual std::size_t memory_bytes() const = 0;

  /// Enqueues the calls on `stream`, in order. The caller owns the buffers, which must live until the Work is done.
  /// Throws kUsage at once for the errors that validate() finds; the Work carries all other errors. Received bytes for
  /// S bytes and n ranks: all_gather S(n-1)/n, reduce_scatter S(n-1)/n, broadcast S, all_reduce 2S(n-1)/n, or S(n-1) if
  /// S is at most 8 KiB; other calls receive the data for this rank.
  virtual Work submit(std::span<const Collective> collectives, const Stream& stream) = 0;

  /// Starts sends and receives (kUsage for other calls), and returns without waiting for another rank. The caller asks
  /// the result, or waits, later; buffers must live until it is done. Messages of one pair of ranks in one direction
  /// are in order, whether started or submitted, and one half of a message may be started and the other submitted.
  /// Two ranks may start sends of any size to each other and receive later. Ranks compare these messages, and traffic
  /// is counted, as for submit(). Throws what a broken group throws.
  ///
  /// The messages come after the earlier work of `stream` and after all calls submitted before. start() waits for these
  /// where they have not run yet (on a CPU device in inline mode they always have). Not from a task of a stream.
  ///
  /// What happens while a rank computes, between two waits or calls of done():
  ///   shm       The receiver reads a send of more than 16 KiB where it lies, and also a smaller one that finds the 64
  ///             KiB between the two ranks full. Other sends are copied in start(). So a sender need not look. Data
  ///             that the receiver cannot read (no process_vm_readv, no attached arena) and all data of inproc moves
  ///             in pieces of at most 64 KiB, whenever both ranks look. A receive takes its data when its rank looks.
  ///   messages  A send gives header and data to the transport at once. A receive asks for the data when its rank sees
  ///             the header. The transport decides what it moves in the meantime.
  ///
  /// Memory of a device: over NCCL a start() is one group call. It runs on the device after all earlier calls of this
  /// rank and before all later ones, so it delays these until its other ranks have come. Ranks that send to each other
  /// must put the send and the receive into one start(), as with submit(). Other backends copy through pinned memory:
  /// start() waits for the copies to the host, and a receive is done when its data is on the device.
  [[nodiscard]] virtual std::unique_ptr<PendingPoints> start(std::span<const Collective> points,
                                                             const Stream& stream) = 0;

  /// Collective, blocks. Ranks with the same color form a new group, ordered by (key, rank). A negative color returns
  /// nullptr. The new group shares the liveness checks and abort() with this one and may outlive it. `name` is appended
  /// to this group's name.
  [[nodiscard]] virtual std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) = 0;

  /// Collective, blocks: all ranks attach an arena under the same name. Its kind is capabilities().window_kind; sizes
  /// may differ and may be 0. The group shares the arena. In later matched calls, other ranks read buffers inside
  /// attached arenas in place, without staging. Throws kUsage for an arena of the wrong kind, kResource if the system
  /// refuses.
  [[nodiscard]] virtual PeerWindow attach(const Arena& arena, std::string_view name) = 0;

  /// Blocks until predicate() is true. The predicate is called again after each ring() of another rank and at least
  /// every 100 ms. It may do work, and should read windows with seq_cst loads. The wait spins for a short time, then
  /// sleeps. Throws the errors described above, and exceptions of the predicate.
  virtual void wait_until(const std::function<bool()>& predicate, const WaitContext& context) = 0;
  /// Wakes ranks that sleep in a wait. Call it after the stores that they may wait for. Costs one load per rank if no
  /// rank sleeps.
  virtual void notify() = 0;

  /// From now on every wait of this rank that lasts, in this group and in all others that come from the same world,
  /// calls `progress` between two looks, until the object goes. Waits that come to rest in shared memory are woken by
  /// notify() of any of these groups, others look every millisecond or every 20 (see Progress::advance()). Returns this
  /// rank's number as Progress::set_awaited() counts ranks.
  [[nodiscard]] virtual int add_progress(std::weak_ptr<Progress> progress) = 0;

  /// Throws kAborted if a rank has stopped the job, and kPeerLost if one of `context.ranks` (empty: any other rank) is
  /// lost, as far as the group knows this without waiting. Never blocks. For code that waits for something else, such
  /// as a device.
  virtual void check_peers(const WaitContext& context) = 0;

  /// Stops the job: every wait, now or later, in any group of this job throws kAborted with the text of the first
  /// abort. Idempotent. Any thread.
  virtual void abort(const Error& error) noexcept = 0;

  /// Reports bytes that the caller copied out of the window of rank `peer` to the observer.
  virtual void count_one_sided(CollectiveKind kind, int peer, std::uint64_t bytes) = 0;
  virtual void set_observer(std::shared_ptr<TrafficObserver> observer) = 0;
  /// Sets the texts of this group's tags in errors. Without it, and in groups split from this one, tags are numbers.
  virtual void set_tag_names(TagNames names) = 0;
};

}  // namespace zeroth
