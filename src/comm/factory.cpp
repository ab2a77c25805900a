#include "comm/inproc_exchange.h"
#include "comm/levels_of_hosts.h"
#include "comm/mpi/mpi_transport.h"
#include "comm/nccl/nccl_backend.h"
#include "comm/rendezvous.h"
#include "comm/segment_backend.h"
#include "comm/self_backend.h"
#include "comm/shm_exchange.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/base/surroundings.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/factory.h>
#include <zeroth/comm/messages.h>

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <utility>

namespace zeroth {
namespace {

std::unique_ptr<CommBackend> make_self(const WorldSpec& spec) {
  ZR_CHECK(spec.size == 1,
           ErrorCode::kUsage,
           "backend self is for a world of one rank",
           {.where = "comm.self",
            .got = fmt::format("{} ranks", spec.size),
            .hint = "use shm, or inproc for threads"});
  return detail::make_self_backend(spec.options);
}

std::unique_ptr<CommBackend> make_inproc(const WorldSpec& spec) {
  ZR_CHECK(spec.hub != nullptr,
           ErrorCode::kUsage,
           "ranks that are threads need a hub",
           {.where = "comm.inproc", .hint = "make_inproc_hub(world_size), the same for every rank"});
  ZR_CHECK(spec.hub->world_size() == spec.size,
           ErrorCode::kMismatch,
           "world sizes differ",
           {.where = "comm.inproc",
            .who = fmt::format("rank {}/{}", spec.rank, spec.size),
            .expected = fmt::format("{} ranks, as the hub was made for", spec.hub->world_size()),
            .got = fmt::format("{} ranks", spec.size)});
  spec.hub->claim(spec.rank);
  return std::make_unique<detail::SegmentBackend>(detail::SharedMemoryEngine::make_world(
      std::make_unique<detail::InprocExchange>(spec.hub, "world", spec.rank, spec.size),
      spec.rank,
      spec.size,
      spec.options));
}

std::unique_ptr<CommBackend> make_shm(const WorldSpec& spec) {
  ZR_CHECK(spec.size <= detail::kMaxShmRanks,
           ErrorCode::kConfig,
           "too many ranks on one host",
           {.where = "comm.shm",
            .expected = fmt::format("at most {}", detail::kMaxShmRanks),
            .got = fmt::format("{}", spec.size)});
  const std::shared_ptr<SystemCalls> system = spec.options.system ? spec.options.system : make_system_calls();
  const detail::Refusal refused = detail::probe_system_calls(*system);
  if (refused.call != 0 && spec.size == 1) throw detail::refusal_error(refused, spec.rank, spec.size);
  detail::RendezvousSpec rendezvous{
      .job = spec.job.empty() && spec.size > 1 ? job_from_environment() : spec.job,
      .rank = spec.rank,
      .size = spec.size,
      .timeout = spec.options.timeout,
      .refused = refused};
  if (rendezvous.job.empty()) rendezvous.job = fmt::format("alone-{}", ::getpid());
  auto exchange = std::make_unique<detail::ShmExchange>(std::move(rendezvous), spec.options, system, [] {});
  return std::make_unique<detail::SegmentBackend>(
      detail::SharedMemoryEngine::make_world(std::move(exchange), spec.rank, spec.size, spec.options));
}

std::unique_ptr<CommBackend> make_mpi(const WorldSpec& spec) {
  return make_message_backend(detail::make_mpi_transport(detail::load_mpi(), spec.rank, spec.size, spec.options), spec.options);
}

std::unique_ptr<CommBackend> make_shm_and_mpi(const WorldSpec& spec) {
  return detail::make_levels_of_hosts(detail::make_mpi_transport(detail::load_mpi(), spec.rank, spec.size, spec.options), spec);
}

std::unique_ptr<CommBackend> make_nccl(const WorldSpec& spec) {
  return make_nccl_backend(spec.hub ? make_inproc(spec) : make_shm(spec), spec.options);
}

std::unique_ptr<CommBackend> make_nccl_and_mpi(const WorldSpec& spec) { return make_nccl_backend(make_shm_and_mpi(spec), spec.options); }

/// What is built. A new backend adds its line here.
struct Entry {
  std::string_view name;
  std::unique_ptr<CommBackend> (*make)(const WorldSpec&);
  bool has_segment;
  bool has_board = false;
};
constexpr auto kBackends = std::to_array<Entry>({
    {"self", make_self, false},
    {"inproc", make_inproc, true},
    {"shm", make_shm, true},
    {"mpi", make_mpi, false},
    {"shm+mpi", make_shm_and_mpi, false},
    {"nccl", make_nccl, true, true},
    {"nccl+mpi", make_nccl_and_mpi, false},
});

const Entry& find_backend(std::string_view name) {
  for (const Entry& entry : kBackends) {
    if (entry.name == name) return entry;
  }
  const std::vector<std::string> names = backend_names();
  const std::string nearest = nearest_name(name, names);
  throw Error(ErrorCode::kConfig,
              "no such communication backend",
              {.where = "comm",
               .which = std::string(name),
               .expected = "one of those in this build: " + join(names, ", "),
               .hint = nearest.empty() ? "" : "did you mean " + nearest + "?"});
}

}  // namespace

std::string job_from_environment() {
  if (std::string job = variable_or_empty("ZEROTH_JOB_ID"); !job.empty()) return job;
  const std::string address = variable_or_empty("MASTER_ADDR");
  const std::string port = variable_or_empty("MASTER_PORT");
  ZR_CHECK(!address.empty() && !port.empty(),
           ErrorCode::kEnvironment,
           "the ranks of this job have no common name",
           {.where = "comm.shm",
            .expected = "ZEROTH_JOB_ID, or MASTER_ADDR and MASTER_PORT",
            .hint = "start the ranks with zeroth-run or torchrun"});
  return address + ":" + port + "/" + variable_or_empty("TORCHELASTIC_RUN_ID");
}

std::unique_ptr<CommBackend> make_backend(std::string_view name, const WorldSpec& spec) {
  arm_failpoints_of_environment();
  const Entry& entry = find_backend(name);
  ZR_CHECK(spec.size >= 1 && spec.rank >= 0 && spec.rank < spec.size,
           ErrorCode::kUsage,
           "the rank is not in the world",
           {.where = "comm." + std::string(name),
            .expected = "0 <= rank < world size",
            .got = fmt::format("rank {}, world size {}", spec.rank, spec.size)});
  return entry.make(spec);
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kBackends) names.emplace_back(entry.name);
  return names;
}

std::size_t transport_bytes(std::string_view name, int size, const CommOptions& options) {
  const Entry& entry = find_backend(name);
  return (entry.has_segment ? detail::SharedMemoryEngine::segment_bytes(options, true, size) : 0) + (entry.has_board ? detail::nccl_host_bytes() : 0);
}

}  // namespace zeroth
