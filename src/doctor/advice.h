// Which sharding plan suits these links: bytes of each plan by the functions that the engine itself plans with, over
// what was measured.
#pragma once

#include <zeroth/base/dtype.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zeroth::doctor {

struct ModelSize {
  double params = 0;  ///< 1e6 to 1e14
  DType dtype = DType::kBFloat16;
  int layers = 32;  ///< repeated units of equal size, and one of that size beside them
  int micro_steps = 1;
};

struct Cluster {
  int hosts = 1;
  int ranks_per_host = 1;
  double near_bytes_per_s = 0;  ///< that a rank receives inside its host
  double far_bytes_per_s =
      0;  ///< that a host receives from others, for all of its ranks together; not used with one host
  std::uint64_t bytes_per_host = 0;  ///< memory for all ranks of a host together
  double compute_s = 0;              ///< of a step, without communication; 0: not known
};

struct PlanCost {
  std::string name{};              ///< "zero-3", "hpz-8", "hpz-8-g8"
  std::string keys{};              ///< of the configuration
  std::uint64_t memory_bytes = 0;  ///< on each rank, activations not counted
  std::uint64_t near_bytes = 0;    ///< that a rank receives in a step inside its host
  std::uint64_t far_bytes = 0;     ///< from other hosts
  double seconds = 0;              ///< of communication
  bool splits_parameters = false;
  bool fits = false;
};

struct Advice {
  std::vector<PlanCost>
      plans{};  ///< stages 0 to 3, then those of groups inside a host, where there are several of several ranks
  std::optional<std::size_t> chosen{};  ///< none fits
  /// With several hosts: methods that change what is trained (docs/slow-links.md), the gentlest first.
  std::vector<PlanCost> lossy{};
  /// One of them, where the chosen plan communicates for longer than a step computes: the first whose communication
  /// does not, or the fastest. Needs Cluster::compute_s.
  std::optional<std::size_t> lossy_chosen{};
};

/// Splitting the parameters may make a step so many times as long as the fastest plan's, for the memory that it saves:
/// it brings half as many bytes again, and that is no reason against it.
inline constexpr double kWorthSplitting = 1.6;
/// Of plans that split parameters alike (all of them, or none), one may make a step so many times as long as the
/// fastest of them. What stage 3 over all ranks costs beyond groups inside a host is spent between hosts alone.
inline constexpr double kWorthItsMemory = 1.2;

/// The plan with the least memory among those that fit and are fast enough by the two numbers above. Pure. Throws
/// Error(kUsage) for sizes out of their limits.
[[nodiscard]] Advice advise(const ModelSize& model, const Cluster& cluster);
/// Lines for people: what was measured, a table, the proposal with its keys.
[[nodiscard]] std::vector<std::string> describe(const Advice& advice, const ModelSize& model, const Cluster& cluster);

}  // namespace zeroth::doctor
