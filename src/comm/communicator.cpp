#include <zeroth/comm/communicator.h>
#include <zeroth/device/device.h>

#include <fmt/format.h>

#include <numeric>
#include <utility>

namespace zeroth {

Communicator::Communicator(std::shared_ptr<CommBackend> backend)
    : Communicator(backend, make_cpu_device()->make_stream("host")) {}

Communicator::Communicator(std::shared_ptr<CommBackend> backend, Stream stream)
    : backend_(std::move(backend)), stream_(std::move(stream)) {}

void Communicator::barrier(MessageTag tag) const {
  const Collective collective{.kind = CollectiveKind::kBarrier, .tag = tag};
  backend_->submit({&collective, 1}, stream_).wait();
}

Work Communicator::submit(const Call& call, const Stream& stream) const {
  const Collective& collective = call.collective;
  const auto own = static_cast<std::size_t>(rank());
  const std::int64_t total =
      std::accumulate(collective.counts.begin(), collective.counts.end(), std::int64_t{0});
  std::int64_t send = total;
  std::int64_t recv = total;
  if (own < collective.counts.size()) {
    if (collective.kind == CollectiveKind::kAllGather) send = collective.counts[own];
    if (collective.kind == CollectiveKind::kReduceScatter) recv = collective.counts[own];
  }
  if (call.send_elements != send || call.recv_elements != recv) {
    throw Error(ErrorCode::kUsage,
                "spans do not fit the counts",
                {.where = fmt::format("comm.{} group={}", backend_->kind(), backend_->group_name()),
                 .who = fmt::format("rank {}/{}", rank(), size()),
                 .which = describe(collective),
                 .expected = fmt::format("{} elements in, {} out", send, recv),
                 .got = fmt::format("{} in, {} out", call.send_elements, call.recv_elements)});
  }
  return backend_->submit({&collective, 1}, stream);
}

}  // namespace zeroth
