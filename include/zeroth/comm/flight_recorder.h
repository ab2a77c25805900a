// FlightRecorder: the last calls of one rank, in a ring that is always on. Read after a failure, or while the rank
// hangs.
#pragma once

#include <zeroth/base/dtype.h>
#include <zeroth/comm/collective.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

/// One call, or one wait for what others put into shared memory.
struct CallRecord {
  std::uint64_t sequence = 0;  ///< in its group, from 0; waits are counted by themselves
  std::int64_t begun_ns = 0;   ///< of a steady clock of this host
  std::int64_t ended_ns = 0;   ///< 0: has not ended, or has failed
  std::int64_t elements = 0;   ///< sum of its counts
  std::int32_t group = 0;      ///< of groups()
  std::int32_t name = -1;      ///< of names(): of a barrier; -1: none
  std::int32_t about = -1;     ///< of names(): "the parameters of unit blocks.0"; -1: nobody says
  std::int32_t unit = -1;
  std::uint32_t label = 0;
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kUInt8;
  bool wait = false;  ///< no call: `kind` and `dtype` mean nothing
  bool operator==(const CallRecord&) const = default;
};

/// 1,024 records of 64 bytes. Calls of one group come from one thread at a time; several groups may record at once.
/// Readers see whole records or none: one that is being written is left out.
class FlightRecorder {
 public:
  static constexpr std::size_t kRecords = 1'024;

  /// A number for the group's name; the same for the same name.
  [[nodiscard]] std::int32_t group(std::string_view name);
  /// A number for a name, or for what a call is about. There are 1,024; later ones are all the same one, "...". Some
  /// 100 ns.
  [[nodiscard]] std::int32_t name(std::string_view name);
  /// A call begins. Returns its ticket. With end() some 60 ns, most of it for two looks at a clock.
  std::uint64_t begin(const CallRecord& call) noexcept;
  /// Its end. Does nothing once the ring has gone past it.
  void end(std::uint64_t ticket) noexcept;

  /// Oldest first.
  [[nodiscard]] std::vector<CallRecord> records() const;
  [[nodiscard]] std::vector<std::string> groups() const;
  [[nodiscard]] std::vector<std::string> names() const;
  /// "all_gather#40 (the parameters of unit blocks.0) of world/engine0, ended 12.3 s ago", of the newest record; "" if
  /// there is none.
  [[nodiscard]] std::string last_call() const;
  /// Why it is written, by name: "code", "message", "step", ...; see RankWatch::write_record().
  using Facts = std::map<std::string, std::string>;
  /// One JSON object a line: first {"rank", "size", "host", "now_ns", "names"} and, where there are some, "failure"
  /// with the facts, then one a record, oldest first; its "about" is the place of a name in "names". A new file that
  /// only its owner can read, in place of a plain one of that name. Throws kIo, and then leaves none.
  void write(const std::string& path, int rank, int size, const Facts& facts = {}) const;

 private:
  /// Words, so that a reader races with nobody: version (odd while written), then the record.
  static constexpr std::size_t kWords = 8;
  struct alignas(64) Slot {
    std::array<std::atomic<std::uint64_t>, kWords> words{};
  };
  [[nodiscard]] bool read(std::uint64_t ticket, CallRecord& record) const;

  std::unique_ptr<Slot[]> slots_ = std::make_unique<Slot[]>(kRecords);
  std::atomic<std::uint64_t> next_{0};
  mutable std::mutex mutex_;
  std::vector<std::string> groups_;
  std::vector<std::string> names_;
  std::map<std::string, std::int32_t, std::less<>> name_numbers_;
};

}  // namespace zeroth
