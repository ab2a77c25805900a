// The command line of zeroth: one word that says what to do, and its options.
#pragma once

#include "doctor/advice.h"
#include "doctor/judge.h"
#include "hosts/hostfile.h"

#include <zeroth/base/deadline.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

namespace zeroth::doctor {

struct Options {
  int num_ranks = 2;                       ///< on this host; not used with hosts
  std::vector<zeroth::HostEntry> hosts{};  ///< those of --hosts or --hostfile that --include and --exclude leave
  std::string ssh{};                       ///< for zeroth-run; "": its own default
  std::string remote_program{};
  Milliseconds connect_timeout{60'000};
  Milliseconds timeout{120'000};  ///< of one examination
  std::string folder = ".";       ///< "": no disk is looked at
  int disk_mib = 64;
  Thresholds thresholds{};
  std::optional<ModelSize> model{};  ///< --params and what belongs to it
  double compute_s = 0;
  std::uint64_t memory_bytes = 0;  ///< for all ranks of a host; 0: what is available there
  bool json = false;
  bool report = false;                   ///< for ourselves: a rank that hands its report to the head, unjudged
  std::vector<std::string> for_ranks{};  ///< the arguments that ranks must get as well
};

struct CommandLine {
  std::optional<Options> options{};
  std::string text{};  ///< to print instead
};

/// Reads the arguments after the program's own name. Throws Error: kUsage with one line that says what is wrong, and
/// what reading a hostfile throws.
[[nodiscard]] CommandLine parse_command_line(std::span<const char* const> arguments);

}  // namespace zeroth::doctor
