#include "comm/levels/levels_of_hosts.h"
#include "comm/mpi/mpi_collectives.h"
#include "comm/mpi/mpi_transport.h"
#include "comm/nccl/nccl_backend.h"
#include "comm/rank_facts.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/self/self_backend.h"
#include "comm/shm/inproc_exchange.h"
#include "comm/shm/segment_backend.h"
#include "comm/shm/shm_exchange.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/base/log.h>
#include <zeroth/base/surroundings.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/comm/factory.h>
#include <zeroth/comm/messages.h>
#include <zeroth/comm/mixed.h>
#include <zeroth/comm/staging.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <utility>

namespace zeroth {
namespace {

std::unique_ptr<CommBackend> make_self(const WorldSpec& spec) {
  ZR_CHECK(spec.size == 1, ErrorCode::kUsage, "backend self is for a world of one rank",
           {.where = "comm.self", .got = fmt::format("{} ranks", spec.size), .hint = "use shm, or inproc for threads"});
  return detail::make_self_backend(spec.options);
}

std::unique_ptr<CommBackend> make_inproc(const WorldSpec& spec) {
  ZR_CHECK(spec.hub != nullptr, ErrorCode::kUsage, "ranks that are threads need a hub",
           {.where = "comm.inproc", .hint = "make_inproc_hub(world_size), the same for every rank"});
  ZR_CHECK(spec.hub->world_size() == spec.size, ErrorCode::kMismatch, "world sizes differ",
           {.where = "comm.inproc",
            .who = fmt::format("rank {}/{}", spec.rank, spec.size),
            .expected = fmt::format("{} ranks, as the hub was made for", spec.hub->world_size()),
            .got = fmt::format("{} ranks", spec.size)});
  spec.hub->claim(spec.rank);
  return std::make_unique<detail::SegmentBackend>(detail::SharedMemoryEngine::make_world(
      std::make_unique<detail::InprocExchange>(spec.hub, "world", spec.rank, spec.size), spec.rank, spec.size,
      spec.options));
}

std::unique_ptr<CommBackend> make_shm(const WorldSpec& spec) {
  ZR_CHECK(spec.size <= detail::kMaxShmRanks, ErrorCode::kConfig, "too many ranks on one host",
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
      .timeout = spec.options.meeting_timeout(),
      .refused = refused,
      .notices = spec.options.meeting_notices,
      .say = [logger = Logger(spec.rank, spec.size)](std::string_view text) { logger.warn(text); },
      .hint = spec.meeting_hint,
      .is_job = true};
  if (rendezvous.job.empty()) rendezvous.job = fmt::format("alone-{}", ::getpid());
  auto exchange = std::make_unique<detail::ShmExchange>(std::move(rendezvous), spec.options, system, [] {});
  return std::make_unique<detail::SegmentBackend>(
      detail::SharedMemoryEngine::make_world(std::move(exchange), spec.rank, spec.size, spec.options));
}

/// Ranks that make their calls in different ways would wait for each other: so this is compared over messages, which
/// all of them have.
void require_same_way(const std::shared_ptr<MessageTransport>& transport, const CommOptions& options) {
  const std::array<std::int32_t, 2> own{static_cast<std::int32_t>(options.reduction), options.check_calls ? 1 : 0};
  const std::vector<std::array<std::int32_t, 2>> all = detail::facts_of_ranks(transport, options, own);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == own) continue;
    const auto text = [](const std::array<std::int32_t, 2>& way) {
      return fmt::format("zeroth.reduction {}, zeroth.check_calls {}", name_of(static_cast<Reduction>(way[0])),
                         way[1] != 0);
    };
    throw Error(ErrorCode::kMismatch, "ranks do not make their calls in the same way",
                {.where = "comm.mpi",
                 .who = fmt::format("rank {}/{}", transport->rank(), transport->size()),
                 .expected = fmt::format("{} (rank {})", text(own), transport->rank()),
                 .got = fmt::format("{} (rank {})", text(all[rank]), rank),
                 .hint = "start every rank with the same configuration file and arguments"});
  }
}

std::unique_ptr<CommBackend> make_mpi(const WorldSpec& spec) {
  const std::shared_ptr<detail::MpiWorld> mpi =
      detail::open_mpi_world(detail::load_mpi(), spec.rank, spec.size, spec.options);
  const std::shared_ptr<MessageTransport> transport = detail::make_mpi_transport(mpi);
  require_same_way(transport, spec.options);
  CommOptions options = spec.options;
  options.nodes = detail::nodes_of_ranks(transport, options, detail::host_identity());
  std::unique_ptr<CommBackend> messages = make_message_backend(transport, options);
  if (options.reduction == Reduction::kRankOrder) return messages;
  std::unique_ptr<CommBackend> side = options.check_calls ? messages->split(0, spec.rank, "checks") : nullptr;
  std::unique_ptr<CommBackend> own_sums = detail::make_mpi_collectives(mpi, std::move(messages), options);
  if (!side) return own_sums;
  return std::make_unique<CheckedBackend>(std::move(own_sums), std::move(side));
}

std::unique_ptr<CommBackend> make_shm_and_mpi(const WorldSpec& spec) {
  return detail::make_levels_of_hosts(
      detail::make_mpi_transport(detail::load_mpi(), spec.rank, spec.size, spec.options), spec);
}

std::unique_ptr<CommBackend> make_nccl(const WorldSpec& spec) {
  return make_nccl_backend(spec.hub ? make_inproc(spec) : make_shm(spec), spec.options);
}

std::unique_ptr<CommBackend> make_nccl_and_mpi(const WorldSpec& spec) {
  return make_nccl_backend(make_shm_and_mpi(spec), spec.options);
}

/// What is built. A new backend adds its line here.
struct Entry {
  std::string_view name;
  std::unique_ptr<CommBackend> (*make)(const WorldSpec&);
  bool has_segment;
  bool has_own_sums;  ///< takes Reduction::kTransport
  bool has_board = false;
  bool has_devices = false;  ///< takes calls on streams of a device by itself
};
constexpr auto kBackends = std::to_array<Entry>({
    {"self", make_self, false, true},
    {"inproc", make_inproc, true, false},
    {"shm", make_shm, true, false},
    {"mpi", make_mpi, false, true},
    {"shm+mpi", make_shm_and_mpi, false, false},
    {"nccl", make_nccl, true, true, true, true},
    {"nccl+mpi", make_nccl_and_mpi, false, true, false, true},
});

const Entry& find_backend(std::string_view name) {
  for (const Entry& entry : kBackends) {
    if (entry.name == name) return entry;
  }
  const std::vector<std::string> names = backend_names();
  const std::string nearest = nearest_name(name, names);
  throw Error(ErrorCode::kConfig, "no such communication backend",
              {.where = "comm",
               .which = std::string(name),
               .expected = "one of those in this build: " + join(names, ", "),
               .hint = nearest.empty() ? "" : "did you mean " + nearest + "?"});
}

constexpr char kBetweenBackends = '|';

/// What rank 0 finds in the file, on all ranks.
CallTable shared_table(const std::string& path, CommBackend& base) {
  constexpr std::size_t kLongest = std::size_t{1} << 20U;
  const Communicator ranks(std::shared_ptr<CommBackend>(&base, [](CommBackend*) {}));  // borrowed for this call
  std::string text;
  if (ranks.rank() == 0) {
    std::ifstream file(path, std::ios::binary);
    text.resize(kLongest + 1);
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(file.is_open() ? static_cast<std::size_t>(file.gcount()) : 0);
  }
  auto length = static_cast<std::int64_t>(text.size());
  ranks.broadcast(std::span(&length, 1), 0);
  ZR_CHECK(length > 0 && length <= static_cast<std::int64_t>(kLongest), ErrorCode::kConfig,
           "the call table cannot be read",
           {.where = "comm.mixed",
            .which = path,
            .expected = "a file of at most 1 MiB where rank 0 runs",
            .got = length > 0 ? "a longer one" : "none, or an empty one",
            .hint = "zeroth-bench comm --tune FILE makes it, ZEROTH_CALL_TABLE names it"});
  text.resize(static_cast<std::size_t>(length));
  ranks.broadcast(std::span(reinterpret_cast<std::uint8_t*>(text.data()), text.size()), 0);
  return CallTable::from_json(text, path);
}

std::unique_ptr<CommBackend> make_mixture(const std::vector<std::string>& names, const WorldSpec& spec) {
  ZR_CHECK(!spec.options.call_table.empty(), ErrorCode::kConfig,
           "a mixture of backends needs a table of which makes which calls",
           {.where = "comm.mixed",
            .which = join(names, std::string(1, kBetweenBackends)),
            .expected = "CommOptions::call_table, ZEROTH_CALL_TABLE in the environment",
            .hint = "zeroth-bench comm --tune FILE measures one"});
  std::vector<NamedBackend> backends;
  for (const std::string& name : names) {
    WorldSpec own = spec;
    // Each meets under a name of its own.
    if (!own.job.empty() || spec.size > 1) own.job = (own.job.empty() ? job_from_environment() : own.job) + "." + name;
    backends.push_back({name, find_backend(name).make(own)});
  }
  CallTable table = shared_table(spec.options.call_table, *backends.front().backend);
  return make_mixed_backend(std::move(backends), std::move(table));
}

}  // namespace

std::string job_from_environment() {
  if (std::string job = variable_or_empty("ZEROTH_JOB_ID"); !job.empty()) return job;
  const std::string address = variable_or_empty("MASTER_ADDR");
  const std::string port = variable_or_empty("MASTER_PORT");
  ZR_CHECK(!address.empty() && !port.empty(), ErrorCode::kEnvironment, "the ranks of this job have no common name",
           {.where = "comm.shm",
            .expected = "ZEROTH_JOB_ID, or MASTER_ADDR and MASTER_PORT",
            .hint = "start the ranks with zeroth-run or torchrun"});
  return address + ":" + port + "/" + variable_or_empty("TORCHELASTIC_RUN_ID");
}

std::vector<std::string> backends_in(std::string_view name) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find(kBetweenBackends, begin), name.size());
    parts.emplace_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::unique_ptr<CommBackend> make_backend(std::string_view name, const WorldSpec& spec) {
  arm_failpoints_of_environment();
  const std::vector<std::string> parts = backends_in(name);
  for (const std::string& part : parts) (void)find_backend(part);
  ZR_CHECK(spec.size >= 1 && spec.rank >= 0 && spec.rank < spec.size, ErrorCode::kUsage, "the rank is not in the world",
           {.where = "comm." + std::string(name),
            .expected = "0 <= rank < world size",
            .got = fmt::format("rank {}, world size {}", spec.rank, spec.size)});
  for (const std::string& part : parts) {
    ZR_CHECK(find_backend(part).has_own_sums || spec.options.reduction == Reduction::kRankOrder, ErrorCode::kConfig,
             "this transport has no sums of its own",
             {.where = "comm." + part,
              .which = "zeroth.reduction",
              .expected = "rank_order; or ranks of mpirun with ZEROTH_BACKEND=mpi",
              .got = std::string(name_of(spec.options.reduction))});
  }
  for (const std::string& part : parts) {
    ZR_CHECK(parts.size() == 1 || !find_backend(part).has_devices, ErrorCode::kConfig,
             "a backend of devices cannot be part of a mixture",
             {.where = "comm." + std::string(name),
              .which = part,
              .expected = "backends of the host",
              .got = "one that chooses by the stream of a call, and not by its kind and size",
              .hint = "use " + part + " alone: its calls on streams of the host are made by its base"});
  }
  std::unique_ptr<CommBackend> backend = parts.size() == 1 ? find_backend(name).make(spec) : make_mixture(parts, spec);
  return find_backend(parts.front()).has_devices ? std::move(backend)
                                                 : make_staging_backend(std::move(backend), spec.options);
}

std::string_view name_of(Reduction reduction) noexcept {
  return reduction == Reduction::kRankOrder ? "rank_order" : "transport";
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kBackends) names.emplace_back(entry.name);
  return names;
}

std::size_t transport_bytes(std::string_view name, int size, const CommOptions& options) {
  std::size_t bytes = 0;
  for (const std::string& part : backends_in(name)) {
    const Entry& entry = find_backend(part);
    if (entry.has_segment) bytes += detail::SharedMemoryEngine::segment_bytes(options, true, size);
    if (entry.has_board) bytes += detail::nccl_board_bytes();
    const bool has_gate = entry.has_devices && options.check_calls;
    if (has_gate && entry.has_segment) bytes += detail::SharedMemoryEngine::segment_bytes(options, false, size);
  }
  return bytes;
}

}  // namespace zeroth
