// Several "hosts" on this one: a program in place of ssh that runs its command as sshd does, through a shell,
// in another directory and with an environment of its own. Some names of hosts misbehave.
#pragma once

#include "process/launcher/job.h"
#include "process/launcher/scratch.h"

#include <string>
#include <vector>

namespace zeroth::test {

class FakeHosts {
 public:
  FakeHosts();

  /// Starts zeroth-run with these options, on hosts that answer as their names say:
  ///   refused   says so like ssh, 255      silent   never answers          banner   greets before the agent
  ///   speaks garbage   writes without end         other    has another version    liar     announces a frame
  ///   of 4 GiB child...  keeps a process between     chatty   writes 100,000 lines to standard error
  ///   any other name: a host that works
  [[nodiscard]] std::vector<std::string> arguments(const std::vector<std::string>& options,
                                                   const std::vector<std::string>& program) const;
  /// With rank_probe as the program.
  [[nodiscard]] std::vector<std::string> probe(const std::vector<std::string>& options,
                                               const std::vector<std::string>& arguments) const;
  /// Agents may end a moment after the head, as they do on other hosts.
  [[nodiscard]] JobSetup setup() const {
    return {.environment = {{"ZEROTH_SSH", scratch.path("ssh")}}, .outlived = kEndDeadline};
  }

  Scratch scratch;
};

/// Parent of a process.
[[nodiscard]] pid_t parent_of(pid_t pid);

}  // namespace zeroth::test
