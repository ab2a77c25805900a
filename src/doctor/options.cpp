#include "doctor/options.h"

#include "hosts/option_values.h"
#include "hosts/text_cursor.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/base/version.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <memory>
#include <string_view>
#include <utility>

namespace zeroth::doctor {
namespace {

constexpr const char* kHint = "zeroth doctor --help";
constexpr const char* kHelp =
    "zeroth doctor looks at the hosts of a job before it is started: versions, devices, memory, limits, disks, clocks, "
    "and every link.\n"
    "It prints a table, and one line for each thing that is wrong. Its exit code is 0 if nothing is, else 1.\n";
constexpr const char* kExamples =
    "Examples:\n"
    "  zeroth doctor                                  this host, with two ranks\n"
    "  zeroth doctor --hosts node1:8,node2:8          several hosts, over zeroth-run\n"
    "  zeroth doctor --hostfile hosts --params 7e9    also which sharding plan suits the links\n"
    "  mpirun -n 16 --hostfile hosts zeroth doctor    also the links of MPI\n";

class UsageFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App* /*app*/, std::string /*name*/) const override {
    return "\nUsage: zeroth doctor [options]\n";
  }
};

[[noreturn]] void refuse(const std::string& message, ErrorContext context = {}) {
  if (context.hint.empty()) context.hint = kHint;
  refuse_usage(message, std::move(context));
}

struct Raw {
  std::string num_ranks, hosts, hostfile, include, exclude, ssh, remote_program, connect_timeout, timeout, folder,
      disk_mib, slow_below, max_skew, min_free, params, dtype, layers, micro_steps, compute, memory;
  bool no_disk = false;
};

void declare(CLI::App& app, Options& options, Raw& raw) {
  app.add_option("-n,--ranks", raw.num_ranks, "Ranks on this host, 1 to 128 (2)")->type_name("N");
  app.add_option("--folder", raw.folder, "Where a file is written and read (the current directory)")->type_name("DIR");
  app.add_option("--disk-mib", raw.disk_mib, "Size of that file (64)")->type_name("MIB");
  app.add_flag("--no-disk", raw.no_disk, "Look at no disk");
  app.add_option("--slow-below", raw.slow_below, "A link with less than this part of what is usual is slow (0.5)")
      ->type_name("PART");
  app.add_option("--max-skew-ms", raw.max_skew, "Clocks may differ by so much (500)")->type_name("MS");
  app.add_option("--min-free-gib", raw.min_free, "A disk must have so much room (1)")->type_name("GIB");
  app.add_option("--timeout", raw.timeout, "End the examination after this time (120)")->type_name("SECONDS");
  app.add_flag("--json", options.json, "Print one JSON object");
  app.add_flag("--report", options.report)->group("");
  const std::string hosts = "Several hosts (see zeroth-run --help)";
  for (const auto& [name, value, what, type] :
       std::vector<std::tuple<const char*, std::string*, const char*, const char*>>{
           {"--hostfile", &raw.hostfile, "The hosts of FILE, lines HOST slots=N", "FILE"},
           {"--hosts", &raw.hosts, "These hosts: HOST[:SLOTS],...", "LIST"},
           {"--include", &raw.include, "Only these: HOST[:SLOT,...]@...", "NODES"},
           {"--exclude", &raw.exclude, "All but these: HOST[:SLOT,...]@...", "NODES"},
           {"--ssh", &raw.ssh, "A program that is called like ssh (ZEROTH_SSH, ssh)", "PROGRAM"},
           {"--remote-program", &raw.remote_program, "zeroth-run on the other hosts (zeroth-run)", "PATH"},
           {"--connect-timeout", &raw.connect_timeout, "How long the hosts may take to answer (60)", "SECONDS"}}) {
    app.add_option(name, *value, what)->type_name(type)->group(hosts);
  }
  const std::string plan = "Which plan suits the links";
  for (const auto& [name, value, what, type] :
       std::vector<std::tuple<const char*, std::string*, const char*, const char*>>{
           {"--params", &raw.params, "Parameters of the model: 7e9", "N"},
           {"--dtype", &raw.dtype, "Of the parameters: bf16, fp16, fp32 or fp64 (bf16)", "NAME"},
           {"--layers", &raw.layers, "Blocks that repeat (32)", "N"},
           {"--micro-steps", &raw.micro_steps, "Gradient accumulation (1)", "N"},
           {"--compute-seconds", &raw.compute, "What a step takes without links (0)", "SECONDS"},
           {"--memory-gib", &raw.memory, "Memory for all ranks of a host (what is available)", "GIB"}}) {
    app.add_option(name, *value, what)->type_name(type)->group(plan);
  }
}

bool given(const CLI::App& app, const char* option) {
  return app.count(option) != 0;
}

double parse_number(const char* option, const std::string& text, double low, double high) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value) || value < low ||
      value > high) {
    refuse("a number is not usable",
           {.which = option, .expected = fmt::format("{} to {}", low, high), .got = in_quotes(text)});
  }
  return value;
}

std::uint64_t parse_gib(const char* option, const std::string& text) {
  return static_cast<std::uint64_t>(parse_number(option, text, 0, 1e6) * static_cast<double>(std::uint64_t{1} << 30U));
}

DType parse_dtype(const std::string& text) {
  for (const auto& [name, dtype] : {std::pair{"bf16", DType::kBFloat16},
                                    {"bfloat16", DType::kBFloat16},
                                    {"fp16", DType::kFloat16},
                                    {"float16", DType::kFloat16},
                                    {"fp32", DType::kFloat32},
                                    {"float32", DType::kFloat32},
                                    {"fp64", DType::kFloat64},
                                    {"float64", DType::kFloat64}}) {
    if (text == name) return dtype;
  }
  refuse("parameters are not trained in this type",
         {.which = "--dtype", .expected = "bf16, fp16, fp32 or fp64", .got = in_quotes(text)});
}

void check_hosts(const CLI::App& app, Options& options, const Raw& raw) {
  const bool hosts = given(app, "--hosts");
  const bool file = given(app, "--hostfile");
  if (hosts && file) refuse("--hostfile and --hosts together", {.hint = "give one of the two"});
  for (const char* option : {"--include", "--exclude", "--ssh", "--remote-program", "--connect-timeout"}) {
    if (given(app, option) && !hosts && !file)
      refuse("this option needs hosts", {.which = option, .hint = "add --hostfile or --hosts"});
    if (given(app, option) && app.get_option(option)->as<std::string>().empty())
      refuse("an empty value", {.which = option});
  }
  if (hosts || file) {
    if (given(app, "--ranks"))
      refuse("-n counts the ranks of this host alone", {.which = "-n", .hint = "give slots: --hosts node1:2,node2:2"});
    const std::vector<zeroth::HostEntry> all =
        hosts ? parse_host_list(raw.hosts) : parse_hostfile(read_hostfile(raw.hostfile), raw.hostfile);
    for (const HostSelection& host : select_hosts(all, raw.include, raw.exclude)) {
      options.hosts.push_back({.name = host.name, .num_slots = static_cast<int>(host.slots.size())});
    }
  }
  options.ssh = raw.ssh;
  if (given(app, "--remote-program")) options.remote_program = parse_remote_program(raw.remote_program);
  if (given(app, "--connect-timeout"))
    options.connect_timeout = parse_seconds("--connect-timeout", raw.connect_timeout);
}

void check_plan(const CLI::App& app, Options& options, const Raw& raw) {
  if (!given(app, "--params")) {
    for (const char* option : {"--dtype", "--layers", "--micro-steps", "--compute-seconds", "--memory-gib"}) {
      if (given(app, option))
        refuse("this option needs the size of the model", {.which = option, .hint = "add --params"});
    }
    return;
  }
  ModelSize model{.params = parse_number("--params", raw.params, 1e6, 1e14)};
  if (given(app, "--dtype")) model.dtype = parse_dtype(raw.dtype);
  if (given(app, "--layers")) model.layers = parse_integer("--layers", raw.layers, 1, 4096, "the number of layers");
  if (given(app, "--micro-steps"))
    model.micro_steps = parse_integer("--micro-steps", raw.micro_steps, 1, 1'000'000, "the number of micro-steps");
  if (given(app, "--compute-seconds")) options.compute_s = parse_number("--compute-seconds", raw.compute, 0, 1e6);
  if (given(app, "--memory-gib")) options.memory_bytes = parse_gib("--memory-gib", raw.memory);
  options.model = model;
}

void check(const CLI::App& app, Options& options, const Raw& raw) {
  check_hosts(app, options, raw);
  check_plan(app, options, raw);
  if (given(app, "--ranks")) options.num_ranks = parse_integer("-n", raw.num_ranks, 1, 128, "the number of ranks");
  if (given(app, "--timeout")) options.timeout = parse_seconds("--timeout", raw.timeout);
  if (given(app, "--folder") && raw.folder.empty()) refuse("an empty folder name", {.which = "--folder"});
  if (given(app, "--folder")) options.folder = raw.folder;
  if (given(app, "--disk-mib"))
    options.disk_mib = parse_integer("--disk-mib", raw.disk_mib, 1, 1024, "the size of the file");
  if (raw.no_disk && (given(app, "--folder") || given(app, "--disk-mib")))
    refuse("--no-disk with a folder or a size", {.hint = "give one of the two"});
  if (raw.no_disk) options.folder.clear();
  if (given(app, "--slow-below")) options.thresholds.slow_link = parse_number("--slow-below", raw.slow_below, 0.001, 1);
  if (given(app, "--max-skew-ms")) options.thresholds.skew_ms = parse_number("--max-skew-ms", raw.max_skew, 0, 1e9);
  if (given(app, "--min-free-gib")) options.thresholds.free_disk_bytes = parse_gib("--min-free-gib", raw.min_free);
  // Rank 0 has slow links measured again, so it must know what is slow.
  options.for_ranks = {"--slow-below", fmt::format("{}", options.thresholds.slow_link), "--timeout",
                       fmt::format("{:.3f}", static_cast<double>(options.timeout.count()) / 1000)};
  if (options.folder.empty()) {
    options.for_ranks.emplace_back("--no-disk");
  } else {
    options.for_ranks.insert(options.for_ranks.end(),
                             {"--folder", options.folder, "--disk-mib", std::to_string(options.disk_mib)});
  }
}

CommandLine parse_doctor(std::span<const char* const> arguments) {
  Options options;
  Raw raw;
  CLI::App app{kHelp, "zeroth doctor"};
  app.formatter(std::make_shared<UsageFormatter>());
  app.footer(kExamples);
  app.set_help_flag("-h,--help", "Print this text and exit");
  declare(app, options, raw);
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // CLI11 consumes the vector from its end
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    return {.text = app.help()};
  } catch (const CLI::ParseError& error) {
    refuse(in_our_words(error.what()));
  }
  try {
    check(app, options, raw);
  } catch (const Error& error) {
    // What zeroth-run's own functions refuse has its hint where there is none.
    if (error.context().hint != "zeroth-run --help") throw;
    ErrorContext context = error.context();
    context.hint = kHint;
    throw Error(error.code(), error.message(), std::move(context));
  }
  return {.options = std::move(options)};
}

}  // namespace

CommandLine parse_command_line(std::span<const char* const> arguments) {
  const std::string_view word = arguments.empty() ? "" : arguments.front();
  if (word == "--version") return {.text = fmt::format("zeroth {}\n", version_text())};
  if (word == "doctor") return parse_doctor(arguments.subspan(1));
  if (word == "-h" || word == "--help")
    return {.text =
                "Usage: zeroth doctor [options]\n       zeroth ckpt COMMAND [options]\n"
                "       zeroth schedule NAME [options]\n       zeroth --version\n\n"
                "zeroth doctor --help, zeroth ckpt --help and zeroth schedule --help say more.\n"};
  refuse(word.empty() ? "nothing to do was given" : "there is no such thing to do",
         {.expected = "doctor, ckpt or schedule", .got = word.empty() ? "" : in_quotes(word)});
}

}  // namespace zeroth::doctor
