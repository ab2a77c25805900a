#include "launcher/first_cause.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <string_view>
#include <tuple>

namespace zeroth::launcher {
namespace {

constexpr int kUncaughtException = 1;

/// "PEER_LOST" from "... ZEROTH ERROR [PEER_LOST] ...", or "".
std::string_view code_in(std::string_view line) {
  constexpr std::string_view kMark = "ZEROTH ERROR [";
  const std::size_t mark = line.find(kMark);
  if (mark == std::string_view::npos) {
    return {};
  }
  const std::string_view rest = line.substr(mark + kMark.size());
  const std::size_t end = rest.find(']');
  return end == std::string_view::npos ? std::string_view{} : rest.substr(0, end);
}

}  // namespace

FailureClass classify(const FailureRecord& record) {
  if (record.signal != 0) {
    return FailureClass::kSignal;
  }
  const bool shared_code = record.exit_code == exit_code(ErrorCode::kPeerLost);
  if (!shared_code && record.exit_code != kUncaughtException) {
    return FailureClass::kOwnFault;
  }
  const std::string_view code = code_in(record.error_line);
  if (code == slug(ErrorCode::kMismatch)) return FailureClass::kMismatch;
  if (code == slug(ErrorCode::kTimeout)) return FailureClass::kTimeout;
  if (code == slug(ErrorCode::kPeerLost)) return FailureClass::kPeerLost;
  if (code == slug(ErrorCode::kAborted)) return FailureClass::kAborted;
  return shared_code ? FailureClass::kPeerLost : FailureClass::kOwnFault;
}

std::optional<std::size_t> first_cause(std::span<const FailureRecord> records) {
  if (records.empty()) {
    return std::nullopt;
  }
  const auto key = [](const FailureRecord& record) {
    return std::tuple(classify(record), record.when, record.rank);
  };
  const auto best =
      std::min_element(records.begin(), records.end(), [&](const FailureRecord& a, const FailureRecord& b) {
        return key(a) < key(b);
      });
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
  if (record.signal != 0) {
    return fmt::format("rank {} (pid {}) was killed by signal {} ({}){}",
                       record.rank,
                       record.pid,
                       record.signal,
                       signal_name(record.signal),
                       record.core_dumped ? ", core dumped" : "");
  }
  const std::string head =
      fmt::format("rank {} (pid {}) exited with code {}", record.rank, record.pid, record.exit_code);
  return record.error_line.empty() ? head : head + ": " + record.error_line;
}

std::string describe_others(int num_ended, int num_ranks) {
  if (num_ended <= 0) {
    return "";
  }
  if (num_ended < num_ranks - 1) {
    return num_ended == 1 ? "; 1 other rank was ended"
                          : fmt::format("; {} other ranks were ended", num_ended);
  }
  return num_ended == 1 ? "; the other rank was ended"
                        : fmt::format("; the other {} ranks were ended", num_ended);
}

}  // namespace zeroth::launcher
