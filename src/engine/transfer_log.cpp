#include "engine/transfer_log.h"

#include <zeroth/base/text.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <utility>

namespace zeroth {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::array<std::string_view, kNumPhases> kPhases{"starting", "forward",       "backward",   "after backward",
                                                           "step",     "between steps", "sync point", "evaluation"};
constexpr std::array<std::string_view, std::size(kBlockSets)> kSets{"optimizer", "parameters"};
constexpr std::string_view kActivations = "activations";

/// Rows of the trace: one for phases, one for waits, and as many for each kind of transfer as there are at once.
constexpr int kPhaseRow = 0;
constexpr int kWaitRow = 1;
constexpr int kFirstRead = 100;
constexpr int kFirstWrite = 10'000;

double microseconds(SteadyClock::time_point at) {
  return std::chrono::duration<double, std::micro>(at.time_since_epoch()).count();
}

OrderedJson event(std::string name, int rank, int row, SteadyClock::time_point begin, SteadyClock::time_point end) {
  return {{"name", std::move(name)},
          {"ph", "X"},
          {"pid", rank},
          {"tid", row},
          {"ts", microseconds(begin)},
          {"dur", std::chrono::duration<double, std::micro>(end - begin).count()}};
}

OrderedJson row_name(int rank, int row, std::string name) {
  return {{"name", "thread_name"}, {"ph", "M"}, {"pid", rank}, {"tid", row}, {"args", {{"name", std::move(name)}}}};
}

/// Spans of one kind, each in the first row that is free.
void add_transfers(OrderedJson& events, std::vector<TransferSpan> spans, int rank, int first, const std::string& kind) {
  std::ranges::sort(spans, {}, &TransferSpan::begin);
  std::vector<SteadyClock::time_point> free_at;
  for (const TransferSpan& span : spans) {
    auto row = std::ranges::find_if(free_at, [&span](SteadyClock::time_point end) { return end <= span.begin; });
    if (row == free_at.end()) {
      const auto number = static_cast<int>(free_at.size());
      row = free_at.insert(free_at.end(), span.end);
      events.push_back(row_name(rank, first + number, number == 0 ? kind : kind + " " + std::to_string(number + 1)));
    }
    *row = span.end;
    OrderedJson transfer =
        event(span.name, rank, first + static_cast<int>(row - free_at.begin()), span.begin, span.end);
    if (span.bytes > 0) transfer["args"] = {{"bytes", span.bytes}};
    events.push_back(std::move(transfer));
  }
}

TransferRow row_of(std::string_view set, const StoreCounters& last, const StoreCounters& before,
                   const StoreCounters& now, const StoreCounters& first) {
  return {.set = std::string(set), .last_step = last.since(before), .all = now.since(first)};
}

double seconds(std::uint64_t ns) {
  return static_cast<double>(ns) * 1e-9;
}

std::string percent(const TransferTimes& times) {
  if (times.in_flight.count() == 0) return "nothing was on its way";
  return fmt::format("on their way {:.3f} s, waited {:.3f} s: {:.0f}% hidden",
                     std::chrono::duration<double>(times.in_flight).count(),
                     std::chrono::duration<double>(times.waited).count(), 100.0 * times.hidden_share());
}

}  // namespace

void TransferLog::end_step(const TransferTotals& now) {
  before_ = std::exchange(last_, now);
}

TransferReport TransferLog::report(const TransferTotals& now) const {
  TransferReport report{.last_step = last_.states - before_.states,
                        .all = now.states - first_.states,
                        .activations_last_step = last_.activations_times - before_.activations_times,
                        .activations_all = now.activations_times - first_.activations_times};
  for (std::size_t set = 0; set < now.sets.size(); ++set)
    report.rows.push_back(row_of(kSets[set], last_.sets[set], before_.sets[set], now.sets[set], first_.sets[set]));
  report.rows.push_back(
      row_of(kActivations, last_.activations, before_.activations, now.activations, first_.activations));
  return report;
}

void TransferLog::keep_phases(std::size_t most) {
  most_marks_ = most;
  marks_.clear();
}

void TransferLog::enter(SteadyClock::time_point at, Phase phase, int unit) {
  if (most_marks_ == 0) return;
  if (marks_.size() == most_marks_) marks_.pop_front();
  marks_.push_back({.at = at, .phase = phase, .unit = unit});
}

const TransferRow* TransferReport::row(std::string_view set) const {
  const auto found = std::ranges::find(rows, set, &TransferRow::set);
  return found == rows.end() ? nullptr : &*found;
}

std::string to_text(const TransferReport& report) {
  if (report.rows.empty()) return "";
  std::string text =
      fmt::format("  {:<12}{:>11}{:>12}{:>12}{:>12}{:>12}{:>12}{:>8}{:>6}{:>8}{:>9}\n", "last step", "", "formula",
                  "moved", "in memory", "ahead", "unused", "blocks", "late", "demand", "wait s");
  for (const TransferRow& row : report.rows) {
    const StoreCounters& step = row.last_step;
    const auto bytes = [&row](std::uint64_t FileTraffic::* planned) {
      return row.planned ? format_bytes(*row.planned.*planned) : std::string("-");
    };
    text += fmt::format("  {:<12}{:>11}{:>12}{:>12}{:>12}{:>12}{:>12}{:>8}{:>6}{:>8}{:>9.3f}\n", row.set, "read",
                        bytes(&FileTraffic::read_bytes), format_bytes(step.read_bytes),
                        format_bytes(step.spared_read_bytes), format_bytes(step.ahead_bytes),
                        format_bytes(step.unused_bytes), step.reads, step.late, step.on_demand, seconds(step.wait_ns));
    text += fmt::format("  {:<12}{:>11}{:>12}{:>12}{:>12}{:>12}{:>12}{:>8}\n", "", "written",
                        bytes(&FileTraffic::write_bytes), format_bytes(step.write_bytes),
                        format_bytes(step.spared_write_bytes), "", "", step.writes);
  }
  text += "  states: " + percent(report.last_step);
  if (report.activations_all.in_flight.count() > 0) text += "\n  activations: " + percent(report.activations_last_step);
  return text;
}

std::string chrome_trace(const std::deque<TransferLog::Mark>& marks, const std::vector<TransferSpan>& spans,
                         const std::vector<std::string>& units, int rank, SteadyClock::time_point now) {
  OrderedJson events = OrderedJson::array();
  events.push_back(
      {{"name", "process_name"}, {"ph", "M"}, {"pid", rank}, {"args", {{"name", "rank " + std::to_string(rank)}}}});
  events.push_back(row_name(rank, kPhaseRow, "training"));
  events.push_back(row_name(rank, kWaitRow, "waits for files"));
  for (std::size_t at = 0; at < marks.size(); ++at) {
    const TransferLog::Mark& mark = marks[at];
    std::string name(kPhases[static_cast<std::size_t>(mark.phase)]);
    if (mark.unit >= 0) name += " " + units[static_cast<std::size_t>(mark.unit)];
    events.push_back(event(std::move(name), rank, kPhaseRow, mark.at, at + 1 < marks.size() ? marks[at + 1].at : now));
  }
  std::vector<TransferSpan> reads;
  std::vector<TransferSpan> writes;
  for (const TransferSpan& span : spans) {
    if (span.kind == TransferSpan::Kind::kRead) reads.push_back(span);
    if (span.kind == TransferSpan::Kind::kWrite) writes.push_back(span);
    if (span.kind == TransferSpan::Kind::kWait)
      events.push_back(event(span.name, rank, kWaitRow, span.begin, span.end));
  }
  add_transfers(events, std::move(reads), rank, kFirstRead, "reads");
  add_transfers(events, std::move(writes), rank, kFirstWrite, "writes");
  return OrderedJson{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}.dump();
}

}  // namespace zeroth
