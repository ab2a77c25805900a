#include "launcher/job_log.h"

#include <zeroth/base/error.h>
#include <zeroth/base/preemption.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <utility>

namespace zeroth::launcher {
namespace {

using Json = nlohmann::ordered_json;

/// The host is left out where there is only this one.
Json rank_of(int rank, const std::string& host, pid_t pid, int exit_code, int signal) {
  Json object{{"rank", rank}};
  if (!host.empty()) object["host"] = host;
  if (pid > 0) object["pid"] = pid;
  if (signal != 0) {
    object["signal"] = signal;
  } else {
    object["exit_code"] = exit_code;
  }
  return object;
}

}  // namespace

JobLog::JobLog(const std::string& path) : path_(path) {
  // O_NONBLOCK: a FIFO that nobody reads is an error, not a wait.
  file_.reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666));
  if (!file_.valid()) {
    throw Error(ErrorCode::kIo, "cannot write the status file: " + errno_text(errno),
                {.where = "--json", .which = path, .hint = "give a path in a folder that is there and can be written"});
  }
}

template <typename Object>
void JobLog::write(const char* event, Object object) {
  if (!file_.valid()) return;
  // The wall clock, for readers only: nothing waits by it.
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  Json line{{"event", event},
            {"time", static_cast<double>(std::chrono::duration_cast<Milliseconds>(now).count()) / 1000},
            {"restart", restart_}};
  line.update(object);
  std::string text = line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  for (std::string_view rest = text; !rest.empty();) {
    const ssize_t written = ::write(file_.get(), rest.data(), rest.size());
    if (written >= 0) {
      rest.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      failure_ = fmt::format("[IO] cannot write {}: {}; this file is incomplete", path_, errno_text(errno));
      file_.reset();
      return;
    }
  }
}

void JobLog::start(int num_ranks, const std::vector<std::string>& command, const std::vector<std::string>& hosts) {
  write("start",
        Json{{"version", ZEROTH_VERSION_TEXT}, {"num_ranks", num_ranks}, {"hosts", hosts}, {"command", command}});
}

void JobLog::host_refused(const std::string& host, const std::string& text, bool late) {
  write("host_refused", Json{{"host", host}, {"text", text}, {"late", late}});
}

void JobLog::rank_end(int rank, const std::string& host, pid_t pid, const ExitStatus& status) {
  write("rank_end", rank_of(rank, host, pid, status.exit_code, status.signal));
}

void JobLog::first_cause(const FailureRecord& cause, const std::string& text) {
  Json object = rank_of(cause.rank, cause.host, cause.pid, cause.exit_code, cause.signal);
  object["text"] = text;
  write("first_cause", std::move(object));
}

void JobLog::end(const JobEnd& end) {
  write("end", Json{{"exit_code", end.exit_code},
                    {"preempted", end.exit_code == kExitPreempted},
                    {"will_restart", end.restart},
                    {"text", end.text}});
}

}  // namespace zeroth::launcher
