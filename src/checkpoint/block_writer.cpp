#include "checkpoint/block_writer.h"

#include "base/own_thread.h"

#include <exception>
#include <utility>

namespace zeroth::detail {

BlockWriter::BlockWriter(WriteAt write_at) : write_at_(std::move(write_at)) {
  thread_ = start_own_thread([this] { run(); }, "the writer of a file", {.where = "checkpoint"});
}

BlockWriter::~BlockWriter() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void BlockWriter::write(std::span<const std::byte> block, std::uint64_t offset) {
  finish();
  {
    const std::lock_guard lock(mutex_);
    block_ = block;
    offset_ = offset;
  }
  changed_.notify_all();
}

// The wait is as long as a write to the file system, which has no deadline either.
void BlockWriter::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return block_.empty(); });
  if (error_) throw Error(*error_);
}

void BlockWriter::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !block_.empty(); });
    if (block_.empty()) return;
    const std::span<const std::byte> block = block_;
    const std::uint64_t offset = offset_;
    std::optional<Error> error;
    lock.unlock();
    try {
      write_at_(block, offset);
    } catch (const std::exception& caught) {
      error = error_of(caught);
    }
    lock.lock();
    if (error && !error_) error_ = std::move(error);
    block_ = {};
    changed_.notify_all();
  }
}

}  // namespace zeroth::detail
