// BackgroundSave: writes a rank's file of a checkpoint, and on rank 0 commits it, on a thread that makes no calls
// between ranks. See [Note: Marks] in checkpoint/rank_mark.h.
#pragma once

#include "checkpoint/rank_mark.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>
#include <zeroth/checkpoint/folder.h>
#include <zeroth/checkpoint/manifest.h>

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace zeroth {

class BackgroundSave {
 public:
  struct Terms {
    std::string folder{};      ///< temporary, in which all ranks write
    std::string final_path{};  ///< after the commit
    std::string run{};
    int rank = 0;
    int world = 1;
    std::span<const std::byte> file{};  ///< all bytes of this rank's file; must live until the save has ended
    Milliseconds timeout{};             ///< of the wait for another rank
    Retention retention{};
  };
  /// `pending`: on the rank that commits, else null. Makes this rank's mark, and a thread that waits for begin().
  /// Throws kIo, kResource.
  BackgroundSave(Terms terms, std::unique_ptr<PendingCheckpoint> pending);
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;
  /// Waits for its end. Without begin() nothing has been written. In a forked child it does nothing.
  ~BackgroundSave();

  /// All ranks have made their marks. `manifest`: all of it but the files, on the rank that commits.
  void begin(Manifest manifest);
  /// Other ranks may have died: from now on a wait for them is short.
  void hurry();
  /// True if it ends within this time, and always in a forked child.
  [[nodiscard]] bool wait(Milliseconds time);
  [[nodiscard]] bool has_ended() const { return ended_.load(std::memory_order_acquire); }
  /// Of one that has ended; none: the checkpoint is on the disk.
  [[nodiscard]] const std::optional<Error>& error() const { return error_; }

 private:
  void run() noexcept;
  void write_and_commit();
  /// What this rank has done, for all to read.
  [[nodiscard]] std::string write_file() const;
  [[nodiscard]] std::string await_mark(int rank, const Deadline& deadline);
  void write_and_await_commit();
  /// Sleeps between two looks, longer each time. Throws when the time is over.
  void pause(Milliseconds& next, const Deadline& deadline, const std::string& what);

  Terms terms_;
  std::unique_ptr<PendingCheckpoint> pending_;
  std::unique_ptr<detail::RankMark> mark_;
  Manifest manifest_;
  std::optional<Error> error_;
  std::mutex mutex_;
  /// Apart, for a forked child must leave it: its end would wait for a thread that the child does not have.
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  bool begun_ = false;
  bool stopped_ = false;
  std::optional<Deadline> hurried_;
  std::atomic<bool> ended_{false};
  pid_t process_ = ::getpid();
  std::thread thread_;
};

}  // namespace zeroth
