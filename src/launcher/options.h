// The command line of zeroth-run.
#pragma once

#include "hosts/option_values.h"
#include "launcher/host_task.h"

#include <zeroth/base/deadline.h>

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::launcher {

inline constexpr int kMaxRanks = 4096;

struct Options {
  int num_ranks = 0;         ///< 0: every slot of the hosts
  int ranks_per_host = 0;    ///< --nproc-per-node, --num-gpus with hosts: so many slots of each; 0: all
  std::string ranks_note{};  ///< how a word of --nproc-per-node has become num_ranks; "" = it was a number
  bool prefix = true;        ///< "[rank] " before every line
  bool merge = true;  ///< a line that several ranks write within 100 ms is written once; needs prefix and two ranks
  bool forward_stdin = false;   ///< rank 0 reads our standard input; all others read /dev/null
  bool quiet = false;           ///< no informational lines (errors stay)
  std::string log_directory{};  ///< also write each rank's output there; "" = no
  std::optional<Milliseconds> timeout{};
  Milliseconds grace{2000};            ///< from a forwarded SIGINT or SIGTERM to SIGKILL
  Milliseconds preempt_grace{30'000};  ///< from SIGTERM to SIGKILL where a rank makes room
  std::string hostfile{};              ///< start ranks on the hosts of this file; "" = no
  std::string hosts{};                 ///< or on these, "a:2,b"; "" = no
  std::string include{};               ///< DeepSpeed's filters over either
  std::string exclude{};
  std::string ssh{};  ///< a program that is called like ssh
  std::string remote_program = "zeroth-run";
  int num_nodes = 0;                     ///< --nnodes: every node is started by itself; 0 = no
  int node = 0;                          ///< --node-rank
  Endpoint rendezvous{};                 ///< --rdzv: where node 0 listens
  std::string secret_file{};             ///< --rdzv-secret-file; "" = ZEROTH_RDZV_SECRET
  Milliseconds connect_timeout{60'000};  ///< with nodes 300 s
  Milliseconds lost_after{10'000};       ///< a host that is silent for so long is lost
  int num_sites = 0;                     ///< --sites: jobs of their own, with a hub between them; 0 = no
  int site = -1;                         ///< --site: this process is that one; -1 = all of them, or the hub
  Endpoint site_hub{};                   ///< --hub: this process is the hub alone, and listens there
  Endpoint sites_at{};                   ///< --sites-at: where the hub of this site is; port 0 = as the variables say
  std::string launcher{};                ///< "mpirun" or "srun" does it; "" = we do
  bool dry_run = false;                  ///< only print who would run where
  BindCores bind = BindCores::kAuto;
  int max_restarts = 0;     ///< starts of the whole job, or of each site, after the first
  std::string json_file{};  ///< status lines; "" = none
  std::vector<std::pair<std::string, std::string>> environment{};  ///< --env, in order; names are valid
  std::vector<std::string> command{};  ///< program and its arguments, at least one; or kModule, module, arguments

  /// "1:" in site 1, before numbers of ranks in output.
  [[nodiscard]] std::string site_mark() const { return site < 0 ? "" : std::to_string(site) + ":"; }
  [[nodiscard]] bool several_hosts() const { return !hostfile.empty() || !hosts.empty(); }
};

/// Either a job to run, or a text (help, version) to print on standard output.
struct CommandLine {
  std::optional<Options> options{};
  std::string text{};
  bool is_agent = false;  ///< --agent: a head speaks through standard input
};

/// Reads the arguments after the program's own name. Throws Error(kUsage) with one line that says what is
/// wrong.
[[nodiscard]] CommandLine parse_command_line(std::span<const char* const> arguments);

}  // namespace zeroth::launcher
