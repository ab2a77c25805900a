// Which activations stay in memory, are computed again, or rest on a slower tier: the choice with the least step time.
//
// With f, w, r the times of forward, backward and recompute of a unit, s its saved bytes, i the bytes of its input:
//
//   choice               in memory from forward to backward   bytes to the tier and back   added to backward
//   keep                 s                                    0                            0
//   recompute            i                                    0                            r
//   move                 0                                    s                            0
//   recompute and move   0                                    i                            r
//
//   step = max(sum f, moved / write bandwidth) + max(sum w + sum r of what is recomputed, moved / read bandwidth)
//
// under sum(in memory) <= the cap. Transfers run beside the computation of the whole forward or backward. Memory that a
// single unit needs while it computes is not part of the cap.
// Ref: Liao et al., "Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single GPU" (Fuyou), 2024,
// section 4.2; here exact, and with recompute as a choice.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

struct ActivationUnit {
  std::string name{};
  std::uint64_t saved_bytes = 0;  ///< what its forward saves for backward
  std::uint64_t input_bytes = 0;  ///< what a recompute needs
  double forward_s = 0.0;
  double backward_s = 0.0;   ///< without a recompute
  double recompute_s = 0.0;  ///< about forward_s
};

/// Bytes per second; 0: nothing can be moved.
struct ActivationTier {
  double write_bytes_per_s = 0.0;
  double read_bytes_per_s = 0.0;
};

enum class ActivationChoice : std::uint8_t { kKeep, kRecompute, kMove, kRecomputeAndMove };
inline constexpr int kNumActivationChoices = 4;
/// "keep", "recompute", "move", "recompute+move"
[[nodiscard]] std::string_view name_of(ActivationChoice choice) noexcept;

/// What a choice for each unit costs.
struct ActivationCost {
  std::uint64_t resident_bytes = 0;  ///< in memory between forward and backward
  std::uint64_t moved_bytes = 0;     ///< to the tier, and back
  double forward_s = 0.0;            ///< of computation
  double write_s = 0.0;              ///< beside it
  double backward_s = 0.0;           ///< of computation, recompute counted
  double recompute_s = 0.0;          ///< the part of it that is recompute
  double read_s = 0.0;               ///< beside it
  [[nodiscard]] double step_s() const;
};
/// `choices`: one a unit. Infinite times for bytes that no tier takes.
[[nodiscard]] ActivationCost activation_cost(std::span<const ActivationUnit> units, const ActivationTier& tier,
                                             std::span<const ActivationChoice> choices);

struct ActivationPlan {
  std::vector<ActivationChoice> choices{};  ///< one a unit
  ActivationCost cost{};
  /// False: there were too many different units; of choices that are nearly alike one was looked at.
  bool exact = true;
};

/// The choices with the least step_s(); among equals with the fewest moved bytes, then the least recompute. Searches
/// the choices that no other beats in memory, moved bytes and recompute at once: a few thousand for a model of equal
/// blocks. Throws kUsage for negative or infinite numbers; kOutOfMemory, with the least cap that would do, if nothing
/// fits.
[[nodiscard]] ActivationPlan plan_activations(std::span<const ActivationUnit> units, const ActivationTier& tier,
                                              std::uint64_t memory_bytes);

/// Why: a line a unit, then what bounds forward and backward, and the memory beside its cap. No trailing newline.
[[nodiscard]] std::string to_text(const ActivationPlan& plan, std::span<const ActivationUnit> units,
                                  std::uint64_t memory_bytes);

}  // namespace zeroth
