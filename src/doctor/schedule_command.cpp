#include "doctor/schedule_command.h"

#include "doctor/python_command.h"
#include "doctor/schedule_options.h"
#include "doctor/schedule_report.h"

#include <zeroth/program/simulate.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <string>

namespace zeroth::doctor {
namespace {

/// Widest picture of text, in letters.
constexpr double kMostColumns = 400;

/// Draws the computations of a trace that stands in its input.
constexpr const char* kDraw = R"(import json, sys
try:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError as error:
    print(f"zeroth: [ENVIRONMENT] a PNG needs Python's matplotlib: {error}; which: {sys.executable}; "
          "hint: --svg FILE needs nothing; ZEROTH_PYTHON=PATH names another Python", file=sys.stderr)
    sys.exit(77)
COLOURS = {"F": ("#9ecae1", "#4292c6"), "B": ("#a1d99b", "#41ab5d"), "I": ("#c7e9c0", "#74c476"),
           "W": ("#fdd0a2", "#fd8d3c"), "RECOMPUTE": ("#d9d9d9", "#bdbdbd"), "V_S": ("#dadaeb", "#dadaeb"),
           "V_T": ("#bcbddc", "#bcbddc")}
events = [event for event in json.load(sys.stdin)["traceEvents"]
          if event["ph"] == "X" and event["tid"] == 0 and event["cat"] in COLOURS]
ranks = 1 + max(event["pid"] for event in events)
end = max(event["ts"] + event["dur"] for event in events)
shortest = min((event["dur"] for event in events if event["dur"] > 0), default=1)
width = min(20, max(6, 0.25 * end / shortest))
first = {}  # chunk of each rank
for event in events:
    chunk = int(event["name"].split(event["cat"])[0] or -1)
    event["dark"] = chunk >= 0 and first.setdefault(event["pid"], chunk) != chunk
figure, axes = pyplot.subplots(figsize=(width, 0.9 + 0.35 * ranks))
unit = 1e6
for event in events:
    axes.barh(event["pid"], event["dur"] / unit, left=event["ts"] / unit, height=0.9,
              color=COLOURS[event["cat"]][event["dark"]], edgecolor="#555555", linewidth=0.4)
    if event["dur"] * width / end > 0.12:
        number = event["name"].rsplit(event["cat"], 1)[1]
        axes.text((event["ts"] + event["dur"] / 2) / unit, event["pid"], number, ha="center", va="center", fontsize=7)
axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
axes.invert_yaxis()
axes.set_xlim(0, end / unit)
figure.tight_layout()
figure.savefig(sys.argv[1], format="png", dpi=120)
)";

}  // namespace

int run_schedule_command(std::span<const char* const> arguments) {
  const ScheduleCommandLine line = parse_schedule_command(arguments);
  if (!line.command) {
    fmt::print("{}", line.text);
    return 0;
  }
  const ScheduleCommand& command = *line.command;
  const StepProgram program = program_of(command);
  const StepProgram shown = shown_of(program);
  Costs costs = costs_of(command);
  costs.steps_meet = !program.late.empty();
  const Simulation simulation = simulate(shown, costs);
  fmt::print("{}", to_text(program));
  const double unit = std::min({command.times.forward, command.times.input, command.times.weight});
  if (!command.text_only) {
    // A letter, a number and a blank in each column, as long as that fits a wide window.
    if (unit > 0 && 3 * simulation.step_time / unit <= kMostColumns)
      fmt::print("\n{}\n", text_picture(shown, simulation, unit));
    fmt::print("{}", table_of(command, program, simulation));
  }
  if (!command.svg.empty()) write_file(command.svg, svg_picture(shown, simulation));
  const std::string trace = command.trace.empty() && command.png.empty() ? "" : chrome_trace(shown, simulation);
  if (!command.trace.empty()) write_file(command.trace, trace);
  std::fflush(stdout);
  if (!command.png.empty()) become_python(kDraw, {command.png}, trace);
  return 0;
}

}  // namespace zeroth::doctor
