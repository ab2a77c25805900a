#include <zeroth/base/text.h>
#include <zeroth/engine/engine.h>

#include <algorithm>
#include <array>
#include <cstdio>

namespace zeroth {

std::string to_text(const MemoryReport& report) {
  std::string text;
  const auto row = [&text](std::string_view name, std::uint64_t planned, std::uint64_t measured) {
    std::array<char, 128> line{};
    std::snprintf(line.data(), line.size(), "  %-12.*s %14llu %14llu  %s\n", static_cast<int>(name.size()), name.data(),
                  static_cast<unsigned long long>(planned), static_cast<unsigned long long>(measured),
                  planned == measured ? "" : "differs");
    text += line.data();
  };
  text += "  state           planned (B)   measured (B)\n";
  for (std::size_t state = 0; state < kNumMemoryStates; ++state) {
    const auto kind = static_cast<MemoryState>(state);
    if (report.planned[kind] == 0 && report.measured_peak[kind] == 0) continue;
    row(name_of(kind), report.planned[kind], report.measured_peak[kind]);
  }
  row("sum", report.planned.total(), report.measured_peak.total());
  if (report.planned_files + report.measured_files > 0) row("on disk", report.planned_files, report.measured_files);
  if (report.activation_files > 0) text += "  saved tensors on disk " + format_bytes(report.activation_files) + "\n";
  const std::uint64_t planned = report.planned.total();
  text += "  resident " + format_bytes(report.resident) + ", reserved and never used " +
          format_bytes(planned - std::min(planned, report.resident)) + "\n";
  text += "  gathered at once " + format_bytes(report.live_gathered_peak) + ", ring slots at once " +
          std::to_string(report.live_slots_peak) + ", overflow slots " + std::to_string(report.overflow_slots) +
          ", spills " + std::to_string(report.spills) + ", construction " + format_bytes(report.construction_peak) +
          ", transport " + format_bytes(report.transport) + ", PSS " + format_bytes(report.pss);
  if (report.demand_fetches > 0) text += ", fetched on demand " + std::to_string(report.demand_fetches);
  if (report.bus_down + report.bus_up > 0)
    text += ", over the bus " + format_bytes(report.bus_down) + " down and " + format_bytes(report.bus_up) + " up";
  if (report.checkpoint_copy > 0) text += ", copy for checkpoints " + format_bytes(report.checkpoint_copy);
  if (report.compute_copies > 0) text += ", copies for computing " + format_bytes(report.compute_copies);
  if (!report.residency_choice.empty()) text += "\n  " + report.residency_choice;
  if (!report.activation_choice.empty()) text += "\n  " + report.activation_choice;
  return text;
}

}  // namespace zeroth
