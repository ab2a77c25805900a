#include "process/launcher/job.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace zeroth::test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kLook{2};

std::array<int, 2> make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw std::runtime_error("pipe2");
  }
  return ends;
}

bool until(Clock::time_point deadline, const std::function<bool()>& condition) {
  while (!condition()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

/// Reaps what has ended; true when this process has no child at all.
bool no_child_left() {
  for (;;) {
    siginfo_t info{};
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG) != 0) return true;
    if (info.si_pid == 0) return false;
  }
}

std::vector<pid_t> children_of_this_process() {
  std::vector<pid_t> result;
  const pid_t self = ::getpid();
  std::ifstream file("/proc/self/task/" + std::to_string(self) + "/children");
  for (pid_t pid = 0; file >> pid;) {
    result.push_back(pid);
  }
  return result;
}

}  // namespace

Job::Job(const std::vector<std::string>& arguments, const JobSetup& setup)
    : outlived_(setup.outlived), start_(Clock::now()) {
  const auto in = make_pipe();
  const auto out = make_pipe();
  const auto err = make_pipe();
  std::vector<std::string> command{ZEROTH_RUN_PATH};
  if (!setup.merge) command.emplace_back("--no-merge");
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ == 0) {
    // The test itself may run in the background of a script, with these ignored.
    for (const int signal : {SIGINT, SIGQUIT, SIGHUP, SIGTERM, SIGPIPE}) std::signal(signal, SIG_DFL);
    for (const int signal : setup.ignored_signals) std::signal(signal, SIG_IGN);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (const auto& [name, value] : setup.environment) ::setenv(name.c_str(), value.c_str(), 1);
    const rlimit no_core{0, 0};
    ::setrlimit(RLIMIT_CORE, &no_core);
    if (setup.descriptor_limit) {
      const rlimit limit{*setup.descriptor_limit, *setup.descriptor_limit};
      ::setrlimit(RLIMIT_NOFILE, &limit);
    }
    ::dup2(in[0], 0);
    ::dup2(out[1], 1);
    ::dup2(err[1], 2);
    // What the test itself has inherited must not be taken for a leak of the launcher.
    ::close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
    ::execv(argv[0], argv.data());
    ::_exit(126);
  }
  ::close(in[0]);
  ::close(out[1]);
  ::close(err[1]);
  out_fd_ = out[0];
  err_fd_ = err[0];
  threads_.emplace_back([fd = in[1], text = setup.stdin_text] {
    std::signal(SIGPIPE, SIG_IGN);
    std::size_t done = 0;
    while (done < text.size()) {
      const ssize_t bytes = ::write(fd, text.data() + done, text.size() - done);
      if (bytes <= 0) break;
      done += static_cast<std::size_t>(bytes);
    }
    ::close(fd);
  });
  threads_.emplace_back([this] { collect(err_fd_, err_); });
  if (setup.read_output) {
    start_reading();
  }
}

Job::~Job() {
  kill_everything();
  close_outputs();
}

std::vector<std::string> Job::probe(int num_ranks, const std::vector<std::string>& arguments,
                                    const std::vector<std::string>& options) {
  std::vector<std::string> result{"-q", "-n", std::to_string(num_ranks)};
  result.insert(result.end(), options.begin(), options.end());
  result.emplace_back(RANK_PROBE_PATH);
  result.insert(result.end(), arguments.begin(), arguments.end());
  return result;
}

void Job::signal(int number) const {
  ASSERT_EQ(::kill(pid_, number), 0);
}

void Job::start_reading() {
  threads_.emplace_back([this] { collect(out_fd_, out_); });
}

void Job::close_stdout() {
  ::close(out_fd_);
  out_fd_ = -1;
}

void Job::close_outputs() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  for (int* const fd : {&out_fd_, &err_fd_}) {
    if (*fd >= 0) ::close(std::exchange(*fd, -1));
  }
}

std::string Job::out() const {
  const std::lock_guard lock(mutex_);
  return out_;
}

void Job::collect(int fd, std::string& text) {
  std::array<char, 65536> block;
  for (;;) {
    const ssize_t bytes = ::read(fd, block.data(), block.size());
    if (bytes <= 0) return;
    const std::lock_guard lock(mutex_);
    text.append(block.data(), static_cast<std::size_t>(bytes));
    changed_.notify_all();
  }
}

std::map<int, pid_t> Job::wait_for(const std::string& word, int count) {
  std::map<int, pid_t> result;
  std::unique_lock lock(mutex_);
  const bool complete = changed_.wait_for(lock, kPatience, [&] {
    result.clear();
    std::istringstream lines(out_.substr(0, out_.rfind('\n') + 1));
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string prefix;
      std::string name;
      int rank = 0;
      pid_t number = 0;
      if (words >> prefix >> name >> rank >> number && name == word) {
        result[rank] = number;
      }
    }
    return static_cast<int>(result.size()) >= count;
  });
  EXPECT_TRUE(complete) << "only " << result.size() << " of " << count << " lines " << word << " came; output:\n"
                        << out_ << err_;
  return result;
}

JobResult Job::wait(std::chrono::milliseconds deadline) {
  JobResult result;
  siginfo_t info{};
  const bool in_time = until(Clock::now() + deadline, [&] {
    return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG) == 0 && info.si_pid == pid_;
  });
  result.lasted = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start_);
  EXPECT_TRUE(in_time) << "zeroth-run did not end in time";
  if (in_time) {
    ended_ = true;
    result.exit_code = info.si_code == CLD_EXITED ? info.si_status : -1;
    result.signal = info.si_code == CLD_EXITED ? 0 : info.si_status;
    EXPECT_TRUE(until(Clock::now() + outlived_, no_child_left))
        << "a process of the job was alive when zeroth-run had ended";
  }
  kill_everything();
  close_outputs();
  EXPECT_EQ(left_.text(), "");
  result.out = out_;
  result.err = err_;
  return result;
}

void Job::kill_everything() {
  if (!ended_) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    ended_ = true;
  }
  // Orphans arrive one generation after the other.
  until(Clock::now() + kEndDeadline, [] {
    for (const pid_t child : children_of_this_process()) ::kill(child, SIGKILL);
    return no_child_left();
  });
}

bool is_alive(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::stringstream text;
  text << file.rdbuf();
  const std::string content = text.str();
  const std::size_t name_end = content.rfind(')');
  return name_end != std::string::npos && name_end + 2 < content.size() && content[name_end + 2] != 'Z' &&
         content[name_end + 2] != 'X';
}

bool all_gone_within(const std::map<int, pid_t>& pids, std::chrono::milliseconds deadline) {
  return until(Clock::now() + deadline, [&] {
    for (const auto& [rank, pid] : pids) {
      if (is_alive(pid)) return false;
    }
    return true;
  });
}

}  // namespace zeroth::test
