#include "comm/control/control_link.h"
#include "comm/control/end_of_job.h"
#include "comm/decorators/slow_link_backend.h"
#include "engine/launcher_variables.h"
#include "engine/unwatched.h"
#include "hosts/site_messages.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/log.h>
#include <zeroth/base/surroundings.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/control_plane.h>
#include <zeroth/comm/two_level.h>
#include <zeroth/engine/settings.h>
#include <zeroth/engine/site_line.h>
#include <zeroth/engine/world.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <utility>

namespace zeroth {

struct World::Connection {
  bool is_watched = true;
  std::shared_ptr<RankActivity> activity;
  std::unique_ptr<CommBackend> base;
  bool met_in_part = false;  ///< over a group of the user's, which keeps what was said in vain
  std::shared_ptr<ControlPlane> control;
  int groups = 0;
  int lines = 0;  ///< to the hub between sites
  std::shared_ptr<std::atomic<bool>> failed = std::make_shared<std::atomic<bool>>(false);
  CommOptions options{};  ///< of the first connect()
  bool met_for_mesh = false;
  std::vector<MeshSpec> meshes;
};

World::World() : connection_(std::make_shared<Connection>()) {
  arm_failpoints_of_environment();
}

namespace {

using Lookup = detail::VariableLookup;

constexpr int kMostRanks = 4096;

int number(const std::string& name, const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  ZR_CHECK(error == std::errc{} && end == text.data() + text.size() && value >= 0 && value <= kMostRanks,
           ErrorCode::kEnvironment, "a world variable is not a sensible number",
           {.where = "world",
            .which = name,
            .expected = "0 to " + std::to_string(kMostRanks),
            .got = "\"" + text + "\"",
            .hint = "start the ranks with zeroth-run -n N PROGRAM, or unset it"});
  return value;
}

/// Variable names of one launcher.
struct Launcher {
  std::string_view rank, size, local_rank;
  std::string_view local_size;  ///< ranks on this host, "" if the launcher has no such variable
  std::string_view hosts;       ///< hosts of the job, likewise
  std::string_view job, step;   ///< together unique on the host
  std::string_view name;
  bool has_mpi;  ///< MPI reaches the ranks of all its hosts
};
constexpr std::string_view kOwnJob = "ZEROTH_JOB_ID";
// Slurm's SLURM_NTASKS_PER_NODE is what was asked for at most, not what there is: its number of nodes decides.
constexpr Launcher kLaunchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "", kOwnJob, "", "torchrun", false},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "",
     "PMIX_NAMESPACE", "", "mpirun", true},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_STEP_NUM_NODES", "SLURM_JOB_ID", "SLURM_STEP_ID",
     "srun", false},
};

constexpr const Launcher& kSlurm = kLaunchers[2];

constexpr std::string_view kBackendVariable = "ZEROTH_BACKEND";

/// What the variable asks for, "" for nothing.
std::string wanted_backend(const Lookup& lookup) {
  const std::string wanted = lookup(kBackendVariable).value_or("");
  const bool known = std::ranges::all_of(
      backends_in(wanted), [](const std::string& part) { return part == "shm" || part == "mpi" || part == "shm+mpi"; });
  ZR_CHECK(wanted.empty() || known, ErrorCode::kEnvironment, "no such transport between processes",
           {.where = "world",
            .which = std::string(kBackendVariable),
            .expected = "shm, mpi or shm+mpi, or a mixture such as shm|mpi",
            .got = "\"" + wanted + "\"",
            .hint = "unset it: shm on one host, shm+mpi where mpirun has started ranks on several"});
  return wanted;
}

/// How many of the `size` ranks are on this rank's host, as far as the launcher says.
int ranks_on_host_of(const Lookup& lookup, const Launcher& launcher, int size) {
  const auto count = [&](std::string_view variable, int otherwise) {
    const auto text = variable.empty() ? std::nullopt : lookup(variable);
    return text ? std::clamp(number(std::string(variable), *text), 1, size) : otherwise;
  };
  const int hosts = count(launcher.hosts, 1);
  return count(launcher.local_size, (size + hosts - 1) / hosts);
}

std::optional<std::string> environment(std::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
}

/// What says that the ranks are on several hosts.
struct SeveralHosts {
  std::string variable;
  std::string expected;
  std::string got;
};

std::optional<SeveralHosts> several_hosts(const Lookup& lookup, const Launcher& launcher, int size) {
  struct Hint {
    std::string_view variable;
    int expected;
    std::string meaning;
  };
  for (const Hint& hint : {Hint{launcher.local_size, size, std::to_string(size) + ", all ranks on this host"},
                           Hint{launcher.hosts, 1, "1 host"}}) {
    const auto text = hint.variable.empty() ? std::nullopt : lookup(hint.variable);
    if (text && number(std::string(hint.variable), *text) != hint.expected)
      return SeveralHosts{std::string(hint.variable), hint.meaning, *text};
  }
  return std::nullopt;
}

/// The transport of ranks that this launcher has started; none where they are on several hosts and what they ask for
/// stays on one.
std::optional<std::string> backend_of(const Lookup& lookup, const Launcher& launcher, int size) {
  const std::string wanted = wanted_backend(lookup);
  const bool reaches_all = !wanted.empty() && std::ranges::none_of(backends_in(wanted), [](const std::string& part) {
    return part == "shm";
  });
  if (!reaches_all && several_hosts(lookup, launcher, size)) {
    return launcher.has_mpi && wanted.empty() ? std::optional<std::string>("shm+mpi") : std::nullopt;
  }
  return !wanted.empty() ? wanted : size > 1 ? "shm" : "self";
}

struct Started {
  const Launcher* launcher;
  int rank;
  int size;
};

/// Who has started this rank: the first of the launchers whose variables are there.
std::optional<Started> started_by(const Lookup& lookup) {
  for (const Launcher& launcher : kLaunchers) {
    const auto rank = lookup(launcher.rank);
    const auto size = lookup(launcher.size);
    if (!rank && !size) continue;
    if (&launcher == &kSlurm && !detail::is_rank_of_srun(lookup)) continue;
    ZR_CHECK(rank && size, ErrorCode::kEnvironment, "one of two world variables is missing",
             {.where = "world",
              .which = std::string(rank ? launcher.size : launcher.rank),
              .expected = "set together with " + std::string(rank ? launcher.rank : launcher.size),
              .got = "unset",
              .hint = "start the ranks with zeroth-run -n N PROGRAM, or unset both"});
    const Started started{&launcher, number(std::string(launcher.rank), *rank),
                          number(std::string(launcher.size), *size)};
    ZR_CHECK(started.size >= 1 && started.rank < started.size, ErrorCode::kEnvironment,
             "the rank does not exist in this world",
             {.where = "world",
              .which = std::string(launcher.rank) + ", " + std::string(launcher.size),
              .expected = "0 <= rank < size",
              .got = "rank " + *rank + ", size " + *size,
              .hint = "ranks are counted from 0; give every rank the same size"});
    return started;
  }
  return std::nullopt;
}

/// What to do where ranks do not come.
std::string meeting_hint(const Launcher& launcher, bool by_hand, int size) {
  return std::string(by_hand ? "start the other ranks, or all of them"
                             : "look at the output of the ranks that do not come; or start all of them") +
         " with zeroth-run -n " + std::to_string(size) + " PROGRAM; for one rank alone unset " +
         std::string(launcher.rank) + " and " + std::string(launcher.size);
}

/// The launcher's, or else the rank.
int local_rank_of(const Lookup& lookup, const Started& started) {
  const auto local = lookup(started.launcher->local_rank);
  const int rank = local ? number(std::string(started.launcher->local_rank), *local) : started.rank;
  ZR_CHECK(rank < started.size, ErrorCode::kEnvironment, "the local rank does not exist in this world",
           {.where = "world",
            .which = std::string(started.launcher->local_rank),
            .expected = "below the size, " + std::to_string(started.size),
            .got = local.value_or(""),
            .hint = "local ranks are counted from 0 on each host; or unset it"});
  return rank;
}

}  // namespace

namespace {

/// "1/3": site 1 of 3.
std::optional<SitePlace> place_in(const Lookup& lookup) {
  const std::optional<std::string> said = lookup(kSiteVariable);
  if (!said) return std::nullopt;
  const std::size_t slash = said->find('/');
  ZR_CHECK(slash != std::string::npos && lookup(kSitesAtVariable) && lookup(kSitesSecretVariable),
           ErrorCode::kEnvironment, "the variables of a site are not whole",
           {.where = "world",
            .which = kSiteVariable,
            .expected = "1/3, together with " + std::string(kSitesAtVariable) + " and " + kSitesSecretVariable,
            .got = "\"" + *said + "\"",
            .hint = "zeroth-run --sites sets them; unset them for a job without sites"});
  const SitePlace place{.site = number(kSiteVariable, said->substr(0, slash)),
                        .sites = number(kSiteVariable, said->substr(slash + 1)),
                        .hub = *lookup(kSitesAtVariable),
                        .secret = *lookup(kSitesSecretVariable)};
  ZR_CHECK(place.site < place.sites && place.sites <= kMostSites, ErrorCode::kEnvironment, "there is no such site",
           {.where = "world",
            .which = kSiteVariable,
            .expected = "below the number of sites, at most " + std::to_string(kMostSites),
            .got = *said});
  return place;
}

}  // namespace

World World::from_variables(const Lookup& lookup) {
  World world;
  world.place_ = place_in(lookup);
  if (const std::string wanted = wanted_backend(lookup); !wanted.empty()) world.backend_name_ = wanted;
  const std::optional<Started> started = started_by(lookup);
  if (!started) {
    world.not_taken_ = detail::variables_not_taken(lookup);
    return world;
  }
  const Launcher& launcher = *started->launcher;
  world.rank_ = started->rank;
  world.size_ = started->size;
  const std::optional<std::string> backend = backend_of(lookup, launcher, world.size_);
  if (!backend) {
    const SeveralHosts told = several_hosts(lookup, launcher, world.size_).value();
    throw Error(
        ErrorCode::kEnvironment, "the ranks are on several hosts, and the shared memory of one does not reach them",
        {.where = "world",
         .which = told.variable,
         .expected = told.expected,
         .got = told.got,
         .hint = "start them with mpirun, or set ZEROTH_BACKEND=shm+mpi where they are ranks of MPI; in Python a group "
                 "of torch.distributed "
                 "joins them: zeroth.Engine makes it where MASTER_ADDR and MASTER_PORT are set, or takes that of "
                 "torch.distributed.init_process_group(\"gloo\", ...)"});
  }
  world.backend_name_ = *backend;
  world.local_rank_ = local_rank_of(lookup, *started);
  world.ranks_on_host_ = ranks_on_host_of(lookup, launcher, world.size_);
  const auto job = lookup(launcher.job);
  const auto step = launcher.step.empty() ? std::nullopt : lookup(launcher.step);
  if (job) world.job_ = step ? *job + "." + *step : *job;
  const bool ours = launcher.job == kOwnJob && job;  // zeroth-run uses torchrun's variables, and one more
  const bool by_hand = launcher.job == kOwnJob && !job && !lookup("TORCHELASTIC_RUN_ID");
  world.meeting_hint_ = meeting_hint(launcher, by_hand, world.size_);
  world.origin_ = std::string(launcher.rank) + " and " + std::string(launcher.size) + " (" +
                  std::string(ours ? "zeroth-run" : launcher.name) + ")";
  return world;
}

std::optional<World::RankAndSize> World::without_transport(const Lookup& lookup) {
  const std::optional<Started> started = started_by(lookup);
  if (!started || backend_of(lookup, *started->launcher, started->size)) return std::nullopt;
  return RankAndSize{.rank = started->rank, .size = started->size};
}

std::optional<World::RankAndSize> World::without_transport() {
  return without_transport(environment);
}

World World::from_environment() {
  return from_variables(environment);
}

World World::from_hub(std::shared_ptr<InprocHub> hub, int rank, int size) {
  World world;
  world.rank_ = rank;
  world.size_ = size;
  world.local_rank_ = rank;
  world.ranks_on_host_ = size;
  world.backend_name_ = "inproc";
  world.origin_ = "threads of this process";
  world.hub_ = std::move(hub);
  return world;
}

World World::from_transport(std::shared_ptr<MessageTransport> transport, std::string origin) {
  World world;
  world.rank_ = transport->rank();
  world.size_ = transport->size();
  world.local_rank_ = world.rank_;
  world.ranks_on_host_ =
      ranks_on_host_of(environment, *std::ranges::find(kLaunchers, "torchrun", &Launcher::name), world.size_);
  world.backend_name_ = transport->kind();
  world.origin_ = std::move(origin);
  world.transport_ = std::move(transport);
  // A group of some ranks has places of its own.
  for (const Launcher& launcher : kLaunchers) {
    const bool whole = environment(launcher.rank) == std::to_string(world.rank_) &&
                       environment(launcher.size) == std::to_string(world.size_);
    if (!whole) continue;
    world.local_rank_ = local_rank_of(environment, {&launcher, world.rank_, world.size_});
    world.place_ = place_in(environment);
    break;
  }
  return world;
}

World detail::unwatched(const World& world) {
  ZR_CHECK(!world.hub_ && !world.transport_, ErrorCode::kUsage, "ranks of a hub or a transport meet once",
           {.where = "world", .expected = "ranks that a launcher's variables describe", .got = world.origin_});
  World other = world;
  other.job_ += ".unwatched";
  other.connection_ = std::make_shared<World::Connection>();
  other.connection_->is_watched = false;
  return other;
}

bool World::is_watched() const {
  return connection_->is_watched;
}

World World::site(int count) const {
  ZR_CHECK(!whole_, ErrorCode::kUsage, "a site of a site",
           {.where = "world.site",
            .which = "site " + std::to_string(site_index_) + " of " + std::to_string(num_sites_),
            .expected = "the world of all ranks"});
  if (place_) {
    ZR_CHECK(num_sites_ == 1, ErrorCode::kUsage, "a site of a site",
             {.where = "world.site",
              .which = "site " + std::to_string(site_index_) + " of " + std::to_string(num_sites_),
              .expected = "one call of site()"});
    ZR_CHECK(count == place_->sites, ErrorCode::kConfig, "zeroth-run has started another number of sites",
             {.where = "world.site",
              .which = "count",
              .expected = std::to_string(place_->sites) + ", as --sites says",
              .got = std::to_string(count)});
    World part = *this;
    part.num_sites_ = place_->sites;
    part.site_index_ = place_->site;
    return part;
  }
  ZR_CHECK(count >= 1 && size_ % count == 0, ErrorCode::kConfig, "the ranks do not divide into sites of one size",
           {.where = "world.site",
            .who = "rank " + std::to_string(rank_) + "/" + std::to_string(size_),
            .which = "count",
            .expected = "a divisor of " + std::to_string(size_) + ", the ranks",
            .got = std::to_string(count)});
  World part = *this;
  part.whole_ = std::make_shared<const World>(*this);
  part.size_ = size_ / count;
  part.rank_ = rank_ % part.size_;
  part.num_sites_ = count;
  part.site_index_ = rank_ / part.size_;
  return part;
}

std::unique_ptr<SiteLine> World::across_sites(std::shared_ptr<TrafficTable> table) const {
  const World& all = whole_ ? *whole_ : *this;
  ZR_ASSERT(connection_->base != nullptr, "a line across sites before the first engine or mesh");
  if (place_ && num_sites_ > 1) {
    return make_hub_line(*place_, {.rank = rank_,
                                   .ranks = size_,
                                   .session = connection_->lines++,
                                   .job = environment(kOwnJob).value_or(job_),
                                   .timeout = connection_->options.timeout,
                                   .activity = is_watched() ? activity() : nullptr,
                                   .table = std::move(table),
                                   .failed = connection_->failed});
  }
  const std::shared_ptr<CommBackend> group = all.make_group("sites", connection_->options, std::move(table));
  return make_group_line(group->split(rank_, site_index_, "sites"));
}

CommOptions World::of_whole(const CommOptions& options) const {
  CommOptions whole = options;
  whole.nodes.clear();
  const int most = options.nodes.empty() ? 0 : *std::ranges::max_element(options.nodes) + 1;
  for (int site = 0; most > 0 && site < num_sites_; ++site) {
    for (const int node : options.nodes) whole.nodes.push_back(site * most + node);
  }
  return whole;
}

void World::connect_base(const CommOptions& options) const {
  CommOptions watched = options;
  watched.activity = is_watched() ? activity() : nullptr;
  watched.call_table = variable_or_empty("ZEROTH_CALL_TABLE");
  activity()->set_first_timeout(options.first_timeout);
  ZR_CHECK(!transport_ || options.reduction == Reduction::kRankOrder, ErrorCode::kConfig,
           "this transport has no sums of its own",
           {.where = "world",
            .which = "zeroth.reduction",
            .expected = "rank_order over " + backend_name_,
            .got = std::string(name_of(options.reduction)),
            .hint = "start the ranks with mpirun and set ZEROTH_BACKEND=mpi"});
  ZR_CHECK(!connection_->met_in_part, ErrorCode::kAborted,
           "the ranks of this group have begun to meet, and an error or an interrupt of this rank has ended that",
           {.where = "world",
            .who = "rank " + std::to_string(rank_) + "/" + std::to_string(size_),
            .hint = "the group carries what was half said: start the job again, or make another group"});
  connection_->met_in_part = transport_ != nullptr;
  connection_->base = transport_ ? make_backend_over_hosts(transport_, watched)
                                 : make_backend(backend_name_, {.rank = rank_,
                                                                .size = size_,
                                                                .job = job_,
                                                                .hub = hub_,
                                                                .options = watched,
                                                                .meeting_hint = meeting_hint_});
  if (const std::string_view kind = connection_->base->kind(); transport_ && kind != transport_->kind()) {
    Logger(rank_, size_).progress("ranks of a node share its memory: calls go over " + std::string(kind));
  }
  const std::string interface = variable_or_empty("ZEROTH_INTERFACE");
  if (size_ == 1 && !interface.empty())
    (void)detail::interface_addresses(interface);  // a typing error is one with any world
  if (size_ > 1 && is_watched()) {
    connection_->control = ControlPlane::join(
        *connection_->base, activity(),
        {.timeout = options.timeout,
         .silent_after = options.frozen_after + std::max(options.frozen_after / 2, Milliseconds{2'000}),
         .end_stuck_after = options.end_stuck_after,
         .interface = interface,
         .meeting_host = variable_or_empty("MASTER_ADDR"),
         .trace_folder = variable_or_empty("ZEROTH_TRACE_DIR"),
         .logger = Logger(rank_, size_)});
  }
  if (options.reduction == Reduction::kTransport) {
    Logger(rank_, size_)
        .progress("calls between ranks are those of " + std::string(connection_->base->kind()) +
                  " (zeroth.reduction = transport), " +
                  (options.check_calls ? "and compared (zeroth.check_calls)"
                                       : "and not compared (zeroth.check_calls = false)"));
  }
  connection_->options = options;
  connection_->options.ledger = nullptr;  // of one engine
}

namespace {

/// "timeout_ms 300000 (5000 here)": the keys of zeroth that differ.
std::string other_timeouts(const CommOptions& met, const CommOptions& wanted) {
  std::vector<std::string> texts;
  const auto compare = [&](const char* key, Milliseconds ours, Milliseconds theirs) {
    if (ours == theirs) return;
    texts.push_back(key + (" " + std::to_string(ours.count())) + " (" + std::to_string(theirs.count()) + " here)");
  };
  compare("timeout_ms", met.timeout, wanted.timeout);
  compare("first_timeout_ms", met.first_timeout, wanted.first_timeout);
  compare("frozen_after_ms", met.frozen_after, wanted.frozen_after);
  compare("end_stuck_after_ms", met.end_stuck_after, wanted.end_stuck_after);
  return join(texts, ", ");
}

}  // namespace

std::shared_ptr<CommBackend> World::connect(const CommOptions& options, std::shared_ptr<TrafficTable> table) const {
  if (whole_) return whole_->connect(of_whole(options), std::move(table))->split(site_index_, rank_, "site");
  if (!connection_->base) connect_base(options);
  ZR_CHECK(connection_->options.nodes == options.nodes, ErrorCode::kConfig,
           "the nodes of a process's ranks are those of its first engine or mesh",
           {.where = "world",
            .who = "rank " + std::to_string(rank_) + "/" + std::to_string(size_),
            .which = "zeroth.ranks_per_node",
            .hint = "give every engine of the process the same value"});
  ZR_CHECK(
      connection_->options.reduction == options.reduction && connection_->options.check_calls == options.check_calls,
      ErrorCode::kConfig, "how the ranks of a process make their calls is decided by its first engine or mesh",
      {.where = "world",
       .who = "rank " + std::to_string(rank_) + "/" + std::to_string(size_),
       .which = "zeroth.reduction, zeroth.check_calls",
       .hint = "give every engine of the process the same values"});
  const std::string others = other_timeouts(connection_->options, options);
  ZR_CHECK(others.empty() || !connection_->met_for_mesh, ErrorCode::kConfig,
           "the ranks have met in world.mesh(), with other timeouts than the configuration's",
           {.where = "world",
            .who = "rank " + std::to_string(rank_) + "/" + std::to_string(size_),
            .which = "zeroth." + others,
            .hint = "give the mesh the configuration, too: world.mesh(config), in Python world.mesh(axes, config)"});
  if (!others.empty()) {
    Logger(rank_, size_).progress("the timeouts of this process's first engine hold for this one too: " + others);
  }
  return make_group("engine", options, std::move(table));
}

Mesh World::mesh(MeshSpec spec, const CommOptions& options) const {
  validate(spec, size_);  // before anybody waits for a rank that is mistaken
  if (!connection_->base) {
    whole_ ? whole_->connect_base(of_whole(options)) : connect_base(options);
    connection_->met_for_mesh = true;
  }
  if (std::ranges::find(connection_->meshes, spec) == connection_->meshes.end()) connection_->meshes.push_back(spec);
  return Mesh(make_group("mesh", connection_->options, std::make_shared<TrafficTable>()), std::move(spec));
}

Mesh World::mesh(const Config& config) const {
  return mesh(mesh_of(config, size_), make_comm_options(config, size_));
}

const std::vector<MeshSpec>& World::meshes() const {
  return connection_->meshes;
}

std::shared_ptr<CommBackend> World::make_group(std::string_view kind, const CommOptions& options,
                                               std::shared_ptr<TrafficTable> table) const {
  if (whole_) return whole_->make_group(kind, options, std::move(table))->split(site_index_, rank_, "site");
  const std::string name = std::string(kind) + std::to_string(connection_->groups++);
  std::unique_ptr<CommBackend> group = connection_->base->split(0, rank_, name);
  if (options.link_bytes_per_s > 0) {
    const LinkSpeed speed{.bytes_per_second = static_cast<double>(options.link_bytes_per_s)};
    group = std::make_unique<SlowLinkBackend>(std::move(group), speed);
  }
  if (is_watched()) group = std::make_unique<RecordingBackend>(std::move(group), activity(), connection_->control);
  return std::make_shared<CountingBackend>(std::move(group), std::move(table));
}

const std::shared_ptr<RankActivity>& World::activity() const {
  if (whole_) return whole_->activity();
  if (!connection_->activity) connection_->activity = std::make_shared<RankActivity>(rank_, size_);
  return connection_->activity;
}

void World::abort(const std::exception& cause) const noexcept {
  if (whole_) return whole_->abort(cause);
  if (connection_) connection_->failed->store(true);
  if (!connection_ || !connection_->base) return;
  try {
    const auto* own = dynamic_cast<const Error*>(&cause);  // a copy would forget that it is a verdict
    std::optional<Error> made;
    if (own == nullptr) own = &made.emplace(error_of(cause));
    if (const std::string action = activity()->failed_action();
        !action.empty() && detail::is_own_error(*own) && own->context().which.find(action) == std::string::npos)
      own = &made.emplace(detail::with_action(*own, action));
    const Error& error = *own;
    connection_->base->abort(error);
    if (connection_->control) connection_->control->tell(end_of_job(rank_, error));
  } catch (...) {  // no memory to say so: the others see this rank end
  }
}

}  // namespace zeroth
