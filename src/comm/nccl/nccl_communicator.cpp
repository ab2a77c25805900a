#include "comm/nccl/nccl_communicator.h"

#include "base/own_thread.h"
#include "comm/nccl/nccl_calls.h"
#include "device/polling.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

namespace zeroth::detail {

NcclCommunicator::NcclCommunicator(const NcclTable& nccl, std::function<void()> enter, std::string where,
                                   std::string who)
    : nccl_(nccl), enter_(std::move(enter)), where_(std::move(where)), who_(std::move(who)) {}

NcclCommunicator::~NcclCommunicator() {
  (void)end(End::kAbort, Deadline(Milliseconds{0}));
}

void NcclCommunicator::join(int size, const NcclId& id, int rank) {
  const std::lock_guard lock(mutex_);
  NcclConfig config;
  config.blocking = 0;
  NcclComm comm = nullptr;
  const NcclStatus status = nccl_.init(&comm, size, id, rank, &config);
  comm_.store(comm);
  check(status, "to join a group");
}

void NcclCommunicator::split(int color, int key, NcclCommunicator& part) {
  const std::lock_guard lock(mutex_);
  require_living();
  const bool joins = color >= 0;
  // NCCL may write it after this call, and also after we have stopped to wait: so it is on nobody's stack.
  const auto made = std::make_shared<NcclComm>(nullptr);
  if (joins) {
    const std::lock_guard part_lock(part.mutex_);
    part.awaited_ = made;
  }
  awaited_of_parts_.push_back(made);
  check(nccl_.split(comm_.load(), joins ? color : kNcclNoColor, key, made.get(), nullptr), "to split a group");
}

bool NcclCommunicator::settled() {
  const std::lock_guard lock(mutex_);
  ZR_CHECK(!ended_.load(), ErrorCode::kAborted, "NCCL's communicator has been given up",
           {.where = where_, .who = who_});
  if (awaited_) {
    comm_.store(std::atomic_ref(*awaited_).load());
    if (comm_.load() == nullptr) return false;
    awaited_.reset();
  }
  NcclStatus status = NcclStatus::kSuccess;
  check(nccl_.async_error(comm_.load(), &status), "to say how it is");
  check(status, "to go on: a call that it had taken has failed");
  return status != NcclStatus::kInProgress;
}

void NcclCommunicator::add_buffer(std::byte* data, std::size_t bytes, std::shared_ptr<void> keep) {
  const std::lock_guard lock(mutex_);
  require_living();
  if (nccl_.register_buffer == nullptr || nccl_.deregister_buffer == nullptr || bytes == 0) return;
  void* handle = nullptr;
  buffers_.reserve(buffers_.size() + 1);
  check(nccl_.register_buffer(comm_.load(), data, bytes, &handle), "to register a buffer");
  buffers_.push_back({handle, std::move(keep)});
}

bool NcclCommunicator::end(End how, const Deadline& deadline) noexcept {
  std::shared_ptr<Ending> ending;
  {
    // Whoever holds it is inside a call of NCCL that does not block: but if it does, nothing else will free it than an
    // abort beside it.
    const bool locked =
        poll_for(std::min(deadline.remaining(), Milliseconds{1'000}), [&] { return mutex_.try_lock(); });
    if (!ended_.exchange(true)) {
      NcclComm comm = comm_.exchange(nullptr);
      if (comm == nullptr && locked && awaited_) comm = std::atomic_ref(*awaited_).load();
      if (comm != nullptr) {
        try {
          ending = std::make_shared<Ending>();
          if (locked) ending_ = ending;
          start_own_thread(
              [&nccl = nccl_, enter = enter_, comm,
               buffers = locked ? std::exchange(buffers_, {}) : std::vector<Registered>{}, parts = awaited_of_parts_,
               how, deadline, ending]() mutable {
                enter();
                end_now(nccl, comm, std::move(buffers), how, deadline);
                const std::lock_guard lock(ending->mutex);
                ending->done = true;
                ending->changed.notify_all();
              },
              "the end of a communicator", {.where = where_, .who = who_})
              .detach();
        } catch (...) {
          // No thread: the communicator stays until the process ends, and is never seen to have ended.
        }
      }
    }
    if (!ending && locked) ending = ending_;
    if (locked) mutex_.unlock();
  }
  if (!ending) return true;
  std::unique_lock lock(ending->mutex);
  return ending->changed.wait_for(lock, deadline.remaining(), [&] { return ending->done; });
}

bool NcclCommunicator::ended() const {
  return ended_.load();
}

void NcclCommunicator::end_now(const NcclTable& nccl, NcclComm comm, std::vector<Registered> buffers, End how,
                               const Deadline& deadline) noexcept {
  if (how == End::kClean) {
    for (const Registered& buffer : buffers) {
      if (buffer.handle != nullptr)
        (void)nccl.deregister_buffer(comm, buffer.handle);  // null: memory that NCCL has no use for
    }
    NcclStatus status = nccl.finalize(comm);
    while (status == NcclStatus::kInProgress && !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::microseconds{200});
      if (nccl.async_error(comm, &status) != NcclStatus::kSuccess) status = NcclStatus::kInternalError;
    }
    if (status == NcclStatus::kSuccess) {
      (void)nccl.destroy(comm);
      return;
    }
  }
  (void)nccl.abort(comm);
}

void NcclCommunicator::check(NcclStatus status, std::string_view call) const {
  check_nccl(nccl_, status, comm_.load(), call, where_, who_);
}

void NcclCommunicator::require_living() const {
  ZR_CHECK(!ended_.load() && comm_.load() != nullptr, ErrorCode::kAborted, "NCCL's communicator has been given up",
           {.where = where_, .who = who_});
}

}  // namespace zeroth::detail
