#include "launcher/spawn.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/surroundings.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

namespace zeroth::launcher {
namespace {

/// Descriptors of the launcher that belong to no rank: standard streams, signalfd, /dev/null, the relay,
/// spare.
constexpr rlim_t kOwnDescriptors = 32;
constexpr std::size_t kChildStackBytes = std::size_t{64} << 10;

ErrorCode code_of(int error_number) {
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
    case ENAMETOOLONG:
      return ErrorCode::kUsage;
    case EACCES:
    case EPERM:
    case EISDIR:
    case ENOEXEC:
      return ErrorCode::kEnvironment;
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case EAGAIN:
      return ErrorCode::kResource;
    default:
      return ErrorCode::kLaunch;
  }
}

constexpr const char* kFewer = "start fewer ranks, or free memory";

constexpr const char* kNotExecutable = "chmod +x, or name its interpreter";

/// All that the child needs, prepared before it exists: between clone and execve it shares our memory and may
/// only make system calls.
struct ChildPlan {
  const char* program;
  char* const* arguments;
  char* const* environment;
  std::array<int, 3> streams;
  const InheritedSignals* inherited;
  const rlimit* descriptors;
  int death_signal;
  bool own_session;
  const cpu_set_t* processors;  ///< none: as they are
  std::size_t processors_bytes;
  pid_t launcher;
  int error_number;
};

/// Gives back what the launcher changed about itself.
bool restore_inherited(const ChildPlan& plan) {
  return ::setrlimit(RLIMIT_NOFILE, plan.descriptors) == 0 &&
         ::sigaction(SIGCHLD, &plan.inherited->on_child, nullptr) == 0 &&
         ::sigaction(SIGPIPE, &plan.inherited->on_pipe, nullptr) == 0;
}

bool become_rank(const ChildPlan& plan) {
  const bool leads = plan.own_session ? ::setsid() >= 0 : ::setpgid(0, 0) == 0;
  if (!leads || ::prctl(PR_SET_PDEATHSIG, plan.death_signal) != 0) {
    return false;
  }
  if (::getppid() != plan.launcher) {
    ::_exit(1);  // the launcher died before the line above: nobody would end us any more
  }
  for (int stream = 0; stream < 3; ++stream) {
    if (::dup2(plan.streams[static_cast<std::size_t>(stream)], stream) < 0) {
      return false;
    }
  }
  if (plan.processors != nullptr && ::sched_setaffinity(0, plan.processors_bytes, plan.processors) != 0) {
    return false;
  }
  // The mask comes last: a signal that waits behind it then meets the dispositions of the rank.
  return restore_inherited(plan) && ::sigprocmask(SIG_SETMASK, &plan.inherited->mask, nullptr) == 0;
}

int child_main(void* argument) {
  auto* plan = static_cast<ChildPlan*>(argument);
  if (become_rank(*plan)) {
    ::execve(plan->program, plan->arguments, plan->environment);
  }
  plan->error_number = errno;
  ::_exit(127);
}

std::vector<char*> pointers_to(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  result.reserve(texts.size() + 1);
  for (const std::string& text : texts) {
    result.push_back(const_cast<char*>(text.c_str()));
  }
  result.push_back(nullptr);
  return result;
}

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

Pipe make_pipe(const std::string& program) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    cannot_start(program, errno, errno == EMFILE ? "raise the limit of open files (ulimit -n)" : kFewer);
  }
  Pipe result{UniqueFd(ends[0]), UniqueFd(ends[1])};
  ::fcntl(result.read.get(), F_SETFL, O_NONBLOCK);
  return result;
}

}  // namespace

void cannot_start(const std::string& program, int error_number, std::string hint) {
  throw Error(code_of(error_number), fmt::format("cannot start {}: {}", program, ::strerrordesc_np(error_number)),
              {.hint = std::move(hint)});
}

bool is_runnable(const std::string& path) {
  struct stat info{};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && ::access(path.c_str(), X_OK) == 0;
}

std::optional<std::string> look_up(const std::string& program, const std::string& search_path) {
  std::string_view rest = search_path;
  for (;;) {
    const std::size_t colon = rest.find(':');
    const std::string directory(rest.substr(0, colon));
    std::string path = directory.empty() ? "./" + program : directory + "/" + program;
    if (is_runnable(path)) return path;
    if (colon == std::string_view::npos) return std::nullopt;
    rest.remove_prefix(colon + 1);
  }
}

std::string find_program(const std::string& program, const std::string& search_path) {
  struct stat info{};
  if (program.find('/') != std::string::npos) {
    if (::stat(program.c_str(), &info) != 0) {
      cannot_start(program, errno);
    }
    if (S_ISDIR(info.st_mode)) {
      cannot_start(program, EISDIR);
    }
    if (!is_runnable(program)) {
      cannot_start(program, EACCES, kNotExecutable);
    }
    return program;
  }
  if (std::optional<std::string> path = look_up(program, search_path)) return *std::move(path);
  const bool here = ::stat(program.c_str(), &info) == 0 && S_ISREG(info.st_mode);
  if (!here) {
    cannot_start(program, ENOENT, "it is neither in a directory of PATH nor in the working directory");
  }
  if (std::string path = "./" + program; is_runnable(path)) return path;
  cannot_start(program, EACCES, kNotExecutable);
}

rlimit reserve_descriptors(int num_ranks, int per_rank) {
  rlimit before{};
  if (::getrlimit(RLIMIT_NOFILE, &before) != 0) {
    throw Error(ErrorCode::kResource, "cannot read the limit of open files: " + errno_text(errno));
  }
  const rlim_t needed = static_cast<rlim_t>(num_ranks) * static_cast<rlim_t>(per_rank) + kOwnDescriptors;
  if (needed > before.rlim_max) {
    throw Error(ErrorCode::kResource, fmt::format("too many open files for {} ranks", num_ranks),
                {.expected = fmt::format("a limit of at least {}", needed),
                 .got = fmt::format("{}", before.rlim_max),
                 .hint = "raise it (ulimit -n) or start fewer ranks"});
  }
  if (allow_open_files(needed) < needed) {
    throw Error(ErrorCode::kResource, "cannot raise the limit of open files: " + errno_text(errno));
  }
  return before;
}

SpawnedRank spawn_rank(const SpawnPlan& plan, const InheritedSignals& inherited) {
  ZR_FAILPOINT("launcher.spawn");
  const std::string& program = plan.arguments.front();
  Pipe out = make_pipe(program);
  Pipe err = make_pipe(program);
  const std::vector<char*> arguments = pointers_to(plan.arguments);
  const std::vector<char*> environment = pointers_to(plan.environment);
  const int last = plan.processors.empty() ? 0 : plan.processors.back();
  const std::size_t processors_bytes = CPU_ALLOC_SIZE(last + 1);
  const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> processors(
      plan.processors.empty() ? nullptr : CPU_ALLOC(last + 1), [](cpu_set_t* mask) { CPU_FREE(mask); });
  if (processors) CPU_ZERO_S(processors_bytes, processors.get());
  for (const int number : plan.processors)
    CPU_SET_S(static_cast<std::size_t>(number), processors_bytes, processors.get());
  ChildPlan child{.program = plan.program.c_str(),
                  .arguments = arguments.data(),
                  .environment = environment.data(),
                  .streams = {plan.stdin_fd, out.write.get(), err.write.get()},
                  .inherited = &inherited,
                  .descriptors = &plan.descriptors,
                  .death_signal = plan.death_signal,
                  .own_session = plan.own_session,
                  .processors = processors.get(),
                  .processors_bytes = processors_bytes,
                  .launcher = ::getpid(),
                  .error_number = 0};
  std::vector<std::byte> stack(kChildStackBytes);
  auto top = reinterpret_cast<std::uintptr_t>(stack.data() + stack.size());
  top -= top % 64;

  // [Note: Spawn] posix_spawn cannot set the parent-death signal, and fork copies page tables.
  // CLONE_VM|CLONE_VFORK is what posix_spawn does inside: the child borrows our memory and we sleep until it
  // has called execve or _exit, so `error_number` arrives without a pipe. All signals are blocked meanwhile:
  // no handler may run in the borrowed memory.
  sigset_t all;
  sigset_t ours;
  sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, &ours);
  const pid_t pid = ::clone(child_main, reinterpret_cast<void*>(top), CLONE_VM | CLONE_VFORK | SIGCHLD, &child);
  const int clone_error = errno;
  ::sigprocmask(SIG_SETMASK, &ours, nullptr);
  if (pid < 0) {
    cannot_start(program, clone_error, clone_error == EAGAIN ? "the limit of processes (ulimit -u)" : kFewer);
  }
  SpawnedRank rank{RankProcess(pid), std::move(out.read), std::move(err.read)};
  if (child.error_number != 0) {
    const bool no_interpreter = child.error_number == ENOENT && is_runnable(plan.program);
    cannot_start(program, child.error_number,
                 no_interpreter                  ? "the file is there; the interpreter that it names is not"
                 : child.error_number == ENOEXEC ? "not a program; a script needs a first line like #!/bin/sh"
                                                 : "try it by hand, without zeroth-run");
  }
  return rank;
}

}  // namespace zeroth::launcher
