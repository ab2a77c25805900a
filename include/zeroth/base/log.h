// Logging: rank-prefixed lines through a value that is passed along; spdlog lives in src/base/log.cpp only.
#pragma once

#include <memory>
#include <string_view>

namespace zeroth {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

/// A handle to one rank's log. Cheap to copy, safe from several threads. There is no global logger.
/// Rank 0 speaks about progress (`progress`), every rank about trouble (`warn`, `error`).
class Logger {
 public:
  /// Writes nothing.
  Logger();
  /// Lines go to stderr as "[zeroth rank/world] level: text".
  Logger(int rank, int world_size, LogLevel level = LogLevel::kInfo);

  void debug(std::string_view text) const;
  /// Info from rank 0 only; other ranks stay quiet.
  void progress(std::string_view text) const;
  void warn(std::string_view text) const;
  void error(std::string_view text) const;

 private:
  struct Sink;
  std::shared_ptr<Sink> sink_;
};

}  // namespace zeroth
