#include "launcher/output.h"

#include <zeroth/base/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace zeroth::launcher {
namespace {

constexpr std::size_t kBlockBytes = std::size_t{64} << 10;

/// How much of `text` to write at once: whole lines if one ends within PIPE_BUF, so that other writers to the
/// same terminal do not come in between.
std::size_t next_chunk(std::string_view text) {
  const std::string_view head = text.substr(0, PIPE_BUF);
  const std::size_t last = head.rfind('\n');
  return last == std::string_view::npos ? head.size() : last + 1;
}

}  // namespace

void OutputSink::flush_some() {
  while (pending() > 0 && error_number_ == 0) {
    pollfd ready{.fd = fd_, .events = POLLOUT, .revents = 0};
    if (::poll(&ready, 1, 0) <= 0) {
      return;
    }
    const std::string_view rest = std::string_view(queue_).substr(offset_);
    const ssize_t written = ::write(fd_, rest.data(), next_chunk(rest));
    if (written < 0) {
      if (errno == EINTR || errno == EAGAIN) {
        return;
      }
      error_number_ = errno;
    } else {
      offset_ += static_cast<std::size_t>(written);
    }
  }
  if (error_number_ != 0 || pending() == 0) {
    queue_.clear();
    offset_ = 0;
  } else if (offset_ > kCongestedBytes) {
    queue_.erase(0, offset_);
    offset_ = 0;
  }
}

RankOutput::RankOutput(OutputSink& sink, LineStyle style, std::string file, bool append)
    : sink_(&sink), splitter_(std::move(style)), path_(std::move(file)) {
  if (!path_.empty()) {
    file_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | (append ? O_APPEND : O_TRUNC) | O_CLOEXEC, 0666));
    if (!file_.valid()) {
      throw Error(ErrorCode::kIo, "cannot write " + path_ + ": " + errno_text(errno),
                  {.where = "--log-dir", .hint = "give a folder that can be written"});
    }
  }
}

void RankOutput::feed(std::string_view bytes) {
  splitter_.feed(bytes, sink_->queue());
  copy(bytes);
}

void RankOutput::finish() {
  splitter_.finish(sink_->queue());
  file_.reset();
}

void RankOutput::copy(std::string_view bytes) {
  while (file_.valid() && !bytes.empty()) {
    const ssize_t written = ::write(file_.get(), bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      // A full disk under the logs is no reason to end the training; it is one to say so.
      failure_ = fmt::format("[IO] cannot write {}: {}; this file is incomplete", path_, ::strerrordesc_np(errno));
      file_.reset();
    }
  }
}

StdinRelay::StdinRelay(int source, UniqueFd pipe) : source_(source), pipe_(std::move(pipe)) {
  ::fcntl(pipe_.get(), F_SETFL, O_NONBLOCK);
}

short StdinRelay::poll_events() const {
  return pending_.empty() ? POLLIN : POLLOUT;
}

void StdinRelay::advance() {
  if (pending_.empty()) {
    pending_.resize(kBlockBytes);
    const ssize_t bytes = ::read(source_, pending_.data(), pending_.size());
    pending_.resize(static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
    if (bytes == 0 || (bytes < 0 && errno != EINTR && errno != EAGAIN)) {
      close();
      return;
    }
  }
  const ssize_t written = ::write(pipe_.get(), pending_.data(), pending_.size());
  if (written > 0) {
    pending_.erase(0, static_cast<std::size_t>(written));
  } else if (written < 0 && errno != EINTR && errno != EAGAIN) {
    close();  // rank 0 has closed its standard input
  }
}

}  // namespace zeroth::launcher
