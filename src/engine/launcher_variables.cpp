#include "engine/launcher_variables.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <charconv>
#include <cstdint>
#include <vector>

namespace zeroth::detail {
namespace {

constexpr std::string_view kProcId = "SLURM_PROCID";
constexpr std::string_view kNumTasks = "SLURM_NTASKS";
constexpr std::string_view kStep = "SLURM_STEP_ID";
constexpr std::string_view kTasksOfStep = "SLURM_STEP_NUM_TASKS";
/// Above it are batch scripts, the shell of salloc and what else is no step of srun (slurm.h:
/// SLURM_MAX_NORMAL_STEP_ID).
constexpr std::int64_t kLastStep = 0xfffffff0;

std::optional<std::int64_t> number_in(const VariableLookup& lookup, std::string_view name) {
  const std::optional<std::string> text = lookup(name);
  std::int64_t value = 0;
  if (!text) return std::nullopt;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  return error == std::errc{} && end == text->data() + text->size() ? std::optional(value) : std::nullopt;
}

/// srun gives every step a number, and no process of another kind a small one.
bool in_step(const VariableLookup& lookup) {
  return lookup(kStep) && number_in(lookup, kStep).value_or(0) <= kLastStep;
}

/// The shell of salloc, where it is a step: one task, and the variables of the allocation.
bool is_shell_of_allocation(const VariableLookup& lookup) {
  return number_in(lookup, kTasksOfStep) == 1 && number_in(lookup, kNumTasks).value_or(1) != 1;
}

/// Who sets variables that no rank here reads, or not alone.
struct Family {
  std::string_view size;
  std::string_view rank;
  std::string_view why;
};
constexpr Family kFamilies[] = {
    {"PMI_SIZE", "PMI_RANK", "a launcher of PMI (MPICH, Intel MPI) is none that Zeroth knows"},
    {"MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "the launcher of MVAPICH is none that Zeroth knows"},
    {"JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun is no launcher that Zeroth knows"},
    {"PBS_NP", "PBS_TASKNUM", "PBS runs the script of a job once"},
    {"PBS_NUM_NODES", "PBS_NODENUM", "PBS runs the script of a job once"},
    {"LSB_DJOB_NUMPROC", "LSF_PM_TASKID", "LSF runs the command of a job once"},
    {"PET_NNODES", "PET_NODE_RANK", "only torchrun reads them, which has not started this process"},
};

std::string with_value(const VariableLookup& lookup, std::string_view name) {
  constexpr std::size_t kLongest = 64;
  std::string value = lookup(name).value_or("").substr(0, kLongest);
  for (char& c : value) {
    if (static_cast<unsigned char>(c) < 0x20) c = '?';  // a line of the log, whatever the variable holds
  }
  return std::string(name) + "=" + value;
}

/// "A=1, B=4 not taken: why"
std::string line_for(const VariableLookup& lookup, const std::vector<std::string_view>& names, std::string_view why) {
  std::vector<std::string> found;
  for (const std::string_view name : names) {
    if (!name.empty() && lookup(name)) found.push_back(with_value(lookup, name));
  }
  return join(found, ", ") + (found.size() == 1 ? " is not taken: " : " are not taken: ") + std::string(why);
}

std::string finish(const std::string& line, const std::string& how) {
  return line + ". This is a world of one rank; hint: " + how;
}

std::string start_with(std::string_view first, std::int64_t ranks) {
  return "start " + std::to_string(ranks) + " ranks with " + std::string(first) + "zeroth-run -n " +
         std::to_string(ranks) + " PROGRAM";
}

std::string of_slurm(const VariableLookup& lookup) {
  const std::int64_t tasks = number_in(lookup, kNumTasks).value_or(1);
  const std::int64_t nodes = number_in(lookup, "SLURM_JOB_NUM_NODES").value_or(1);
  if (tasks <= 1 && nodes <= 1) return "";
  const bool is_shell = in_step(lookup) && is_shell_of_allocation(lookup);
  const std::string why =
      is_shell ? "the step has 1 task, a shell, and the others describe the allocation"
      : lookup(kProcId)
          ? "no " + std::string(kStep) + " of srun, so this is the batch script of the job, which runs once"
          : "no " + std::string(kStep) + " and no " + std::string(kProcId) + ", so srun has not started this process";
  const std::vector<std::string_view> names{kProcId, tasks > 1 ? kNumTasks : std::string_view("SLURM_JOB_NUM_NODES"),
                                            is_shell ? kTasksOfStep : std::string_view()};
  return finish(line_for(lookup, names, why),
                tasks > 1 ? start_with("srun PROGRAM, or ", tasks) : std::string("start the ranks with srun PROGRAM"));
}

std::string of_kubernetes(const VariableLookup& lookup) {
  constexpr std::string_view kIndex = "JOB_COMPLETION_INDEX";
  if (!lookup(kIndex)) return "";
  return finish(line_for(lookup, {kIndex}, "Kubernetes does not say how many pods there are"),
                "for one job in all pods start zeroth-run --nnodes PODS --node-rank $JOB_COMPLETION_INDEX in each");
}

}  // namespace

bool is_rank_of_srun(const VariableLookup& lookup) {
  if (!lookup(kProcId) && !lookup(kNumTasks)) return false;
  if (!in_step(lookup)) {
    // Rank 0 is what the batch script of a job looks like. Another rank has lost a variable on the way.
    ZR_CHECK(number_in(lookup, kProcId).value_or(0) <= 0, ErrorCode::kEnvironment,
             "a rank of Slurm without a step of srun",
             {.where = "world",
              .which = std::string(kStep),
              .expected = "the number of a step, which srun sets together with " + std::string(kProcId),
              .got = with_value(lookup, kProcId) + ", " + (lookup(kStep) ? with_value(lookup, kStep) : "no step"),
              .hint = "pass all variables of Slurm on to the program (into a container, too), or unset them"});
    return false;
  }
  if (is_shell_of_allocation(lookup)) return false;
  const auto of_step = lookup(kTasksOfStep);
  const auto tasks = lookup(kNumTasks);
  ZR_CHECK(!of_step || !tasks || *of_step == *tasks, ErrorCode::kEnvironment,
           "the step has another number of ranks than the variables say",
           {.where = "world",
            .which = std::string(kNumTasks),
            .expected = *of_step + ", as " + std::string(kTasksOfStep) + " says",
            .got = *tasks,
            .hint = "start srun without --preserve-env"});
  return true;
}

std::string variables_not_taken(const VariableLookup& lookup) {
  if (std::string line = of_slurm(lookup); !line.empty()) return line;
  for (const Family& family : kFamilies) {
    const std::int64_t ranks = number_in(lookup, family.size).value_or(1);
    if (ranks <= 1) continue;
    return finish(line_for(lookup, {family.rank, family.size}, family.why),
                  start_with("Open MPI's mpirun, or ", ranks));
  }
  return of_kubernetes(lookup);
}

}  // namespace zeroth::detail
