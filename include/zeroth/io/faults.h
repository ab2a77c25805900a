// Planted faults of transfers, for tests of what stands above a queue (IoQueueOptions::faults).
//
// They lie between the queue and its engine, where the kernel's own faults come from: what resumes short transfers and
// checks results is above them. Failpoints (base/failpoint.h: "io.*") lie at the system calls of the engines.
#pragma once

#include <zeroth/base/deadline.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zeroth {

enum class IoFaultKind : std::uint8_t {
  kErrno,   ///< the transfer ends with `error_number`; nothing was moved
  kShort,   ///< half of it is moved, rounded down to blocks of 4096 bytes, at least one
  kFlip,    ///< one bit of what was moved is wrong, and nobody says so
  kDelay,   ///< its end is seen `delay` later
  kRefuse,  ///< it is not taken when it is submitted, nor are those after it; the next time it may be
};

struct IoFault {
  IoFaultKind kind = IoFaultKind::kErrno;
  std::uint64_t at = 0;     ///< the transfer with this number, counted from 1 over all queues that share the faults
  double probability = 0;   ///< with at = 0: each transfer, by chance
  int error_number = 5;     ///< EIO
  Milliseconds delay{100};  ///< of kDelay
};

/// Decides about each transfer. May be shared by queues of one thread. The same seed and transfers give the same
/// faults.
class IoFaults {
 public:
  explicit IoFaults(std::vector<IoFault> faults, std::uint64_t seed = 1);

  /// The fault of the next transfer; none: null. Called by the queue's engine.
  [[nodiscard]] const IoFault* next();
  /// Faults of this kind that happened.
  [[nodiscard]] std::uint64_t count(IoFaultKind kind) const { return counts_[static_cast<std::size_t>(kind)]; }
  /// Transfers that were decided about.
  [[nodiscard]] std::uint64_t transfers() const { return transfers_; }
  /// From now on nothing fails.
  void stop() { faults_.clear(); }
  /// A number below `bound`, of the same random sequence.
  [[nodiscard]] std::uint64_t draw(std::uint64_t bound);

 private:
  std::vector<IoFault> faults_;
  std::uint64_t state_;
  std::uint64_t transfers_ = 0;
  std::array<std::uint64_t, 5> counts_{};
};

}  // namespace zeroth
