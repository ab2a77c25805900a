#include "io/request_queue.h"

#include <zeroth/base/error.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/base/text.h>

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

namespace zeroth::detail {
namespace {

/// Transfers of a request that may move less than a block in a row, and be tried again.
constexpr int kMostFruitless = 16;
/// Sleep when the kernel takes nothing and nothing is in flight that could make room.
constexpr Milliseconds kPause{1};

void check_request(const IoRequest& request) {
  const auto refuse = [&](const std::string& message, const std::string& expected, const std::string& got) {
    throw Error(
        ErrorCode::kUsage, message,
        {.where = fmt::format("io {}", name_of(request.op)), .which = request.name, .expected = expected, .got = got});
  };
  if (!request.file) refuse("a request without a file", "a file", "none");
  const ScratchFile& file = *request.file;
  const std::size_t block = file.alignment();
  const auto address = std::bit_cast<std::uintptr_t>(request.memory.data());
  if (request.memory.empty() || address == 0) refuse("a request without memory", "at least one block", "0 bytes");
  if (address % block != 0 || request.memory.size() % block != 0 || request.offset % block != 0) {
    refuse("a request is not aligned", fmt::format("address, length and offset are multiples of {} bytes", block),
           fmt::format("address {:#x}, {} bytes at offset {}", address, request.memory.size(), request.offset));
  }
  if (request.offset > file.bytes() || request.memory.size() > file.bytes() - request.offset) {
    refuse("a request leaves its file", fmt::format("a range within {} bytes", file.bytes()),
           fmt::format("{} bytes at offset {}", request.memory.size(), request.offset));
  }
}

}  // namespace

RequestFlow::RequestFlow(std::unique_ptr<IoEngine> engine, const IoQueueOptions& options)
    : engine_(std::move(engine)),
      timeout_(options.timeout),
      watch_(options.watch),
      log_(options.log),
      process_(::getpid()) {
  if (options.one_thread) thread_ = std::this_thread::get_id();
  const auto depth = static_cast<std::size_t>(engine_->depth());
  slots_.resize(depth);
  ends_.resize(depth);
  for (std::size_t slot = depth; slot > 0; --slot) free_slots_.push_back(slot - 1);
}

RequestFlow::~RequestFlow() {
  // Threads and rings are the parent's: a child must not end them.
  if (::getpid() != process_) (void)engine_.release();
}

void RequestFlow::check_caller(const char* call) const {
  ZR_CHECK(::getpid() == process_, ErrorCode::kUsage, "a queue of the parent process is used in a forked child",
           {.where = fmt::format("io.{} {}", engine_->name(), call), .hint = "open a queue after the fork"});
  ZR_CHECK(
      !thread_ || *thread_ == std::this_thread::get_id(), ErrorCode::kUsage,
      "a queue of one thread is used by another one",
      {.where = fmt::format("io.{} {}", engine_->name(), call), .hint = "open it without IoQueueOptions::one_thread"});
}

std::shared_ptr<Completion> RequestFlow::add(std::span<const IoRequest> requests) {
  for (const IoRequest& request : requests) check_request(request);
  if (requests.empty()) return nullptr;
  const auto batch = std::make_shared<Batch>();
  batch->completion = std::make_shared<Completion>();
  batch->completion->source = shared_from_this();
  batch->left = requests.size();
  for (const IoRequest& request : requests) {
    waiting_.push_back({.request = request, .batch = batch});
    if (request.clock == nullptr) continue;
    clock_ = request.clock;
    waiting_.back().begun = request.clock->now();
    request.clock->began(waiting_.back().begun);
  }
  start_waiting();
  return batch->completion;
}

Transfer RequestFlow::transfer_of(std::size_t slot) const {
  const Task& task = *slots_[slot];
  const std::span<std::byte> rest = task.request.memory.subspan(task.moved);
  return {.op = task.request.op,
          .descriptor = task.request.file->descriptor(),
          .offset = task.request.offset + task.moved,
          .data = rest.data(),
          .bytes = std::min(rest.size(), kLongestTransfer),
          .id = slot};
}

/// Gives the engine what it takes, in the order of the requests.
void RequestFlow::start_waiting() {
  while (!waiting_.empty() && !free_slots_.empty()) {
    starting_.clear();
    while (!waiting_.empty() && !free_slots_.empty()) {
      const std::size_t slot = free_slots_.back();
      free_slots_.pop_back();
      slots_[slot] = std::move(waiting_.front());
      waiting_.pop_front();
      starting_.push_back(transfer_of(slot));
    }
    std::size_t taken = 0;
    std::exception_ptr error;
    try {
      taken = engine_->start(starting_);
    } catch (const Error&) {
      error = std::current_exception();
    }
    in_flight_ += taken;
    counters_.peak_in_flight = std::max(counters_.peak_in_flight, in_flight_);
    for (std::size_t i = starting_.size(); i > taken; --i) {
      const std::size_t slot = starting_[i - 1].id;
      waiting_.push_front(*std::exchange(slots_[slot], std::nullopt));
      free_slots_.push_back(slot);
    }
    if (error) {
      Task refused = std::move(waiting_.front());
      waiting_.pop_front();
      end(std::move(refused), error);
    } else if (taken < starting_.size()) {
      ++counters_.resubmissions;
      if (taken == 0) return;
    }
  }
}

bool RequestFlow::turn(Milliseconds wait) {
  start_waiting();
  if (in_flight_ == 0) {
    if (!waiting_.empty() && wait.count() > 0) std::this_thread::sleep_for(kPause);
    return false;
  }
  const SteadyClock::time_point before = looked_;
  looked_ = now();
  const std::size_t found = engine_->reap(ends_, wait);
  in_flight_ -= found;
  for (std::size_t i = 0; i < found; ++i) {
    // Where the engine knows no time: who waited saw it. Else it was after the look before, and nobody knows how long
    // after: then that look counts, so that the time on the way is never too long, and no share of it too large.
    if (ends_[i].at == SteadyClock::time_point{}) ends_[i].at = wait.count() > 0 ? now() : before;
    take(ends_[i]);
  }
  start_waiting();
  return found > 0;
}

void RequestFlow::take(const TransferEnd& ended) {
  const auto slot = static_cast<std::size_t>(ended.id);
  ZR_ASSERT(slot < slots_.size() && slots_[slot].has_value(), "the end of a transfer that nobody has started");
  slots_[slot]->ended = ended.at;
  const std::int64_t result = ended.result;
  if (result >= 0) return take_moved(slot, static_cast<std::size_t>(result));
  const int error_number = static_cast<int>(-result);
  if (error_number == EAGAIN || error_number == EINTR) return again(slot, true);
  Task task = *std::exchange(slots_[slot], std::nullopt);
  free_slots_.push_back(slot);
  ErrorContext context = context_of(task);
  if (error_number == ENOSPC) context.hint = "the file system could not reserve the file's space when it was made";
  const auto error = std::make_exception_ptr(Error(
      ErrorCode::kIo, fmt::format("a {} failed: {}", name_of(task.request.op), errno_text(error_number)), context));
  end(std::move(task), error);
}

/// Direct transfers go on at a whole block: what was moved beyond it is moved again.
void RequestFlow::take_moved(std::size_t slot, std::size_t bytes) {
  Task& task = *slots_[slot];
  const std::size_t asked = transfer_of(slot).bytes;
  ZR_ASSERT(bytes <= asked, "a transfer moved more than it was asked for");
  (task.request.op == IoOp::kRead ? counters_.bytes_read : counters_.bytes_written) += bytes;
  const std::size_t whole = bytes - bytes % task.request.file->alignment();
  task.moved += whole;
  task.fruitless = whole > 0 ? 0 : task.fruitless + 1;
  if (task.moved == task.request.memory.size() || task.fruitless > kMostFruitless) {
    Task ended = *std::exchange(slots_[slot], std::nullopt);
    free_slots_.push_back(slot);
    std::exception_ptr error;
    if (ended.moved < ended.request.memory.size()) {
      error = std::make_exception_ptr(Error(
          ErrorCode::kIo, fmt::format("a {} moves no whole block", name_of(ended.request.op)), context_of(ended)));
    }
    return end(std::move(ended), error);
  }
  again(slot, bytes < asked);
}

/// Before all others: who waits for it has waited longest. The next part of a very long request does not count.
void RequestFlow::again(std::size_t slot, bool counts) {
  if (counts) ++counters_.resubmissions;
  waiting_.push_front(*std::exchange(slots_[slot], std::nullopt));
  free_slots_.push_back(slot);
}

void RequestFlow::end(Task task, std::exception_ptr error) {
  ++counters_.requests;
  if (const auto& clock = task.request.clock) {
    clock->ended(task.request.op, task.begun, std::max(task.begun, task.ended), task.request.memory.size(),
                 task.request.name);
  }
  if (error) ++counters_.failures;
  Batch& batch = *task.batch;
  if (error && !batch.error) batch.error = std::move(error);
  if (--batch.left > 0 || batch.completion->done) return;
  batch.completion->error = batch.error;
  batch.completion->done = true;
}

ErrorContext RequestFlow::context_of(const Task& task) const {
  const IoRequest& request = task.request;
  return {.where = fmt::format("io.{} {}", engine_->name(), name_of(request.op)),
          .which = fmt::format("{} in a {} file of {}", request.name.empty() ? "a block" : request.name,
                               name_of(request.file->access()), request.file->folder()),
          .expected = fmt::format("{} bytes at offset {}", request.memory.size(), request.offset),
          .got = fmt::format("{} bytes", task.moved)};
}

std::string RequestFlow::oldest() const {
  for (const std::optional<Task>& task : slots_) {
    if (task) {
      const ErrorContext context = context_of(*task);
      return fmt::format("{} of {}: {}, {} done", name_of(task->request.op), context.which, context.expected,
                         context.got);
    }
  }
  return "the kernel takes no request";
}

void RequestFlow::run_until(Completion& completion) {
  check_caller("wait");
  const Deadline deadline(timeout_);
  Deadline slice(kWaitSlice);
  while (!completion.done) {
    ZR_CHECK(!closed_, ErrorCode::kAborted, "the queue of a request has gone", {.where = "io"});
    if (!turn(Milliseconds{0})) (void)turn(deadline.slice());
    if (completion.done) return;
    if (slice.passed()) {
      check_interrupt();
      if (watch_) watch_();
      slice = Deadline(kWaitSlice);
    }
    ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "a transfer to or from a file does not end",
             {.where = fmt::format("io.{} wait", engine_->name()),
              .which = oldest(),
              .expected = fmt::format("its end within {} ms", deadline.timeout().count()),
              .got = fmt::format("{} requests not finished", pending())});
  }
}

bool RequestFlow::ready(Completion& completion) {
  if (!completion.done && !closed_) {
    check_caller("ready");
    (void)turn(Milliseconds{0});
  }
  return completion.done;
}

void RequestFlow::drop_waiting() noexcept {
  try {
    while (!waiting_.empty()) {
      Task task = std::move(waiting_.front());
      waiting_.pop_front();
      const auto error = std::make_exception_ptr(
          Error(ErrorCode::kAborted, "the queue of a request has gone before it", context_of(task)));
      end(std::move(task), error);
    }
  } catch (...) {  // no memory for an error: who waits is told in run_until()
    waiting_.clear();
  }
}

void RequestFlow::close() noexcept {
  closed_ = true;
  if (::getpid() != process_) return;
  drop_waiting();
  const Deadline deadline(timeout_);
  try {
    for (bool said = false; in_flight_ > 0; drop_waiting()) {
      const std::size_t found = engine_->reap(ends_, kWaitSlice);
      in_flight_ -= found;
      for (std::size_t i = 0; i < found; ++i) take(ends_[i]);
      if (said || !deadline.passed()) continue;
      log_.error("the files' queue still waits for its end: " + oldest());
      said = true;
    }
  } catch (const std::exception& error) {
    log_.error(std::string("the files' queue ends with requests on their way: ") + error.what());
  }
}

namespace {

class RequestQueue final : public IoQueue {
 public:
  RequestQueue(std::unique_ptr<IoEngine> engine, const IoQueueOptions& options, std::string reason)
      : flow_(std::make_shared<RequestFlow>(std::move(engine), options)), reason_(std::move(reason)) {}
  ~RequestQueue() override { flow_->close(); }

  Work submit(std::span<const IoRequest> requests) override {
    flow_->check_caller("submit");
    std::uint64_t bytes = 0;
    for (const IoRequest& request : requests) bytes += request.memory.size();
    Event event(flow_->add(requests));
    std::string what =
        requests.empty() ? "io" : fmt::format("io {} {}", name_of(requests.front().op), requests.front().name);
    return {std::move(event), {.what = std::move(what), .bytes = bytes}};
  }
  void progress() override {
    flow_->check_caller("progress");
    (void)flow_->turn(Milliseconds{0});
  }
  int depth() const override { return flow_->engine().depth(); }
  std::size_t pending() const override { return flow_->pending(); }
  IoCounters counters() const override { return flow_->counters(); }
  std::string_view name() const override { return flow_->engine().name(); }
  const std::string& reason() const override { return reason_; }

 private:
  std::shared_ptr<RequestFlow> flow_;
  std::string reason_;
};

}  // namespace

std::unique_ptr<IoQueue> make_request_queue(std::unique_ptr<IoEngine> engine, const IoQueueOptions& options,
                                            std::string reason) {
  return std::make_unique<RequestQueue>(std::move(engine), options, std::move(reason));
}

}  // namespace zeroth::detail
