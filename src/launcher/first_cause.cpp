#include "launcher/first_cause.h"

#include "launcher/error_line.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <string_view>
#include <tuple>

namespace zeroth::launcher {
namespace {

// [Note: Cause and echo] When one rank fails, the others fail too, each in its own way, and the launcher sees
// their ends in any order. Which one explains the job:
//
// 1. An error of Zeroth about the rank itself, a death by signal, or the loss of a host, whichever came
// first. Neither is made by
//    the failure of another rank, so time decides between them.
// 2. An end without explanation (the program's own exit code, SIGABRT) is either: a user's exception that
//    made the others lose a peer, or what a program does after it has caught PEER_LOST. It is the cause only
//    if it came before every death by signal, mismatch and timeout. An error of Zeroth about a rank always
//    explains more, however late that rank gets to its exit.
// 3. Else mismatch, timeout, peer lost, aborted, in this order: each may be an echo of those before it.

constexpr std::array kOwnFaults{ErrorCode::kUsage,       ErrorCode::kConfig,   ErrorCode::kModel, ErrorCode::kNonFinite,
                                ErrorCode::kOutOfMemory, ErrorCode::kResource, ErrorCode::kIo,    ErrorCode::kLaunch,
                                ErrorCode::kEnvironment, ErrorCode::kInternal};

/// Where a record stands in [Note: Cause and echo]; smaller explains more.
enum class Standing { kFirstOfAll, kCause, kMismatch, kTimeout, kPeerLost, kAborted, kEcho };

Standing standing_of(const FailureRecord& record, bool any_own_fault, SteadyClock::time_point explained_since) {
  switch (classify(record)) {
    case FailureClass::kOwnFault:
    case FailureClass::kSignal:
    case FailureClass::kHostLost:
      return Standing::kCause;
    case FailureClass::kUnexplained:
      return !any_own_fault && record.when + kOneLook < explained_since ? Standing::kFirstOfAll : Standing::kEcho;
    case FailureClass::kMismatch:
      return Standing::kMismatch;
    case FailureClass::kTimeout:
      return Standing::kTimeout;
    case FailureClass::kPeerLost:
      return Standing::kPeerLost;
    case FailureClass::kAborted:
      return Standing::kAborted;
  }
  return Standing::kEcho;
}

/// Among records seen in one look: a rank that says what is wrong with it, a death by signal, the rest.
int weight_of(const FailureRecord& record) {
  if (classify(record) == FailureClass::kOwnFault) return 0;
  return record.signal != 0 ? 1 : 2;
}

}  // namespace

FailureClass classify(const FailureRecord& record) {
  if (record.num_ranks > 0 && record.exit_code == exit_code(ErrorCode::kPeerLost)) {
    return FailureClass::kHostLost;
  }
  const bool aborted_itself = record.signal == SIGABRT;
  if (record.signal != 0 && !aborted_itself) {
    return FailureClass::kSignal;
  }
  const auto has_code = [&record](ErrorCode code) { return record.exit_code == exit_code(code); };
  if (!aborted_itself && std::ranges::any_of(kOwnFaults, has_code)) {
    return FailureClass::kOwnFault;
  }
  const std::string_view code = find_error_mark(record.error_line).value_or(ErrorMark{}).code;
  if (code == slug(ErrorCode::kMismatch)) return FailureClass::kMismatch;
  if (code == slug(ErrorCode::kTimeout)) return FailureClass::kTimeout;
  if (code == slug(ErrorCode::kPeerLost)) return FailureClass::kPeerLost;
  if (code == slug(ErrorCode::kAborted)) return FailureClass::kAborted;
  if (!aborted_itself && has_code(ErrorCode::kPeerLost)) {
    return FailureClass::kPeerLost;
  }
  const bool names_own_fault = code == slug(ErrorCode::kUser) ||  // whose exit code, 1, says nothing
                               std::ranges::any_of(kOwnFaults, [code](ErrorCode own) { return code == slug(own); });
  return names_own_fault ? FailureClass::kOwnFault : FailureClass::kUnexplained;
}

std::optional<std::size_t> first_cause(std::span<const FailureRecord> records) {
  if (records.empty()) {
    return std::nullopt;
  }
  bool any_own_fault = false;
  auto explained_since = SteadyClock::time_point::max();
  for (const FailureRecord& record : records) {
    const FailureClass failure_class = classify(record);
    any_own_fault = any_own_fault || failure_class == FailureClass::kOwnFault;
    if (failure_class == FailureClass::kSignal || failure_class == FailureClass::kHostLost ||
        failure_class == FailureClass::kMismatch || failure_class == FailureClass::kTimeout) {
      explained_since = std::min(explained_since, record.when);
    }
  }
  const auto standing = [&](const FailureRecord& record) {
    return standing_of(record, any_own_fault, explained_since);
  };
  Standing best_standing = Standing::kEcho;
  for (const FailureRecord& record : records) best_standing = std::min(best_standing, standing(record));
  auto first_seen = SteadyClock::time_point::max();
  for (const FailureRecord& record : records) {
    if (standing(record) == best_standing) first_seen = std::min(first_seen, record.when);
  }
  const auto key = [&](const FailureRecord& record) {
    const bool in_first_look = standing(record) == best_standing && record.when <= first_seen + kOneLook;
    return std::tuple(!in_first_look, weight_of(record), record.when, record.rank);
  };
  const auto best = std::min_element(records.begin(), records.end(),
                                     [&](const FailureRecord& a, const FailureRecord& b) { return key(a) < key(b); });
  return static_cast<std::size_t>(best - records.begin());
}

int job_exit_code(const FailureRecord& record) {
  return record.signal != 0 ? 128 + record.signal : record.exit_code;
}

std::string signal_name(int signal) {
  if (const char* name = ::sigabbrev_np(signal); name != nullptr) {
    return std::string("SIG") + name;
  }
  if (signal >= SIGRTMIN && signal <= SIGRTMAX) {
    return fmt::format("SIGRTMIN+{}", signal - SIGRTMIN);
  }
  return "unknown";
}

std::string describe(const FailureRecord& record) {
  if (record.num_ranks > 0) {
    const std::string ranks = record.num_ranks == 1
                                  ? fmt::format("rank {}", record.rank)
                                  : fmt::format("ranks {}-{}", record.rank, record.rank + record.num_ranks - 1);
    return fmt::format("host {} ({}): {}", record.host, ranks, record.error_line);
  }
  const std::string who =
      fmt::format("rank {} (pid {}{})", record.rank, record.pid, record.host.empty() ? "" : " on " + record.host);
  if (record.signal != 0) {
    return fmt::format("{} was killed by signal {} ({}){}", who, record.signal, signal_name(record.signal),
                       record.core_dumped ? ", core dumped" : "");
  }
  const std::string head = fmt::format("{} exited with code {}", who, record.exit_code);
  return record.error_line.empty() ? head : head + ": " + record.error_line;
}

std::string said_of(const FailureRecord& record, std::string_view line) {
  if (!record.error_line.empty() || record.num_ranks > 0) return "";
  const auto after = [](std::string_view text, std::string_view mark) {
    const std::size_t at = text.find(mark);
    return at == std::string_view::npos ? std::string_view{} : text.substr(at + mark.size());
  };
  if (const std::string_view why = after(line, fmt::format("[ABORTED] rank {} stopped the job: ", record.rank));
      !why.empty()) {
    return fmt::format(": {}", why.substr(0, why.rfind("; who: rank ")));
  }
  // As transports and the control plane say it.
  const std::string_view who = after(line, fmt::format("rank {} (pid ", record.rank));
  std::string_view more =
      after(who, record.signal != 0 ? fmt::format("(signal {})", record.signal)
                                    : fmt::format("code {} before the others were done", record.exit_code));
  more = more.substr(0, std::min(more.find("; where: "), more.find(": rank ")));
  return more.starts_with(", ") ? std::string(more) : "";
}

std::string describe_others(int num_ended, int num_ranks) {
  if (num_ended <= 0) {
    return "";
  }
  if (num_ended < num_ranks - 1) {
    return num_ended == 1 ? "; 1 other rank was ended" : fmt::format("; {} other ranks were ended", num_ended);
  }
  return num_ended == 1 ? "; the other rank was ended" : fmt::format("; the other {} ranks were ended", num_ended);
}

}  // namespace zeroth::launcher
