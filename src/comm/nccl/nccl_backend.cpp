#include "comm/nccl/nccl_backend.h"

#include "comm/device_buffers.h"
#include "comm/levels/levels_of_hosts.h"
#include "comm/matched_calls.h"
#include "comm/nccl/nccl_calls.h"
#include "comm/nccl/nccl_group.h"
#include "comm/started_points.h"

#include <zeroth/base/text.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/device/device.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {
namespace detail {
namespace {

/// What ranks tell each other before NCCL is asked for anything.
struct Introduction {
  std::int32_t nccl_version = 0;
  std::int32_t cuda_version = 0;
  std::int32_t reduction = 0;
  std::uint64_t checks = 0;  ///< CommOptions::check_calls
  std::uint64_t host = 0;
  char bus_id[32] = "";  ///< of the device
  char nccl_library[256] = "";
  char cuda_library[256] = "";
  char problem[512] = "";  ///< why this rank cannot
  NcclId id{};             ///< rank 0's counts
};

template <std::size_t kSize>
void put(char (&to)[kSize], std::string_view text) {
  const std::size_t bytes = std::min(text.size(), kSize - 1);
  std::memcpy(to, text.data(), bytes);
  to[bytes] = '\0';
}

/// Bytes from everybody to everybody, over the base.
std::vector<Introduction> introduce(CommBackend& base, const Introduction& own) {
  std::vector<Introduction> all(static_cast<std::size_t>(base.size()));
  const auto device = make_cpu_device();
  const Collective call{.kind = CollectiveKind::kAllGather,
                        .send = reinterpret_cast<const std::byte*>(&own),
                        .recv = reinterpret_cast<std::byte*>(all.data()),
                        .counts = std::vector<std::int64_t>(all.size(), static_cast<std::int64_t>(sizeof own))};
  base.submit({&call, 1}, device->make_stream("introduction")).wait();
  return all;
}

/// One group call on NCCL's stream.
class NcclPoints final : public PendingPoints {
 public:
  NcclPoints(std::shared_ptr<NcclGroup> group, std::shared_ptr<Completion> completion)
      : group_(std::move(group)), completion_(std::move(completion)), event_(completion_) {}
  bool done() override {
    if (event_.ready()) {
      event_.wait();  // throws what was found out about it
      return true;
    }
    const auto now = SteadyClock::now();
    if (now < next_look_) return false;
    next_look_ = now + kWaitSlice;
    group_->look(*completion_);
    return false;
  }
  void wait() override { event_.wait(); }

 private:
  std::shared_ptr<NcclGroup> group_;
  std::shared_ptr<Completion> completion_;
  Event event_;
  SteadyClock::time_point next_look_ = SteadyClock::now() + kWaitSlice;
};

class NcclBackend final : public ForwardingBackend {
 public:
  NcclBackend(std::unique_ptr<CommBackend> base, std::shared_ptr<NcclGroup> group)
      : ForwardingBackend(std::move(base)), group_(std::move(group)) {}
  ~NcclBackend() override { group_->leave(); }

  [[nodiscard]] std::string_view kind() const override { return "nccl"; }
  [[nodiscard]] Capabilities capabilities() const override {
    Capabilities all = inner().capabilities();
    all.widens_device_sums = false;
    return all;
  }
  [[nodiscard]] std::size_t memory_bytes() const override { return inner().memory_bytes() + group_->host_bytes(); }

  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    void* const native = stream.native();
    if (native == nullptr) {
      group_->check_host_pointers(collectives);
      return inner().submit(collectives, stream);
    }
    WorkInfo info = validated(collectives, rank(), size(), group_->where());
    return {Event(group_->submit(collectives, native)), std::move(info)};
  }

  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points,
                                                     const Stream& stream) override {
    validate_points(points, rank(), size(), group_->where());
    void* const native = stream.native();
    if (native != nullptr) return std::make_unique<NcclPoints>(group_, group_->submit(points, native));
    group_->check_host_pointers(points);
    return also_moved_by(inner().start(points, stream),
                         [this](const std::weak_ptr<Progress>& progress) { group_->job().progress.add(progress); });
  }

  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override {
    group_->finish();
    group_->pass_gate("split", name);
    std::unique_ptr<CommBackend> base = inner().split(color, key, name);
    std::shared_ptr<NcclGroup> part;
    if (base) {
      part = std::make_shared<NcclGroup>(group_->share_job(), *base);
      part->set_observer(observer_);
    }
    group_->open_part(color, key, part.get());
    if (!base) return nullptr;
    group_->job().add(part);
    auto backend = std::make_unique<NcclBackend>(std::move(base), std::move(part));
    backend->observer_ = observer_;
    return backend;
  }

  [[nodiscard]] PeerWindow attach(const Arena& arena, std::string_view name) override {
    group_->pass_gate("attach", name);
    if (arena.kind() != ArenaKind::kDevice) return inner().attach(arena, name);
    // Ranks compare the name, as in every attach(): a barrier of the base that carries it.
    const auto device = make_cpu_device();
    const Collective meeting{.kind = CollectiveKind::kBarrier,
                             .tag = {.unit = -1, .label = static_cast<std::uint32_t>(digest64(name))}};
    inner().submit({&meeting, 1}, device->make_stream("attach")).wait();
    group_->register_buffer(arena);
    PeerWindow window{.ranks = std::vector<std::span<std::byte>>(static_cast<std::size_t>(size())),
                      .keep = {arena.keep_alive()}};
    window.ranks[static_cast<std::size_t>(rank())] = {arena.data(), arena.capacity()};
    return window;
  }

  [[nodiscard]] int add_progress(std::weak_ptr<Progress> progress) override {
    group_->job().progress.add(progress);
    return inner().add_progress(std::move(progress));
  }
  void abort(const Error& error) noexcept override {
    inner().abort(error);
    group_->job().abort(error.what());
  }
  void set_observer(std::shared_ptr<TrafficObserver> observer) override {
    observer_ = observer;
    group_->set_observer(observer);
    inner().set_observer(std::move(observer));
  }
  void set_tag_names(TagNames names) override {
    group_->set_tag_names(names);
    inner().set_tag_names(std::move(names));
  }

 private:
  std::shared_ptr<NcclGroup> group_;
  std::shared_ptr<TrafficObserver> observer_;
};

/// Every rank must be able, and no two in the same place.
void compare(const std::vector<Introduction>& all, const CommBackend& base) {
  const std::string who = fmt::format("rank {}/{}", base.rank(), base.size());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    ZR_CHECK(all[rank].problem[0] == '\0', ErrorCode::kEnvironment, "a rank cannot use NCCL",
             {.where = "comm.nccl", .who = who, .which = fmt::format("rank {}", rank), .got = all[rank].problem});
  }
  const auto own_rank = static_cast<std::size_t>(base.rank());
  const Introduction& own = all[own_rank];
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Introduction& other = all[rank];
    const auto said = [&](const std::string& version, const char* library, std::size_t by) {
      return fmt::format("{} ({}, rank {})", version, library, by);
    };
    ZR_CHECK(other.nccl_version == own.nccl_version, ErrorCode::kMismatch, "ranks have different versions of NCCL",
             {.where = "comm.nccl",
              .who = who,
              .expected = said(nccl_version_text(own.nccl_version), own.nccl_library, own_rank),
              .got = said(nccl_version_text(other.nccl_version), other.nccl_library, rank),
              .hint = "install the same on all hosts, or set ZEROTH_NCCL_LIBRARY"});
    ZR_CHECK(other.cuda_version == own.cuda_version, ErrorCode::kMismatch,
             "ranks have different versions of the CUDA runtime",
             {.where = "comm.nccl",
              .who = who,
              .expected = said(cuda_version_text(own.cuda_version), own.cuda_library, own_rank),
              .got = said(cuda_version_text(other.cuda_version), other.cuda_library, rank),
              .hint = "install the same on all hosts, or set ZEROTH_CUDA_LIBRARY"});
    ZR_CHECK(other.reduction == own.reduction, ErrorCode::kMismatch, "ranks ask for different orders of sums",
             {.where = "comm.nccl",
              .who = who,
              .which = "CommOptions::reduction",
              .expected = fmt::format("{} (rank {})", own.reduction, base.rank()),
              .got = fmt::format("{} (rank {})", other.reduction, rank)});
    ZR_CHECK(other.checks == own.checks, ErrorCode::kMismatch, "some ranks want their calls compared, and some do not",
             {.where = "comm.nccl",
              .who = who,
              .which = "CommOptions::check_calls",
              .expected = fmt::format("{} (rank {})", own.checks != 0, base.rank()),
              .got = fmt::format("{} (rank {})", other.checks != 0, rank),
              .hint = "start every rank with the same configuration file and arguments"});
    for (std::size_t before = 0; before < rank; ++before) {
      const bool same = all[before].host == other.host && std::strcmp(all[before].bus_id, other.bus_id) == 0;
      ZR_CHECK(!same, ErrorCode::kConfig, "two ranks have the same GPU",
               {.where = "comm.nccl",
                .who = who,
                .which = fmt::format("ranks {} and {}", before, rank),
                .expected = "a GPU for each rank",
                .got = fmt::format("{} for both", static_cast<const char*>(other.bus_id)),
                .hint = "set CommOptions::device, or make it current, to the rank's number on its host"});
    }
  }
}

}  // namespace

std::size_t nccl_board_bytes() {
  return CallBoard::bytes();
}

std::unique_ptr<CommBackend> make_nccl_backend(std::unique_ptr<CommBackend> base, const CommOptions& options,
                                               const std::function<NcclLibraries()>& load) {
  NcclLibraries libraries;
  int device = 0;
  Introduction own{.reduction = static_cast<std::int32_t>(options.reduction),
                   .checks = options.check_calls ? 1U : 0U,
                   .host = digest64(host_identity())};
  std::exception_ptr problem;
  try {
    libraries = load();
    own.nccl_version = libraries.nccl->version;
    put(own.nccl_library, libraries.nccl->library);
    own.cuda_version = libraries.cuda->version;
    put(own.cuda_library, libraries.cuda->library);
    device = choose_device(*libraries.cuda, options.device, "comm.nccl");
    check_cuda(*libraries.cuda, libraries.cuda->device_bus_id(own.bus_id, sizeof own.bus_id, device),
               "the address of a device", "comm.nccl");
    const CudaDeviceScope scope(*libraries.cuda, device, "comm.nccl");
    if (base->rank() == 0) {
      check_nccl(*libraries.nccl, libraries.nccl->unique_id(&own.id), nullptr, "an id for the group", "comm.nccl",
                 "rank 0");
    }
  } catch (const Error& error) {
    problem = std::current_exception();
    put(own.problem, error.what());
  }
  const std::vector<Introduction> all = introduce(*base, own);  // also with a problem: nobody is to wait for this rank
  if (problem) std::rethrow_exception(problem);
  compare(all, *base);
  auto job = std::make_shared<NcclJob>(*libraries.nccl, *libraries.cuda, device, base->rank(), options);
  auto group = std::make_shared<NcclGroup>(job, *base);
  job->add(group);
  auto backend = std::make_unique<NcclBackend>(std::move(base), group);  // from here on it takes leave
  group->open(all.front().id);
  return backend;
}

}  // namespace detail

std::unique_ptr<CommBackend> make_nccl_backend(std::unique_ptr<CommBackend> base, const CommOptions& options) {
  return detail::make_nccl_backend(std::move(base), options, [] {
    return detail::NcclLibraries{.nccl = &detail::load_nccl(), .cuda = &detail::load_cuda()};
  });
}

}  // namespace zeroth
