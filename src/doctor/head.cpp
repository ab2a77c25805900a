#include "doctor/head.h"

#include "base/unique_fd.h"
#include "doctor/status_lines.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace zeroth::doctor {
namespace {

namespace fs = std::filesystem;

/// For zeroth-run to end by itself after its own deadline.
constexpr Milliseconds kFarewell{15'000};

std::string own_program() {
  std::error_code error;
  const fs::path path = fs::read_symlink("/proc/self/exe", error);
  ZR_CHECK(!error, ErrorCode::kEnvironment, "the path of this program cannot be read: " + error.message(),
           {.where = "zeroth doctor"});
  return path.string();
}

/// Beside this program, where they are installed together; else in PATH.
std::string zeroth_run() {
  const std::string beside = (fs::path(own_program()).parent_path() / "zeroth-run").string();
  return ::access(beside.c_str(), X_OK) == 0 ? beside : "zeroth-run";
}

std::string host_list(const std::vector<zeroth::HostEntry>& hosts) {
  std::vector<std::string> parts;
  for (const zeroth::HostEntry& host : hosts) {
    const bool is_ipv6 = host.name.find(':') != std::string::npos;
    parts.push_back(fmt::format("{}:{}", is_ipv6 ? "[" + host.name + "]" : host.name, host.num_slots));
  }
  return join(parts, ",");
}

std::string seconds(Milliseconds time) {
  return fmt::format("{:.3f}", static_cast<double>(time.count()) / 1000);
}

std::vector<std::string> command_of(const Options& options, const std::vector<zeroth::HostEntry>& hosts,
                                    const std::string& status_file) {
  std::vector<std::string> command{zeroth_run(), "-q", "--no-prefix", "--timeout", seconds(options.timeout)};
  if (!status_file.empty()) command.insert(command.end(), {"--json", status_file});
  if (hosts.empty()) {
    command.insert(command.end(), {"-n", std::to_string(options.num_ranks)});
  } else {
    command.insert(command.end(), {"--hosts", host_list(hosts), "--connect-timeout", seconds(options.connect_timeout)});
    if (!options.ssh.empty()) command.insert(command.end(), {"--ssh", options.ssh});
    if (!options.remote_program.empty()) command.insert(command.end(), {"--remote-program", options.remote_program});
  }
  command.insert(command.end(), {"--", own_program(), "doctor", "--report"});
  command.insert(command.end(), options.for_ranks.begin(), options.for_ranks.end());
  return command;
}

/// A child that goes with the object.
class Child {
 public:
  Child(std::vector<std::string> command, UniqueFd& out) {
    std::array<int, 2> ends{};
    ZR_CHECK(::pipe2(ends.data(), O_CLOEXEC) == 0, ErrorCode::kResource, "no pipe: " + errno_text(errno),
             {.where = "zeroth doctor"});
    out = UniqueFd(ends[0]);
    const UniqueFd write_end(ends[1]);
    std::vector<char*> arguments;
    for (std::string& argument : command) arguments.push_back(argument.data());
    arguments.push_back(nullptr);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    ZR_CHECK(pid_ >= 0, ErrorCode::kResource, "no process: " + errno_text(errno), {.where = "zeroth doctor"});
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGTERM);
      if (::getppid() != parent || ::dup2(write_end.get(), STDOUT_FILENO) < 0) ::_exit(127);
      ::execvp(arguments.front(), arguments.data());
      ::_exit(127);
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (pid_ > 0) std::ignore = end(Deadline(Milliseconds{0}));
  }

  /// Its wait status. After the deadline it is asked to end (its ranks end with it), then made to.
  int end(const Deadline& deadline) {
    const Deadline last(deadline.remaining() + Milliseconds{5000});
    bool told = false;
    int status = 0;
    while (true) {
      const pid_t ended = ::waitpid(pid_, &status, WNOHANG);
      if (ended == pid_ || (ended < 0 && errno != EINTR)) break;
      if (deadline.passed() && !std::exchange(told, true)) ::kill(pid_, SIGTERM);
      if (last.passed()) ::kill(pid_, SIGKILL);
      ::poll(nullptr, 0, 10);
    }
    pid_ = -1;
    return status;
  }

 private:
  pid_t pid_ = -1;
};

/// All that comes, up to the deadline and the size of a report.
std::string read_all(int fd, const Deadline& deadline) {
  std::string text;
  std::array<char, 65536> block{};
  while (!deadline.passed() && text.size() <= kMaxReportBytes) {
    pollfd polled{.fd = fd, .events = POLLIN, .revents = 0};
    if (::poll(&polled, 1, static_cast<int>(deadline.slice().count())) <= 0) continue;
    const ssize_t got = ::read(fd, block.data(), block.size());
    if (got == 0) break;
    if (got > 0)
      text.append(block.data(), static_cast<std::size_t>(got));
    else if (errno != EINTR && errno != EAGAIN)
      break;
  }
  return text;
}

std::string read_from_start(int fd) {
  std::string text;
  std::array<char, 65536> block{};
  while (text.size() <= kMaxReportBytes) {
    const ssize_t got = ::pread(fd, block.data(), block.size(), static_cast<off_t>(text.size()));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    text.append(block.data(), static_cast<std::size_t>(got));
  }
  return text;
}

/// A nameless file, and a path to it for a child.
std::pair<UniqueFd, std::string> make_status_file() {
  UniqueFd file(::memfd_create("zeroth-doctor-status", MFD_CLOEXEC));
  if (!file.valid()) {
    std::string path = fs::temp_directory_path().string() + "/zeroth-doctor-XXXXXX";
    file = UniqueFd(::mkostemp(path.data(), O_CLOEXEC));
    if (!file.valid()) return {};
    ::unlink(path.c_str());
  }
  std::string path = fmt::format("/proc/{}/fd/{}", ::getpid(), file.get());
  return {std::move(file), std::move(path)};
}

struct Attempt {
  std::optional<Report> report{};
  std::string status_lines{};
  int wait_status = 0;
};

Attempt attempt(const Options& options, const std::vector<zeroth::HostEntry>& hosts) {
  const auto [status_file, status_path] = make_status_file();
  const Deadline deadline(options.timeout + (hosts.empty() ? Milliseconds{0} : options.connect_timeout) + kFarewell);
  UniqueFd out;
  Child child(command_of(options, hosts, status_path), out);
  const std::string text = read_all(out.get(), deadline);
  Attempt result{.wait_status = child.end(deadline)};
  if (status_file.valid()) result.status_lines = read_from_start(status_file.get());
  const bool whole = WIFEXITED(result.wait_status) && WEXITSTATUS(result.wait_status) == 0;
  ZR_CHECK(!(WIFEXITED(result.wait_status) && WEXITSTATUS(result.wait_status) == 127), ErrorCode::kUsage,
           "cannot start " + zeroth_run(),
           {.where = "zeroth doctor",
            .hint = "zeroth and zeroth-run are installed side by side; or put zeroth-run in PATH"});
  if (whole) result.report = report_from(text);
  return result;
}

/// The job as a whole failed, and no host can be blamed.
Finding failure_of(const Attempt& failed) {
  Finding finding{.code = ErrorCode::kLaunch, .message = "the ranks of the examination did not run to their end"};
  finding.context.got = end_of(failed.status_lines);
  if (finding.context.got.empty()) {
    finding.context.got = WIFSIGNALED(failed.wait_status)
                              ? fmt::format("zeroth-run was ended by signal {}", WTERMSIG(failed.wait_status))
                              : fmt::format("zeroth-run exited with code {}", WEXITSTATUS(failed.wait_status));
  }
  finding.context.hint = "see the lines above";
  return finding;
}

/// What the plan is made for: hosts of as many ranks as the smallest has, with the usual links.
Cluster cluster_of(const Report& report, const Options& options) {
  std::set<int> hosts;
  for (const RankFacts& facts : report.ranks) hosts.insert(facts.host);
  Cluster cluster{.hosts = static_cast<int>(hosts.size()), .compute_s = options.compute_s};
  cluster.ranks_per_host = std::max(1, static_cast<int>(report.ranks.size()));
  cluster.bytes_per_host = ~std::uint64_t{0};
  for (const RankFacts& facts : report.ranks) {
    cluster.ranks_per_host = std::min(cluster.ranks_per_host,
                                      static_cast<int>(std::ranges::count(report.ranks, facts.host, &RankFacts::host)));
  }
  for (const RankFacts& facts : report.ranks)
    cluster.bytes_per_host = std::min(cluster.bytes_per_host, facts.memory_available);
  if (options.memory_bytes > 0) cluster.bytes_per_host = options.memory_bytes;
  for (const Link& link : report.links) {
    const double rate = usual_of(report, link.transport, link.far).bytes_per_s;
    double& known = link.far ? cluster.far_bytes_per_s : cluster.near_bytes_per_s;
    // MPI's comes after TCP's, and is what carries the training.
    known = link.far && link.transport == "tcp" && known > 0 ? known : rate;
  }
  return cluster;
}

/// Hosts are called as the user has called them, also those of which nobody came.
void name_hosts(Report& report, const std::vector<zeroth::HostEntry>& hosts) {
  int first_rank = 0;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const int host = static_cast<int>(i);
    const auto entry = std::ranges::find(report.hosts, host, &HostEntry::host);
    if (entry != report.hosts.end()) {
      entry->name = hosts[i].name;
    } else {
      report.hosts.push_back({.host = host, .name = hosts[i].name});
    }
    for (LostRank& lost : report.lost) {
      if (lost.rank >= first_rank && lost.rank < first_rank + hosts[i].num_slots) lost.host = host;
    }
    first_rank += hosts[i].num_slots;
  }
}

}  // namespace

Report examine(const Options& options) {
  std::vector<zeroth::HostEntry> hosts = options.hosts;
  std::vector<Finding> refused;
  while (true) {
    Attempt now = attempt(options, hosts);
    if (now.report) {
      Report report = std::move(*now.report);
      name_hosts(report, hosts);
      report.findings.insert(report.findings.begin(), refused.begin(), refused.end());
      return report;
    }
    const std::size_t before = hosts.size();
    for (const Culprit& culprit : to_leave_out(culprits_of(now.status_lines))) {
      if (std::erase_if(hosts, [&](const zeroth::HostEntry& host) { return host.name == culprit.host; }) == 0) continue;
      refused.push_back({.code = ErrorCode::kLaunch,
                         .message = "a host cannot take part",
                         .context = {.where = culprit.host,
                                     .got = culprit.text,
                                     .hint = "try by hand: ssh -o BatchMode=yes -- HOST zeroth-run --version"}});
    }
    if (hosts.size() == before) refused.push_back(failure_of(now));
    if (hosts.empty() || hosts.size() == before) return {.findings = std::move(refused)};
  }
}

void conclude(Report& report, const Options& options) {
  judge(report, options.thresholds);
  if (!options.model || report.ranks.empty()) return;
  try {
    const Cluster cluster = cluster_of(report, options);
    report.advice = describe(advise(*options.model, cluster), *options.model, cluster);
  } catch (const Error& error) {
    report.advice = {std::string("no plan can be proposed: ") + error.what()};
  }
}

}  // namespace zeroth::doctor
