// zeroth: looks at hosts and links before a job is started (`zeroth doctor`), at checkpoints (`zeroth ckpt`), and at
// what the ranks of a pipeline will do (`zeroth schedule`).
#include "doctor/facts.h"
#include "doctor/head.h"
#include "doctor/options.h"
#include "doctor/participant.h"
#include "doctor/place.h"
#include "doctor/python_command.h"
#include "doctor/schedule_command.h"
#include "doctor/survey.h"
#include "doctor/table.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/surroundings.h>

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::doctor {
namespace {

constexpr int kFound = 1;

int print(Report& report, const Options& options) {
  if (options.report) {
    fmt::print("{}\n", to_text(report));
    return 0;
  }
  conclude(report, options);
  fmt::print("{}", options.json ? to_text(report) + "\n" : table_of(report, options.thresholds));
  return report.well() ? 0 : kFound;
}

/// So long the ranks may take to come: a part of all the time that there is.
Milliseconds meeting_of(const Options& options) {
  return std::min(SurveyOptions{}.meeting, options.timeout / 4);
}

/// What does not stop the others: this rank is missed by rank 0, which says so.
void complain(int rank, const std::string& text) {
  fmt::print(stderr, "zeroth doctor: rank {}: {}\n", rank, text);
}

Report lead(const Place& place, Door& door, const RankFacts& facts, const Pretence& pretence, const Options& options) {
  auto [ours, theirs] = make_wires();
  std::jthread participant([&, wire = std::move(theirs)]() mutable {
    try {
      take_part(wire, place, facts, pretence, options.timeout);
    } catch (const std::exception& error) {
      complain(place.rank, error.what());
    }
  });
  // The wire is the survey's, and is closed with it: then the participant ends in any case.
  return survey(place, door, std::move(ours),
                {.folder = options.folder,
                 .disk_bytes = static_cast<std::size_t>(options.disk_mib) << 20U,
                 .meeting = meeting_of(options),
                 .thresholds = options.thresholds});
}

int run_as_rank(const Options& options) {
  arm_failpoints_of_environment();
  const Pretence pretence = parse_pretence(variable_or_empty("ZEROTH_DOCTOR_PRETEND"));
  RankFacts facts = facts_of_this_process();
  std::optional<Door> door;
  const Place place = find_place(door, meeting_of(options));
  facts.rank = place.rank;
  facts.host = place.host;
  facts.ranks_on_host = place.local_size;
  if (const auto version = pretence.versions.find(place.rank); version != pretence.versions.end())
    facts.zeroth = version->second;
  if (pretence.silent.contains(place.rank)) return 0;
  if (door) {
    Report report = lead(place, *door, facts, pretence, options);
    return print(report, options);
  }
  try {
    Wire wire = knock(place.hub, place.secret, place.rank, Deadline(meeting_of(options)));
    take_part(wire, place, facts, pretence, options.timeout);
  } catch (const Error& error) {
    complain(place.rank, error.what());
  }
  return 0;
}

int run(std::span<const char* const> arguments) {
  if (!arguments.empty() && std::string_view(arguments.front()) == "ckpt") become_ckpt(arguments.subspan(1));
  if (!arguments.empty() && std::string_view(arguments.front()) == "schedule")
    return run_schedule_command(arguments.subspan(1));
  const CommandLine command_line = parse_command_line(arguments);
  if (!command_line.options) {
    fmt::print("{}", command_line.text);
    return 0;
  }
  const Options& options = *command_line.options;
  if (started_as_rank()) return run_as_rank(options);
  Report report = examine(options);
  return print(report, options);
}

}  // namespace
}  // namespace zeroth::doctor

int main(int argc, char** argv) {
  zeroth::ErrorCode code = zeroth::ErrorCode::kInternal;
  std::string text;
  try {
    const std::vector<const char*> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
    return zeroth::doctor::run(arguments);
  } catch (const zeroth::Error& error) {
    code = error.code();
    text = error.what();
  } catch (const std::exception& error) {
    text = std::string("[INTERNAL] ") + error.what();
  }
  std::ranges::replace_if(text, [](char c) { return static_cast<unsigned char>(c) < 0x20; }, ' ');
  fmt::print(stderr, "zeroth: {}\n", text);
  return zeroth::exit_code(code);
}
