// zeroth-bench comm: what the calls between the ranks of this job take on each backend, and which of them a mixture
// should use. zeroth-bench io: src/bench/io_command.h.
#include "bench/io_command.h"
#include "bench/measure.h"

#include <zeroth/base/error.h>
#include <zeroth/base/log.h>
#include <zeroth/base/text.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string_view>
#include <vector>

namespace {

using namespace zeroth;

struct Arguments {
  std::vector<std::string> backends{};
  std::vector<std::string> calls{"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier"};
  std::vector<std::string> sizes{"4KiB", "32KiB", "256KiB", "2MiB", "16MiB"};
  std::string dtype = "float32";
  int rounds = 7;
  double gain = 0.05;
  std::string tune{};
};

[[noreturn]] void refuse(const std::string& message, const std::string& option, const std::string& expected,
                         const std::string& got) {
  throw Error(ErrorCode::kUsage, message, {.where = "zeroth-bench", .which = option, .expected = expected, .got = got});
}

std::uint64_t bytes_of(const std::string& text) {
  std::size_t used = 0;
  std::uint64_t number = 0;
  while (used < text.size() && text[used] >= '0' && text[used] <= '9' && number < (std::uint64_t{1} << 40U))
    number = number * 10 + static_cast<std::uint64_t>(text[used++] - '0');
  const std::string unit = text.substr(used);
  const std::uint64_t factor = unit.empty() || unit == "B" ? 1 : unit == "KiB" ? 1024 : unit == "MiB" ? 1024 * 1024 : 0;
  if (used == 0 || factor == 0 || number == 0 || number * factor > (std::uint64_t{1} << 32U))
    refuse("this is no size", "--sizes", "1 B to 4096 MiB, such as 64KiB", text);
  return number * factor;
}

CollectiveKind kind_of(const std::string& text) {
  for (const CollectiveKind kind : {CollectiveKind::kAllReduce, CollectiveKind::kAllGather,
                                    CollectiveKind::kReduceScatter, CollectiveKind::kBroadcast, CollectiveKind::kGather,
                                    CollectiveKind::kScatter, CollectiveKind::kAllToAll, CollectiveKind::kBarrier}) {
    if (name_of(kind) == text) return kind;
  }
  refuse("there is no such call to measure", "--calls",
         "all_reduce, all_gather, reduce_scatter, broadcast, gather, scatter, all_to_all, barrier", text);
}

DType dtype_of(const std::string& text) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    if (name_of(dtype) == text) return dtype;
  }
  refuse("there is no such dtype to measure", "--dtype", "float32, float64, bfloat16, float16", text);
}

bench::MeasureOptions options_of(const Arguments& arguments, const World& world) {
  bench::MeasureOptions options{
      .backends = arguments.backends, .dtype = dtype_of(arguments.dtype), .rounds = arguments.rounds};
  if (options.backends.empty()) options.backends = backends_in(world.backend_name());
  for (const std::string& call : arguments.calls) options.kinds.push_back(kind_of(call));
  for (const std::string& size : arguments.sizes) options.sizes.push_back(bytes_of(size));
  return options;
}

void write(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::binary);
  file << text;
  file.close();
  ZR_CHECK(file.good() && std::rename(temporary.c_str(), path.c_str()) == 0, ErrorCode::kIo,
           "the table cannot be written: " + errno_text(errno), {.where = "zeroth-bench", .which = path});
}

void run(const Arguments& arguments) {
  const World world = World::from_environment();
  if (!world.not_taken().empty()) Logger(world.rank(), world.size()).warn(world.not_taken());
  const bench::MeasureOptions options = options_of(arguments, world);
  const std::vector<NamedBackend> backends = bench::connect(world, options);
  const bool speaks = world.rank() == 0;
  const auto say = [speaks](const std::string& line) {
    if (!speaks) return;
    fmt::print("{}\n", line);
    (void)std::fflush(stdout);
  };
  std::string head = fmt::format("{:<16}{:>12}", fmt::format("{} ranks", world.size()), "bytes");
  for (const std::string& name : options.backends) head += fmt::format("{:>14}", name + " us");
  say(head);
  const std::vector<bench::Timing> timings = bench::measure(backends, options, [&](const bench::Timing& timing) {
    std::string line = fmt::format("{:<16}{:>12}", name_of(timing.kind), timing.bytes);
    for (const std::string& name : options.backends)
      line += fmt::format("{:>14.1f}", bench::median(timing.microseconds.at(name)));
    say(line);
  });
  const CallTable table = bench::choose(timings, options.backends, arguments.gain);
  if (backends.size() == 1 && arguments.tune.empty()) return;
  for (const CallTable::Row& row : table.rows()) {
    say(fmt::format("{}{}: {}", name_of(row.kind),
                    row.up_to_bytes == CallTable::kNoBound ? "" : " up to " + format_bytes(row.up_to_bytes),
                    row.backend));
  }
  if (arguments.tune.empty() || !speaks) return;
  write(arguments.tune, table.to_json());
  say(fmt::format("ZEROTH_BACKEND='{}' ZEROTH_CALL_TABLE={} makes calls so", fmt::join(options.backends, "|"),
                  arguments.tune));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Measures what Zeroth's calls and transfers take here.", "zeroth-bench");
  app.require_subcommand(1);
  app.add_subcommand("io", "Transfers to files, with a proposal of engine, block size and depth; io --help says more");
  CLI::App& comm = *app.add_subcommand(
      "comm",
      "Calls between ranks, on one backend or on several side by side; started once a rank, by zeroth-run or mpirun");
  Arguments arguments;
  comm.add_option("--backends", arguments.backends,
                  "Comma-separated: shm, mpi, shm+mpi (default: that of the launcher)")
      ->delimiter(',');
  comm.add_option("--calls", arguments.calls, "Comma-separated")->delimiter(',')->capture_default_str();
  comm.add_option("--sizes", arguments.sizes, "Of the whole call, comma-separated")
      ->delimiter(',')
      ->capture_default_str();
  comm.add_option("--dtype", arguments.dtype, "float32, float64, bfloat16, float16")->capture_default_str();
  comm.add_option("--rounds", arguments.rounds, "Medians are over so many")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  comm.add_option("--gain", arguments.gain, "Another backend than the first must be faster by this share")
      ->check(CLI::Range(0.0, 0.9))
      ->capture_default_str();
  comm.add_option("--tune", arguments.tune, "Rank 0 writes the table of the fastest to FILE")->type_name("FILE");
  try {
    if (argc > 1 && std::string_view(argv[1]) == "io") {
      const std::vector<const char*> rest(argv + 2, argv + argc);
      return bench::run_io_command(rest);
    }
    app.parse(argc, argv);
    run(arguments);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", comm.parsed() ? comm.help() : app.help());
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "ZEROTH ERROR [USAGE] zeroth-bench: {}\n", error.what());
    return exit_code(ErrorCode::kUsage);
  } catch (const Error& error) {
    fmt::print(stderr, "ZEROTH ERROR {}\n", error.what());
    return exit_code(error.code());
  }
  return 0;
}
