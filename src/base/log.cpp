#include <zeroth/base/log.h>

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <string>

namespace zeroth {

struct Logger::Sink {
  Sink(int rank_in, const std::string& name, LogLevel level)
      : rank(rank_in), logger(name, std::make_shared<spdlog::sinks::stderr_sink_mt>()) {
    logger.set_pattern("[%n] %l: %v");
    logger.flush_on(spdlog::level::trace);
    switch (level) {
      case LogLevel::kDebug: logger.set_level(spdlog::level::debug); break;
      case LogLevel::kInfo: logger.set_level(spdlog::level::info); break;
      case LogLevel::kWarning: logger.set_level(spdlog::level::warn); break;
      case LogLevel::kError: logger.set_level(spdlog::level::err); break;
      case LogLevel::kOff: logger.set_level(spdlog::level::off); break;
    }
  }

  int rank;
  spdlog::logger logger;
};

Logger::Logger() = default;

Logger::Logger(int rank, int world_size, LogLevel level)
    : sink_(std::make_shared<Sink>(
          rank, "zeroth " + std::to_string(rank) + "/" + std::to_string(world_size), level)) {}

void Logger::debug(std::string_view text) const {
  if (sink_) sink_->logger.debug("{}", text);
}

void Logger::progress(std::string_view text) const {
  if (sink_ && sink_->rank == 0) sink_->logger.info("{}", text);
}

void Logger::warn(std::string_view text) const {
  if (sink_) sink_->logger.warn("{}", text);
}

void Logger::error(std::string_view text) const {
  if (sink_) sink_->logger.error("{}", text);
}

}  // namespace zeroth
