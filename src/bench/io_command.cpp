#include "bench/io_command.h"

#include "bench/io_measure.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::bench {
namespace {

struct Arguments {
  std::vector<std::string> folders{};
  std::vector<std::string> engines{"io_uring", "aio", "threads"};
  std::vector<std::string> blocks{"256KiB", "1MiB", "4MiB"};
  std::vector<int> depths{1, 4, 16, 32};
  std::string bytes = "256MiB";
  double seconds = 0.5;
  double slack = 0.05;
  bool buffered = false;
  bool several_threads = false;
  std::string json{};
};

[[noreturn]] void refuse(const std::string& message, const std::string& option, const std::string& expected,
                         const std::string& got) {
  throw Error(ErrorCode::kUsage, message,
              {.where = "zeroth-bench io", .which = option, .expected = expected, .got = got});
}

/// "64KiB" as bytes; a multiple of 4 KiB.
std::uint64_t bytes_of(const std::string& text, const std::string& option) {
  constexpr std::array<std::pair<std::string_view, std::uint64_t>, 3> kUnits{
      {{"KiB", 1U << 10U}, {"MiB", 1U << 20U}, {"GiB", 1U << 30U}}};
  std::size_t used = 0;
  std::uint64_t number = 0;
  while (used < text.size() && text[used] >= '0' && text[used] <= '9' && number < (std::uint64_t{1} << 40U))
    number = number * 10 + static_cast<std::uint64_t>(text[used++] - '0');
  std::uint64_t factor = 0;
  for (const auto& [unit, bytes] : kUnits) {
    if (std::string_view(text).substr(used) == unit) factor = bytes;
  }
  constexpr std::uint64_t kBlock = 4096;
  constexpr std::uint64_t kLargest = std::uint64_t{1} << 40U;
  if (used == 0 || factor == 0 || number == 0 || number > kLargest / factor || number * factor % kBlock != 0)
    refuse("this is no size", option, "a multiple of 4KiB up to 1024GiB, such as 1MiB", text);
  return number * factor;
}

IoEngineKind engine_of(const std::string& text) {
  const auto kind = io_engine_of(text);
  if (!kind || kind == IoEngineKind::kAuto)
    refuse("there is no such engine", "--engines", "io_uring, aio, threads", text);
  return *kind;
}

void write(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::binary);
  file << text;
  file.close();
  ZR_CHECK(file.good() && std::rename(temporary.c_str(), path.c_str()) == 0, ErrorCode::kIo,
           "the table cannot be written: " + errno_text(errno), {.where = "zeroth-bench io", .which = path});
}

void say(const std::string& line) {
  fmt::print("{}\n", line);
  (void)std::fflush(stdout);
}

std::string text_of(const IoTiming& timing) {
  return fmt::format("{:<10}{:>12}{:>8}{:>12.2f}{:>12.2f}", timing.engine, format_bytes(timing.block_bytes),
                     timing.depth, timing.read_bytes_per_s / 1e9, timing.write_bytes_per_s / 1e9);
}

/// A row for each engine, block and depth. An engine that this machine does not have gets a line with the reason.
std::vector<IoTiming> measure_all(const Arguments& arguments, const IoMeasure& measure) {
  std::vector<IoTiming> timings;
  for (const std::string& engine : arguments.engines) {
    try {
      for (const std::string& block : arguments.blocks) {
        for (const int depth : arguments.depths) {
          timings.push_back(measure.row(engine_of(engine), bytes_of(block, "--blocks"), depth));
          say(text_of(timings.back()));
        }
      }
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kIo) throw;
      say(fmt::format("{:<10}not measured: {}", engine, error.message()));
    }
  }
  return timings;
}

void run(const Arguments& arguments) {
  for (const std::string& engine : arguments.engines) (void)engine_of(engine);
  for (const std::string& block : arguments.blocks) (void)bytes_of(block, "--blocks");
  const IoMeasure measure({.folders = arguments.folders,
                           .access = arguments.buffered ? FileAccess::kBuffered : FileAccess::kDirect,
                           .file_bytes = bytes_of(arguments.bytes, "--bytes"),
                           .seconds = arguments.seconds,
                           .one_thread = !arguments.several_threads});
  const std::string access(name_of(measure.access()));
  say(fmt::format("{} files of {} in all, {}{}", access, arguments.bytes, fmt::join(arguments.folders, ", "),
                  measure.reason().empty() ? "" : "; not direct, " + measure.reason()));
  say(fmt::format("{:<10}{:>12}{:>8}{:>12}{:>12}", "engine", "block", "depth", "read GB/s", "write GB/s"));
  const std::vector<IoTiming> timings = measure_all(arguments, measure);
  ZR_CHECK(!timings.empty(), ErrorCode::kIo, "no engine could be measured", {.where = "zeroth-bench io"});
  const IoTiming& proposal = propose(timings, arguments.slack);
  say(fmt::format("proposal: {}, blocks of {}, depth {}: the least memory within {:g} % of the fastest",
                  proposal.engine, format_bytes(proposal.block_bytes), proposal.depth, 100 * arguments.slack));
  if (!arguments.json.empty()) write(arguments.json, to_json(timings, proposal, arguments.folders, access));
}

void add_options(CLI::App& app, Arguments& arguments) {
  app.add_option("folders", arguments.folders, "Folders on the disks; files lie in all of them")->required();
  app.add_option("--engines", arguments.engines, "Comma-separated")->delimiter(',')->capture_default_str();
  app.add_option("--blocks", arguments.blocks, "Sizes of a transfer, comma-separated")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--depths", arguments.depths, "Transfers at once, comma-separated")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--bytes", arguments.bytes, "Of all files; more than the disk's cache")->capture_default_str();
  app.add_option("--seconds", arguments.seconds, "Of reads, and of writes, for a row")
      ->check(CLI::Range(0.001, 600.0))
      ->capture_default_str();
  app.add_option("--slack", arguments.slack, "The proposal may be slower than the fastest by this share")
      ->check(CLI::Range(0.0, 0.9))
      ->capture_default_str();
  app.add_flag("--buffered", arguments.buffered, "Through the page cache");
  app.add_flag("--several-threads", arguments.several_threads, "Queues that several threads may use");
  app.add_option("--json", arguments.json, "Write the table and the proposal to FILE")->type_name("FILE");
}

}  // namespace

int run_io_command(std::span<const char* const> arguments) {
  CLI::App app("Measures sequential transfers between memory and files, and proposes engine, block size and depth.",
               "zeroth-bench io");
  Arguments parsed;
  add_options(app, parsed);
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  try {
    app.parse(std::move(reversed));
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return 0;
  } catch (const CLI::ParseError& error) {
    refuse(error.what(), "", "", "");
  }
  run(parsed);
  return 0;
}

}  // namespace zeroth::bench
