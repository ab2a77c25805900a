// GPUs and an NCCL that are not there: streams, events and collectives in memory of the host, behind the tables of
// src/device/cuda and src/comm/nccl. Ranks are threads, each with a device of its own.
//
// What is given to a stream runs only when somebody asks for an event, and then as far as events, held streams and
// other ranks let it: so a missing order shows as wrong data, and a missing wait as a call that NCCL has not yet taken.
// What no program may do lands in violations().
#pragma once

#include "comm/nccl/nccl_table.h"
#include "device/cuda/cuda_table.h"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace zeroth::test {

/// C functions have no object, so there is one at a time.
class FakeGpu {
 public:
  /// Streams and events are numbers in the log: "event_record e1 s0".
  struct Event;
  struct Stream;
  struct Comm;

  /// "an illegal memory access was encountered"
  static constexpr detail::CudaStatus kBroken = 700;

  explicit FakeGpu(int devices);
  FakeGpu(const FakeGpu&) = delete;
  FakeGpu& operator=(const FakeGpu&) = delete;
  ~FakeGpu();

  // What the test wants to go wrong. Set before the ranks run, or under no call.
  detail::CudaStatus count_status = detail::kCudaSuccess;
  std::string same_bus{};     ///< all devices are at this address
  bool never_opens = false;   ///< NCCL never connects
  bool moves_data = true;     ///< collectives copy; false: buffers are addresses that nobody reads
  bool abort_blocks = false;  ///< ncclCommAbort does not come back until release_aborts()
  bool host_memory_is_managed =
      false;          ///< what the fake does not know is managed memory: of the host and of every device
  bool late = false;  ///< streams run no further than an event that is asked for needs; else as far as they can
  int looks = 0;      ///< at a recorded event that find it not there yet, however little is left
  std::size_t device_bytes = 0;                            ///< memory that each device has; 0: no limit
  std::size_t most_pinned = 0;                             ///< larger pinned allocations are refused; 0: no limit
  bool registers = true;                                   ///< false: NCCL has no use for a buffer, and gives no handle
  bool finalize_blocks = false;                            ///< ncclCommFinalize stays in progress
  int polls_in_progress = 3;                               ///< looks until NCCL has taken what it was given
  detail::CudaStatus event_status = detail::kCudaSuccess;  ///< what every look at an event says, if not success
  std::atomic<int> broken_device{-1};  ///< every look at one of its events says kBroken; may be set at any time
  std::string refuse{};                ///< the call of NCCL with this name returns kSystemError

  /// What the stream holds stays where it is.
  void hold(void* stream, bool held);
  void release_aborts();
  /// All communicators of this device are in this state from now on.
  void fail_comms(int device, detail::NcclStatus status);
  /// A task on a stream, as a kernel of the user.
  void enqueue(void* stream, std::function<void()> task);

  /// Memory of a device, zeroed.
  [[nodiscard]] std::byte* allocate(int device, std::size_t bytes, bool pinned = false);
  /// Of a device: what is allocated now.
  [[nodiscard]] std::size_t allocated(int device);
  /// As if it were memory of a device; nobody touches it.
  void pretend(int device, std::uintptr_t address, std::size_t bytes);

  /// Calls on a device, in order.
  [[nodiscard]] std::vector<std::string> log(int device);
  /// Those of the log that begin with one of these words.
  [[nodiscard]] std::vector<std::string> log(int device, const std::vector<std::string>& words);
  void clear_log();
  [[nodiscard]] std::vector<std::string> violations();
  [[nodiscard]] std::size_t living_comms();
  [[nodiscard]] std::size_t living_streams();
  [[nodiscard]] std::size_t living_events();

  [[nodiscard]] detail::CudaTable cuda_table() const;
  /// Of version 2.28.9.
  [[nodiscard]] detail::NcclTable nccl_table() const;

 private:
  friend struct Calls;
  struct Operation;
  struct Batch;
  struct Clique;
  struct Item;
  struct Memory {
    std::size_t bytes = 0;
    int device = 0;
    std::unique_ptr<std::byte[]> owned{};
    bool pinned = false;
  };

  void say(const std::string& line);
  void violate(const std::string& line) { violations_.push_back(line); }
  void advance();
  bool advance(Stream& stream);
  /// Runs what has to run before this record of the event.
  void advance_to(const Event& event, std::uint64_t number);
  void offer(Operation& operation);
  void match(Clique& clique);
  void give(Comm& comm);

  static FakeGpu* one;
  static thread_local int current;
  static thread_local int group_depth;
  static thread_local std::vector<Comm*> grouped;

  std::mutex mutex_;
  std::condition_variable changed_;
  int devices_;
  std::map<int, std::vector<std::string>> log_;
  std::vector<std::string> violations_;
  std::map<std::uintptr_t, Memory> memory_;
  std::set<Stream*> streams_;
  std::set<Event*> events_;
  std::vector<Event*> ended_events_;
  std::set<Comm*> comms_;
  std::map<std::string, std::shared_ptr<Clique>> cliques_;
  std::map<int, int> next_stream_;  ///< by device
  std::map<int, int> next_event_;
  int next_id_ = 0;
  bool may_abort_ = false;
};

}  // namespace zeroth::test
