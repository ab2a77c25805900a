// The command line of `zeroth schedule`.
#pragma once

#include <zeroth/program/passes.h>
#include <zeroth/program/schedules.h>
#include <zeroth/program/simulate.h>

#include <optional>
#include <span>
#include <string>

namespace zeroth::doctor {

struct ScheduleCommand {
  std::string name{};     ///< of the schedule
  std::string program{};  ///< else a file with the text of a program
  ScheduleOptions schedule{.ranks = 4, .micro_batches = 8};
  LowerOptions passes{};
  ChunkTimes times{};
  double message = 0;  ///< what one takes, in the unit of the times
  bool text_only = false;
  std::string svg{};  ///< files to write; "": none
  std::string png{};
  std::string trace{};
};

struct ScheduleCommandLine {
  std::optional<ScheduleCommand> command{};
  std::string text{};  ///< to print instead
};

/// Reads the arguments after the word "schedule". Throws Error(kUsage) with one line that says what is wrong.
[[nodiscard]] ScheduleCommandLine parse_schedule_command(std::span<const char* const> arguments);

}  // namespace zeroth::doctor
