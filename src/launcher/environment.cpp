#include "launcher/environment.h"

#include "base/unique_fd.h"

#include <zeroth/base/ended_ranks.h>
#include <zeroth/base/error.h>
#include <zeroth/base/secret.h>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <map>
#include <optional>
#include <string_view>

namespace zeroth::launcher {
namespace {

constexpr std::string_view kThreadsVariable = "OMP_NUM_THREADS";

std::string_view name_of_assignment(std::string_view assignment) {
  return assignment.substr(0, assignment.find('='));
}

}  // namespace

std::optional<std::string> value_of(const HostTask& task, std::string_view name) {
  std::optional<std::string> value;
  for (const std::string& entry : task.environment) {
    if (name_of_assignment(entry) == name) value = entry.substr(std::min(entry.size(), name.size() + 1));
  }
  for (const auto& [extra, text] : task.extra) {
    if (extra == name) value = text;
  }
  return value;
}

std::vector<std::string> current_environment() {
  std::vector<std::string> result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    result.emplace_back(*entry);
  }
  return result;
}

std::string random_job_id() {
  std::array<unsigned char, 16> bytes{};
  fill_random(std::as_writable_bytes(std::span(bytes)), "the job id");
  std::string text;
  for (const unsigned char byte : bytes) {
    text += fmt::format("{:02x}", byte);
  }
  return text;
}

int free_port() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (!socket.valid() || ::bind(socket.get(), generic, length) != 0 ||
      ::getsockname(socket.get(), generic, &length) != 0) {
    throw Error(ErrorCode::kResource, "no free port on 127.0.0.1 for MASTER_PORT: " + errno_text(errno),
                {.hint = "give one with --env MASTER_PORT=<port>"});
  }
  return ntohs(address.sin_port);
}

int count_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // Fails only beyond 1024 processors; one thread a rank is then a poor but safe answer.
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

int threads_per_rank(const HostTask& task, int num_cores) {
  return value_of(task, kThreadsVariable) ? 0 : std::max(1, num_cores / task.num_ranks);
}

int chosen_threads(const HostTask& task) {
  const std::string text = value_of(task, kThreadsVariable).value_or("");
  int value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return std::max(0, value);
}

std::optional<std::string> variable_in(const std::vector<std::string>& environment, std::string_view name) {
  for (const std::string& entry : environment) {
    if (name_of_assignment(entry) == name && entry.size() > name.size()) return entry.substr(name.size() + 1);
  }
  return std::nullopt;
}

std::string search_path_of(const std::vector<std::string>& environment) {
  return variable_in(environment, "PATH").value_or("/usr/bin:/bin");
}

std::vector<std::string> rank_environment(const HostTask& task, int local_rank, int num_threads) {
  const JobFacts& job = task.job;
  std::map<std::string, std::string, std::less<>> ours{
      {"RANK", std::to_string(task.first_rank + local_rank)},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"WORLD_SIZE", std::to_string(job.num_ranks)},
      {"LOCAL_WORLD_SIZE", std::to_string(task.num_ranks)},
      {"GROUP_RANK", std::to_string(task.node)},
      {"NODE_RANK", std::to_string(task.node)},
      {"GROUP_WORLD_SIZE", std::to_string(job.num_nodes)},
      {"MASTER_ADDR", job.master_address},
      {"MASTER_PORT", std::to_string(job.master_port)},
      {"TORCHELASTIC_RUN_ID", job.job_id},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(job.restart)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(job.max_restarts)},
      {"ZEROTH_JOB_ID", job.job_id},
      {"ZEROTH_RESTART_COUNT", std::to_string(job.restart)},
  };
  if (num_threads > 0) {
    ours.emplace(kThreadsVariable, std::to_string(num_threads));
  }
  for (const auto& [name, value] : task.extra) {
    ours.insert_or_assign(name, value);
  }
  std::vector<std::string> result;
  result.reserve(task.environment.size() + ours.size());
  for (const std::string& entry : task.environment) {
    const std::string_view name = name_of_assignment(entry);
    if (!ours.contains(name) && name != kBoundVariable && name != kEndedRanksVariable) {
      result.push_back(entry);
    }
  }
  for (const auto& [name, value] : ours) {
    result.push_back(name + "=" + value);
  }
  return result;
}

}  // namespace zeroth::launcher
