// MPI's world, as one rank has it: every call of MPI is made here, under one lock, and every wait ends.
#pragma once

#include "comm/mpi/mpi_table.h"
#include "comm/polling.h"

#include <zeroth/base/deadline.h>
#include <zeroth/comm/factory.h>
#include <zeroth/device/stream.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::detail {

/// How a wait spends its time until what it waits for is late.
enum class MpiPatience {
  kSparing,  ///< looks for a while, then sleeps 20 us between looks
  kEager,    ///< looks all the time, after a while yielding, for 10 ms and 0.5 ms a MB: MPI goes on with a call only
             ///< while somebody looks
};

/// A part of an exchange; any length.
struct MpiPiece {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// Requests of one message or call, and how long they have been waited for.
struct MpiRequests {
  std::vector<void*> list{};
  std::size_t bytes = 0;
  bool confirms = false;  ///< done, the sender is to know that nobody had left who was to take it
  std::chrono::microseconds waited{0};
};

class MpiWorld {
 public:
  /// `world` as MpiTable::open() gives it.
  MpiWorld(const MpiTable& table, const MpiWorldFacts& facts, void* world, const CommOptions& options);
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  [[nodiscard]] int rank() const { return facts_.rank; }
  [[nodiscard]] int size() const { return facts_.size; }
  [[nodiscard]] void* world() const { return world_; }

  /// A message, in pieces that MPI can count. A sender whose message is done knows that nobody had left who was to take
  /// it, but of what MPI sends ahead.
  [[nodiscard]] MpiRequests start(bool sends, int peer, std::uint32_t tag, std::byte* data, std::size_t bytes);
  /// A call of a group: call(table, &request) starts it and returns MPI's code. `bytes`: about as many as it moves.
  /// [Note: Done] A rank whose own part is done goes on, as in MPI: what it sent to a rank that had left it hears in
  /// its next call, or after 10 ms in any.
  template <class Call>
  [[nodiscard]] MpiRequests start_call(std::string_view what, std::size_t bytes, const Call& call) {
    const std::lock_guard lock(mutex_);
    enter();
    void* request = nullptr;
    check(call(table_, &request), what);
    under_way_.push_back({request, Kind::kCall});
    return {.list = {request}, .bytes = bytes};
  }
  /// to[r] goes to rank r of the group, and from[r] comes from it, as messages between each two ranks: that is how
  /// MPI's non-blocking calls do it, and it has no limit of length. (MPI_Ialltoallw has none either, and takes 8 us
  /// longer.) See [Note: Done].
  [[nodiscard]] MpiRequests start_exchange(void* group, int rank, std::span<const MpiPiece> to,
                                           std::span<const MpiPiece> from);
  /// MpiTable::split(), which blocks, for at most `timeout`: kTimeout, and this rank is without MPI. Null for a color
  /// below 0.
  [[nodiscard]] void* split(void* group, int color, int key, Milliseconds timeout);

  /// Blocks for at most `slice`; true once all are done, and none is left.
  [[nodiscard]] bool wait(MpiRequests& requests, Milliseconds slice, MpiPatience patience);
  /// Afterwards MPI does not touch the bytes of these messages; or, if it does not give them back, is not called any
  /// more.
  void forget(MpiRequests& requests) noexcept;
  /// Tells the others, and leaves. All that is under way ends within less than a second: the others leave, too, and
  /// each takes what another has still to send. What a rank has not taken by then it never will; but where MPI may
  /// still write, nobody in this process calls it any more.
  void abort(std::string_view text) noexcept;
  /// Throws kAborted if another rank has stopped the job, as this one hears it within 10 ms. For who waits for
  /// something else than MPI.
  void hear();

 private:
  /// One message of the group, in pieces that MPI can count.
  struct Message {
    void* group = nullptr;
    bool sends = false;
    int peer = 0;
    int tag = 0;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  enum class Kind { kSend, kReceive, kCall };
  /// A request that callers wait for.
  struct UnderWay {
    void* request = nullptr;
    Kind kind = Kind::kCall;
  };
  /// Takes what others have sent in the world's groups, to nowhere.
  class Drain;

  /// Before anything is started. A rank that comes from elsewhere first hears whether another one has left meanwhile:
  /// it must not take what that one could no more take back.
  void enter();
  void start_locked(const Message& message, MpiRequests& requests);
  void ended(void* request) noexcept;
  bool is_done(void* request) const noexcept;
  bool advance(std::vector<void*>& requests) const noexcept;
  [[nodiscard]] bool take_back_all() noexcept;
  bool look(MpiRequests& asked, bool probes);
  void listen();
  void forget_locked(std::vector<void*>& requests) noexcept;
  void stop(std::string why) noexcept;
  void throw_if_stopped() const;
  void check(int code, std::string_view call) const;

  const MpiTable& table_;
  MpiWorldFacts facts_;
  void* world_;
  Polling polling_;
  std::mutex mutex_;
  std::string stopped_;              ///< under mutex: why MPI is not called any more
  bool has_told_ = false;            ///< under mutex: the others know, or have said it themselves
  std::int64_t heard_at_ = 0;        ///< under mutex: when abort was last looked for, about, of CLOCK_MONOTONIC_COARSE
  std::vector<void*> groups_;        ///< the world's parts, and the world
  std::vector<UnderWay> under_way_;  ///< under mutex; those that were started last are mostly done first
};

/// All ranks of MPI's world, on a duplicate of it. Blocks until they have come, at most options.timeout: kTimeout.
/// Throws kMismatch if MPI has another rank or size than `rank` and `size`, kEnvironment if it does not let threads in
/// or has too few tags.
[[nodiscard]] std::shared_ptr<MpiWorld> open_mpi_world(const MpiTable& table, int rank, int size,
                                                       const CommOptions& options);

}  // namespace zeroth::detail
