// FlightRecorder: the last calls of one rank, in a ring buffer that is always on. It is read after a failure, or while
// the rank hangs.
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

/// One call, or one wait for data of other ranks in shared memory.
struct CallRecord {
  std::uint64_t sequence = 0;  ///< number in its group, from 0; waits have their own numbers
  std::int64_t begun_ns = 0;   ///< of a steady clock of this host
  std::int64_t ended_ns = 0;   ///< 0: has not ended, or has failed
  std::int64_t elements = 0;   ///< sum of its counts
  std::int32_t group = 0;      ///< index into groups()
  std::int32_t name = -1;      ///< index into names(), of a barrier; -1: none
  std::int32_t about = -1;     ///< index into names(): "the parameters of unit blocks.0"; -1: none
  std::int32_t unit = -1;
  std::uint32_t label = 0;
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kUInt8;
  bool wait = false;  ///< a wait, not a call: `kind` and `dtype` have no meaning
  bool operator==(const CallRecord&) const = default;
};

/// 1,024 records of 64 bytes. Calls of one group come from one thread at a time; several groups may record at once.
/// Readers see whole records only: a record that is being written is left out.
class FlightRecorder {
 public:
  static constexpr std::size_t kRecords = 1'024;

  /// The number of a group's name; the same for the same name.
  [[nodiscard]] std::int32_t group(std::string_view name);
  /// The number of a name or of a call's subject. There are 1,024 numbers; later names share the number of "...". Costs
  /// some 100 ns.
  [[nodiscard]] std::int32_t name(std::string_view name);
  /// Records the begin of a call and returns its ticket. With end() it costs some 60 ns, mostly for two clock reads.
  std::uint64_t begin(const CallRecord& call) noexcept;
  /// Records the end of a call. Does nothing if the ring has already overwritten the call.
  void end(std::uint64_t ticket) noexcept;

  /// Oldest first.
  [[nodiscard]] std::vector<CallRecord> records() const;
  [[nodiscard]] std::vector<std::string> groups() const;
  [[nodiscard]] std::vector<std::string> names() const;
  /// Text of the newest record: "all_gather#40 (the parameters of unit blocks.0) of world/engine0, ended 12.3 s ago";
  /// "" if there is none.
  [[nodiscard]] std::string last_call() const;
  /// Facts about the failure, by name: "code", "message", "step", ...; see RankActivity::write_record().
  using Facts = std::map<std::string, std::string>;
  /// Writes one JSON object per line: first {"rank", "size", "host", "now_ns", "names"} and, if there are facts,
  /// "failure"; then one per record, oldest first, where "about" is an index into "names". It makes a new file that
  /// only its owner can read, and replaces a plain file of that name. Blocks. Throws kIo, and then leaves no file.
  void write(const std::string& path, int rank, int size, const Facts& facts = {}) const;

 private:
  /// Atomic words, so readers and the writer do not race: a version (odd during a write), then the record.
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
