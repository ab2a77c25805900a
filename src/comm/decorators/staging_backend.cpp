#include "comm/decorators/staging_backend.h"

#include "comm/control/watched.h"
#include "comm/device_buffers.h"
#include "comm/matched_calls.h"
#include "comm/progress_list.h"
#include "comm/started_points.h"
#include "device/cuda/cuda_runtime.h"
#include "device/cuda/event_cache.h"
#include "device/cuda/pinned_slab.h"
#include "device/polling.h"

#include <zeroth/base/interrupt.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/device/device.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::detail {
namespace {

/// What all groups of the rank share: its device, and pinned memory.
class Staging {
 public:
  Staging(const CudaTable& cuda_table, const CommOptions& options, std::string_view where)
      : cuda(cuda_table),
        device(choose_device(cuda_table, options.device, where)),
        timeout(options.timeout),
        watched(options),
        events_(std::make_shared<EventCache>(cuda, device, std::string(where))),
        ledger_(options.ledger ? options.ledger : MemoryLedger::create()) {}

  const CudaTable& cuda;
  const int device;
  const Milliseconds timeout;
  const Watched watched;

  /// The same for messages that are not waited for: in a slab of which no other call waits for a part.
  [[nodiscard]] PinnedSlab::Block take_for_long(std::size_t bytes) {
    if (bytes == 0) return {};
    const auto has_room = [bytes](const auto& slab) { return slab->largest_free() >= bytes; };
    auto found = std::ranges::find_if(slabs_, has_room);
    if (found == slabs_.end()) found = slabs_.insert(found, PinnedSlab::create(cuda, device, bytes, *ledger_));
    return (*found)->take(bytes, timeout);
  }
  /// One place of that size; waits for what is on its way back.
  [[nodiscard]] PinnedSlab::Block take(std::size_t bytes) {
    if (!slab_ || slab_->capacity() < bytes) {
      slab_.reset();  // before the new one is there: its copies end, its bytes are given back
      slab_ = PinnedSlab::create(cuda, device, bytes, *ledger_);
    }
    return slab_->take(bytes, timeout);
  }
  [[nodiscard]] std::shared_ptr<void> record(void* stream, std::string_view where, std::string_view who) {
    std::shared_ptr<void> event = events_->take();
    check_cuda(cuda, cuda.event_record(event.get(), stream), "to record an event", where, who);
    return event;
  }

 private:
  std::shared_ptr<EventCache> events_;
  std::shared_ptr<MemoryLedger> ledger_;
  std::shared_ptr<PinnedSlab> slab_;
  std::vector<std::shared_ptr<PinnedSlab>> slabs_;  // as many as started messages have needed at once
};

/// The Staging of a rank, once it is needed.
class StagingRoot {
 public:
  StagingRoot(const CommOptions& options, std::function<const CudaTable&()> load)
      : options_(options), load_(std::move(load)) {}

  ProgressList progress{};  ///< done while the host waits for the device
  [[nodiscard]] Staging* made() const { return staging_.get(); }
  [[nodiscard]] Staging& make(std::string_view where) {
    if (!staging_) staging_ = std::make_unique<Staging>(load_(), options_, where);
    return *staging_;
  }

 private:
  CommOptions options_;
  std::function<const CudaTable&()> load_;
  std::unique_ptr<Staging> staging_;
};

/// A call's buffers on the device, and where they lie in a block of pinned memory.
struct StagedCall {
  Collective on_host;  ///< its pointers are offsets until place()
  const Collective* on_device = nullptr;
  std::size_t send_bytes = 0;
  std::size_t recv_bytes = 0;
  std::size_t begin = 0;        ///< in the block
  std::size_t send_offset = 0;  ///< from there
  std::size_t recv_offset = 0;
  std::size_t bytes = 0;

  StagedCall(const Collective& call, int rank, std::size_t at) : on_host(call), on_device(&call), begin(at) {
    const CallExtent extent = extent_of(call, rank);
    send_bytes = static_cast<std::size_t>(extent.send) * size_of(call.in_dtype);
    recv_bytes = static_cast<std::size_t>(extent.recv) * size_of(call.out_dtype);
    const auto send = reinterpret_cast<std::uintptr_t>(call.send);
    const auto recv = reinterpret_cast<std::uintptr_t>(call.recv);
    const bool in_place = send_bytes > 0 && recv_bytes > 0 && send < recv + recv_bytes && recv < send + send_bytes;
    if (in_place) {  // the one is a part of the other: see validate()
      const std::uintptr_t first = std::min(send, recv);
      send_offset = send - first;
      recv_offset = recv - first;
    } else {
      recv_offset = align_up(send_bytes, PinnedSlab::kGrainBytes);
    }
    bytes = align_up(std::max(send_offset + send_bytes, recv_offset + recv_bytes), PinnedSlab::kGrainBytes);
  }

  void place(std::byte* block) {
    on_host.send = send_bytes > 0 ? block + begin + send_offset : nullptr;
    on_host.recv = recv_bytes > 0 ? block + begin + recv_offset : nullptr;
  }
};

/// Who waits, and for which call.
struct DeviceWait {
  std::string where{};
  std::string who{};
  std::string what{};
};

/// Blocks until the device has come to `event`.
void wait_for_device(CommBackend& base, StagingRoot& root, const std::shared_ptr<void>& event, const DeviceWait& wait) {
  const Staging& staging = *root.made();
  const Deadline deadline(staging.watched.patience(staging.timeout));
  WaitProgress owed(root.progress);
  while (
      !poll_for(owed.slice(deadline.slice()), [&] { return event_happened(staging.cuda, event.get(), wait.where); })) {
    check_interrupt();
    base.check_peers({.what = wait.what});
    owed.advance();
    if (!deadline.passed()) continue;
    const Error error(ErrorCode::kTimeout,
                      fmt::format("the device did not come to the call within {:.1f} s",
                                  std::chrono::duration<double>(deadline.timeout()).count()),
                      {.where = wait.where,
                       .who = wait.who,
                       .which = wait.what,
                       .expected = "the end of what its stream holds before it",
                       .hint = "a kernel that never ends"});
    base.abort(error);
    throw error;
  }
}

/// Calls of which `base` has the other half: copies between a stream's device and pinned memory.
class StagedCalls {
 public:
  /// `calls` outlive it. `take(bytes)`: a block of pinned memory.
  template <class Take>
  StagedCalls(Staging& staging, std::span<const Collective> calls, int rank, void* native, std::string where,
              std::string who, const Take& take)
      : staging_(staging), native_(native), where_(std::move(where)), who_(std::move(who)) {
    std::size_t bytes = 0;
    for (const Collective& call : calls) bytes += staged_.emplace_back(call, rank, bytes).bytes;
    block_ = take(bytes);
  }

  /// What the ranks give, to the host; the event after it.
  [[nodiscard]] std::shared_ptr<void> copy_in() {
    for (StagedCall& call : staged_) {
      call.place(block_.data());
      copy(block_.data() + call.begin + call.send_offset, call.on_device->send, call.send_bytes);
      if (call.on_host.accumulate) copy(call.on_host.recv, call.on_device->recv, call.recv_bytes);
    }
    return staging_.record(native_, where_, who_);
  }
  [[nodiscard]] std::vector<Collective> on_host() const {
    std::vector<Collective> calls;
    for (const StagedCall& call : staged_) calls.push_back(call.on_host);
    return calls;
  }
  /// What came, to the device; the event after it.
  std::shared_ptr<void> copy_out() {
    for (const StagedCall& call : staged_) copy(call.on_device->recv, call.on_host.recv, call.recv_bytes);
    std::shared_ptr<void> copied = staging_.record(native_, where_, who_);
    give_back_after(copied);
    return copied;
  }
  void give_back_after(std::shared_ptr<void> event) noexcept { block_.give_back_after(std::move(event)); }

 private:
  void copy(void* to, const void* from, std::size_t size) const {
    if (size > 0)
      check_cuda(staging_.cuda, staging_.cuda.copy(to, from, size, kCudaCopyAnyWay, native_),
                 "a copy through pinned memory", where_, who_);
  }

  Staging& staging_;
  void* native_;
  std::string where_;
  std::string who_;
  std::vector<StagedCall> staged_;
  PinnedSlab::Block block_;
};

/// Messages that `base` has started with pinned memory.
class StagedPoints final : public PendingPoints {
 public:
  StagedPoints(CommBackend& base, std::shared_ptr<StagingRoot> root, std::span<const Collective> calls, Stream stream,
               DeviceWait about)
      : base_(base),
        root_(std::move(root)),
        stream_(std::move(stream)),
        about_(std::move(about)),
        calls_(calls.begin(), calls.end()),
        staged_(*root_->made(), calls_, base.rank(), stream_.native(), about_.where, about_.who,
                [this](std::size_t bytes) { return root_->made()->take_for_long(bytes); }) {}

  /// Where an exception unwinds, the device must not write to buffers that go now.
  ~StagedPoints() override {
    constexpr Milliseconds kCopyTime{1'000};
    try {
      if (copied_)
        (void)poll_for(kCopyTime, [&] { return event_happened(root_->made()->cuda, copied_.get(), about_.where); });
    } catch (...) {  // the device has failed: nothing is copied any more
    }
  }

  [[nodiscard]] StagedCalls& staged() { return staged_; }
  void set_points(std::unique_ptr<PendingPoints> points) { points_ = std::move(points); }

  bool done() override {
    if (points_ && points_->done()) copy_out();
    if (points_ || !copied_) return !points_;
    if (event_happened(root_->made()->cuda, copied_.get(), about_.where)) copied_.reset();
    return !copied_;
  }
  void wait() override {
    if (points_) {
      points_->wait();
      copy_out();
    }
    if (!copied_) return;
    wait_for_device(base_, *root_, copied_, about_);
    copied_.reset();
  }

 private:
  void copy_out() {
    try {
      const CudaDeviceScope scope(root_->made()->cuda, root_->made()->device, about_.where);
      copied_ = staged_.copy_out();
    } catch (const Error& error) {
      base_.abort(error);  // only this rank knows
      throw;
    }
    points_.reset();
  }

  CommBackend& base_;
  std::shared_ptr<StagingRoot> root_;
  Stream stream_;  // keeps its device's handle
  DeviceWait about_;
  std::vector<Collective> calls_;
  StagedCalls staged_;
  std::unique_ptr<PendingPoints> points_;  // null: what came is on its way to the device,
  std::shared_ptr<void> copied_;           // until then; null: or there
};

class StagingBackend final : public ForwardingBackend {
 public:
  StagingBackend(std::unique_ptr<CommBackend> base, std::shared_ptr<StagingRoot> root)
      : ForwardingBackend(std::move(base)),
        root_(std::move(root)),
        stream_(make_cpu_device()->make_stream("staging")) {}

  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    void* const native = stream.native();
    if (native == nullptr) {
      if (const Staging* staging = root_->made()) {
        for (const Collective& call : collectives) validate(call, rank(), size(), where());
        check_host_buffers(staging->cuda, collectives, rank(), where(), who());
      }
      return inner().submit(collectives, stream);
    }
    WorkInfo info = validated(collectives, rank(), size(), where());
    Staging& staging = root_->make(where());
    for (const Collective& call : collectives)
      check_device_buffers(staging.cuda, staging.device, call, rank(), where(), who());
    stream.enqueue([&] { run(staging, collectives, native); });  // runs before it returns
    return {stream.record(), std::move(info)};
  }

  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points,
                                                     const Stream& stream) override {
    const auto moved_in_waits = [this](const std::weak_ptr<Progress>& progress) { root_->progress.add(progress); };
    if (stream.native() == nullptr) {
      if (const Staging* staging = root_->made()) {
        validate_points(points, rank(), size(), where());
        check_host_buffers(staging->cuda, points, rank(), where(), who());
      }
      return also_moved_by(inner().start(points, stream), moved_in_waits);
    }
    validate_points(points, rank(), size(), where());
    Staging& staging = root_->make(where());
    for (const Collective& point : points)
      check_device_buffers(staging.cuda, staging.device, point, rank(), where(), who());
    std::unique_ptr<PendingPoints> started;
    stream.enqueue([&] { started = start_staged(points, stream); });  // runs before it returns
    if (!started) stream.synchronize();                               // throws why
    return also_moved_by(std::move(started), moved_in_waits);
  }

  [[nodiscard]] int add_progress(std::weak_ptr<Progress> progress) override {
    root_->progress.add(progress);
    return inner().add_progress(std::move(progress));
  }

  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override {
    std::unique_ptr<CommBackend> part = inner().split(color, key, name);
    return part ? std::make_unique<StagingBackend>(std::move(part), root_) : nullptr;
  }

 private:
  [[nodiscard]] std::string where() const { return fmt::format("comm.{} group={}", kind(), group_name()); }
  [[nodiscard]] std::string who() const { return fmt::format("rank {}/{}", rank(), size()); }

  void run(Staging& staging, std::span<const Collective> calls, void* native) {
    or_stop([&] {
      for_each_run(
          calls, [&](std::span<const Collective> points) { run_together(staging, points, native); },
          [&](const Collective& call) { run_together(staging, {&call, 1}, native); });
    });
  }

  template <class Body>
  void or_stop(const Body& body) {
    try {
      body();
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kResource || error.code() == ErrorCode::kOutOfMemory)
        inner().abort(error);  // only this rank knows
      throw;
    }
  }

  /// One collective, or sends and receives side by side.
  void run_together(Staging& staging, std::span<const Collective> calls, void* native) {
    StagedCalls staged(staging, calls, rank(), native, where(), who(),
                       [&](std::size_t bytes) { return staging.take(bytes); });
    const std::shared_ptr<void> copied = staged.copy_in();
    try {
      await_device(copied, calls);  // also where nothing is copied: a barrier comes after what the stream holds
      inner().submit(staged.on_host(), stream_).wait();
    } catch (...) {
      staged.give_back_after(copied);
      throw;
    }
    staged.copy_out();
  }

  [[nodiscard]] std::unique_ptr<PendingPoints> start_staged(std::span<const Collective> points, const Stream& stream) {
    std::unique_ptr<StagedPoints> started;
    or_stop([&] {
      started = std::make_unique<StagedPoints>(
          inner(), root_, points, stream, DeviceWait{where(), who(), points.empty() ? "" : describe(points.front())});
      const std::shared_ptr<void> copied = started->staged().copy_in();
      try {
        await_device(copied, points);
        started->set_points(inner().start(started->staged().on_host(), stream_));
      } catch (...) {
        started->staged().give_back_after(copied);
        throw;
      }
    });
    return started;
  }

  void await_device(const std::shared_ptr<void>& event, std::span<const Collective> calls) {
    wait_for_device(inner(), *root_, event, {where(), who(), calls.empty() ? "" : describe(calls.front())});
  }

  std::shared_ptr<StagingRoot> root_;
  Stream stream_;  // of the host: it waits for calls that came before
};

}  // namespace

std::unique_ptr<CommBackend> make_staging_backend(std::unique_ptr<CommBackend> base, const CommOptions& options,
                                                  std::function<const CudaTable&()> load) {
  return std::make_unique<StagingBackend>(std::move(base), std::make_shared<StagingRoot>(options, std::move(load)));
}

}  // namespace zeroth::detail

namespace zeroth {

std::unique_ptr<CommBackend> make_staging_backend(std::unique_ptr<CommBackend> base, const CommOptions& options) {
  return detail::make_staging_backend(std::move(base), options,
                                      []() -> const detail::CudaTable& { return detail::load_cuda(); });
}

}  // namespace zeroth
