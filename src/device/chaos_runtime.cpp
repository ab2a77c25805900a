#include "device/stream_runtime.h"

#include <zeroth/base/error.h>

#include <chrono>
#include <deque>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::detail {
namespace {

/// [Note: Chaos] One thread, several queues. Each enqueue may run a few ready heads of random queues, each wait runs
/// random ready heads until its point is reached. So the order across streams is any that the events allow, and a task
/// whose completion nobody waits for may run very late. The same seed gives the same order.
class ChaosRuntime final : public StreamRuntime {
 public:
  explicit ChaosRuntime(std::uint64_t seed) : random_(seed) {}

  int add_stream() override {
    queues_.emplace_back();
    return static_cast<int>(queues_.size()) - 1;
  }

  void enqueue(int stream, std::function<void()> task) override {
    queue(stream).items.push_back({std::move(task), nullptr, nullptr});
    run_some();
  }

  std::shared_ptr<Completion> record(int stream) override {
    auto completion = std::make_shared<Completion>();
    completion->source = shared_from_this();
    queue(stream).items.push_back({nullptr, nullptr, completion});
    settle(queue(stream));
    return completion;
  }

  void order_after(int stream, std::shared_ptr<Completion> completion) override {
    finish_foreign(*this, *completion);
    queue(stream).items.push_back({nullptr, std::move(completion), nullptr});
  }

  void run_until(Completion& completion) override {
    while (!completion.done) {
      const bool progressed = run_one();
      ZR_ASSERT(progressed || completion.done, "a stream waits for an event that no task will ever complete");
    }
  }

  void close() noexcept override {
    std::deque<Item> dropped;  // destroyed last: what a task owns may speak to this runtime when it goes
    for (Queue& queue : queues_) {
      std::exception_ptr error = std::exchange(queue.error, nullptr);
      for (Item& item : queue.items) {
        if (item.task && !error) {
          error = std::make_exception_ptr(
              Error(ErrorCode::kAborted, "the device was closed before this work ran", {.where = "device.chaos"}));
        }
        if (item.completes) {
          item.completes->error = std::exchange(error, nullptr);
          item.completes->done = true;
        }
        dropped.push_back(std::move(item));
      }
      queue.items.clear();
    }
  }

  bool runs_inline() const override { return false; }

 private:
  struct Item {
    std::function<void()> task;             // run, or
    std::shared_ptr<Completion> wait_for;   // block the queue until done, or
    std::shared_ptr<Completion> completes;  // mark done
  };
  struct Queue {
    std::deque<Item> items;
    std::exception_ptr error;
    bool running = false;  // a task of this queue is on the stack: nothing behind it may run yet
  };

  Queue& queue(int stream) { return queues_[static_cast<std::size_t>(stream)]; }

  /// Passes markers and satisfied waits at the head.
  static void settle(Queue& queue) {
    if (queue.running) return;
    while (!queue.items.empty()) {
      Item& head = queue.items.front();
      if (head.completes) {
        head.completes->error = std::exchange(queue.error, nullptr);
        head.completes->done = true;
      } else if (head.wait_for) {
        if (!head.wait_for->done) return;
        if (head.wait_for->error && !queue.error) queue.error = head.wait_for->error;
      } else {
        return;
      }
      queue.items.pop_front();
    }
  }

  /// Runs one random ready task; false if there is none. A task may enqueue and wait itself.
  bool run_one() {
    std::vector<std::size_t> ready;
    bool settled = true;
    while (settled) {  // a marker in one queue may open a wait in another
      settled = false;
      for (Queue& candidate : queues_) {
        const std::size_t before = candidate.items.size();
        settle(candidate);
        settled = settled || candidate.items.size() != before;
      }
    }
    for (std::size_t index = 0; index < queues_.size(); ++index) {
      const Queue& candidate = queues_[index];
      if (!candidate.running && !candidate.items.empty() && candidate.items.front().task) ready.push_back(index);
    }
    if (ready.empty()) return false;
    Queue& chosen = queues_[ready[random_() % ready.size()]];
    const std::function<void()> task = std::move(chosen.items.front().task);
    chosen.items.pop_front();
    if (random_() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
    if (!chosen.error) {
      chosen.running = true;
      try {
        task();
      } catch (...) {
        chosen.error = std::current_exception();
      }
      chosen.running = false;
    }
    settle(chosen);
    return true;
  }

  void run_some() {
    for (std::uint64_t left = random_() % 3; left > 0; --left) {
      if (!run_one()) return;
    }
  }

  std::mt19937_64 random_;
  std::deque<Queue> queues_;
};

}  // namespace

std::shared_ptr<StreamRuntime> make_chaos_runtime(std::uint64_t seed) {
  return std::make_shared<ChaosRuntime>(seed);
}

}  // namespace zeroth::detail
