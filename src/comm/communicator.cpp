#include <zeroth/comm/communicator.h>
#include <zeroth/device/device.h>

#include <fmt/format.h>

#include <string>
#include <utility>

namespace zeroth {

Communicator::Communicator(std::shared_ptr<CommBackend> backend)
    : Communicator(backend, make_cpu_device()->make_stream("host")) {}

Communicator::Communicator(std::shared_ptr<CommBackend> backend, Stream stream)
    : backend_(std::move(backend)), stream_(std::move(stream)) {}

void Communicator::barrier(std::string_view name, MessageTag tag) const {
  const Collective collective{.kind = CollectiveKind::kBarrier, .tag = tag, .name = std::string(name)};
  backend_->submit({&collective, 1}, stream_).wait();
}

Work Communicator::submit(const Call& call, const Stream& stream) const {
  const Collective& collective = call.collective;
  const bool one_count = collective.kind == CollectiveKind::kAllReduce || collective.kind == CollectiveKind::kBroadcast;
  // With another number of counts there is no extent, and the backend says what is wrong.
  CallExtent extent{.send = call.send_elements, .recv = call.recv_elements};
  if (one_count || collective.counts.size() == static_cast<std::size_t>(size())) extent = extent_of(collective, rank());
  if (call.send_elements != extent.send || call.recv_elements != extent.recv) {
    throw Error(ErrorCode::kUsage, "spans do not fit the counts",
                {.where = fmt::format("comm.{} group={}", backend_->kind(), backend_->group_name()),
                 .who = fmt::format("rank {}/{}", rank(), size()),
                 .which = describe(collective),
                 .expected = fmt::format("{} elements in, {} out", extent.send, extent.recv),
                 .got = fmt::format("{} in, {} out", call.send_elements, call.recv_elements)});
  }
  return backend_->submit({&collective, 1}, stream);
}

}  // namespace zeroth
