#include "launcher/options.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/text.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <memory>
#include <string_view>

namespace zeroth::launcher {
namespace {

constexpr const char* kDescription =
    "zeroth-run starts N ranks of a program on this host and ends all of them when one fails.\n"
    "Each rank finds its place in the world in torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, ...).\n"
    "Its exit code is 0, or that of the first rank that failed (128 + signal if a signal ended it).\n";

constexpr const char* kExamples =
    "Examples:\n"
    "  zeroth-run -n 2 ./trainer --steps 100          two ranks of a C++ trainer\n"
    "  zeroth-run -n 4 python3 train.py               four ranks of a Python script\n"
    "  zeroth-run -n 4 --tee logs ./trainer           also logs/rank0.stdout.log, ...\n"
    "  zeroth-run -n 2 --env OMP_NUM_THREADS=4 ./trainer\n"
    "  zeroth-run -n 2 --timeout 600 -- ./trainer     give up after ten minutes\n";

class UsageFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App* /*app*/, std::string /*name*/) const override {
    return "\nUsage: zeroth-run -n N [options] PROGRAM [arguments...]\n";
  }
};

[[noreturn]] void refuse(const std::string& message, ErrorContext context = {}) {
  if (context.hint.empty()) {
    context.hint = "zeroth-run --help";
  }
  throw Error(ErrorCode::kUsage, message, std::move(context));
}

int parse_num_ranks(const std::string& text) {
  int value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc{} || end != text.data() + text.size() || value < 1 || value > kMaxRanks) {
    refuse("the number of ranks is not usable",
           {.which = "-n", .expected = fmt::format("1 to {}", kMaxRanks), .got = fmt::format("'{}'", text)});
  }
  return value;
}

Milliseconds parse_seconds(const char* option, const std::string& text) {
  constexpr double kLongest = 365.0 * 24 * 3600;
  double seconds = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (status != std::errc{} || end != text.data() + text.size() || !std::isfinite(seconds) || seconds <= 0 ||
      seconds > kLongest) {
    refuse(
        "not a usable time",
        {.which = option, .expected = "seconds above 0, at most a year", .got = fmt::format("'{}'", text)});
  }
  return Milliseconds{std::max<long long>(1, std::llround(seconds * 1000))};
}

bool valid_variable_name(std::string_view name) {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  return !name.empty() && letter(name.front()) &&
         std::all_of(name.begin(), name.end(), [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
}

/// Variables that say who a rank is. A user's value would contradict what the launcher started.
constexpr std::array kOwned{"RANK",
                            "LOCAL_RANK",
                            "WORLD_SIZE",
                            "LOCAL_WORLD_SIZE",
                            "GROUP_RANK",
                            "NODE_RANK",
                            "TORCHELASTIC_RUN_ID",
                            "ZEROTH_JOB_ID"};

std::pair<std::string, std::string> parse_assignment(const std::string& text) {
  const std::size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  if (equals == std::string::npos || !valid_variable_name(name)) {
    refuse("not an environment assignment",
           {.which = "--env",
            .expected = "NAME=VALUE, NAME of letters, digits and _ that does not start with a digit",
            .got = fmt::format("'{}'", text)});
  }
  if (std::find(kOwned.begin(), kOwned.end(), name) != kOwned.end()) {
    refuse("this variable is set by zeroth-run itself, for each rank", {.which = name});
  }
  return {name, text.substr(equals + 1)};
}

/// One line a site: name, file:line, moment.
std::string list_of_failpoints() {
  std::string text;
  for (const Failpoint& site : failpoints()) {
    text += fmt::format("{:<28}{:<42}{}{}\n",
                        site.name,
                        fmt::format("{}:{}", site.file, site.line),
                        site.what,
                        site.kind == FailpointKind::kSystemCall ? " (errno=NAME)"
                        : site.kind == FailpointKind::kNoThrow  ? " (no throw)"
                                                                : "");
  }
  return text;
}

/// What followed the options: [--] PROGRAM [arguments...]. CLI11 puts unknown options in front of it.
std::vector<std::string> take_command(std::vector<std::string> rest, const CLI::App& app) {
  if (!rest.empty() && rest.front() == "--") {
    rest.erase(rest.begin());
  } else if (!rest.empty() && rest.front().size() > 1 && rest.front().front() == '-') {
    const std::string name = rest.front().substr(0, rest.front().find('='));
    std::vector<std::string> known;
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& long_name : option->get_lnames()) {
        known.push_back("--" + long_name);
      }
    }
    const std::string near = nearest_name(name, known);
    refuse("unknown option", {.which = name, .hint = near.empty() ? "" : "did you mean " + near + "?"});
  }
  if (rest.empty() || rest.front().empty()) {
    refuse("no program to run was given");
  }
  return rest;
}

}  // namespace

CommandLine parse_command_line(std::span<const char* const> arguments) {
  Options options;
  std::string num_ranks;
  std::string timeout;
  std::string grace;
  std::vector<std::string> assignments;
  bool no_prefix = false;
  bool no_merge = false;

  CLI::App app{kDescription, "zeroth-run"};
  app.formatter(std::make_shared<UsageFormatter>());
  app.footer(kExamples);
  app.prefix_command();
  app.set_help_flag("-h,--help", "Print this text and exit");
  app.set_version_flag("--version", std::string("zeroth-run ") + ZEROTH_VERSION_TEXT);
  app.add_option("-n,--ranks", num_ranks, "Number of ranks to start, 1 to 4096")->type_name("N");
  app.add_flag("--no-prefix", no_prefix, "Do not put '[rank] ' before each line of output");
  app.add_flag("--no-merge", no_merge, "Write a line that several ranks write as often as it comes");
  app.add_option(
         "--tee", options.tee_directory, "Also write DIR/rank<r>.stdout.log and .stderr.log, unchanged")
      ->type_name("DIR");
  app.add_flag(
      "--stdin", options.forward_stdin, "Rank 0 reads this program's standard input (else /dev/null)");
  app.add_option("--env", assignments, "Set a variable in every rank; may be given several times")
      ->type_name("NAME=VALUE")
      ->expected(1)
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--timeout", timeout, "End the whole job after this time")->type_name("SECONDS");
  app.add_option("--grace", grace, "From a forwarded Ctrl-C or SIGTERM to SIGKILL (2)")->type_name("SECONDS");
  app.add_flag_callback(
      "--list-failpoints",
      [] { throw CLI::CallForVersion(list_of_failpoints(), 0); },
      "Print the sites that ZEROTH_FAULTS can name and exit");
  app.add_flag("-q,--quiet", options.quiet, "No informational lines");

  // CLI11 consumes the vector from its end.
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    return {.text = app.help()};
  } catch (const CLI::CallForVersion& version) {
    return {.text = std::string(version.what()) + "\n"};
  } catch (const CLI::ArgumentMismatch& error) {
    refuse("an option of this kind takes one value and is given once", {.got = error.what()});
  } catch (const CLI::ParseError& error) {
    refuse(error.what());
  }

  options.command = take_command(app.remaining(), app);
  if (app.count("--ranks") == 0) {
    refuse("-n N, the number of ranks, is missing (options come before PROGRAM)");
  }
  options.num_ranks = parse_num_ranks(num_ranks);
  options.prefix = !no_prefix;
  options.merge = options.prefix && !no_merge && options.num_ranks > 1;
  if (app.count("--tee") != 0 && options.tee_directory.empty()) {
    refuse("an empty directory name", {.which = "--tee"});
  }
  if (app.count("--timeout") != 0) {
    options.timeout = parse_seconds("--timeout", timeout);
  }
  if (app.count("--grace") != 0) {
    options.grace = parse_seconds("--grace", grace);
  }
  for (const std::string& assignment : assignments) {
    options.environment.push_back(parse_assignment(assignment));
  }
  return {.options = std::move(options)};
}

}  // namespace zeroth::launcher
