#include "engine/startup_check.h"

#include "engine/box_tiles.h"
#include "engine/odd_rank.h"
#include "engine/texts.h"

#include <zeroth/base/text.h>
#include <zeroth/engine/config.h>

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <sstream>

namespace zeroth {
namespace {

constexpr std::string_view kConfigurationLine = "configuration ";
constexpr std::string_view kVersionLine = "version ";
constexpr std::string_view kLibrariesLine = "libraries ";

std::string describe(const ShardingPlan& plan) {
  std::ostringstream text;
  text << name_of(plan.parameter) << " " << name_of(plan.gradient) << " " << name_of(plan.optimizer) << " "
       << name_of(plan.policy) << " reshard " << name_of(plan.reshard) << " ring_slots " << plan.ring_slots
       << (plan.narrow_buckets ? "" : " wide buckets") << " parameter_degree " << plan.parameter_degree
       << " optimizer_degree " << plan.optimizer_degree;
  // How parameters come is the same on all ranks; where the optimizer's states rest is each rank's own affair.
  if (plan.residency.in_blocks(plan.residency.parameter)) text << " parameters in blocks";
  if (plan.gradient_degree != 0) text << " gradient_degree " << plan.gradient_degree;
  if (plan.codes.any()) {
    text << " codes of " << plan.codes.parameter_bits << " and " << plan.codes.gradient_bits << " bits, blocks of "
         << plan.codes.block << ", nodes of " << plan.codes.node_degree << (plan.codes.feedback ? ", feedback" : "");
  }
  if (plan.residency.plans_ratio) text << " plans its ratio of states in files";
  return text.str();
}

std::string describe_params(const ModelLayout& model) {
  std::string text;
  for (std::size_t param = 0; param < model.params.size(); ++param) {
    text += "parameter " + model.describe_param(static_cast<int>(param)) + "\n";
  }
  return text;
}

/// One line for each thing that all ranks must have alike, in a form that people can compare.
std::string describe(const ShardGroups& groups, const EngineSettings& settings) {
  std::ostringstream text;
  text << kVersionLine << settings.version << "\n";
  text << kLibrariesLine << (settings.libraries.empty() ? "none" : settings.libraries) << "\n";
  text << kConfigurationLine << settings.configuration << "\n";
  if (!settings.mesh.axes.empty()) text << "mesh " << describe(settings.mesh) << "\n";
  for (const auto& group : groups) {
    text << "plan " << describe(group->spec().plan);
    if (groups.size() > 1) text << " of " << group->spec().name << " over " << join(group->spec().plan.axes, " ");
    text << "\n";
  }
  text << "micro_steps " << settings.micro_steps << "\n";
  text << "gradient_clipping " << hex_float(settings.gradient_clipping) << "\n";
  const UpdateSettings& update = settings.update;
  if (update != UpdateSettings()) {
    text << "update" << (update.inside_backward ? " inside backward" : "")
         << (update.clip_by == ClipBy::kPreviousNorm ? " clipped by the previous norm" : "")
         << (update.rounds_sums ? " of rounded sums" : "")
         << (update.delayed_after ? " delayed after " + std::to_string(*update.delayed_after) : "") << "\n";
  }
  text << "optimizer " << settings.optimizer.type << (settings.optimizer.momentum ? " with momentum" : "")
       << " freeze_step " << settings.optimizer.freeze_step << " or at "
       << hex_float(settings.optimizer.freeze_threshold) << " compression "
       << settings.optimizer.compression.compression << " " << hex_float(settings.optimizer.compression.ratio) << " "
       << settings.optimizer.compression.rank << " " << settings.optimizer.compression.every << "\n";
  text << "max_nonfinite_steps " << settings.max_nonfinite_steps << "\n";
  const LossScaling& scaling = settings.loss_scaling;
  text << "loss_scaling " << scaling.enabled << " static " << hex_float(scaling.static_scale) << " power "
       << scaling.initial_power << " window " << scaling.window << " hysteresis " << scaling.hysteresis
       << (scaling.consecutive_hysteresis ? " consecutive" : "") << " at least " << hex_float(scaling.min_scale)
       << "\n";
  text << "uneven " << static_cast<int>(settings.uneven) << "\n";
  text << "stragglers " << settings.stragglers << "\n";
  text << "compare_replicas " << settings.compare_replicas << "\n";
  text << "threads " << settings.threads << "\n";
  const TierBudget& budget = settings.budget;
  text << "budget " << budget.device_bytes << " " << budget.host_bytes << " " << budget.file_bytes << "\n";
  text << "schedule " << name_of(settings.schedule.kind) << " " << settings.schedule.warmup_steps << " "
       << settings.schedule.total_steps << " from " << hex_float(settings.schedule.warmup_start)
       << (settings.schedule.logarithmic ? " along a logarithm" : "") << " to " << hex_float(settings.schedule.floor)
       << "\n";
  for (std::size_t group = 0; group < settings.groups.size(); ++group) {
    const GroupHyper& hyper = settings.groups[group];
    text << "group " << group << " lr " << hex_float(hyper.lr) << " betas " << hex_float(hyper.beta1) << " "
         << hex_float(hyper.beta2) << " eps " << hex_float(hyper.eps) << " weight_decay "
         << hex_float(hyper.weight_decay) << " momentum " << hex_float(hyper.momentum) << " dampening "
         << hex_float(hyper.dampening) << (hyper.nesterov ? " nesterov" : "") << "\n";
  }
  for (const auto& group : groups) {
    if (group->has_all_ranks()) text << describe_params(group->layout());
  }
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// Blocking; on all ranks, which know it. `text`: this rank's.
[[noreturn]] void throw_difference(const std::string& text, int usual, int odd, const Communicator& communicator) {
  const auto world = static_cast<std::size_t>(communicator.size());
  const std::vector<std::string> texts = gather_texts(text, communicator);
  const std::vector<std::string> expected = lines_of(texts[static_cast<std::size_t>(usual)]);
  const std::vector<std::string> got = lines_of(texts[static_cast<std::size_t>(odd)]);
  const std::string who = "rank " + std::to_string(odd) + "/" + std::to_string(world);
  const std::string usual_rank = "rank " + std::to_string(usual);
  const std::string odd_rank = "rank " + std::to_string(odd);
  for (std::size_t line = 0; line < std::max(expected.size(), got.size()); ++line) {
    const std::string ours = line < expected.size() ? expected[line] : "nothing more";
    const std::string theirs = line < got.size() ? got[line] : "nothing more";
    if (ours == theirs) continue;
    if (ours.starts_with(kVersionLine) && theirs.starts_with(kVersionLine)) {
      throw Error(ErrorCode::kMismatch, "ranks run different versions of Zeroth",
                  {.where = "engine",
                   .who = who,
                   .expected = ours + " (" + usual_rank + ")",
                   .got = theirs + " (" + odd_rank + ")",
                   .hint = "install the same version on every host; zeroth doctor --hosts names the odd one"});
    }
    if (ours.starts_with(kLibrariesLine) && theirs.starts_with(kLibrariesLine)) {
      throw Error(ErrorCode::kMismatch, "ranks compute with different versions of a library",
                  {.where = "engine",
                   .who = who,
                   .expected = ours.substr(kLibrariesLine.size()) + " (" + usual_rank + ")",
                   .got = theirs.substr(kLibrariesLine.size()) + " (" + odd_rank + ")",
                   .hint = "install the same versions on every host, with a Zeroth that was built against them"});
    }
    if (ours.starts_with(kConfigurationLine) && theirs.starts_with(kConfigurationLine)) {
      throw Error(ErrorCode::kMismatch, "ranks do not have the same configuration",
                  {.where = "engine",
                   .who = who,
                   .which = join(shared_differences(ours.substr(kConfigurationLine.size()),
                                                    theirs.substr(kConfigurationLine.size())),
                                 "; "),
                   .expected = "the values of " + usual_rank + " (\"here\")",
                   .got = "those of " + odd_rank + " (\"there\")",
                   .hint = "start every rank with the same configuration file and arguments"});
    }
    throw Error(ErrorCode::kMismatch, "ranks do not train the same thing",
                {.where = "engine",
                 .who = who,
                 .expected = ours + " (" + usual_rank + ")",
                 .got = theirs + " (" + odd_rank + ")",
                 .hint = "build the same model from the same configuration on every rank"});
  }
  throw Error(ErrorCode::kInternal, "ranks' digests differ but their descriptions do not", {.where = "engine"});
}

std::int64_t digest_of(const std::string& text) {
  return static_cast<std::int64_t>(digest64(text) >> 1U);
}

}  // namespace

void require_same_structure(const ShardGroups& groups, const EngineSettings& settings, const MeshPlace& place,
                            const Communicator& communicator) {
  const auto world = static_cast<std::size_t>(communicator.size());
  const std::string own = describe(groups, settings);
  const std::int64_t digest = digest_of(own);
  std::vector<std::int64_t> digests(world);
  communicator.all_gather(std::span(&digest, 1), std::span(digests));
  if (const OddRank found = find_odd_rank(digests); found.odd >= 0)
    throw_difference(own, found.usual, found.odd, communicator);

  require_tiles(groups, place, communicator);  // before parts are compared: another mesh is no other model
  for (const auto& group : groups) {           // the same on all ranks, now
    if (group->has_all_ranks()) continue;
    const std::string params = describe_params(group->layout());
    const std::int64_t digest_of_params = digest_of(params);
    communicator.all_gather(std::span(&digest_of_params, 1), std::span(digests));
    std::vector<int> colors = group->colors();
    std::ranges::sort(colors);
    colors.erase(std::unique(colors.begin(), colors.end()), colors.end());
    for (const int color : colors) {
      std::vector<int> members;
      std::vector<std::int64_t> theirs;
      for (std::size_t rank = 0; rank < world; ++rank) {
        if (group->colors()[rank] != color) continue;
        members.push_back(static_cast<int>(rank));
        theirs.push_back(digests[rank]);
      }
      if (const OddRank found = find_odd_rank(theirs); found.odd >= 0) {
        throw_difference(params, members[static_cast<std::size_t>(found.usual)],
                         members[static_cast<std::size_t>(found.odd)], communicator);
      }
    }
  }
}

void require_plan_fits(const ShardGroups& groups, const EngineSettings& settings,
                       std::span<const StateDeclaration> states, const Communicator& communicator) {
  struct Choice {
    std::string name;
    std::function<ShardingPlan(const ShardingPlan& asked)> plan;
  };
  std::vector<Choice> choices{{settings.plan.name, [](const ShardingPlan& asked) { return asked; }}};
  for (const ShardingPlan& stage : all_zero_plans(settings.plan.axes)) {
    std::vector<Reshard> reshards{settings.plan.reshard};
    if (stage.gathers_parameters() && stage.reshard != settings.plan.reshard) reshards.push_back(stage.reshard);
    for (const Reshard reshard : reshards) {
      choices.push_back({stage.name + (reshards.size() > 1 ? " with reshard " + std::string(name_of(reshard)) : ""),
                         [stage, reshard](const ShardingPlan& asked) {
                           ShardingPlan plan = stage;
                           plan.policy = asked.policy;
                           plan.ring_slots = asked.ring_slots;
                           plan.prefetch_units = asked.prefetch_units;
                           plan.narrow_buckets = asked.narrow_buckets;
                           plan.reshard = reshard;
                           plan.residency = asked.residency;
                           plan.holds_gradients = asked.holds_gradients;
                           plan.codes = asked.codes;
                           if (!plan.gathers_parameters()) plan.codes.parameter_bits = 0;
                           return plan;
                         }});
    }
  }
  if (settings.plan.residency.optimizer != Residency::kFiles) {
    choices.push_back(
        {settings.plan.name + " with optimizer states in files (offload_optimizer)", [](const ShardingPlan& asked) {
           ShardingPlan plan = asked;
           plan.residency.optimizer = Residency::kFiles;
           return plan;
         }});
  }
  if (settings.plan.residency.parameter != Residency::kFiles) {
    choices.push_back({settings.plan.name + " with optimizer states and parameters in files (offload_param)",
                       [](const ShardingPlan& asked) {
                         ShardingPlan plan = asked;
                         plan.residency.optimizer = Residency::kFiles;
                         plan.residency.parameter = Residency::kFiles;
                         return plan;
                       }});
  }
  // First the limit, then what this rank needs under each choice.
  std::vector<std::int64_t> own{static_cast<std::int64_t>(
      std::min<std::uint64_t>(settings.memory_limit_bytes > 0 ? settings.memory_limit_bytes : available_memory_bytes(),
                              std::uint64_t{std::numeric_limits<std::int64_t>::max()}))};
  for (const Choice& choice : choices) {
    std::uint64_t bytes = settings.activation_staging();
    for (const auto& group : groups) {
      bytes += group->planned_memory(choice.plan(group->spec().plan), states, settings.micro_steps).total();
    }
    own.push_back(static_cast<std::int64_t>(bytes));
  }
  const auto world = static_cast<std::size_t>(communicator.size());
  std::vector<std::int64_t> all(own.size() * world);
  communicator.all_gather(std::span<const std::int64_t>(own), std::span(all));
  std::size_t least = 0;  // rank
  std::vector<std::uint64_t> needs(choices.size());
  for (std::size_t rank = 0; rank < world; ++rank) {
    const std::int64_t* theirs = all.data() + rank * own.size();
    if (theirs[0] < all[least * own.size()]) least = rank;
    for (std::size_t choice = 0; choice < needs.size(); ++choice)
      needs[choice] += static_cast<std::uint64_t>(theirs[1 + choice]);
  }
  const auto limit = static_cast<std::uint64_t>(all[least * own.size()]);
  if (needs[0] <= limit) return;

  std::string table;
  std::string fits;
  for (std::size_t choice = 1; choice < choices.size(); ++choice) {
    table += (table.empty() ? "" : ", ") + choices[choice].name + " " + format_bytes(needs[choice]);
    if (needs[choice] <= limit && fits.empty()) fits = choices[choice].name;
  }
  throw Error(ErrorCode::kOutOfMemory, "the plan does not fit the memory that is there",
              {.where = "engine.plan",
               .who = "rank " + std::to_string(least) + "/" + std::to_string(world),
               .which = settings.plan.name + " on " + std::to_string(world) + " ranks",
               .expected = "at most " + format_bytes(limit) + " for all ranks, activations not counted",
               .got = format_bytes(needs[0]) + " [" + table + "]",
               .hint = fits.empty() ? "no ZeRO stage fits: use more hosts or a smaller model"
                                    : "smallest change that fits: " + fits});
}

void require_files_fit(const ShardGroups& groups, const EngineSettings& settings,
                       std::span<const StateDeclaration> states, const Communicator& communicator) {
  const ResidencyPlan& residency = settings.plan.residency;
  if (residency.optimizer != Residency::kFiles && residency.parameter != Residency::kFiles) return;  // on all ranks
  std::vector<std::string> folders = settings.storage.folders;
  folders.insert(folders.end(), settings.storage.parameter_folders.begin(), settings.storage.parameter_folders.end());
  std::map<dev_t, std::uint64_t> room;  // by file system
  bool known = !folders.empty();        // without any, and for one that is not there, there are errors of their own
  for (const std::string& folder : folders) {
    struct stat about{};
    struct statvfs facts{};
    known = known && ::stat(folder.c_str(), &about) == 0 && ::statvfs(folder.c_str(), &facts) == 0;
    if (known) room[about.st_dev] = std::uint64_t{facts.f_bavail} * facts.f_frsize;
  }
  std::uint64_t free = 0;
  std::string disks;
  for (const auto& [device, bytes] : room) {
    free += bytes;
    disks += std::to_string(device) + " ";
  }
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  if (!known) free = kMost;
  std::uint64_t need = 0;
  for (const auto& group : groups)
    need += group->planned_files(states, settings.micro_steps, settings.storage.stripe_bytes);
  enum : std::size_t { kNeed, kFree, kDisks, kWords };
  const std::array<std::int64_t, kWords> own{static_cast<std::int64_t>(need),
                                             static_cast<std::int64_t>(std::min(free, kMost)),
                                             static_cast<std::int64_t>(digest64(disks) >> 1U)};
  std::vector<std::int64_t> all(own.size() * static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(std::span<const std::int64_t>(own), std::span(all));
  const auto word = [&all](int rank, std::size_t which) {
    return all[kWords * static_cast<std::size_t>(rank) + which];
  };
  int first = 0;
  for (const int ranks : communicator.backend().node_sizes()) {
    for (int rank = first; rank < first + ranks; ++rank) {
      std::int64_t needed = 0;
      int sharing = 0;
      for (int other = first; other < first + ranks; ++other) {
        if (word(other, kDisks) != word(rank, kDisks)) continue;
        needed += word(other, kNeed);
        ++sharing;
      }
      if (needed <= word(rank, kFree)) continue;
      throw Error(ErrorCode::kIo, "the folders of files have no room for the states of all ranks that share them",
                  {.where = "engine.plan",
                   .who = "rank " + std::to_string(rank) + "/" + std::to_string(communicator.size()),
                   .which = broadcast_text(zeroth::join(folders, ":"), rank, communicator),
                   .expected = format_bytes(static_cast<std::uint64_t>(needed)) + " free, for " +
                               std::to_string(sharing) + (sharing == 1 ? " rank" : " ranks of this host"),
                   .got = format_bytes(static_cast<std::uint64_t>(word(rank, kFree))) + " free",
                   .hint = "name a folder on a larger disk, or several separated by ':'; or lower "
                           "offload_optimizer.ratio"});
    }
    first += ranks;
  }
}

}  // namespace zeroth
