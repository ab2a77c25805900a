#include <zeroth/base/error.h>
#include <zeroth/program/simulate.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string_view>

namespace zeroth {
namespace {

constexpr std::size_t kMostRows = 64;
constexpr std::size_t kMostBoxes = 20'000;
constexpr double kRowHeight = 26;
constexpr double kLeft = 64;  // for the names of the rows
constexpr double kTop = 30;
constexpr double kMostWidth = 1600;
constexpr std::size_t kMostColumns = 10'000;

struct Look {
  ActionKind kind;
  std::string_view name;
  std::string_view light;  ///< a rank's first chunk
  std::string_view dark;   ///< its others
};

constexpr std::array kLooks{
    Look{ActionKind::kForward, "F forward", "#9ecae1", "#4292c6"},
    Look{ActionKind::kBackward, "B backward", "#a1d99b", "#41ab5d"},
    Look{ActionKind::kBackwardInput, "I input gradient", "#c7e9c0", "#74c476"},
    Look{ActionKind::kBackwardWeight, "W weight gradient", "#fdd0a2", "#fd8d3c"},
    Look{ActionKind::kRecompute, "RECOMPUTE", "#d9d9d9", "#bdbdbd"},
    Look{ActionKind::kVocabScores, "V_S logits", "#dadaeb", "#dadaeb"},
    Look{ActionKind::kVocabGradients, "V_T their gradients", "#bcbddc", "#bcbddc"},
};

const Look* look_of(ActionKind kind) {
  const auto* look = std::ranges::find(kLooks, kind, &Look::kind);
  return look == kLooks.end() ? nullptr : look;
}

bool is_first_chunk(const StepProgram& program, std::size_t rank, const Action& action) {
  if (action.chunk < 0) return true;
  const auto first = std::ranges::find(program.rank_of_chunk, static_cast<int>(rank));
  return first - program.rank_of_chunk.begin() == action.chunk;
}

std::string words(double x, double y, std::string_view text, std::string_view anchor = "start") {
  return fmt::format("<text x=\"{:.6g}\" y=\"{:.6g}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor, text);
}

/// A box with a text that a browser shows under the pointer.
std::string box(double x, double y, double width, double height, std::string_view fill, std::string_view title) {
  return fmt::format(
      "<rect x=\"{:.6g}\" y=\"{:.6g}\" width=\"{:.6g}\" height=\"{:.6g}\" fill=\"{}\" stroke=\"#555\" "
      "stroke-width=\"0.5\"><title>{}</title></rect>\n",
      x, y, width, height, fill, title);
}

/// Pixels a unit of time: the shortest box gets room for its number, if the whole then fits.
double scale_of(const Simulation& simulation) {
  double shortest = simulation.step_time;
  for (const RankTimes& rank : simulation.ranks) {
    for (const TimedAction& timed : rank.actions) {
      const double duration = timed.end - timed.begin;
      if (look_of(timed.action.kind) != nullptr && duration > 0) shortest = std::min(shortest, duration);
    }
  }
  return simulation.step_time > 0 ? std::min(20 / shortest, kMostWidth / simulation.step_time) : 1;
}

std::string row(const StepProgram& program, const RankTimes& times, std::size_t rank, double scale) {
  const double y = kTop + kRowHeight * static_cast<double>(rank);
  std::string svg = words(8, y + 17, fmt::format("rank {}", rank));
  for (const TimedAction& timed : times.actions) {
    const Look* look = look_of(timed.action.kind);
    if (look == nullptr) continue;
    const double x = kLeft + timed.begin * scale;
    const double width = (timed.end - timed.begin) * scale;
    svg += box(x, y + 2, width, kRowHeight - 4, is_first_chunk(program, rank, timed.action) ? look->light : look->dark,
               fmt::format("{} {:.6g} to {:.6g}", to_text(timed.action), timed.begin, timed.end));
    if (width >= 9) svg += words(x + width / 2, y + 17, std::to_string(timed.action.micro_batch), "middle");
  }
  return svg;
}

std::string legend(const Simulation& simulation, double y) {
  std::string svg;
  double x = kLeft;
  for (const Look& look : kLooks) {
    const bool used = std::ranges::any_of(simulation.ranks, [&](const RankTimes& rank) {
      return std::ranges::any_of(rank.actions,
                                 [&](const TimedAction& timed) { return timed.action.kind == look.kind; });
    });
    if (!used) continue;
    svg += box(x, y - 9, 12, 12, look.light, look.name) + words(x + 17, y + 1, look.name);
    x += 34 + 6.6 * static_cast<double>(look.name.size());
  }
  return svg;
}

/// "F3"; chunks but a rank's first in a small letter.
std::string cell_text(const StepProgram& program, std::size_t rank, const Action& action) {
  std::string name(name_of(action.kind));
  if (is_vocabulary(action.kind)) name = name.substr(2);
  if (action.kind == ActionKind::kRecompute) name = "R";
  if (!is_first_chunk(program, rank, action)) name[0] = static_cast<char>(name[0] - 'A' + 'a');
  return name + std::to_string(action.micro_batch);
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    const bool plain =
        static_cast<unsigned char>(c) >= 0x20 && std::string_view("<>&\"\\").find(c) == std::string::npos;
    result += plain ? c : '_';
  }
  return result;
}

}  // namespace

std::string svg_picture(const StepProgram& program, const Simulation& simulation) {
  std::size_t boxes = 0;
  for (const RankTimes& rank : simulation.ranks) boxes += rank.actions.size();
  ZR_CHECK(simulation.ranks.size() <= kMostRows && boxes <= kMostBoxes, ErrorCode::kUsage,
           "the program is too large for a picture",
           {.where = "program.svg_picture",
            .expected = fmt::format("at most {} ranks and {} actions", kMostRows, kMostBoxes),
            .got = fmt::format("{} ranks, {} actions", simulation.ranks.size(), boxes),
            .hint = "the trace has no such limit"});
  const double scale = scale_of(simulation);
  const double rows = kRowHeight * static_cast<double>(simulation.ranks.size());
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.6g}\" height=\"{:.6g}\" font-family=\"sans-serif\" "
      "font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      std::max(kLeft + simulation.step_time * scale + 16, 560.0), kTop + rows + 34);
  svg += words(8, 18,
               fmt::format("{}, {} ranks, {} micro-batches; step {:.6g}, bubble {:.6g}", escaped(program.schedule),
                           program.ranks(), program.micro_batches, simulation.step_time, simulation.bubble));
  for (std::size_t rank = 0; rank < simulation.ranks.size(); ++rank)
    svg += row(program, simulation.ranks[rank], rank, scale);
  return svg + legend(simulation, kTop + rows + 20) + "</svg>\n";
}

std::string text_picture(const StepProgram& program, const Simulation& simulation, double unit) {
  ZR_CHECK(unit > 0 && simulation.step_time / unit <= kMostColumns, ErrorCode::kUsage,
           "the program is too long for a picture of this unit",
           {.where = "program.text_picture", .expected = fmt::format("at most {} units", kMostColumns)});
  std::size_t cell = 3;  // a letter, a number, a blank
  for (int count = program.micro_batches - 1; count >= 10; count /= 10) ++cell;
  const auto column = [&](double time) { return static_cast<std::size_t>(std::lround(time / unit)) * cell; };
  std::string text;
  for (std::size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    std::string line;
    for (const TimedAction& timed : simulation.ranks[rank].actions) {
      if (look_of(timed.action.kind) == nullptr) continue;
      if (line.size() < column(timed.begin)) line.resize(column(timed.begin), ' ');
      line += cell_text(program, rank, timed.action);
      if (line.size() + 1 < column(timed.end)) line.resize(column(timed.end) - 1, '-');
      line += ' ';
    }
    if (!line.empty()) line.pop_back();
    text += fmt::format("rank {}  {}\n", rank, line);
  }
  return text;
}

namespace {

constexpr std::array<std::string_view, 5> kThreads{"computations", "messages", "gathers", "reductions", "copies"};

/// An index of kThreads.
int thread_of(ActionKind kind) {
  if (is_message(kind)) return 1;
  if (kind == ActionKind::kUnshard) return 2;
  if (kind == ActionKind::kReduce) return 3;
  if (kind == ActionKind::kFetch || kind == ActionKind::kFlush) return 4;
  return 0;
}

std::string meta_event(std::string_view what, std::size_t rank, std::size_t thread, std::string_view name) {
  return fmt::format(R"({{"ph": "M", "name": "{}", "pid": {}, "tid": {}, "args": {{"name": "{}"}}}},)"
                     "\n",
                     what, rank, thread, name);
}

}  // namespace

std::string chrome_trace(const StepProgram& program, const Simulation& simulation, double unit_us) {
  ZR_CHECK(std::isfinite(unit_us) && unit_us > 0, ErrorCode::kUsage, "a unit of time is not usable",
           {.where = "program.chrome_trace", .expected = "more than 0"});
  std::string json = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
  for (std::size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    json += meta_event("process_name", rank, 0, fmt::format("rank {}", rank));
    for (std::size_t thread = 0; thread < kThreads.size(); ++thread)
      json += meta_event("thread_name", rank, thread, kThreads[thread]);
    for (const TimedAction& timed : simulation.ranks[rank].actions) {
      json += fmt::format(
          R"({{"ph": "X", "name": "{}", "cat": "{}", "pid": {}, "tid": {}, "ts": {:.15g}, "dur": {:.15g}}},)"
          "\n",
          to_text(timed.action), name_of(timed.action.kind), rank, thread_of(timed.action.kind), timed.begin * unit_us,
          (timed.end - timed.begin) * unit_us);
    }
    for (const LivePoint& point : simulation.ranks[rank].live) {
      json += fmt::format(R"({{"ph": "C", "name": "activations", "pid": {}, "ts": {:.15g}, )"
                          R"("args": {{"pairs": {}, "bytes": {}}}}},)"
                          "\n",
                          rank, point.time * unit_us, point.pairs, point.bytes);
    }
  }
  return json +
         fmt::format(R"({{"ph": "M", "name": "process_labels", "pid": 0, "args": {{"labels": "{}"}}}})",
                     escaped(program.schedule)) +
         "\n]}\n";
}

}  // namespace zeroth
