// What the head of a job and its agents say to each other.
#pragma once

#include "launcher/host_task.h"
#include "launcher/rank_group.h"

#include <zeroth/base/error.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

inline constexpr int kMaxJobRanks = 4096;
/// Of a text in a hello, and of other names.
inline constexpr std::size_t kMaxName = 256;

/// The first words of an agent.
struct Hello {
  std::string version{};         ///< of zeroth-run; the head's own, or the host is refused
  std::string host{};            ///< its own name for itself
  int free_port = 0;             ///< a port that was free there, for MASTER_PORT
  int num_ranks = 0;             ///< ranks that it brings (--nnodes); 0: the head decides
  int node = -1;                 ///< its --node-rank; -1: the head decides
  int num_nodes = 0;             ///< its --nnodes
  std::string ssh_connection{};  ///< its SSH_CONNECTION, "" if it was not started over ssh

  bool operator==(const Hello&) const = default;
};

struct Started {
  std::vector<int> pids{};
  std::vector<std::string> notes{};
};

struct RankEnd {
  int rank = 0;
  int pid = 0;
  ExitStatus status{};
};

struct Output {
  int rank = 0;
  Stream stream{};
  std::string_view bytes{};  ///< in the payload that was decoded
};

struct SignalOrder {
  int number = 0;
  bool groups = true;  ///< every process of every rank, not only the ranks
};

[[nodiscard]] std::string encode(const Hello& hello);
[[nodiscard]] std::string encode(const HostTask& task);
[[nodiscard]] std::string encode(const Started& started);
[[nodiscard]] std::string encode(const RankEnd& end);
[[nodiscard]] std::string encode(const std::vector<EndedRank>& ranks);
[[nodiscard]] std::string encode(const Output& output);
[[nodiscard]] std::string encode(const SignalOrder& order);
[[nodiscard]] std::string encode(const JobEnd& end);
[[nodiscard]] std::string encode(const Error& error);

/// These throw Error(kLaunch) for what is not such a message or breaks a limit.
[[nodiscard]] Hello decode_hello(std::string_view payload);
[[nodiscard]] HostTask decode_task(std::string_view payload);
[[nodiscard]] Started decode_started(std::string_view payload);
[[nodiscard]] RankEnd decode_rank_end(std::string_view payload);
[[nodiscard]] std::vector<EndedRank> decode_ended_ranks(std::string_view payload);
[[nodiscard]] Output decode_output(std::string_view payload);
[[nodiscard]] SignalOrder decode_signal(std::string_view payload);
[[nodiscard]] JobEnd decode_job_end(std::string_view payload);
/// The error that the other side has met; its text stays one line.
[[nodiscard]] Error decode_error(std::string_view payload);

/// One line, whatever came: control characters are spaces.
[[nodiscard]] std::string printable(std::string text);
/// Letters, digits and '_', no digit first.
[[nodiscard]] bool valid_variable_name(std::string_view name);

}  // namespace zeroth::launcher
