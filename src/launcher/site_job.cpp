#include "launcher/site_job.h"

#include "hosts/secret.h"
#include "hosts/site_hub.h"
#include "hosts/sockets.h"
#include "launcher/environment.h"
#include "launcher/rank_process.h"
#include "launcher/signals.h"

#include <zeroth/base/error.h>
#include <zeroth/base/preemption.h>
#include <zeroth/base/surroundings.h>

#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::launcher {
namespace {

/// A zeroth-run of its own, in a process group of its own.
struct RunningSite {
  int number;
  RankProcess process;
  std::optional<ExitStatus> end{};
};

std::string words_of(const ExitStatus& end) {
  return end.signal != 0 ? fmt::format("was killed by signal {}", end.signal)
                         : fmt::format("ended with exit code {}", end.exit_code);
}

int code_of(const ExitStatus& end) {
  return end.signal != 0 ? 128 + end.signal : end.exit_code;
}

pid_t start_site(const std::vector<char*>& arguments, const InheritedSignals& inherited) {
  const pid_t launcher = ::getpid();
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(1);
  ::sigaction(SIGCHLD, &inherited.on_child, nullptr);
  ::sigaction(SIGPIPE, &inherited.on_pipe, nullptr);
  ::sigprocmask(SIG_SETMASK, &inherited.mask, nullptr);
  ::execv("/proc/self/exe", arguments.data());
  ::_exit(exit_code(ErrorCode::kLaunch));
}

class SiteJob {
 public:
  SiteJob(const Options& options, const Console& console, SiteHub& hub)
      : options_(options), console_(console), hub_(hub) {}

  void start(std::span<const char* const> arguments) {
    for (int site = 0; site < options_.num_sites; ++site) {
      std::vector<std::string> words{"zeroth-run", "--site", std::to_string(site)};
      words.insert(words.end(), arguments.begin(), arguments.end());
      std::vector<char*> pointers;
      for (std::string& word : words) pointers.push_back(word.data());
      pointers.push_back(nullptr);
      const pid_t pid = start_site(pointers, console_.inbox.inherited());
      if (pid < 0) throw Error(ErrorCode::kResource, "cannot start a site: " + errno_text(errno));
      ::setpgid(pid, pid);  // whoever comes first
      sites_.push_back({.number = site, .process = RankProcess(pid)});
    }
  }

  /// Until all sites have ended; without sites until a signal comes.
  int run() {
    const bool hub_alone = sites_.empty();
    while (num_running() > 0 || (hub_alone && stopped_by_ == 0)) {
      std::vector<pollfd> polled{{.fd = console_.inbox.fd(), .events = POLLIN, .revents = 0}};
      hub_.add_polled(polled);
      ::poll(polled.data(), polled.size(), static_cast<int>(SiteHub::kTurnEvery.count()));
      for (const int signal : console_.inbox.take()) handle(signal);
      look_for_exits();
      hub_.turn();
      if (const std::string notice = hub_.take_notice(); !notice.empty()) console_.say(notice);
      console_.err.flush_some();
    }
    if (hub_alone) return 128 + stopped_by_;
    int code = 0;
    for (const RunningSite& site : sites_) {
      const int own = code_of(*site.end);
      if (own == kExitPreempted && code == 0) code = own;
      if (site.number == first_failed_) return own;
    }
    return code;
  }

 private:
  [[nodiscard]] int num_running() const {
    int running = 0;
    for (const RunningSite& site : sites_) running += site.end ? 0 : 1;
    return running;
  }

  // The sites pass them on to their ranks, each once.
  void handle(int signal) {
    if (signal == SIGCHLD) return;
    for (const RunningSite& site : sites_) {
      if (!site.end) site.process.signal_leader(signal);
    }
    if (signal == SIGTSTP) {
      ::kill(::getpid(), SIGSTOP);
      for (const RunningSite& site : sites_) site.process.signal_leader(SIGCONT);
    } else if (signal != SIGUSR1 && signal != SIGUSR2) {
      stopped_by_ = signal;
    }
  }

  void look_for_exits() {
    for (RunningSite& site : sites_) {
      if (site.end) continue;
      site.end = site.process.exit_status();
      if (!site.end) continue;
      site.process.end_group();
      hub_.turn();  // which rank it was says the end of its connection
      hub_.gone(site.number);
      if (site.end->ok() || site.end->preempted()) continue;
      if (first_failed_ < 0) first_failed_ = site.number;
      console_.say(fmt::format("site {} {}{}", site.number, words_of(*site.end),
                               num_running() > 0 ? "; the other sites are not ended for it" : ""));
    }
  }

  const Options& options_;
  const Console& console_;
  SiteHub& hub_;
  std::vector<RunningSite> sites_;
  int first_failed_ = -1;
  int stopped_by_ = 0;
};

void set_variable(const char* name, const std::string& value) {
  if (::setenv(name, value.c_str(), 1) != 0)
    throw Error(ErrorCode::kResource, "cannot set a variable: " + errno_text(errno), {.which = name});
}

}  // namespace

int run_sites(const Options& options, std::span<const char* const> arguments, const Console& console) {
  const bool hub_alone = options.site_hub.port != 0;
  std::string secret;
  if (hub_alone) {
    secret = read_secret(options.secret_file);
    if (const std::string warning = warning_of_secret(options.secret_file); !warning.empty()) console.say(warning);
  } else {
    secret = random_job_id();
  }
  SiteHub hub(options.num_sites, hub_alone ? options.site_hub : Endpoint{.host = "127.0.0.1", .port = 0}, secret);
  SiteJob job(options, console, hub);
  if (hub_alone) {
    if (!options.quiet)
      console.say(fmt::format("the hub of {} sites listens at {}", options.num_sites, text_of(options.site_hub)));
    return job.run();
  }
  set_variable(kSitesAtVariable, fmt::format("127.0.0.1:{}", hub.port()));
  set_variable(kSitesSecretVariable, secret);
  // Else each site would share out all cores of this host.
  if (const std::string threads = variable_or_empty("OMP_NUM_THREADS"); threads.empty())
    set_variable("OMP_NUM_THREADS", std::to_string(std::max(1, count_cores() / options.num_ranks)));
  if (!options.quiet)
    console.say(fmt::format("{} sites of {} rank{}", options.num_sites, options.num_ranks / options.num_sites,
                            options.num_ranks == options.num_sites ? "" : "s"));
  job.start(arguments);
  return job.run();
}

void take_site_variables(const Options& options) {
  if (options.site < 0) {  // this job's ranks are none of a site around it
    for (const char* name : {kSiteVariable, kSitesAtVariable, kSitesSecretVariable}) ::unsetenv(name);
    return;
  }
  if (options.sites_at.port != 0) {
    set_variable(kSitesAtVariable, text_of(options.sites_at));
    set_variable(kSitesSecretVariable, read_secret(options.secret_file));
  }
  set_variable(kSiteVariable, fmt::format("{}/{}", options.site, options.num_sites));
}

}  // namespace zeroth::launcher
