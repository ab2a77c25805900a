#include "bench/measure.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/factory.h>
#include <zeroth/device/device.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace zeroth::bench {
namespace {

/// What one rank has of a call of `bytes`, with buffers for all kinds.
class Buffers {
 public:
  Buffers(std::uint64_t largest, int ranks) {
    // A part of each rank, rounded up, on both sides.
    const std::size_t bytes = static_cast<std::size_t>(largest) + static_cast<std::size_t>(ranks) * kPageBytes;
    const auto device = make_cpu_device(ExecutionMode::kInline);
    send_ = device->make_arena(ArenaKind::kPrivate, bytes, "bench.send");
    recv_ = device->make_arena(ArenaKind::kPrivate, bytes, "bench.recv");
    std::memset(send_.data(), 0, bytes);
    std::memset(recv_.data(), 0, bytes);
  }

  [[nodiscard]] Collective call(CollectiveKind kind, std::uint64_t bytes, DType dtype, int ranks) const {
    Collective call{.kind = kind, .in_dtype = dtype, .out_dtype = dtype, .send = send_.data(), .recv = recv_.data()};
    const auto elements = static_cast<std::int64_t>(bytes / size_of(dtype));
    const std::vector<std::int64_t> parts(static_cast<std::size_t>(ranks), std::max<std::int64_t>(1, elements / ranks));
    switch (kind) {
      case CollectiveKind::kAllReduce:
      case CollectiveKind::kBroadcast:
        call.counts = {std::max<std::int64_t>(1, elements)};
        break;
      case CollectiveKind::kBarrier:
        break;
      case CollectiveKind::kAllToAll:
        call.counts = call.recv_counts = parts;
        call.equal_parts = true;
        break;
      default:
        call.counts = parts;
    }
    return call;
  }

 private:
  Arena send_;
  Arena recv_;
};

double seconds_since(SteadyClock::time_point begin) {
  return std::chrono::duration<double>(SteadyClock::now() - begin).count();
}

}  // namespace

std::vector<NamedBackend> connect(const World& world, const MeasureOptions& options) {
  CommOptions comm;
  comm.timeout = options.timeout;
  std::vector<NamedBackend> backends;
  for (const std::string& name : options.backends) {
    const std::string job = world.job().empty() ? "" : world.job() + ".bench." + name;
    backends.push_back(
        {name,
         make_backend(name, {.rank = world.rank(), .size = world.size(), .job = job, .hub = {}, .options = comm})});
  }
  return backends;
}

std::vector<Timing> measure(const std::vector<NamedBackend>& backends, const MeasureOptions& options,
                            const std::function<void(const Timing&)>& progress) {
  const Communicator first(
      std::shared_ptr<CommBackend>(backends.front().backend.get(), [](CommBackend*) {}));  // borrowed
  const Stream stream = make_cpu_device(ExecutionMode::kInline)->make_stream("bench");
  const Buffers buffers(*std::ranges::max_element(options.sizes), first.size());
  const auto make = [&](const NamedBackend& backend, const Collective& call, int times) {
    for (int time = 0; time < times; ++time) backend.backend->submit({&call, 1}, stream).wait();
  };
  // Of the slowest rank, so that all ranks go on alike.
  const auto slowest = [&](double own) {
    first.all_reduce(std::span(&own, 1), ReduceOp::kMax);
    return own;
  };
  std::vector<Timing> timings;
  for (const CollectiveKind kind : options.kinds) {
    for (const std::uint64_t bytes : options.sizes) {
      const Collective call = buffers.call(kind, bytes, options.dtype, first.size());
      Timing timing{.kind = kind, .bytes = table_bytes(call), .microseconds = {}};
      std::vector<int> repeats;
      for (const NamedBackend& backend : backends) {
        make(backend, call, 2);
        const auto begin = SteadyClock::now();
        make(backend, call, 1);
        const double once = slowest(seconds_since(begin));
        repeats.push_back(static_cast<int>(
            std::clamp(std::chrono::duration<double>(options.round_time).count() / once, 1.0, 10'000.0)));
      }
      for (int round = 0; round < options.rounds; ++round) {
        for (std::size_t turn = 0; turn < backends.size(); ++turn) {
          const std::size_t index = (turn + static_cast<std::size_t>(round)) % backends.size();
          first.barrier();
          const auto begin = SteadyClock::now();
          make(backends[index], call, repeats[index]);
          timing.microseconds[backends[index].name].push_back(slowest(seconds_since(begin)) * 1e6 / repeats[index]);
        }
      }
      progress(timing);
      timings.push_back(std::move(timing));
      if (kind == CollectiveKind::kBarrier) break;  // it has no size
    }
  }
  return timings;
}

}  // namespace zeroth::bench
