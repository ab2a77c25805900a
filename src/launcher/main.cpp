// zeroth-run: starts the ranks of a program on this host and ends all of them when one fails.

#include "launcher/environment.h"
#include "launcher/options.h"
#include "launcher/output.h"
#include "launcher/signals.h"
#include "launcher/spawn.h"
#include "launcher/supervisor.h"

#include <zeroth/base/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace zeroth::launcher {
namespace {

/// Descriptors 0 to 2 are always open, so that none of ours lands there and is taken for a rank's stream.
void open_standard_streams() {
  while (true) {
    const int fd = ::open("/dev/null", O_RDWR);
    if (fd < 0 || fd > 2) {
      ::close(fd);
      return;
    }
  }
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno != EINTR) {
      return;
    }
    text.remove_prefix(static_cast<std::size_t>(written < 0 ? 0 : written));
  }
}

std::vector<std::string> current_environment() {
  std::vector<std::string> result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    result.emplace_back(*entry);
  }
  return result;
}

bool same_file(int a, int b) {
  struct stat info_a {};
  struct stat info_b {};
  return ::fstat(a, &info_a) == 0 && ::fstat(b, &info_b) == 0 && info_a.st_dev == info_b.st_dev &&
         info_a.st_ino == info_b.st_ino;
}

std::string tee_path(const Options& options, int rank, const char* stream) {
  return options.tee_directory.empty() ? ""
                                       : fmt::format("{}/rank{}.{}.log", options.tee_directory, rank, stream);
}

LineStyle style_of(const Options& options, int rank, LineMerger& merger) {
  if (options.merge) {
    return {.taker = [&merger, rank](std::string_view line) { merger.add(rank, line, SteadyClock::now()); }};
  }
  return {.prefix = options.prefix ? fmt::format("[{}] ", rank) : "",
          .pass_through = !options.prefix && options.num_ranks == 1};
}

StartedRank start_rank(const Options& options,
                       int rank,
                       const SpawnPlan& plan,
                       const SignalInbox& inbox,
                       OutputSink& out,
                       OutputSink& err,
                       Supervisor& job) {
  const auto stream = [&](UniqueFd pipe, OutputSink& sink, const char* name) {
    return RankStream(std::move(pipe), sink, style_of(options, rank, job.merger(sink)), tee_path(options, rank, name));
  };
  SpawnedRank spawned = spawn_rank(plan, inbox.inherited());
  return {.process = std::move(spawned.process),
          .out = stream(std::move(spawned.out), out, "stdout"),
          .err = stream(std::move(spawned.err), err, "stderr")};
}

/// Starts all ranks; a failure throws, and what was started until then ends with the supervisor.
void start_ranks(
    const Options& options, const SignalInbox& inbox, OutputSink& out, OutputSink& err, Supervisor& job) {
  const std::vector<std::string> parent = current_environment();
  const char* search_path = std::getenv("PATH");
  SpawnPlan plan{
      .program =
          find_program(options.command.front(), search_path != nullptr ? search_path : "/usr/bin:/bin"),
      .arguments = options.command,
      .descriptors = reserve_descriptors(options.num_ranks, options.tee_directory.empty() ? 2 : 4)};
  const JobFacts facts = make_job_facts(options.num_ranks, parent, options.environment);
  if (facts.omp_threads > 0 && !options.quiet) {
    job.say(fmt::format("OMP_NUM_THREADS={} in every rank ({} cores, {} ranks)",
                        facts.omp_threads,
                        facts.num_cores,
                        options.num_ranks));
  }
  if (!options.tee_directory.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options.tee_directory, error);
    if (error) {
      throw Error(ErrorCode::kIo,
                  fmt::format("cannot make the directory {}: {}", options.tee_directory, error.message()),
                  {.where = "--tee"});
    }
  }
  const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    plan.environment = rank_environment(facts, rank, parent, options.environment);
    plan.stdin_fd = nothing.get();
    UniqueFd relay_read;
    if (rank == 0 && options.forward_stdin) {
      int ends[2];
      if (::pipe2(ends, O_CLOEXEC) != 0) {
        throw Error(ErrorCode::kResource, "no pipe for standard input: " + errno_text(errno));
      }
      relay_read.reset(ends[0]);
      job.set_stdin(StdinRelay(STDIN_FILENO, UniqueFd(ends[1])));
      plan.stdin_fd = relay_read.get();
    }
    job.add(start_rank(options, rank, plan, inbox, out, err, job));
  }
}

int run(std::span<const char* const> arguments) {
  const CommandLine command_line = parse_command_line(arguments);
  if (!command_line.options) {
    write_all(STDOUT_FILENO, command_line.text);
    return 0;
  }
  const Options& options = *command_line.options;
  SignalInbox inbox;
  // Orphans of the ranks become our children, so that we can see the end of them.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  OutputSink out(STDOUT_FILENO);
  OutputSink separate_err(STDERR_FILENO);
  // One terminal or one file: one queue, which keeps the order in which lines came.
  OutputSink& err = same_file(STDOUT_FILENO, STDERR_FILENO) ? out : separate_err;
  Supervisor job(options, inbox, out, err);
  start_ranks(options, inbox, out, err, job);
  return job.run();
}

}  // namespace
}  // namespace zeroth::launcher

int main(int argc, char** argv) {
  zeroth::launcher::open_standard_streams();
  zeroth::ErrorCode code = zeroth::ErrorCode::kInternal;
  std::string text;
  try {
    const std::vector<const char*> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
    return zeroth::launcher::run(arguments);
  } catch (const zeroth::Error& error) {
    code = error.code();
    text = error.what();
  } catch (const std::exception& error) {
    text = std::string("[INTERNAL] ") + error.what();
  }
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';  // one line, whatever the arguments held
  }
  zeroth::launcher::write_all(STDERR_FILENO, "zeroth-run: " + text + "\n");
  return zeroth::exit_code(code);
}
