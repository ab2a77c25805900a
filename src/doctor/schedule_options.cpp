#include "doctor/schedule_options.h"

#include "hosts/option_values.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth::doctor {
namespace {

constexpr const char* kHelp =
    "zeroth schedule prints what every rank of a pipeline does in a step, after the verifier has passed it, and "
    "simulates it: times, waits, activations that are held, messages.\n";
constexpr const char* kExamples =
    "Examples:\n"
    "  zeroth schedule 1f1b --stages 4 --micro 8\n"
    "  zeroth schedule zb-v --stages 4 --micro 8 --costs 1,1,1,0.1 --svg zb-v.svg\n"
    "  zeroth schedule interleaved --chunks 2 --gathers kept --text > step.txt\n"
    "  zeroth schedule --program step.txt --trace step.json\n";
constexpr double kMostTime = 1e9;

class ScheduleUsage : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App* /*app*/, std::string /*name*/) const override {
    return "\nUsage: zeroth schedule NAME [options]\n       zeroth schedule --program FILE [options]\n";
  }
};

[[noreturn]] void refuse_schedule(const std::string& message, ErrorContext context = {}) {
  context.where = "zeroth.schedule";
  if (context.hint.empty()) context.hint = "zeroth schedule --help";
  throw Error(ErrorCode::kUsage, message, std::move(context));
}

int integer_of(const char* option, const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 1)
    refuse_schedule("a number is not usable",
                    {.which = option, .expected = "an integer from 1", .got = "'" + text + "'"});
  return value;
}

/// "1,1,1" or "1,1,1,0.1".
void parse_costs(const std::string& text, ScheduleCommand& command) {
  std::array<double, 4> values{1, 1, 1, 0};
  std::size_t count = 0;
  std::string_view rest = text;
  bool usable = true;
  while (usable) {
    const std::string_view word = rest.substr(0, rest.find(','));
    usable = count < values.size();
    if (!usable) break;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), values[count]);
    usable =
        error == std::errc{} && end == word.data() + word.size() && values[count] >= 0 && values[count] <= kMostTime;
    ++count;
    if (word.size() == rest.size()) break;
    rest.remove_prefix(word.size() + 1);
  }
  if (!usable || count < 3)
    refuse_schedule("costs are not usable",
                    {.which = "--costs",
                     .expected = fmt::format("F,I,W or F,I,W,MESSAGE, numbers from 0 to {}", kMostTime),
                     .got = "'" + text + "'"});
  command.times = {.forward = values[0], .input = values[1], .weight = values[2]};
  command.message = values[3];
}

template <class Value>
Value choice_of(const char* option, const std::string& text,
                const std::vector<std::pair<std::string, Value>>& choices) {
  std::vector<std::string> names;
  for (const auto& [name, value] : choices) {
    if (name == text) return value;
    names.push_back(name);
  }
  refuse_schedule("there is no such choice", {.which = option, .expected = join(names, ", "), .got = "'" + text + "'"});
}

struct Words {
  std::string ranks{};
  std::string micro{};
  std::string chunks{};
  std::string costs{};
  std::string gathers{};
  std::string vocabulary{};
  bool list = false;
};

void declare(CLI::App& app, ScheduleCommand& command, Words& words) {
  app.add_option("NAME", command.name, "The schedule; --list prints them");
  app.add_flag("--list", words.list, "Print the names of the schedules and exit");
  app.add_option("--program", command.program, "Take the program of FILE instead, as --text prints it")
      ->type_name("FILE");
  app.add_option("--stages,--ranks", words.ranks, "Ranks of the pipeline (4)")->type_name("N");
  app.add_option("--micro", words.micro, "Micro-batches of a step (8)")->type_name("N");
  app.add_option("--chunks", words.chunks, "Chunks of layers a rank (what the schedule has)")->type_name("N");
  app.add_option("--costs", words.costs, "Times of F, I and W of a chunk, and of a message (1,1,1,0)")
      ->type_name("LIST");
  app.add_option("--gathers", words.gathers, "Parameters are gathered: none, each (micro-batch) or kept (none)")
      ->type_name("WORD");
  app.add_flag("--recompute", command.passes.recompute, "Compute activations again in the backward");
  app.add_flag("--offload", command.passes.offload_activations, "Move activations to the host in between");
  app.add_option("--vocabulary", words.vocabulary, "Split the output layer over all ranks, with 1 or 2 barriers")
      ->type_name("N");
  app.add_flag("--inexact", command.schedule.inexact, "Allow schedules that train with gradients of older parameters");
  app.add_flag("--text", command.text_only, "Print the text of the program alone");
  app.add_option("--svg", command.svg, "Write a picture to FILE")->type_name("FILE");
  app.add_option("--png", command.png, "Write a picture to FILE, by Python's matplotlib")->type_name("FILE");
  app.add_option("--trace", command.trace, "Write a trace to FILE, for chrome://tracing or ui.perfetto.dev")
      ->type_name("FILE");
}

void check(const CLI::App& app, ScheduleCommand& command, const Words& words) {
  const auto given = [&](const char* option) { return app.count(option) != 0; };
  if (command.name.empty() == command.program.empty())
    refuse_schedule("a schedule or a program is needed, and one of the two",
                    {.expected = join(schedule_names(true), ", ") + ", or --program FILE"});
  if (!command.program.empty()) {
    for (const char* option :
         {"--stages", "--micro", "--chunks", "--gathers", "--recompute", "--offload", "--vocabulary", "--inexact"}) {
      if (given(option)) refuse_schedule("a program of a file is taken as it is", {.which = option});
    }
  }
  for (const auto& [option, value] :
       {std::pair{"--svg", &command.svg}, {"--png", &command.png}, {"--trace", &command.trace}}) {
    if (given(option) && value->empty()) refuse_schedule("an empty file name", {.which = option});
  }
  if (given("--stages")) command.schedule.ranks = integer_of("--stages", words.ranks);
  if (given("--micro")) command.schedule.micro_batches = integer_of("--micro", words.micro);
  if (given("--chunks")) command.schedule.chunks_per_rank = integer_of("--chunks", words.chunks);
  if (given("--costs")) parse_costs(words.costs, command);
  if (given("--gathers"))
    command.passes.gathers =
        choice_of<Gathers>("--gathers", words.gathers,
                           {{"none", Gathers::kNone}, {"each", Gathers::kPerMicroBatch}, {"kept", Gathers::kKept}});
  if (given("--vocabulary"))
    command.passes.vocabulary = choice_of<Vocabulary>(
        "--vocabulary", words.vocabulary, {{"1", Vocabulary::kOneBarrier}, {"2", Vocabulary::kTwoBarriers}});
}

}  // namespace

ScheduleCommandLine parse_schedule_command(std::span<const char* const> arguments) {
  ScheduleCommand command;
  Words words;
  CLI::App app{kHelp, "zeroth schedule"};
  app.formatter(std::make_shared<ScheduleUsage>());
  app.footer(kExamples);
  app.set_help_flag("-h,--help", "Print this text and exit");
  declare(app, command, words);
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // CLI11 consumes the vector from its end
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    return {.text = app.help()};
  } catch (const CLI::ParseError& error) {
    refuse_schedule(in_our_words(error.what()));
  }
  if (words.list) return {.text = join(schedule_names(true), "\n") + "\n"};
  check(app, command, words);
  return {.command = std::move(command)};
}

}  // namespace zeroth::doctor
