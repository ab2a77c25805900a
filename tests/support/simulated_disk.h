// A disk on a clock of its own: transfers move their bytes at once and end when the clock says so, one after the other.
// The clock goes on when somebody computes, or waits for a transfer: to its end. So what overlaps is what the code
// lets overlap, on every machine.
#pragma once

#include "io/engine.h"
#include "io/request_queue.h"

#include <zeroth/base/deadline.h>
#include <zeroth/io/io_queue.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {

/// One thread.
class SimulatedDisk : public std::enable_shared_from_this<SimulatedDisk> {
 public:
  /// `per_transfer`: how long each takes, whatever its bytes.
  /// `tells_ends`: as the engine `threads`, transfers know when they ended; else as io_uring they do not.
  explicit SimulatedDisk(std::chrono::nanoseconds per_transfer, bool tells_ends = true)
      : per_transfer_(per_transfer), tells_ends_(tells_ends) {}

  [[nodiscard]] SteadyClock::time_point now() const { return now_; }
  void compute(std::chrono::nanoseconds time) { now_ += time; }
  void note(std::string what) { events_.push_back(std::move(what)); }
  /// What was noted, and "begin" and "end" of "read" and "write", with the names of blocks: "begin read states of ...".
  [[nodiscard]] const std::vector<std::string>& events() const { return events_; }
  void forget_events() { events_.clear(); }

  [[nodiscard]] std::unique_ptr<IoQueue> open(const IoQueueOptions& options) {
    return std::make_unique<Queue>(
        shared_from_this(),
        detail::make_request_queue(std::make_unique<Engine>(shared_from_this(), options.depth), options, ""));
  }

 private:
  using Place = std::pair<int, std::uint64_t>;  ///< descriptor and offset

  class Engine final : public detail::IoEngine {
   public:
    Engine(std::shared_ptr<SimulatedDisk> disk, int depth) : disk_(std::move(disk)), depth_(depth) {}
    [[nodiscard]] std::string_view name() const override { return "simulated"; }
    [[nodiscard]] int depth() const override { return depth_; }
    [[nodiscard]] std::size_t start(std::span<const detail::Transfer> transfers) override {
      for (const detail::Transfer& transfer : transfers) {
        const auto offset = static_cast<off_t>(transfer.offset);
        const ssize_t moved = transfer.op == IoOp::kRead
                                  ? ::pread(transfer.descriptor, transfer.data, transfer.bytes, offset)
                                  : ::pwrite(transfer.descriptor, transfer.data, transfer.bytes, offset);
        const std::string what =
            std::string(name_of(transfer.op)) + " " + disk_->names_[{transfer.descriptor, transfer.offset}];
        disk_->note("begin " + what);
        disk_->busy_until_ = std::max(disk_->busy_until_, disk_->now_) + disk_->per_transfer_;
        on_their_way_.push_back({{.id = transfer.id, .result = moved, .at = disk_->busy_until_}, what});
      }
      return transfers.size();
    }
    [[nodiscard]] std::size_t reap(std::span<detail::TransferEnd> ends, Milliseconds wait) override {
      if (on_their_way_.empty()) return 0;
      if (wait.count() > 0) disk_->now_ = std::max(disk_->now_, on_their_way_.front().first.at);
      std::size_t found = 0;
      while (!on_their_way_.empty() && found < ends.size() && on_their_way_.front().first.at <= disk_->now_) {
        disk_->note("end " + on_their_way_.front().second);
        ends[found] = on_their_way_.front().first;
        if (!disk_->tells_ends_) ends[found].at = {};
        ++found;
        on_their_way_.pop_front();
      }
      return found;
    }

   private:
    std::shared_ptr<SimulatedDisk> disk_;
    int depth_;
    std::deque<std::pair<detail::TransferEnd, std::string>> on_their_way_;
  };

  /// Tells the disk the names.
  class Queue final : public IoQueue {
   public:
    Queue(std::shared_ptr<SimulatedDisk> disk, std::unique_ptr<IoQueue> inner)
        : disk_(std::move(disk)), inner_(std::move(inner)) {}
    [[nodiscard]] Work submit(std::span<const IoRequest> requests) override {
      for (const IoRequest& request : requests)
        disk_->names_[{request.file->descriptor(), request.offset}] = request.name;
      return inner_->submit(requests);
    }
    void progress() override { inner_->progress(); }
    [[nodiscard]] int depth() const override { return inner_->depth(); }
    [[nodiscard]] std::size_t pending() const override { return inner_->pending(); }
    [[nodiscard]] IoCounters counters() const override { return inner_->counters(); }
    [[nodiscard]] std::string_view name() const override { return inner_->name(); }
    [[nodiscard]] const std::string& reason() const override { return inner_->reason(); }

   private:
    std::shared_ptr<SimulatedDisk> disk_;
    std::unique_ptr<IoQueue> inner_;
  };

  std::chrono::nanoseconds per_transfer_;
  bool tells_ends_;
  SteadyClock::time_point now_{std::chrono::seconds{1000}};
  SteadyClock::time_point busy_until_{};
  std::map<Place, std::string> names_;
  std::vector<std::string> events_;
};

}  // namespace zeroth::test
