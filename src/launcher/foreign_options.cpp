#include "launcher/foreign_options.h"

#include "hosts/option_values.h"
#include "launcher/environment.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <optional>
#include <system_error>

namespace zeroth::launcher {
namespace {

struct Foreign {
  std::string_view name;  ///< with '-' for '_'
  std::string_view hint;
};

constexpr std::string_view kMeeting =
    "write --rdzv HOST:PORT (with --nnodes and --node-rank, several nodes); one host needs none";
constexpr std::string_view kNoElastic = "leave it out: the number of ranks is fixed";
constexpr std::string_view kNotNeeded = "leave it out: zeroth-run does without";

constexpr Foreign kForeign[] = {
    // torchrun
    {"--rdzv-endpoint", kMeeting},
    {"--master-addr", kMeeting},
    {"--master-port", kMeeting},
    {"--local-addr", kMeeting},
    {"--rdzv-backend", "leave it out: --rdzv HOST:PORT is all that nodes need"},
    {"--rdzv-id", "leave it out: zeroth-run gives each job a name of its own"},
    {"--rdzv-conf", "leave it out: --connect-timeout SECONDS is how long nodes wait for each other"},
    {"--standalone", "leave it out: ranks of one host need no meeting point"},
    {"--redirects", "write --log-dir DIR, which holds the output of every rank"},
    {"-r", "write --log-dir DIR, which holds the output of every rank"},
    {"-t", "write --log-dir DIR, which holds the output of every rank"},
    {"--local-ranks-filter", kNotNeeded},
    {"--monitor-interval", kNotNeeded},
    {"--start-method", kNotNeeded},
    {"--role", kNotNeeded},
    {"--event-log-handler", "write --json FILE for status lines"},
    {"--logs-specs", "write --log-dir DIR, which holds the output of every rank"},
    {"--numa-binding", "write --bind-cores on"},
    {"--no-python", "leave it out: only a program that ends in .py is run by Python"},
    {"--run-path", "leave it out, and give the path of the script"},
    // DeepSpeed
    {"-H", "write --hostfile FILE"},
    {"-i", "write --include NODES"},
    {"-e", "write --exclude NODES"},
    {"--num-nodes",
     "write --include or --exclude to choose hosts of the hostfile, or --nnodes where each node is "
     "started by itself"},
    {"--min-elastic-nodes", kNoElastic},
    {"--max-elastic-nodes", kNoElastic},
    {"--elastic-training", kNoElastic},
    {"--launcher-args", "leave it out: --launcher NAME --dry-run prints a command that you can add to"},
    {"--force-multi", kNotNeeded},
    {"--no-local-rank", "leave it out: a rank finds its place in variables only"},
    {"--no-ssh", "write --nnodes N --node-rank K --rdzv HOST:PORT on each node"},
    {"--no-ssh-check", kNotNeeded},
    {"--save-pid", "leave it out: --json FILE tells the pids"},
    {"--enable-each-rank-log", "write --log-dir DIR"},
    {"--bind-cores-to-rank", "write --bind-cores on"},
    {"--bind-core-list", "write --bind-cores on, under taskset for some of the cores"},
    {"--ssh-port", "name the port in the configuration of ssh"},
    {"--venv-script", "leave it out: VIRTUAL_ENV and PATH travel to the hosts"},
    {"--autotuning", "leave it out: there is no tuning of configurations"},
    // accelerate
    {"--num-processes", "write -n N"},
    {"--num-machines", "write --nnodes N"},
    {"--machine-rank", "write --node-rank K"},
    {"--main-process-ip", kMeeting},
    {"--main-process-port", kMeeting},
    {"--multi-gpu", kNotNeeded},
    // mpirun, srun
    {"--np", "write -n N"},
    {"--ntasks", "write -n N"},
    {"--nodes", "write --nnodes N, or --hosts LIST"},
    {"--machinefile", "write --hostfile FILE"},
};

}  // namespace

std::string with_hyphens(std::string_view name) {
  std::string text(name);
  std::ranges::replace(text, '_', '-');
  return text;
}

std::string hint_for_foreign_option(std::string_view name) {
  const std::string wanted = with_hyphens(name);
  const auto* const found = std::ranges::find(kForeign, wanted, &Foreign::name);
  return found == std::end(kForeign) ? "" : std::string(found->hint);
}

int count_gpus(const std::vector<std::string>& environment, const std::string& folder) {
  if (const std::optional<std::string> visible = variable_in(environment, "CUDA_VISIBLE_DEVICES")) {
    if (visible->empty() || visible->front() == '-') return 0;
    return 1 + static_cast<int>(std::ranges::count(*visible, ','));
  }
  constexpr std::string_view kDevice = "nvidia";
  int count = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool numbered = name.size() > kDevice.size() && name.starts_with(kDevice) &&
                          std::ranges::all_of(name.substr(kDevice.size()), [](char c) { return c >= '0' && c <= '9'; });
    count += numbered ? 1 : 0;
  }
  return count;
}

RanksOfWord ranks_of_word(const std::string& word, const HostParts& host) {
  const bool by_gpu = word == "gpu" || (word == "auto" && host.gpus > 0);
  if (!by_gpu && word != "cpu" && word != "auto") {
    refuse_usage("not a number of ranks for each host", {.which = kRanksPerNode,
                                                         .expected = "1 to 4096, or gpu, cpu or auto",
                                                         .got = fmt::format("'{}'", word),
                                                         .hint = "write -n N"});
  }
  if (by_gpu && host.gpus == 0) {
    refuse_usage("one rank for each GPU, and there is none",
                 {.which = kRanksPerNode,
                  .expected = "devices in CUDA_VISIBLE_DEVICES, or files /dev/nvidia<N>",
                  .got = "'gpu' on a host without one",
                  .hint = "write -n N"});
  }
  const int ranks = by_gpu ? host.gpus : host.cores;
  return {.ranks = ranks,
          .note = fmt::format("{} {}: {} rank{}, one for each {}", kRanksPerNode, word, ranks, ranks == 1 ? "" : "s",
                              by_gpu ? "GPU" : "core")};
}

}  // namespace zeroth::launcher
