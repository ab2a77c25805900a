// The program that the launcher's tests start as ranks. What it does is said by its arguments:
//   env NAME...        prints NAME=VALUE (or "NAME unset") and ends
//   args ...           prints each argument in brackets and ends
//   self               prints what it has inherited: descriptors, limits, signals, process group; ends
//   lines COUNT        COUNT numbered lines on standard output, and on standard error
//   long BYTES         one line of BYTES letters without an end
//   count              counts the bytes of standard input
//   wait [options]     prints "READY <rank> <pid>", waits for SIGUSR1 (at most 60 s), then acts:
//       exit=CODE | signal=NUMBER   what to do then; default exit=0
//       error=TEXT                  a line on standard error before it
//       now=RANK                    this rank acts at once
//       ignore                      SIGTERM and SIGINT have no effect
//       catch                       SIGTERM and SIGINT print "CAUGHT <rank> <signal>" and end with 0
//       child                       a child of its own that sleeps; prints "CHILD <rank> <pid>"
//       heavy                       with child: it holds 128 MiB, so that its end takes a while
//       flood                       after READY writes to standard output without end
//   room [save=SECONDS]  catches SIGTERM as zeroth.preemption does, prints "READY <rank> <pid>", waits for it (at most
//   60 s); then rank 0
//                        takes that long; prints "SAVED <rank> 0" and ends with 75
#include <zeroth/base/preemption.h>

#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

int rank() {
  const char* text = std::getenv("RANK");
  return text != nullptr ? std::atoi(text) : -1;
}

int print_self() {
  int descriptors = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++descriptors;
  }
  std::printf("descriptors %d\n", descriptors - 1);  // without the one that lists them
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  std::printf("limit %lu\n", static_cast<unsigned long>(limit.rlim_cur));
  sigset_t mask;
  sigprocmask(SIG_BLOCK, nullptr, &mask);
  int blocked = 0;
  int ignored = 0;
  for (int signal = 1; signal < SIGRTMIN; ++signal) {
    blocked += sigismember(&mask, signal) == 1 ? 1 : 0;
    struct sigaction action{};
    ignored += sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN ? 1 : 0;
  }
  int death_signal = 0;
  prctl(PR_GET_PDEATHSIG, &death_signal);
  std::printf("blocked %d\nignored %d\n", blocked, ignored);
  std::printf("death_signal %d\nleader %d\n", death_signal, getpgrp() == getpid() ? 1 : 0);
  return 0;
}

[[noreturn]] void act(const std::vector<std::string_view>& options) {
  int code = 0;
  for (const std::string_view option : options) {
    if (option.starts_with("error=")) {
      std::fprintf(stderr, "%s\n", option.substr(6).data());
    } else if (option.starts_with("signal=")) {
      const int number = std::atoi(option.substr(7).data());
      std::signal(number, SIG_DFL);  // sanitizers have handlers of their own
      raise(number);
    } else if (option.starts_with("exit=")) {
      code = std::atoi(option.substr(5).data());
    }
  }
  std::exit(code);
}

int wait_and_act(const std::vector<std::string_view>& options) {
  const auto has = [&](std::string_view wanted) {
    for (const std::string_view option : options) {
      if (option == wanted) return true;
    }
    return false;
  };
  sigset_t waited;
  sigemptyset(&waited);
  sigaddset(&waited, SIGUSR1);
  if (has("catch")) {
    sigaddset(&waited, SIGTERM);
    sigaddset(&waited, SIGINT);
  }
  sigprocmask(SIG_BLOCK, &waited, nullptr);
  if (has("ignore")) {
    std::signal(SIGTERM, SIG_IGN);
    std::signal(SIGINT, SIG_IGN);
  }
  if (has("child")) {
    const pid_t child = fork();
    if (child == 0) {
      if (has("heavy")) {
        const std::vector<char> held(std::size_t{128} << 20, 'h');
        std::printf("HELD %d %d\n", rank(), getpid());
        std::fflush(stdout);
        sleep(60);
        _exit(held.back() == 'h' ? 0 : 1);
      }
      sleep(60);
      _exit(0);
    }
    std::printf("CHILD %d %d\n", rank(), child);
  }
  std::printf("READY %d %d\n", rank(), getpid());
  std::fflush(stdout);
  if (has("now=" + std::to_string(rank()))) {
    act(options);
  }
  if (has("flood")) {
    const std::string line(1000, 'f');
    while (std::puts(line.c_str()) >= 0) {
    }
  }
  const timespec limit{.tv_sec = 60, .tv_nsec = 0};
  int signal = -1;
  do {  // being stopped and continued interrupts it
    signal = sigtimedwait(&waited, nullptr, &limit);
  } while (signal < 0 && errno == EINTR);
  if (signal < 0) {
    return 99;
  }
  if (signal != SIGUSR1) {
    std::printf("CAUGHT %d %d\n", rank(), signal);
    return 0;
  }
  act(options);
}

int make_room(const std::vector<std::string_view>& options) {
  zeroth::catch_preemption();
  std::printf("READY %d %d\n", rank(), getpid());
  std::fflush(stdout);
  const auto look = std::chrono::milliseconds(5);
  for (auto left = std::chrono::milliseconds(60'000); !zeroth::preemption_requested(); left -= look) {
    if (left.count() <= 0) return 99;
    std::this_thread::sleep_for(look);
  }
  for (const std::string_view option : options) {
    if (option.starts_with("save=") && rank() == 0)
      std::this_thread::sleep_for(std::chrono::duration<double>(std::atof(option.substr(5).data())));
  }
  std::printf("SAVED %d 0\n", rank());
  return zeroth::kExitPreempted;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  const std::vector<std::string_view> rest(argv + (argc > 1 ? 2 : argc), argv + argc);
  if (mode == "env") {
    for (const std::string_view name : rest) {
      const char* value = std::getenv(name.data());
      std::printf(value != nullptr ? "%s=%s\n" : "%s unset%s\n", name.data(), value != nullptr ? value : "");
    }
  } else if (mode == "args") {
    for (const std::string_view argument : rest) {
      std::printf("<%s>\n", argument.data());
    }
  } else if (mode == "self") {
    return print_self();
  } else if (mode == "lines") {
    for (int i = 0; i < std::atoi(rest.at(0).data()); ++i) {
      std::printf("%d out %d\n", rank(), i);
      std::fprintf(stderr, "%d err %d\n", rank(), i);
    }
  } else if (mode == "long") {
    const std::string line(static_cast<std::size_t>(std::atol(rest.at(0).data())), 'x');
    std::fwrite(line.data(), 1, line.size(), stdout);
  } else if (mode == "count") {
    long bytes = 0;
    while (std::getchar() != EOF) {
      ++bytes;
    }
    std::printf("%d read %ld\n", rank(), bytes);
  } else if (mode == "wait") {
    return wait_and_act(rest);
  } else if (mode == "room") {
    return make_room(rest);
  } else {
    std::fprintf(stderr, "rank_probe: unknown mode\n");
    return 98;
  }
  return 0;
}
