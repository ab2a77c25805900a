#include "comm/decorators/staging_backend.h"

#include "comm/control/watched.h"
#include "comm/device_buffers.h"
#include "comm/matched_calls.h"
#include "comm/progress_list.h"
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
    try {
      for_each_run(
          calls, [&](std::span<const Collective> points) { run_together(staging, points, native); },
          [&](const Collective& call) { run_together(staging, {&call, 1}, native); });
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kResource || error.code() == ErrorCode::kOutOfMemory)
        inner().abort(error);  // only this rank knows
      throw;
    }
  }

  /// One collective, or sends and receives side by side.
  void run_together(Staging& staging, std::span<const Collective> calls, void* native) {
    const CudaTable& cuda = staging.cuda;
    std::vector<StagedCall> staged;
    std::size_t bytes = 0;
    for (const Collective& call : calls) bytes += staged.emplace_back(call, rank(), bytes).bytes;
    PinnedSlab::Block block = staging.take(bytes);
    const auto copy = [&](void* to, const void* from, std::size_t size) {
      if (size > 0)
        check_cuda(cuda, cuda.copy(to, from, size, kCudaCopyAnyWay, native), "a copy through pinned memory", where(),
                   who());
    };
    std::vector<Collective> on_host;
    for (StagedCall& call : staged) {
      call.place(block.data());
      copy(block.data() + call.begin + call.send_offset, call.on_device->send, call.send_bytes);
      if (call.on_host.accumulate) copy(call.on_host.recv, call.on_device->recv, call.recv_bytes);
      on_host.push_back(call.on_host);
    }
    const std::shared_ptr<void> copied = staging.record(native, where(), who());
    try {
      wait_for(staging, copied, calls);  // also where nothing is copied: a barrier comes after what the stream holds
      inner().submit(on_host, stream_).wait();
    } catch (...) {
      block.give_back_after(copied);
      throw;
    }
    for (const StagedCall& call : staged) copy(call.on_device->recv, call.on_host.recv, call.recv_bytes);
    block.give_back_after(staging.record(native, where(), who()));
  }

  void wait_for(Staging& staging, const std::shared_ptr<void>& event, std::span<const Collective> calls) {
    const Deadline deadline(staging.watched.patience(staging.timeout));
    WaitProgress owed(root_->progress);
    while (
        !poll_for(owed.slice(deadline.slice()), [&] { return event_happened(staging.cuda, event.get(), where()); })) {
      check_interrupt();
      inner().check_peers({.what = describe(calls.front())});
      owed.advance();
      if (!deadline.passed()) continue;
      const Error error(ErrorCode::kTimeout,
                        fmt::format("the device did not come to the call within {:.1f} s",
                                    std::chrono::duration<double>(deadline.timeout()).count()),
                        {.where = where(),
                         .who = who(),
                         .which = describe(calls.front()),
                         .expected = "the end of what its stream holds before it",
                         .hint = "a kernel that never ends"});
      inner().abort(error);
      throw error;
    }
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
