// CodedStep: a step that does not wait for the slowest ranks (gradient coding).
//
// Each rank computes the same s + 1 chunks of the batch as s others, one a micro-step. The gradient needs one of each
// such s + 1 ranks, whichever it is, and its bits do not depend on that. A rank that has run all of its micro-steps
// tells the others. Once one of each s + 1 has, the step is decided: a rank that sees it leaves its other micro-steps
// out, and its gradients are not summed.
//
//   s = 1, 4 ranks       rank 0   chunks 0 1   complete       summed
//                        rank 1   chunks 0 1   complete
//                        rank 2   chunks 2 .   left out
//                        rank 3   chunks 2 3   complete       summed
//
// So a slow rank costs the others at most one micro-step of its own. Ref: program/gradient_code.h, fractional
// repetition.
#pragma once

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/pending_points.h>
#include <zeroth/program/gradient_code.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace zeroth {

struct EngineSettings;

class CodedStep {
 public:
  /// Collective over `job`, blocks: makes a group of these ranks. `stragglers`: s, for which the ranks fit, see
  /// require_code_fits().
  CodedStep(const Communicator& job, int stragglers);
  CodedStep(const CodedStep&) = delete;
  CodedStep& operator=(const CodedStep&) = delete;
  /// Waits for messages that are under way.
  ~CodedStep();

  /// Of this rank, one a micro-step.
  [[nodiscard]] std::vector<int> chunks() const;

  /// One of each s + 1 ranks has run all micro-steps of this step. Never blocks. Stays so until end().
  [[nodiscard]] bool is_decided();
  /// Once a step: this rank runs no more micro-steps of it. `complete`: it has run all.
  void announce(bool complete);
  /// Whose gradients are summed.
  struct Summed {
    bool own = false;             ///< this rank's
    std::vector<int> left_out{};  ///< ranks that left micro-steps out, ascending
    int missing = -1;             ///< the first of s + 1 ranks of which none is complete; -1: there are none
  };
  /// After announce(): blocks until all ranks have announced. The next step begins.
  [[nodiscard]] Summed end();

  [[nodiscard]] std::size_t transport_bytes() const { return ranks_.backend().memory_bytes(); }

 private:
  enum : std::uint8_t { kUnknown, kComplete, kLeftOut };
  /// Starts to receive what others will announce.
  void begin();
  [[nodiscard]] int group_of(int rank) const { return rank / (code_.stragglers + 1); }
  /// One of each group is complete, as far as this rank knows; else the first of a group without: in `missing`.
  [[nodiscard]] bool has_all(int& missing) const;

  GradientCode code_;
  Communicator ranks_;
  std::uint32_t step_ = 0;
  bool begun_ = false;
  bool decided_ = false;
  std::vector<std::uint8_t> received_;  ///< by rank: what has come
  std::vector<std::uint8_t> known_;     ///< the same, of what is there
  std::uint8_t own_ = kUnknown;
  std::vector<std::unique_ptr<PendingPoints>> receiving_;  ///< by rank
  std::unique_ptr<PendingPoints> sending_;
};

/// Throws kConfig where such steps do not go with the settings. `world`: ranks; `data_ranks`: with batches of their
/// own.
void require_code_fits(const EngineSettings& settings, int world, int data_ranks, bool has_messages);
/// kUsage: of the stragglers + 1 ranks from `first` on none has run all micro-steps.
[[noreturn]] void throw_none_complete(int first, const EngineSettings& settings, int world);

}  // namespace zeroth
