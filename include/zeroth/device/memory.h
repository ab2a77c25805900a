// Tagged memory: every byte that Zeroth holds has a Tag{unit, state} and is counted when it is taken and released.
//
// MemoryLedger  counts live and peak bytes by state. Tests compare its peak with the plan, exactly.
// Arena         one mapping of fixed size: private with huge pages, or shared through a memfd whose descriptor can be
//               passed to another process. It has no file, so nothing is left after kill -9.
// Buffer        a counted part of an arena.
#pragma once

#include <zeroth/base/error.h>
#include <zeroth/base/platform.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

namespace zeroth {

/// The purpose of a byte, in plans and reports.
enum class MemoryState : std::uint8_t {
  kParameter,  ///< parameters at rest, in the dtype of computation and communication
  kMaster,     ///< lower halves of the fp32 masters of bfloat16 parameters
  kOptimizer,  ///< moments, momentum
  kBucket,     ///< local gradients of a unit, before reduction
  kReduced,    ///< reduced gradients (this rank's shard, or all of them at stage 0)
  kGathered,   ///< gathered parameters of sharded units
  kOverflow,   ///< beyond the plan: gathered slots, wide gradients, gradients and sums that were moved away
  kControl,    ///< signals, epochs, tags, staging of the transport
  kStaging,    ///< blocks of states that rest in files, while they are in memory
  kOther,
};
inline constexpr std::size_t kNumMemoryStates = 10;

[[nodiscard]] std::string_view name_of(MemoryState state) noexcept;

/// `unit`: index of the unit in its engine; -1 for memory of no unit.
struct Tag {
  std::int32_t unit = -1;
  MemoryState state = MemoryState::kOther;
};

/// Bytes by state.
struct MemorySnapshot {
  std::array<std::uint64_t, kNumMemoryStates> bytes{};

  [[nodiscard]] std::uint64_t operator[](MemoryState state) const { return bytes[static_cast<std::size_t>(state)]; }
  [[nodiscard]] std::uint64_t total() const;
  MemorySnapshot& operator+=(const MemorySnapshot& other) {
    for (std::size_t state = 0; state < kNumMemoryStates; ++state) bytes[state] += other.bytes[state];
    return *this;
  }
  bool operator==(const MemorySnapshot&) const = default;
};

class MemoryLedger;

/// Owns counted bytes and releases the count when destroyed. Move-only.
class [[nodiscard]] MemoryHold {
 public:
  MemoryHold() = default;
  MemoryHold(std::shared_ptr<MemoryLedger> ledger, Tag tag, std::size_t bytes);
  MemoryHold(MemoryHold&& other) noexcept;
  MemoryHold& operator=(MemoryHold&& other) noexcept;
  MemoryHold(const MemoryHold&) = delete;
  MemoryHold& operator=(const MemoryHold&) = delete;
  ~MemoryHold();

  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  void release() noexcept;
  std::shared_ptr<MemoryLedger> ledger_;
  Tag tag_{};
  std::size_t bytes_ = 0;
};

/// Counts live bytes by state, now and at the moment of the highest total. Thread safe.
class MemoryLedger : public std::enable_shared_from_this<MemoryLedger> {
 public:
  [[nodiscard]] static std::shared_ptr<MemoryLedger> create() {
    return std::shared_ptr<MemoryLedger>(new MemoryLedger);
  }

  [[nodiscard]] MemoryHold hold(Tag tag, std::size_t bytes) { return {shared_from_this(), tag, bytes}; }

  [[nodiscard]] MemorySnapshot live() const;
  /// Bytes by state at the moment of the highest total since the last reset_peak().
  [[nodiscard]] MemorySnapshot at_peak() const;
  /// The highest value of each single state.
  [[nodiscard]] MemorySnapshot state_peaks() const;
  void reset_peak();

 private:
  friend class MemoryHold;
  MemoryLedger() = default;
  void acquire(Tag tag, std::size_t bytes);
  void release(Tag tag, std::size_t bytes) noexcept;

  mutable std::mutex mutex_;
  MemorySnapshot live_;
  MemorySnapshot at_peak_;
  MemorySnapshot state_peaks_;
};

/// A counted part of an arena. Move-only; keeps the arena's mapping alive.
class [[nodiscard]] Buffer {
 public:
  Buffer() = default;
  Buffer(std::shared_ptr<void> keep, std::span<std::byte> bytes, MemoryHold hold)
      : keep_(std::move(keep)), bytes_(bytes), hold_(std::move(hold)) {}

  [[nodiscard]] std::byte* data() const { return bytes_.data(); }
  [[nodiscard]] std::size_t size() const { return bytes_.size(); }
  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }
  template <class T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(bytes_.data());
  }

 private:
  std::shared_ptr<void> keep_;
  std::span<std::byte> bytes_{};
  MemoryHold hold_;
};

/// kDevice: device memory, which the host must not touch; Device::make_arena() of that device makes it.
enum class ArenaKind : std::uint8_t { kPrivate, kShared, kDevice };

/// One anonymous mapping, or device memory. Copies share it. Pages of a mapping start as zero and use no memory until
/// touched. Writes of a forked child to a private arena stay in the child, and a shared arena is not mapped in a child
/// (MADV_DONTFORK). So a DataLoader worker can never write into the trainer's parameters.
class Arena {
 public:
  Arena() = default;

  /// Makes an arena of `bytes` bytes. `name` appears in /proc/<pid>/maps and smaps as "zeroth:<name>": for shared
  /// arenas always, for private ones if the kernel names anonymous memory (Linux 5.17, CONFIG_ANON_VMA_NAME). Throws
  /// kOutOfMemory or kResource with the reason.
  [[nodiscard]] static Arena create(ArenaKind kind, std::size_t bytes, std::string_view name);

  /// An arena over memory of another owner, which lives as long as `keep`. fd() is -1.
  [[nodiscard]] static Arena over(ArenaKind kind, std::span<std::byte> bytes, std::string_view name,
                                  std::shared_ptr<void> keep);

  [[nodiscard]] std::byte* data() const { return bytes_.data(); }
  [[nodiscard]] std::size_t capacity() const { return bytes_.size(); }
  [[nodiscard]] std::size_t used() const;
  [[nodiscard]] ArenaKind kind() const { return kind_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  /// The memfd of a shared arena (owned by the arena), -1 for a private one.
  [[nodiscard]] int fd() const;
  [[nodiscard]] std::shared_ptr<void> keep_alive() const { return mapping_; }
  /// Resident bytes of this mapping in this process (Rss, on every kernel). Slow: reads smaps.
  [[nodiscard]] std::uint64_t resident_bytes() const;

  /// Takes the next `bytes` bytes of the arena, at a multiple of `alignment` bytes. Throws kInternal if the arena is
  /// too small (the plan is wrong).
  [[nodiscard]] std::span<std::byte> reserve(std::size_t bytes, std::size_t alignment = kPageBytes);
  /// reserve(), counted in `ledger` under `tag`.
  [[nodiscard]] Buffer allocate(std::size_t bytes, Tag tag, MemoryLedger& ledger, std::size_t alignment = kPageBytes);

 private:
  struct Mapping;
  ArenaKind kind_ = ArenaKind::kPrivate;
  std::string name_;
  std::span<std::byte> bytes_{};
  std::shared_ptr<Mapping> mapping_;
};

/// The shared arena of another process, mapped here. The caller keeps ownership of `fd`. The mapping lives as long as
/// `keep`.
struct ForeignMapping {
  std::shared_ptr<void> keep;
  std::span<std::byte> bytes{};
};
[[nodiscard]] ForeignMapping map_foreign(int fd, std::size_t bytes);

[[nodiscard]] constexpr std::size_t align_up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

/// Resident bytes (Rss) of all mappings whose name contains `name`, from /proc/self/smaps. See Arena::create for names.
[[nodiscard]] std::uint64_t resident_bytes(std::string_view name);
/// Proportional set size of a process in bytes (smaps_rollup); 0 if it cannot be read. pid 0 is this process.
[[nodiscard]] std::uint64_t pss_bytes(int pid = 0);
/// Bytes that a new process may still use: the minimum of MemAvailable and the free memory in all cgroups of this
/// process (v1 or v2, all levels). Page cache that the kernel can drop counts as free.
[[nodiscard]] std::uint64_t available_memory_bytes();

}  // namespace zeroth
