// SharedMemoryEngine: matched calls and one-sided windows over memory that every rank of a group has mapped.
//
// A collective is posted: its description goes into this rank's slot, everybody reads everybody's and
// compares. Then, by size and place of the data, which all ranks judge alike because they see the same posts:
//   inline   at most 8 KiB a rank: the data lies beside the description; one phase, nobody waits twice
//   direct   every buffer that peers read lies in an attached arena, where they read it in place, or in memory of the
//   rank's own that they
//            can read
//   staged   else: through the shared staging area of each rank, in chunks that stay in the cache, double
//   buffered
//
// [Note: Private memory] One process copies from another's memory with one system call (process_vm_readv), once instead
// of twice, if the kernel lets it. Whether it does is tried when a group meets: each rank reads a word of every other
// one and says whether it could, before its first post. Where all could, a buffer in no attached arena is posted with
// its address. The owner waits in the call until all have read it, as with an arena; should it leave the call with an
// error, nobody gets a result, because everybody waits for everybody at the end of a call.
#pragma once

#include "comm/first_error.h"
#include "comm/matched_calls.h"
#include "comm/shm/control_block.h"
#include "comm/shm/part_table.h"
#include "comm/shm/peers.h"
#include "comm/shm/segment_exchange.h"

#include <kernels/common/dispatch.h>
#include <zeroth/comm/backend.h>
#include <zeroth/comm/factory.h>

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroth::detail {

class SharedMemoryEngine {
 public:
  /// Blocks until every rank's memory is mapped. `rank` of `size` in the world.
  [[nodiscard]] static std::shared_ptr<SharedMemoryEngine> make_world(std::unique_ptr<SegmentExchange> exchange,
                                                                      int rank, int size, const CommOptions& options);
  SharedMemoryEngine(const SharedMemoryEngine&) = delete;
  SharedMemoryEngine& operator=(const SharedMemoryEngine&) = delete;
  ~SharedMemoryEngine();

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] const std::string& group() const { return group_; }
  [[nodiscard]] const std::string& where() const { return where_; }
  [[nodiscard]] const SegmentExchange& exchange() const { return *exchange_; }
  [[nodiscard]] std::size_t memory_bytes() const { return held_bytes_; }
  [[nodiscard]] Peers& peers() { return *peers_; }

  /// In order; a run of sends and receives side by side.
  void run(std::span<const Collective> calls);
  /// Starts sends and receives; `engine` lives as long as what it returns.
  [[nodiscard]] static std::unique_ptr<PendingPoints> start(const std::shared_ptr<SharedMemoryEngine>& engine,
                                                            std::span<const Collective> points);
  [[nodiscard]] PeerWindow attach(const Arena& arena, std::string_view name);
  [[nodiscard]] std::shared_ptr<SharedMemoryEngine> split(int color, int key, std::string_view name);
  void wait_until(const std::function<bool()>& predicate, const WaitContext& context);
  void check_peers(const WaitContext& context);
  void notify() noexcept { peers_->notify(world_ranks_); }
  void depart() noexcept;
  void set_observer(std::shared_ptr<TrafficObserver> observer) { observer_ = std::move(observer); }
  void set_tag_names(TagNames names) { tag_names_ = std::move(names); }
  [[nodiscard]] const NodeMap& nodes() const { return nodes_; }
  void count_one_sided(CollectiveKind kind, int peer, std::uint64_t bytes) noexcept;

  /// Bytes of one group that are used in any case; the world's group holds the job control too.
  [[nodiscard]] static std::size_t segment_bytes(const CommOptions& options, bool world, int size);
  /// And with the rings towards all other ranks, each of which is mere address space until something is sent there.
  [[nodiscard]] static std::size_t reserved_bytes(const CommOptions& options, bool world, int size);

 private:
  /// A call in progress: offsets in elements, and what its waits are for.
  struct Call {
    const Collective& collective;
    CallDescriptor descriptor;
    std::vector<std::int64_t> offsets{};  ///< [size + 1] of the parts
    std::uint64_t received = 0;           ///< payload bytes read from others
    std::uint64_t far = 0;                ///< of these from other nodes
  };
  struct Location {
    std::int32_t window = -1;  ///< -1: nowhere that others can read; or kPrivateMemory
    std::uint64_t offset = 0;
  };
  /// Bytes of a peer.
  struct Source {
    int peer = 0;
    const std::byte* here = nullptr;  ///< mapped; null: in private memory of the peer's,
    std::uint64_t there = 0;          ///< at this address
  };
  struct Rounds {
    std::uint64_t count = 0;
    bool ahead = true;  ///< what a round stages does not depend on what the one before consumes
  };
  struct Window {
    PeerWindow window;
    std::span<std::byte> own;
    std::shared_ptr<void> keep;
  };

  SharedMemoryEngine(std::unique_ptr<SegmentExchange> exchange, std::string group, int rank,
                     std::vector<int> world_ranks);
  void create_segment(const CommOptions& options, bool world, FunctionRef<void()> check);
  void find_out_what_can_be_read();
  [[nodiscard]] GroupView view() const { return {where_, group_, rank_, world_ranks_, controls_}; }

  [[nodiscard]] WaitContext context_of(const CallDescriptor& call, std::vector<int> ranks) const;
  void run_posted(const Collective& collective);

  struct Point;
  class Points;
  class StartedPoints;
  class PointsProgress;
  void run_points(std::span<const Collective> calls);
  /// Blocks until all of them are done.
  void await(Points& points);
  /// Moves what can be moved, of all messages of the group; wakes their other ranks.
  void move_points();
  /// The same for a wait of whatever group; whether something that was started is under way.
  bool move_started();
  /// What waits for these messages are for.
  [[nodiscard]] WaitContext context_of(const Points& points) const;
  /// Moves what can be moved; whether anything was.
  bool progress(Point& point);
  bool progress_send(Point& point);
  bool progress_recv(Point& point);
  void send_directly(Point& point) const;
  void fetch_message(Point& point, std::span<std::byte> data);
  /// Throws if the sender has given the message up.
  void throw_if_given_up(const Point& point);
  /// Bytes on their way in the ring of `from` towards `to`.
  [[nodiscard]] std::size_t in_ring(int from, int to) const;
  /// As many bytes to this rank's ring, or out of the peer's, as go.
  std::size_t put(int peer, std::span<const std::byte> bytes);
  std::size_t take(int peer, std::span<std::byte> bytes);
  void compare(Point& point);
  /// `rank`'s word to `peer`, and its ring towards it.
  [[nodiscard]] PeerLink& link(int rank, int peer) const { return links_[static_cast<std::size_t>(rank)][peer]; }
  [[nodiscard]] std::byte* ring_towards(int rank, int peer) const {
    return rings_[static_cast<std::size_t>(rank)] + static_cast<std::size_t>(peer) * kRingBytes;
  }

  /// Of a call whose counts all ranks know: its size says how it goes.
  void post_and_move(Call& call);
  /// Of the payload that goes beside the description. Nobody reads what is between two parts.
  struct PayloadPart {
    std::size_t offset = 0;
    std::span<const std::byte> bytes{};
  };
  void post(const CallDescriptor& descriptor, std::initializer_list<PayloadPart> payload = {});
  /// Moves what this rank has for itself.
  void keep_own_part(const Call& call) const;
  void await_posts(const CallDescriptor& descriptor);
  /// Waits until predicate(control of rank p) holds for all other ranks.
  void wait_all(const CallDescriptor& descriptor, FunctionRef<bool(const GroupControl&)> predicate);
  void wait_for(int peer, const CallDescriptor& descriptor, FunctionRef<bool()> predicate);

  [[nodiscard]] std::int64_t inline_bytes(const Call& call) const;
  void run_inline(Call& call);

  void all_to_all(Call& call);
  [[nodiscard]] PartTable parts_of_scatter(const Call& call) const;
  [[nodiscard]] const PartTable& parts_of_all_to_all(const Call& call);
  /// Parts that each rank reads from others: from the posts, from attached arenas, through staging.
  void inline_parts(Call& call, const PartTable& parts, std::size_t payload_offset);
  void direct_parts(Call& call, const PartTable& parts);
  void staged_parts(Call& call, const PartTable& parts);

  [[nodiscard]] bool is_direct(const Call& call) const;
  void locate(Call& call) const;
  [[nodiscard]] Location find(const std::byte* data, std::uint64_t bytes) const;
  /// Bytes of a peer's arena that `theirs` names.
  [[nodiscard]] const std::byte* window_bytes(int peer, const CallDescriptor& theirs, std::int32_t window,
                                              std::uint64_t offset, std::uint64_t length) const;
  [[nodiscard]] Source source_of(int peer, bool recv, std::int64_t first_byte, std::int64_t bytes) const;
  /// Which bytes a descriptor's window and offset mean, from `first` on.
  [[nodiscard]] Source source_at(int peer, const CallDescriptor& theirs, std::int32_t window, std::uint64_t offset,
                                 std::uint64_t length) const;
  /// Every rank of the group can read every other one's private memory. Known when all have posted.
  [[nodiscard]] bool all_read_private() const;
  /// Throws what became of the peer if it cannot be read any more.
  void read_private(std::span<std::byte> to, const Source& from, const CallDescriptor& call);
  /// All of `to`, from wherever it lies.
  void fetch(std::span<std::byte> to, const Source& from, const CallDescriptor& call);
  /// The same, counted.
  void pull(std::byte* to, const Source& from, std::int64_t bytes, Call& call);
  /// Sums all ranks' elements from `first` on.
  void reduce_direct(Call& call, std::byte* to, std::int64_t first, std::int64_t elements);
  void run_direct(Call& call);
  /// Nobody reads this rank's arenas any more.
  void await_readers(const Call& call);
  void direct_gather(Call& call);
  void direct_reduce_scatter(Call& call);
  void direct_all_reduce(Call& call);
  void direct_broadcast(Call& call);

  void run_staged(Call& call);
  void staged_rounds(const Call& call, Rounds rounds, FunctionRef<void(std::uint64_t, std::byte*)> stage,
                     FunctionRef<void(std::uint64_t)> consume);
  [[nodiscard]] const std::byte* peer_half(int peer, std::uint64_t round) const;
  [[nodiscard]] std::int64_t piece_bytes() const;
  void staged_gather(Call& call);
  void staged_reduce_scatter(Call& call);
  void staged_all_reduce(Call& call);
  void staged_broadcast(Call& call);

  void report(const TrafficEvent& event) noexcept {
    if (observer_) observer_->observe(event);
  }
  /// Counts what has been read from a peer, or from all of them.
  void count(Call& call, int peer, std::int64_t bytes) const;
  void copy_in(std::byte* to, const std::byte* from, std::int64_t bytes, int peer, Call& call) const;
  void reduce(const Collective& collective, std::byte* to, const Summands& sources, std::int64_t elements) const;
  /// What a rank gives to the call in progress: in a reduce_scatter not always what this one gives.
  [[nodiscard]] DType in_dtype_of(int peer, const Call& call) const {
    return static_cast<DType>(slot_of(peer, call.descriptor.sequence).descriptor.in_dtype);
  }
  [[nodiscard]] const CallSlot& slot_of(int peer, std::uint64_t sequence) const {
    return controls_[static_cast<std::size_t>(peer)]->slots[sequence % 2];
  }
  [[nodiscard]] GroupControl& own() const { return *controls_[static_cast<std::size_t>(rank_)]; }

  std::unique_ptr<SegmentExchange> exchange_;
  std::unique_ptr<PrivateMemory> private_;  ///< null: ranks are threads
  std::string group_;
  std::string where_;
  int rank_;
  int size_;
  std::vector<int> world_ranks_;
  NodeMap nodes_;
  CommOptions options_;
  Arena arena_;
  MemoryHold hold_;
  std::vector<SharedSpan> segments_;
  std::vector<GroupControl*> controls_;
  std::vector<std::byte*> staging_;            ///< of each rank
  std::size_t half_bytes_ = 0;                 ///< half of the smallest staging area
  std::vector<PeerLink*> links_;               ///< of each rank, one towards each
  std::vector<std::byte*> rings_;              ///< of each rank, one towards each
  std::atomic<std::size_t> held_bytes_ = 0;    ///< read by memory_bytes() on any thread
  std::vector<MemoryHold> ring_holds_;         ///< of those in use
  std::vector<std::uint64_t> sent_;            ///< messages to each rank, begun
  std::vector<std::uint64_t> put_;             ///< of these, those of which nothing is left to put into the ring
  std::vector<std::uint64_t> received_;        ///< messages from each rank, begun
  std::vector<std::uint64_t> taken_;           ///< and received
  std::vector<Point*> points_;                 ///< under way, in the order of their beginning
  bool moves_points_ = false;                  ///< a wait inside does not come in again
  std::uint64_t moves_ = 0;                    ///< how often something has moved
  std::vector<int> moved_ranks_;               ///< of the world; to be woken
  std::size_t started_ = 0;                    ///< messages under way that start() began
  std::shared_ptr<Progress> points_progress_;  ///< while there are some
  /// Memory that calls of one kind use again: they are short.
  struct AllToAllScratch {
    std::vector<std::int64_t> table{};
    std::vector<std::int64_t> posted{};
    PartTable parts{};
  };
  AllToAllScratch all_to_all_;
  std::shared_ptr<Peers> peers_;
  std::vector<Window> windows_;
  std::shared_ptr<TrafficObserver> observer_;
  TagNames tag_names_;
  std::uint64_t next_sequence_ = 0;
  std::uint64_t rounds_ = 0;  ///< rounds of staging so far, equal on all ranks
  FirstError first_error_;
  kernels::Isa isa_;
  pid_t owner_;  ///< the process that made this; its forked children hold a copy
};

}  // namespace zeroth::detail
