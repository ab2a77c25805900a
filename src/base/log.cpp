#include "base/unique_fd.h"

#include <zeroth/base/error.h>
#include <zeroth/base/log.h>

#include <fcntl.h>
#include <fmt/chrono.h>
#include <nlohmann/json.hpp>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>

namespace zeroth {
namespace {

/// "2026-11-21T23:20:43.123Z"
std::string now_text() {
  const auto now = std::chrono::system_clock::now();
  const auto milliseconds =
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  return fmt::format("{:%FT%T}.{:03}Z", fmt::gmtime(std::chrono::system_clock::to_time_t(now)), milliseconds);
}

/// A file to which lines are appended, each with one write: so the lines of several processes stay whole.
class JsonFile {
 public:
  JsonFile(std::string path, int rank) : path_(std::move(path)), rank_(rank) {
    if (path_.empty()) return;
    file_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    ZR_CHECK(file_.valid(), ErrorCode::kIo, "the JSON log cannot be opened",
             {.where = "base.log", .which = path_, .got = std::strerror(errno)});
  }

  [[nodiscard]] bool wanted() const { return !path_.empty(); }

  /// Why it could not be written, at the first time; else "".
  [[nodiscard]] std::string append(std::string_view event, nlohmann::ordered_json fields) {
    nlohmann::ordered_json object{{"time", now_text()}, {"rank", rank_}, {"event", event}};
    object.update(fields);
    // Whatever bytes a text holds, the line is JSON.
    const std::string line = object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
    const std::lock_guard lock(mutex_);
    if (!file_) return "";
    const ssize_t written = ::write(file_.get(), line.data(), line.size());
    if (written == static_cast<ssize_t>(line.size())) return "";
    const std::string why = written < 0 ? std::strerror(errno) : "only a part of a line was written";
    file_.reset();
    return "the JSON log " + path_ + " ends here: " + why;
  }

 private:
  std::string path_;
  int rank_;
  UniqueFd file_;
  std::mutex mutex_;
};

}  // namespace

struct Logger::Sink {
  Sink(int rank_in, const std::string& name, LogLevel level, const std::string& json_path)
      : rank(rank_in), json(json_path, rank_in), logger(name, std::make_shared<spdlog::sinks::stderr_sink_mt>()) {
    logger.set_pattern("[%n] %l: %v");
    logger.flush_on(spdlog::level::trace);
    switch (level) {
      case LogLevel::kDebug:
        logger.set_level(spdlog::level::debug);
        break;
      case LogLevel::kInfo:
        logger.set_level(spdlog::level::info);
        break;
      case LogLevel::kWarning:
        logger.set_level(spdlog::level::warn);
        break;
      case LogLevel::kError:
        logger.set_level(spdlog::level::err);
        break;
      case LogLevel::kOff:
        logger.set_level(spdlog::level::off);
        break;
    }
  }

  void append(std::string_view event, nlohmann::ordered_json fields) {
    if (const std::string trouble = json.append(event, std::move(fields)); !trouble.empty()) logger.warn("{}", trouble);
  }
  void append_line(std::string_view level, std::string_view text) {
    if (json.wanted()) append("log", {{"level", level}, {"text", text}});
  }

  int rank;
  JsonFile json;
  spdlog::logger logger;
};

Logger::Logger() = default;

Logger::Logger(int rank, int world_size, LogLevel level, const std::string& json_path)
    : sink_(std::make_shared<Sink>(rank, "zeroth " + std::to_string(rank) + "/" + std::to_string(world_size), level,
                                   json_path)) {}

void Logger::debug(std::string_view text) const {
  if (!sink_) return;
  sink_->logger.debug("{}", text);
  sink_->append_line("debug", text);
}

void Logger::progress(std::string_view text) const {
  if (!sink_ || sink_->rank != 0) return;
  sink_->logger.info("{}", text);
  sink_->append_line("info", text);
}

void Logger::warn(std::string_view text) const {
  if (!sink_) return;
  sink_->logger.warn("{}", text);
  sink_->append_line("warning", text);
}

void Logger::error(std::string_view text) const {
  if (!sink_) return;
  sink_->logger.error("{}", text);
  sink_->append_line("error", text);
}

void Logger::record(std::string_view event, std::initializer_list<LogField> fields) const {
  if (!sink_ || !sink_->json.wanted()) return;
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  for (const LogField& field : fields) {
    std::visit([&](const auto& value) { object[std::string(field.name)] = value; }, field.value);
  }
  sink_->append(event, std::move(object));
}

}  // namespace zeroth
