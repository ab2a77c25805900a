#include "launcher/environment.h"

#include "launcher/unique_fd.h"

#include <zeroth/base/error.h>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <string_view>

namespace zeroth::launcher {
namespace {

constexpr std::string_view kThreadsVariable = "OMP_NUM_THREADS";

std::string_view name_of_assignment(std::string_view assignment) {
  return assignment.substr(0, assignment.find('='));
}

std::string random_job_id() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw Error(ErrorCode::kResource, "no random bytes for the job id: " + errno_text(errno));
  }
  std::string text;
  for (const unsigned char byte : bytes) {
    text += fmt::format("{:02x}", byte);
  }
  return text;
}

/// Only a number: the socket is closed again, rank 0 may bind it (torch.distributed does).
int free_port() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (!socket.valid() || ::bind(socket.get(), generic, length) != 0 ||
      ::getsockname(socket.get(), generic, &length) != 0) {
    throw Error(ErrorCode::kResource,
                "no free port on 127.0.0.1 for MASTER_PORT: " + errno_text(errno),
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

}  // namespace

JobFacts make_job_facts(int num_ranks,
                        std::span<const std::string> parent,
                        std::span<const std::pair<std::string, std::string>> extra) {
  const bool chosen =
      std::any_of(parent.begin(),
                  parent.end(),
                  [](const std::string& entry) { return name_of_assignment(entry) == kThreadsVariable; }) ||
      std::any_of(
          extra.begin(), extra.end(), [](const auto& pair) { return pair.first == kThreadsVariable; });
  const bool has_port =
      std::any_of(extra.begin(), extra.end(), [](const auto& pair) { return pair.first == "MASTER_PORT"; });
  const int cores = count_cores();
  return {.num_ranks = num_ranks,
          .job_id = random_job_id(),
          .master_port = has_port ? 0 : free_port(),
          .omp_threads = chosen ? 0 : std::max(1, cores / num_ranks),
          .num_cores = cores};
}

std::vector<std::string> rank_environment(const JobFacts& job,
                                          int rank,
                                          std::span<const std::string> parent,
                                          std::span<const std::pair<std::string, std::string>> extra) {
  std::map<std::string, std::string, std::less<>> ours{
      {"RANK", std::to_string(rank)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(job.num_ranks)},
      {"LOCAL_WORLD_SIZE", std::to_string(job.num_ranks)},
      {"GROUP_RANK", "0"},
      {"NODE_RANK", "0"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(job.master_port)},
      {"TORCHELASTIC_RUN_ID", job.job_id},
      {"ZEROTH_JOB_ID", job.job_id},
  };
  if (job.omp_threads > 0) {
    ours.emplace(kThreadsVariable, std::to_string(job.omp_threads));
  }
  for (const auto& [name, value] : extra) {
    ours.insert_or_assign(name, value);
  }
  std::vector<std::string> result;
  result.reserve(parent.size() + ours.size());
  for (const std::string& entry : parent) {
    if (!ours.contains(name_of_assignment(entry))) {
      result.push_back(entry);
    }
  }
  for (const auto& [name, value] : ours) {
    result.push_back(name + "=" + value);
  }
  return result;
}

}  // namespace zeroth::launcher
