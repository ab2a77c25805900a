// Where the lines of the ranks go: queues in front of our own output, files beside it, and the relay of
// standard input.
#pragma once

#include "base/unique_fd.h"
#include "launcher/line_splitter.h"

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace zeroth::launcher {

/// A queue in front of standard output or error. A reader that does not read must never stop the supervision
/// of the ranks, and our descriptor may be shared with other programs, so it cannot be made non-blocking: a
/// write happens only when poll promises room, and is no larger than what then fits without blocking
/// (PIPE_BUF).
class OutputSink {
 public:
  explicit OutputSink(int fd) : fd_(fd) {}

  [[nodiscard]] int fd() const { return fd_; }
  /// Text to be written goes to the end of this.
  [[nodiscard]] std::string& queue() { return queue_; }
  [[nodiscard]] std::size_t pending() const { return queue_.size() - offset_; }
  /// So much is waiting that the ranks' pipes should not be read for now.
  [[nodiscard]] bool congested() const { return pending() > kCongestedBytes; }
  /// The reader has gone (EPIPE) or the file is full: `error_number` says why; nothing is queued any more.
  [[nodiscard]] int error_number() const { return error_number_; }

  /// Writes what can be written without blocking.
  void flush_some();

 private:
  static constexpr std::size_t kCongestedBytes = std::size_t{1} << 20;

  int fd_;
  std::string queue_;
  std::size_t offset_ = 0;
  int error_number_ = 0;
};

/// One output stream of one rank on its way to a sink and, if asked for, to a file with the bytes as they
/// came.
class RankOutput {
 public:
  /// `file` "" = none; what it holds stays if `append`. Throws Error(kIo) if it cannot be made.
  RankOutput(OutputSink& sink, LineStyle style, std::string file, bool append);

  [[nodiscard]] const std::string& last_error_line() const { return splitter_.last_error_line(); }
  [[nodiscard]] bool makes_room() const { return splitter_.makes_room(); }

  void feed(std::string_view bytes);
  /// Nothing more comes: what is left is passed on.
  void finish();
  /// Why the file is incomplete, "" if it is not; once.
  [[nodiscard]] std::string take_failure() { return std::exchange(failure_, {}); }
  /// The last line that is not empty, without its end.
  [[nodiscard]] const std::string& last_line() const { return splitter_.last_line(); }

 private:
  void copy(std::string_view bytes);

  OutputSink* sink_;
  LineSplitter splitter_;
  std::string path_;
  UniqueFd file_;
  std::string failure_;
};

/// Copies our standard input to rank 0 through a pipe. The rank cannot have the terminal itself: it is in
/// another process group, and the terminal would stop it when it reads.
class StdinRelay {
 public:
  /// Inactive.
  StdinRelay() = default;
  /// Copies from `source` (borrowed) to `pipe`.
  StdinRelay(int source, UniqueFd pipe);

  [[nodiscard]] bool active() const { return pipe_.valid(); }
  /// The descriptor to poll, and for what: the source while nothing waits to be written, else the pipe.
  [[nodiscard]] int poll_fd() const { return pending_.empty() ? source_ : pipe_.get(); }
  [[nodiscard]] short poll_events() const;
  /// To be called when poll_fd() is ready.
  void advance();
  void close() { pipe_.reset(); }

 private:
  int source_ = -1;
  UniqueFd pipe_;
  std::string pending_;
};

}  // namespace zeroth::launcher
