#include "engine/residency_choice.h"

#include "engine/texts.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/io/io_queue.h>
#include <zeroth/offload/measure.h>
#include <zeroth/offload/plan_split.h>
#include <zeroth/zero/state_table.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

namespace zeroth {
namespace {

constexpr Milliseconds kTransferTimeout{10'000};
constexpr std::int64_t kLargestTrial = std::int64_t{1} << 18U;  // elements
constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();

/// What a rank knows, in the order in which it is told.
struct TierFacts {
  std::int64_t blocks = 0;
  std::int64_t block_bytes = 0;  ///< of all blocks
  std::int64_t read_ns = 0;      ///< of a block
  std::int64_t write_ns = 0;
  std::int64_t update_ns = 0;
  std::int64_t memory_limit = 0;     ///< of all ranks of the host together
  std::int64_t bytes_in_files = 0;   ///< of memory, with all blocks in files
  std::int64_t bytes_in_memory = 0;  ///< with none
};
constexpr std::size_t kNumFacts = sizeof(TierFacts) / sizeof(std::int64_t);

bool plans_ratio(const ShardGroup& group) {
  const ResidencyPlan& residency = group.spec().plan.residency;
  return residency.plans_ratio && residency.optimizer == Residency::kFiles;
}

ResidencyPlan with_ratio(ResidencyPlan residency, double ratio) {
  residency.optimizer_ratio = ratio;
  residency.optimizer_in_files.clear();
  residency.plans_ratio = false;
  return residency;
}

std::uint64_t bytes_with_ratio(const ShardGroups& groups, const EngineSettings& settings, const Optimizer& optimizer,
                               double ratio) {
  std::uint64_t bytes = 0;
  for (const auto& group : groups) {
    ShardingPlan plan = group->spec().plan;
    if (plans_ratio(*group)) plan.residency = with_ratio(plan.residency, ratio);
    bytes += group->planned_memory(plan, optimizer.states(), settings.micro_steps).total();
  }
  return bytes;
}

/// Seconds that an update of `elements` takes with its states in memory.
double time_update(const Optimizer& optimizer, Kernels& kernels, Device& device, std::int64_t elements) {
  const std::int64_t n = std::min(elements, kLargestTrial);
  const std::vector<StateDeclaration> declared = optimizer.states();
  std::vector<float> param(static_cast<std::size_t>(n), 0.5F);
  const std::vector<float> grad(static_cast<std::size_t>(n), 0.25F);
  std::vector<std::vector<std::byte>> memory;
  memory.reserve(declared.size());
  for (const StateDeclaration& state : declared)
    memory.emplace_back(array_bytes(n, state.dtype.value_or(DType::kFloat32)));
  const Stream stream = device.make_stream("measure");
  double best = 0.0;
  for (int round = 0; round < 3; ++round) {
    const auto begin = SteadyClock::now();
    kernels.for_ranges(n, [&](std::int64_t from, std::int64_t to) {
      std::vector<std::byte*> states;
      for (std::size_t state = 0; state < declared.size(); ++state) {
        const bool whole = has_elements(declared[state].shape);
        states.push_back(memory[state].data() +
                         (whole ? array_bytes(from, declared[state].dtype.value_or(DType::kFloat32)) : 0));
      }
      optimizer.step({.param = reinterpret_cast<std::byte*>(param.data() + from),
                      .states = states,
                      .grad = reinterpret_cast<const std::byte*>(grad.data() + from),
                      .n = to - from},
                     kernels, stream);
    });
    const double seconds = std::chrono::duration<double>(SteadyClock::now() - begin).count();
    best = round == 0 ? seconds : std::min(best, seconds);
  }
  return best * static_cast<double>(elements) / static_cast<double>(n);
}

std::int64_t nanoseconds(double seconds) {
  return static_cast<std::int64_t>(std::ceil(seconds * 1e9));
}

class ResidencyChoice {
 public:
  ResidencyChoice(const ShardGroups& groups, const EngineSettings& settings, const Optimizer& optimizer,
                  Kernels& kernels, Device& device, const Communicator& communicator)
      : groups_(groups),
        settings_(settings),
        optimizer_(optimizer),
        kernels_(kernels),
        device_(device),
        communicator_(communicator) {}

  std::string run() {
    share_facts();
    if (blocks() == 0) return "no state rests in blocks: there is nothing to plan";
    TierSplitProblem problem = this->problem();
    for (;;) {
      const TierSplitPlan plan = plan_tier_split(problem);
      take(plan.chosen);
      const auto [needed, over_budget] = total_bytes();
      const bool fits = needed <= problem.memory_bytes && !over_budget;
      if (fits || plan.chosen.files == problem.blocks) return text(plan, needed);
      // Blocks are not all alike, and a rank has a budget of its own: with these in files it is too much. A few more.
      problem.least_files = std::min(plan.chosen.files + std::max(1, problem.blocks / 64), problem.blocks);
      is_over_budget_ = is_over_budget_ || over_budget;
      if (over_budget) problem.limit = budget_text();
    }
  }

 private:
  [[nodiscard]] std::int64_t blocks() const { return most(&TierFacts::blocks); }

  [[nodiscard]] std::int64_t most(std::int64_t TierFacts::* fact) const {
    return std::ranges::max(facts_, {}, fact).*fact;
  }
  [[nodiscard]] std::int64_t sum(std::int64_t TierFacts::* fact) const {
    return std::accumulate(facts_.begin(), facts_.end(), std::int64_t{0},
                           [fact](std::int64_t total, const TierFacts& one) { return total + one.*fact; });
  }

  void share_facts() {
    TierFacts own;
    std::string trouble;
    try {
      own = measure();
    } catch (const Error& error) {
      trouble = error.what();
    }
    const std::vector<std::string> troubles = gather_texts(trouble, communicator_);
    for (std::size_t rank = 0; rank < troubles.size(); ++rank) {
      if (troubles[rank].empty()) continue;
      throw Error(ErrorCode::kIo, "files could not be measured, so no share of the states can be planned",
                  {.where = "engine.residency",
                   .who = "rank " + std::to_string(rank) + "/" + std::to_string(troubles.size()),
                   .got = troubles[rank],
                   .hint = "set offload_optimizer.ratio, or look at the folders of nvme_path"});
    }
    facts_.resize(troubles.size());
    std::vector<std::int64_t> all(kNumFacts * facts_.size());
    communicator_.all_gather(std::span<const std::int64_t>(reinterpret_cast<const std::int64_t*>(&own), kNumFacts),
                             std::span(all));
    for (std::size_t rank = 0; rank < facts_.size(); ++rank) {
      const std::int64_t* at = all.data() + rank * kNumFacts;
      facts_[rank] = {at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]};
    }
  }

  TierFacts measure() {
    TierFacts facts;
    std::size_t largest = 0;
    std::int64_t elements = 0;
    for (const auto& group : groups_) {
      if (!plans_ratio(*group)) continue;
      const ShardingPlan& plan = group->spec().plan;
      residency_ = plan.residency;
      const auto rows =
          state_table(group->layout(), plan, group->rank(), optimizer_.states(), std::max(1, settings_.micro_steps));
      for (const StateBlock& block : state_blocks(rows, plan.residency, BlockSet::kUpdates)) {
        ++facts.blocks;
        facts.block_bytes += static_cast<std::int64_t>(block.bytes);
        largest = std::max(largest, block.bytes);
        elements = std::max(elements, block.range.size());
      }
    }
    const std::uint64_t limit =
        settings_.memory_limit_bytes > 0 ? settings_.memory_limit_bytes : available_memory_bytes() / 2;
    facts.memory_limit = static_cast<std::int64_t>(std::min<std::uint64_t>(limit, kMost));
    facts.bytes_in_files = static_cast<std::int64_t>(bytes_with_ratio(groups_, settings_, optimizer_, 1.0));
    facts.bytes_in_memory = static_cast<std::int64_t>(bytes_with_ratio(groups_, settings_, optimizer_, 0.0));
    if (facts.blocks == 0) return facts;
    const StorageSettings& storage = settings_.storage;
    require_folder(storage.folders, "/zero_optimization/offload_optimizer");
    const auto queue = open_io_queue(
        storage.folders.front(), {.engine = storage.engine, .depth = storage.queue_depth, .timeout = kTransferTimeout});
    const BlockTimes times = measure_block_times({.folders = storage.folders,
                                                  .stripe_bytes = storage.stripe_bytes,
                                                  .first_folder = static_cast<std::size_t>(communicator_.rank()),
                                                  .access = storage.access,
                                                  .block_bytes = largest,
                                                  .slots = residency_.slots,
                                                  .seconds = 0.05},
                                                 *queue);
    facts.read_ns = nanoseconds(times.read_s);
    facts.write_ns = nanoseconds(times.write_s);
    facts.update_ns = nanoseconds(time_update(optimizer_, kernels_, device_, elements));
    return facts;
  }

  [[nodiscard]] TierSplitProblem problem() const {
    const std::int64_t n = blocks();
    TierSplitProblem problem{.blocks = static_cast<int>(n),
                             .slots = residency_.slots,
                             .update_s = static_cast<double>(most(&TierFacts::update_ns)) * 1e-9,
                             .read_s = static_cast<double>(most(&TierFacts::read_ns)) * 1e-9,
                             .write_s = static_cast<double>(most(&TierFacts::write_ns)) * 1e-9,
                             .memory_bytes = static_cast<std::uint64_t>(
                                 std::ranges::min(facts_, {}, &TierFacts::memory_limit).memory_limit)};
    problem.memory_of.push_back(static_cast<std::uint64_t>(sum(&TierFacts::bytes_in_memory)));
    for (std::int64_t files = 1; files <= n; ++files) {
      const double in_memory =
          static_cast<double>(sum(&TierFacts::block_bytes)) * static_cast<double>(n - files) / static_cast<double>(n);
      problem.memory_of.push_back(static_cast<std::uint64_t>(sum(&TierFacts::bytes_in_files)) +
                                  static_cast<std::uint64_t>(in_memory));
    }
    return problem;
  }

  /// The blocks by number where one group has them all, else their share.
  void take(const TierSplit& split) const {
    const auto all = static_cast<double>(split.in_files.size());
    const double ratio = split.files == static_cast<int>(split.in_files.size()) ? 1.0 : split.files / all;
    const auto planning = std::ranges::count_if(groups_, [](const auto& group) { return plans_ratio(*group); });
    for (const auto& group : groups_) {
      if (!plans_ratio(*group)) continue;
      ResidencyPlan residency = group->spec().plan.residency;
      residency.optimizer_ratio = ratio;
      residency.optimizer_in_files = planning == 1 ? split.in_files : std::vector<bool>{};
      group->set_residency(std::move(residency));
    }
  }

  struct Need {
    std::uint64_t bytes = 0;
    bool over_budget = false;  ///< of host memory, on any rank
  };
  /// Of all ranks, as the groups' plans are now.
  [[nodiscard]] Need total_bytes() const {
    TierBytes own;
    for (const auto& group : groups_)
      own += group->planned_tiers(optimizer_.states(), settings_.micro_steps, settings_.storage.stripe_bytes).total();
    const std::uint64_t budget = settings_.budget.host_bytes;
    const std::array<std::int64_t, 2> told{static_cast<std::int64_t>(own.device + own.host),
                                           budget > 0 && own.host > budget ? 1 : 0};
    std::vector<std::int64_t> all(told.size() * facts_.size());
    communicator_.all_gather(std::span<const std::int64_t>(told), std::span(all));
    Need need;
    for (std::size_t rank = 0; rank < facts_.size(); ++rank) {
      need.bytes += static_cast<std::uint64_t>(all[2 * rank]);
      need.over_budget = need.over_budget || all[2 * rank + 1] != 0;
    }
    return need;
  }

  [[nodiscard]] std::string budget_text() const {
    return "/zeroth/budget/host_bytes, " + format_bytes(settings_.budget.host_bytes) + " a rank";
  }
  [[nodiscard]] std::string text(const TierSplitPlan& plan, std::uint64_t needed) const {
    const std::string limit = is_over_budget_                    ? budget_text()
                              : settings_.memory_limit_bytes > 0 ? "memory_limit_bytes"
                                                                 : "half of the memory that is free";
    return "planned ratio " + std::to_string(plan.chosen.files) + "/" + std::to_string(plan.chosen.in_files.size()) +
           ": " + plan.why + "; memory of all ranks by plan " + format_bytes(needed) + ", limit: " + limit;
  }

  const ShardGroups& groups_;
  const EngineSettings& settings_;
  const Optimizer& optimizer_;
  Kernels& kernels_;
  Device& device_;
  const Communicator& communicator_;
  ResidencyPlan residency_{};
  std::vector<TierFacts> facts_;
  bool is_over_budget_ = false;  ///< with fewer blocks in files
};

}  // namespace

void require_folder(const std::vector<std::string>& folders, std::string_view section) {
  const std::string key = std::string(section) + "/nvme_path";
  ZR_CHECK(!folders.empty(), ErrorCode::kConfig, "states that rest in files have no folder",
           {.where = "engine", .which = key, .expected = "a folder on a local disk, or several separated by ':'"});
  for (const std::string& folder : folders) {
    // The "/" makes a file that is no folder an error.
    const int failure = ::access((folder + "/").c_str(), W_OK | X_OK) == 0 ? 0 : errno;
    ZR_CHECK(failure == 0, ErrorCode::kIo, "a folder for files takes none: " + errno_text(failure),
             {.where = "engine",
              .which = key,
              .expected = "a folder that is there and may be written to, on the host of each rank",
              .got = folder,
              .hint = folder.find('$') != std::string::npos
                          ? "variables are not replaced here: write the path out (~ is)"
                          : "mkdir -p " + folder + ", or name another folder on a local disk"});
  }
}

std::string choose_residency(const ShardGroups& groups, const EngineSettings& settings, const Optimizer& optimizer,
                             Kernels& kernels, Device& device, const Communicator& communicator) {
  const bool any = std::ranges::any_of(groups, [](const auto& group) { return plans_ratio(*group); });
  if (!any) return {};
  return ResidencyChoice(groups, settings, optimizer, kernels, device, communicator).run();
}

}  // namespace zeroth
