// zeroth-trace: reads what the flight recorders of all ranks have written, says where they differ, draws the last
// seconds.
#include "trace/trace.h"

#include <zeroth/base/error.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
using zeroth::Error;
using zeroth::ErrorCode;

constexpr std::uintmax_t kLargestFile = std::uintmax_t{64} << 20U;  // a full ring takes some 250 KiB

std::vector<std::string> files_of(const std::vector<std::string>& arguments) {
  std::vector<std::string> files;
  for (const std::string& argument : arguments) {
    if (!fs::is_directory(argument)) {
      files.push_back(argument);
      continue;
    }
    for (const fs::directory_entry& entry : fs::directory_iterator(argument)) {
      if (entry.is_regular_file() && entry.path().extension() == ".jsonl") files.push_back(entry.path().string());
    }
  }
  std::ranges::sort(files);
  ZR_CHECK(!files.empty(), ErrorCode::kUsage, "there is no trace",
           {.where = "zeroth-trace", .which = arguments.front(), .expected = "files *.jsonl"});
  return files;
}

std::string read_all(const std::string& file) {
  std::error_code error;
  const std::uintmax_t bytes = fs::file_size(file, error);
  ZR_CHECK(!error, ErrorCode::kIo, "the file cannot be read: " + error.message(),
           {.where = "zeroth-trace", .which = file});
  ZR_CHECK(bytes <= kLargestFile, ErrorCode::kIo, "the file is too large for a trace",
           {.where = "zeroth-trace", .which = file, .got = std::to_string(bytes) + " bytes"});
  std::ifstream stream(file, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(stream)), {});
  ZR_CHECK(stream.good() || stream.eof(), ErrorCode::kIo, "the file cannot be read: " + zeroth::errno_text(errno),
           {.where = "zeroth-trace", .which = file});
  return text;
}

void run(const std::vector<std::string>& arguments, double seconds, int columns) {
  std::vector<zeroth::trace::RankTrace> ranks;
  for (const std::string& file : files_of(arguments)) ranks.push_back(zeroth::trace::parse(read_all(file), file));
  zeroth::trace::align_clocks(ranks);
  fmt::print("{} of {} ranks; the last {} s\n", ranks.size(), ranks.front().size, seconds);
  for (const std::string& line : zeroth::trace::draw(ranks, seconds, columns)) fmt::print("{}\n", line);
  const std::vector<std::string> lines = zeroth::trace::differences(ranks);
  for (const std::string& line : lines) fmt::print("{}\n", line);
  if (lines.empty()) fmt::print("all ranks have made the same calls\n");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Draws what the flight recorders of all ranks have written (World.write_trace(), ZEROTH_TRACE_DIR).",
               "zeroth-trace");
  std::vector<std::string> arguments;
  double seconds = 10;
  int columns = 60;
  app.add_option("files", arguments, "Files, or folders with *.jsonl")->required();
  app.add_option("--seconds", seconds, "How far back")->check(CLI::Range(1e-3, 1e6))->capture_default_str();
  app.add_option("--columns", columns, "Width of the drawing")->check(CLI::Range(10, 1000))->capture_default_str();
  try {
    app.parse(argc, argv);
    run(arguments, seconds, columns);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "ZEROTH ERROR [USAGE] zeroth-trace: {}\n", error.what());
    return zeroth::exit_code(ErrorCode::kUsage);
  } catch (const Error& error) {
    fmt::print(stderr, "ZEROTH ERROR {}\n", error.what());
    return zeroth::exit_code(error.code());
  }
  return 0;
}
