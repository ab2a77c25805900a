#include "launcher/options.h"

#include "hosts/option_values.h"
#include "hosts/site_messages.h"
#include "hosts/text_cursor.h"
#include "launcher/environment.h"
#include "launcher/foreign_options.h"
#include "launcher/messages.h"
#include "launcher/program.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/text.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <utility>

namespace zeroth::launcher {
namespace {

/// Variables that say who a rank is. A user's value would contradict what the launcher started.
constexpr std::array kOwned{"RANK",
                            "LOCAL_RANK",
                            "WORLD_SIZE",
                            "LOCAL_WORLD_SIZE",
                            "GROUP_RANK",
                            "GROUP_WORLD_SIZE",
                            "NODE_RANK",
                            "TORCHELASTIC_RUN_ID",
                            "TORCHELASTIC_RESTART_COUNT",
                            "TORCHELASTIC_MAX_RESTARTS",
                            "ZEROTH_BOUND_CORES",
                            "ZEROTH_ENDED_RANKS",
                            "ZEROTH_JOB_ID",
                            "ZEROTH_RESTART_COUNT",
                            "ZEROTH_SITE",
                            "ZEROTH_SITES_AT",
                            "ZEROTH_SITES_SECRET"};

/// --env NAME=VALUE; not of the variables that say who a rank is.
std::pair<std::string, std::string> parse_assignment(const std::string& text) {
  const std::size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  if (equals == std::string::npos || !valid_variable_name(name)) {
    refuse_usage("not an environment assignment",
                 {.which = "--env",
                  .expected = "NAME=VALUE, NAME of letters, digits and _ that does not start with a digit",
                  .got = fmt::format("'{}'", text)});
  }
  if (std::find(kOwned.begin(), kOwned.end(), name) != kOwned.end()) {
    refuse_usage("this variable is set by zeroth-run itself, for each rank", {.which = name});
  }
  return {name, text.substr(equals + 1)};
}

constexpr const char* kDescription =
    "zeroth-run starts N ranks of a program, on this host or on several, and ends all of them when one "
    "fails.\n"
    "Each rank finds its place in the world in torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, ...).\n"
    "Its exit code is 0, or that of the first rank that failed (128 + signal if a signal ended it);\n"
    "75 if ranks have made room and ask to be started again.\n";

constexpr const char* kExamples =
    "Examples:\n"
    "  zeroth-run -n 2 ./trainer --steps 100          two ranks of a C++ trainer\n"
    "  zeroth-run -n 4 train.py                       four ranks of a Python script: VIRTUAL_ENV's Python, or PATH's\n"
    "  zeroth-run -n 4 -m package.train --steps 100   four ranks of python -m\n"
    "  zeroth-run -n 4 --log-dir logs ./trainer       also logs/rank0.stdout.log, ...\n"
    "  zeroth-run -n 2 --env OMP_NUM_THREADS=4 ./trainer\n"
    "  zeroth-run -n 2 --timeout 600 -- ./trainer     give up after ten minutes\n"
    "  zeroth-run --hostfile hosts ./trainer          as many ranks on each host as it has slots\n";

class UsageFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App* /*app*/, std::string /*name*/) const override {
    return "\nUsage: zeroth-run -n N [options] PROGRAM [arguments...]\n";
  }
};

/// One line a site: name, file and line, moment.
std::string list_of_failpoints() {
  std::string text;
  for (const Failpoint& site : failpoints()) {
    text += fmt::format("{:<28}{:<44}{}{}\n", site.name, fmt::format("{}:{}", site.file, site.line), site.what,
                        site.kind == FailpointKind::kSystemCall ? " (errno=NAME)"
                        : site.kind == FailpointKind::kNoThrow  ? " (no throw)"
                                                                : "");
  }
  return text;
}

/// "" where there is none.
std::string hint_for_unknown(const std::string& name, const std::vector<std::string>& known) {
  if (std::string hint = hint_for_foreign_option(name); !hint.empty()) return hint;
  const std::string own = with_hyphens(name);
  const bool is_known = std::ranges::find(known, own) != known.end();
  const std::string near = is_known ? own : nearest_name(name, known);
  return near.empty() ? "" : "did you mean " + near + "?";
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
    refuse_usage("unknown option", {.which = name, .hint = hint_for_unknown(name, known)});
  }
  const bool is_module = app.count("-m") != 0;
  if (rest.empty() || rest.front().empty() || (!is_module && rest == std::vector<std::string>{kModule})) {
    refuse_usage(is_module ? "no module to run was given" : "no program to run was given");
  }
  if (is_module) rest.insert(rest.begin(), kModule);
  return rest;
}

/// Values as they were given.
struct Raw {
  std::string num_ranks;
  std::string ranks_per_node;
  std::string num_gpus;
  std::string timeout;
  std::string grace;
  std::string preempt_grace;
  std::string connect_timeout;
  std::string lost_after;
  std::string remote_program;
  std::string num_nodes;
  std::string node;
  std::string rendezvous;
  std::string bind;
  std::string max_restarts;
  std::string num_sites;
  std::string site;
  std::string site_hub;
  std::string sites_at;
  std::vector<std::string> assignments;
  bool is_module = false;
  bool no_prefix = false;
  bool no_merge = false;
};

void declare(CLI::App& app, Options& options, Raw& raw) {
  app.add_option("-n,--ranks", raw.num_ranks, "Number of ranks to start, 1 to 4096")->type_name("N");
  app.add_option("--nproc-per-node,--nproc_per_node", raw.ranks_per_node,
                 "The same, or gpu, cpu, auto; with hosts: of each of them (torchrun)")
      ->type_name("N");
  app.add_option("--num-gpus,--num_gpus", raw.num_gpus, "The same; with hosts: of each of them (DeepSpeed)")
      ->type_name("N");
  app.add_flag("-m,--module", raw.is_module, "PROGRAM is a module of Python: python -m PROGRAM");
  app.add_flag("--no-prefix", raw.no_prefix, "Do not put '[rank] ' before each line of output");
  app.add_flag("--no-merge", raw.no_merge, "Write a line that several ranks write as often as it comes");
  app.add_option("--log-dir,--tee", options.log_directory,
                 "Also write DIR/rank<r>.stdout.log and .stderr.log, unchanged")
      ->type_name("DIR");
  app.add_flag("--stdin", options.forward_stdin, "Rank 0 reads this program's standard input (else /dev/null)");
  app.add_option("--env", raw.assignments, "Set a variable in every rank; may be given several times")
      ->type_name("NAME=VALUE")
      ->expected(1)
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--timeout", raw.timeout, "End the whole job after this time")->type_name("SECONDS");
  app.add_option("--grace", raw.grace, "From a forwarded Ctrl-C or SIGTERM to SIGKILL (2)")->type_name("SECONDS");
  app.add_option("--preempt-grace", raw.preempt_grace, "The same for SIGTERM where a rank makes room (30)")
      ->type_name("SECONDS");
  app.add_option("--bind-cores", raw.bind, "Each rank on cores of its own: auto (where there are enough), on, off")
      ->type_name("WHEN");
  app.add_option("--max-restarts", raw.max_restarts, "Start the whole job again after a failure, at most K times (0)")
      ->type_name("K");
  app.add_option("--json", options.json_file, "Write status lines (JSON) to FILE")->type_name("FILE");
  app.add_option("--launcher", options.launcher, "Let mpirun or srun start the job; prints the command")
      ->type_name("NAME");
  app.add_flag("--dry-run", options.dry_run, "Only print which ranks would run where, by which command");
  app.add_flag("-q,--quiet", options.quiet, "No informational lines");
}

void declare_hosts(CLI::App& app, Options& options, Raw& raw) {
  const std::string group = "Several hosts";
  app.add_option("--hostfile", options.hostfile, "Start ranks on the hosts of FILE, lines HOST slots=N")
      ->type_name("FILE")
      ->group(group);
  app.add_option("--hosts", options.hosts, "Start ranks on these hosts: HOST[:SLOTS],...")
      ->type_name("LIST")
      ->group(group);
  app.add_option("--include", options.include, "Only these: HOST[:SLOT,...]@...")->type_name("NODES")->group(group);
  app.add_option("--exclude", options.exclude, "All but these: HOST[:SLOT,...]@...")->type_name("NODES")->group(group);
  app.add_option("--ssh", options.ssh, "A program that is called like ssh (ZEROTH_SSH, ssh)")
      ->type_name("PROGRAM")
      ->group(group);
  app.add_option("--remote-program", raw.remote_program, "zeroth-run on the other hosts (zeroth-run)")
      ->type_name("PATH")
      ->group(group);
  app.add_option("--connect-timeout", raw.connect_timeout, "How long to wait for the hosts at the start (60)")
      ->type_name("SECONDS")
      ->group(group);
  app.add_option("--lost-after", raw.lost_after, "A host that is silent for so long is lost (10)")
      ->type_name("SECONDS")
      ->group(group);
}

void declare_nodes(CLI::App& app, Options& options, Raw& raw) {
  const std::string group = "Nodes that are started one by one (Kubernetes, other schedulers)";
  app.add_option("--nnodes", raw.num_nodes, "Number of nodes; zeroth-run is started on each")
      ->type_name("N")
      ->group(group);
  app.add_option("--node-rank", raw.node, "Number of this node, from 0")->type_name("K")->group(group);
  app.add_option("--rdzv", raw.rendezvous, "Where node 0 listens, the same on all nodes")
      ->type_name("HOST:PORT")
      ->group(group);
  app.add_option("--rdzv-secret-file", options.secret_file, "The secret that the nodes share (ZEROTH_RDZV_SECRET)")
      ->type_name("FILE")
      ->group(group);
}

void declare_sites(CLI::App& app, Raw& raw) {
  const std::string group = "Sites that train apart, and outlive each other (docs/slow-links.md)";
  app.add_option("--sites", raw.num_sites,
                 "Run the ranks as S jobs, with a hub between them; --max-restarts is of each")
      ->type_name("S")
      ->group(group);
  app.add_option("--site", raw.site, "Run this site of them alone, from 0")->type_name("K")->group(group);
  app.add_option("--sites-at", raw.sites_at, "Where its hub is (ZEROTH_SITES_AT)")
      ->type_name("HOST:PORT")
      ->group(group);
  app.add_option("--hub", raw.site_hub, "Run the hub alone, which listens there")->type_name("HOST:PORT")->group(group);
}

constexpr bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

bool given(const CLI::App& app, const char* option) {
  return app.count(option) != 0;
}

void check_hosts(const CLI::App& app, Options& options, const Raw& raw) {
  for (const char* option : {"--hostfile", "--hosts", "--include", "--exclude", "--ssh"}) {
    if (given(app, option) && app.get_option(option)->as<std::string>().empty())
      refuse_usage("an empty value", {.which = option});
  }
  if (given(app, "--hostfile") && given(app, "--hosts"))
    refuse_usage("--hostfile and --hosts together", {.hint = "give one of the two"});
  if (!options.several_hosts()) {
    for (const char* option : {"--include", "--exclude", "--ssh", "--remote-program"}) {
      if (given(app, option))
        refuse_usage("this option needs hosts", {.which = option, .hint = "add --hostfile or --hosts"});
    }
  }
  if (options.several_hosts() && options.forward_stdin) {
    refuse_usage("standard input does not reach other hosts", {.which = "--stdin", .hint = "let rank 0 read a file"});
  }
  if (const char* ssh = std::getenv("ZEROTH_SSH"); ssh != nullptr && options.ssh.empty()) options.ssh = ssh;
  if (options.ssh.empty()) options.ssh = "ssh";
  if (given(app, "--remote-program")) options.remote_program = parse_remote_program(raw.remote_program);
  if (given(app, "--connect-timeout"))
    options.connect_timeout = parse_seconds("--connect-timeout", raw.connect_timeout);
  if (given(app, "--lost-after")) options.lost_after = parse_seconds("--lost-after", raw.lost_after);
}

/// torchrun's MIN:MAX.
void refuse_elastic(const std::string& nodes) {
  const std::size_t colon = nodes.find(':');
  if (colon == std::string::npos) return;
  const std::string least = nodes.substr(0, colon);
  const std::string most = nodes.substr(colon + 1);
  refuse_usage(
      "the number of nodes is fixed: a job does not go on with fewer, and takes no more",
      {.which = "--nnodes",
       .expected = "one number",
       .got = fmt::format("'{}'", nodes),
       .hint = fmt::format("write --nnodes {}, and --max-restarts K to start all nodes again after a failure; a "
                           "checkpoint can be loaded on any number of ranks",
                           least == most || most.empty() ? least : fmt::format("{} or {}", least, most))});
}

void check_nodes(const CLI::App& app, Options& options, const Raw& raw) {
  if (!given(app, "--nnodes")) {
    const bool of_sites = given(app, "--hub") || given(app, "--sites-at");
    for (const char* option : {"--node-rank", "--rdzv", "--rdzv-secret-file"}) {
      if (given(app, option) && !(of_sites && option == std::string_view("--rdzv-secret-file")))
        refuse_usage("this option needs the number of nodes", {.which = option, .hint = "add --nnodes"});
    }
    return;
  }
  if (options.several_hosts()) {
    refuse_usage("--nnodes with --hostfile or --hosts",
                 {.hint = "either every node is started by itself, or this one starts them all"});
  }
  refuse_elastic(raw.num_nodes);
  options.num_nodes = parse_integer("--nnodes", raw.num_nodes, 1, kMaxRanks, "the number of nodes");
  for (const char* option : {"--node-rank", "--rdzv"}) {
    if (!given(app, option) && options.num_nodes > 1)
      refuse_usage("an option is missing beside --nnodes", {.which = option});
  }
  if (given(app, "--node-rank"))
    options.node = parse_integer("--node-rank", raw.node, 0, options.num_nodes - 1, "the number of this node");
  if (given(app, "--rdzv")) options.rendezvous = parse_endpoint("--rdzv", raw.rendezvous);
  if (given(app, "--rdzv-secret-file") && options.secret_file.empty())
    refuse_usage("an empty value", {.which = "--rdzv-secret-file"});
  if (options.node > 0 && options.forward_stdin) refuse_usage("rank 0 is on node 0", {.which = "--stdin"});
  if (!given(app, "--connect-timeout")) options.connect_timeout = Milliseconds{300'000};
}

/// After the number of ranks is known.
void check_sites(const CLI::App& app, Options& options, const Raw& raw) {
  if (!given(app, "--sites")) {
    for (const char* option : {"--site", "--sites-at", "--hub"}) {
      if (given(app, option))
        refuse_usage("this option needs the number of sites", {.which = option, .hint = "add --sites"});
    }
    return;
  }
  options.num_sites = parse_integer("--sites", raw.num_sites, 2, kMostSites, "the number of sites");
  if (given(app, "--sites-at")) options.sites_at = parse_endpoint("--sites-at", raw.sites_at);
  if (given(app, "--hub")) {
    options.site_hub = parse_endpoint("--hub", raw.site_hub);
    if (given(app, "--site")) refuse_usage("a hub is no site", {.which = "--site", .hint = "give --hub or --site"});
    return;
  }
  const bool alone = given(app, "--sites-at");
  if (alone && !given(app, "--site")) refuse_usage("which of the sites is missing", {.which = "--site"});
  if (given(app, "--site"))
    options.site = parse_integer("--site", raw.site, 0, options.num_sites - 1, "the number of this site");
  if (!alone) {
    for (const char* option : {"--hostfile", "--hosts", "--nnodes", "--launcher", "--stdin", "--dry-run"}) {
      if (given(app, option)) {
        refuse_usage("sites that one zeroth-run starts are on this host",
                     {.which = option,
                      .hint = "start a hub (--hub), and each site with its own zeroth-run (--site, --sites-at)"});
      }
    }
    if (options.bind == BindCores::kOn) {
      refuse_usage("sites on one host share its cores",
                   {.which = "--bind-cores", .expected = "auto or off beside --sites", .got = "on"});
    }
    options.bind = BindCores::kOff;
    if (options.num_ranks % options.num_sites != 0) {
      refuse_usage("the ranks do not divide into sites of one size",
                   {.which = "-n",
                    .expected = fmt::format("a multiple of {}, the sites", options.num_sites),
                    .got = std::to_string(options.num_ranks)});
    }
    if (options.site >= 0) options.num_ranks /= options.num_sites;
  }
  if (options.site < 0) return;
  const std::string name = fmt::format("site{}", options.site);
  if (!options.log_directory.empty()) options.log_directory += "/" + name;
  if (!options.json_file.empty()) options.json_file += "." + name;
}

/// What another launcher would not do is refused, not dropped.
void check_launcher(const CLI::App& app, const Options& options) {
  if (!given(app, "--launcher")) {
    return;
  }
  if (options.launcher != "mpirun" && options.launcher != "srun") {
    const std::string& name = options.launcher;
    refuse_usage("no such launcher",
                 {.which = "--launcher",
                  .expected = "mpirun or srun",
                  .got = zeroth::in_quotes(name),
                  .hint = name == "openmpi"                 ? "write mpirun"
                          : name == "slurm"                 ? "write srun"
                          : name == "pdsh" || name == "ssh" ? "leave it out: zeroth-run starts the hosts by ssh itself"
                                                            : ""});
  }
  for (const char* option :
       {"--log-dir", "--stdin", "--timeout", "--grace", "--preempt-grace", "--max-restarts", "--json", "--nnodes",
        "--ssh", "--remote-program", "--connect-timeout", "--lost-after", "--no-prefix", "--no-merge"}) {
    if (given(app, option)) {
      refuse_usage("another launcher does not know this option",
                   {.which = option, .hint = "leave it out, or leave --launcher out"});
    }
  }
}

BindCores parse_bind(const std::string& text) {
  if (text != "auto" && text != "on" && text != "off") {
    refuse_usage("not a way to bind",
                 {.which = "--bind-cores", .expected = "auto, on or off", .got = zeroth::in_quotes(text)});
  }
  return text == "on" ? BindCores::kOn : text == "off" ? BindCores::kOff : BindCores::kAuto;
}

/// The option of another launcher for the ranks of each host.
void read_ranks_per_host(const char* option, const std::string& text, Options& options) {
  const bool is_word =
      option == std::string_view(kRanksPerNode) && !text.empty() && std::ranges::all_of(text, is_letter);
  if (is_word && options.several_hosts()) {
    refuse_usage("on other hosts only their slots say how many ranks",
                 {.which = option, .got = zeroth::in_quotes(text), .hint = "leave it out, or give a number"});
  }
  if (is_word) {
    const std::vector<std::string> environment = current_environment();
    const RanksOfWord found = ranks_of_word(text, {.cores = count_cores(), .gpus = count_gpus(environment)});
    options.num_ranks = found.ranks;
    options.ranks_note = found.note;
    return;
  }
  const int number = parse_integer(option, text, 1, kMaxRanks, "the number of ranks of each host");
  (options.several_hosts() ? options.ranks_per_host : options.num_ranks) = number;
}

void read_number_of_ranks(const CLI::App& app, Options& options, const Raw& raw) {
  std::vector<std::string> said;
  for (const char* option : {"--ranks", kRanksPerNode, kNumGpus}) {
    if (given(app, option)) said.emplace_back(option == std::string_view("--ranks") ? "-n" : option);
  }
  if (said.size() > 1)
    refuse_usage("the number of ranks twice", {.which = join(said, ", "), .hint = "give one of them"});
  if (given(app, "--ranks")) {
    options.num_ranks = parse_integer("-n", raw.num_ranks, 1, kMaxRanks, "the number of ranks");
  } else if (given(app, kRanksPerNode)) {
    read_ranks_per_host(kRanksPerNode, raw.ranks_per_node, options);
  } else if (given(app, kNumGpus)) {
    read_ranks_per_host(kNumGpus, raw.num_gpus, options);
  } else if (!options.several_hosts()) {
    refuse_usage("-n N, the number of ranks, is missing (options come before PROGRAM; or --hostfile, --hosts)");
  }
}

void check(const CLI::App& app, Options& options, const Raw& raw) {
  check_launcher(app, options);
  check_hosts(app, options, raw);
  check_nodes(app, options, raw);
  if (!given(app, "--hub")) read_number_of_ranks(app, options, raw);
  options.prefix = !raw.no_prefix;
  options.merge = options.prefix && !raw.no_merge;
  if (given(app, "--log-dir") && options.log_directory.empty()) {
    refuse_usage("an empty directory name", {.which = "--log-dir"});
  }
  if (given(app, "--json") && options.json_file.empty()) refuse_usage("an empty file name", {.which = "--json"});
  if (given(app, "--bind-cores")) options.bind = parse_bind(raw.bind);
  if (given(app, "--max-restarts")) {
    options.max_restarts = parse_integer("--max-restarts", raw.max_restarts, 0, 1000, "the number of restarts");
  }
  check_sites(app, options, raw);
  if (given(app, "--timeout")) options.timeout = parse_seconds("--timeout", raw.timeout);
  if (given(app, "--grace")) options.grace = parse_seconds("--grace", raw.grace);
  if (given(app, "--preempt-grace")) options.preempt_grace = parse_seconds("--preempt-grace", raw.preempt_grace);
  for (const std::string& assignment : raw.assignments) {
    options.environment.push_back(parse_assignment(assignment));
  }
}

}  // namespace

CommandLine parse_command_line(std::span<const char* const> arguments) {
  if (arguments.size() == 1 && std::string_view(arguments.front()) == "--agent") {
    return {.is_agent = true};  // not for people: another zeroth-run speaks with it
  }
  Options options;
  Raw raw;
  CLI::App app{kDescription, "zeroth-run"};
  app.formatter(std::make_shared<UsageFormatter>());
  app.footer(kExamples);
  app.prefix_command();
  app.set_help_flag("-h,--help", "Print this text and exit");
  app.set_version_flag("--version", std::string("zeroth-run ") + ZEROTH_VERSION_TEXT);
  declare(app, options, raw);
  declare_hosts(app, options, raw);
  declare_nodes(app, options, raw);
  declare_sites(app, raw);
  app.add_flag_callback(
      "--list-failpoints", [] { throw CLI::CallForVersion(list_of_failpoints(), 0); },
      "Print the sites that ZEROTH_FAULTS can name and exit");

  // CLI11 consumes the vector from its end.
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    return {.text = app.help()};
  } catch (const CLI::CallForVersion& version) {
    return {.text = std::string(version.what()) + "\n"};
  } catch (const CLI::ArgumentMismatch& error) {
    refuse_usage("an option of this kind takes one value and is given once", {.got = in_our_words(error.what())});
  } catch (const CLI::ParseError& error) {
    refuse_usage(in_our_words(error.what()));
  }
  if (app.count("--hub") == 0) options.command = take_command(app.remaining(), app);
  check(app, options, raw);
  return {.options = std::move(options)};
}

}  // namespace zeroth::launcher
