// Faults of one rank out of four, and what the others must say of each. docs/faults.md shows them.
#pragma once

#include "support/watched_job.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {

inline constexpr int kFaultRanks = 4;

/// When things happened, in memory that all ranks and the test share.
class Times {
 public:
  Times() : memory_(::mmap(nullptr, sizeof(All), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::runtime_error("mmap failed");
    all_ = new (memory_) All;
  }
  Times(const Times&) = delete;
  Times& operator=(const Times&) = delete;
  ~Times() { ::munmap(memory_, sizeof(All)); }

  /// The fault happens now; the first time counts.
  void strike() {
    std::int64_t none = 0;
    all_->struck.compare_exchange_strong(none, now());
  }
  void end(int rank) { all_->ended[static_cast<std::size_t>(rank)] = now(); }
  [[nodiscard]] bool has_struck() const { return all_->struck != 0; }
  /// From the fault to the end of the rank; none if one of them did not happen.
  [[nodiscard]] std::optional<double> seconds(int rank) const {
    const std::int64_t ended = all_->ended[static_cast<std::size_t>(rank)];
    if (all_->struck == 0 || ended == 0) return std::nullopt;
    return static_cast<double>(ended - all_->struck) * 1e-9;
  }

 private:
  struct All {
    std::atomic<std::int64_t> struck{0};
    std::array<std::atomic<std::int64_t>, kFaultRanks> ended{};
  };
  static std::int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(SteadyClock::now().time_since_epoch()).count();
  }
  void* memory_;
  All* all_;
};

enum class Over : std::uint8_t { kMemory, kMessages };

/// What every other rank must say.
struct Told {
  ErrorCode code = ErrorCode::kInternal;
  std::vector<std::string> words{};  ///< regular expressions, each of which its line must hold
  /// Where all ranks come to the same error, one may hear it from another before it finds it itself.
  bool or_aborted = false;
};

struct FaultCase {
  std::string name{};  ///< of the test
  std::string what{};  ///< for the page: "rank 2 is killed in the forward of blocks.1"
  int guilty = 2;
  bool hangs = false;  ///< the guilty rank does not end by itself: the test kills it when the others have ended
  bool deaf = false;  ///< nor does it come to a wait again, but its control thread ends it: with the line of the others
  bool absent = false;   ///< it does not even come
  double within_s = 15;  ///< from the fault to the end of every other rank
  /// Over shared memory and over messages. None: the job goes on there, and trains to its end.
  std::optional<Told> memory{};
  std::optional<Told> messages{};
  std::optional<Over> only{};  ///< it does not exist over the other one
  /// A warning that rank 0 writes while the job goes on: a regular expression, "" for none.
  std::string warning{};
  /// Makes it happen.
  std::function<void(WatchedJob& job, Times& times)> arrange{};
  std::string failpoints{};  ///< of the guilty rank

  FaultCase& says(const Told& both) { return says(both, both); }
  FaultCase& says(std::optional<Told> over_memory, std::optional<Told> over_messages) {
    memory = std::move(over_memory);
    messages = std::move(over_messages);
    return *this;
  }
  [[nodiscard]] const std::optional<Told>& told(Over over) const { return over == Over::kMemory ? memory : messages; }
};
inline std::ostream& operator<<(std::ostream& out, const FaultCase& fault) {
  return out << fault.what;
}

[[nodiscard]] std::vector<FaultCase> fault_cases();

}  // namespace zeroth::test
