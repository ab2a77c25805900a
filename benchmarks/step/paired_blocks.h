// Paired blocks inside one job: contestants take turns in the order A B C C B A, so that a drift of the
// machine hits all of them alike; every block starts with a barrier and lasts as long as its slowest rank.
#pragma once

#include "support/statistics.h"

#include <zeroth/comm/communicator.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
}

namespace zeroth::benchmarks {

/// Parts of a step that are timed by themselves.
enum class Phase : std::size_t { kForward, kBackward, kStep };
inline constexpr std::size_t kNumPhases = 3;
[[nodiscard]] std::string_view name_of(Phase phase);

/// Seconds of wall time and of CPU time of this process, all threads together.
struct Times {
  double wall = 0.0;
  double cpu = 0.0;
  Times& operator+=(const Times& other);
};
[[nodiscard]] Times now();
[[nodiscard]] Times since(const Times& start);

using PhaseTimes = std::array<Times, kNumPhases>;

/// Something that can make training steps.
class Contestant {
 public:
  explicit Contestant(std::string name) : name_(std::move(name)) {}
  Contestant(const Contestant&) = delete;
  Contestant& operator=(const Contestant&) = delete;
  virtual ~Contestant() = default;

  [[nodiscard]] const std::string& name() const { return name_; }
  /// Makes one step and adds what its phases took.
  virtual void step(PhaseTimes& phases) = 0;

 private:
  std::string name_;
};

/// A block as the job saw it, per step.
struct BlockTime {
  double wall = 0.0;                            ///< of the slowest rank
  double cpu = 0.0;                             ///< sum over ranks
  std::array<double, kNumPhases> phase_wall{};  ///< mean over ranks
  std::array<double, kNumPhases> phase_cpu{};   ///< sum over ranks
};

/// Two blocks of a contestant in one cycle, averaged; the first contestant is the floor.
struct PairedResult {
  std::vector<std::string> names{};
  std::vector<std::vector<BlockTime>> cycles{};  ///< [cycle][contestant]
  double own_cpu_seconds = 0.0;                  ///< of all ranks while the blocks ran

  using Field = double (*)(const BlockTime&);
  /// Of one contestant over the cycles, times `scale`.
  [[nodiscard]] Summary absolute(std::size_t contestant, Field field, double scale = 1.0) const;
  /// 100 (contestant / floor - 1), pair by pair.
  [[nodiscard]] Summary percent_over_floor(std::size_t contestant, Field field) const;
  /// contestant - floor, pair by pair, times `scale`.
  [[nodiscard]] Summary over_floor(std::size_t contestant, Field field, double scale = 1.0) const;
};

struct PairedOptions {
  int cycles = 10;  ///< of two blocks for each contestant
  int steps_per_block = 2;
  int warmup_steps = 2;      ///< for each contestant, not timed
  double max_seconds = 0.0;  ///< no new cycle after this time; 0: no limit
  bool progress = false;     ///< rank 0 says on stderr how far it is
};

/// --cycles (--blocks), --steps-per-block and --max-seconds.
void add_options(CLI::App& app, PairedOptions& options);

/// Collective: all ranks call it with the same contestants and options.
[[nodiscard]] PairedResult run_paired(const std::vector<std::unique_ptr<Contestant>>& contestants,
                                      const PairedOptions& options, const Communicator& communicator);

}  // namespace zeroth::benchmarks
