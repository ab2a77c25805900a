#include "comm/first_error.h"
#include "comm/matched_calls.h"
#include "comm/started_points.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/comm/mixed.h>
#include <zeroth/device/device.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace zeroth {
namespace {

/// All backends of one group. Run by one thread at a time.
class Backends {
 public:
  Backends(std::vector<NamedBackend> backends, std::shared_ptr<const CallTable> table)
      : backends_(std::move(backends)), table_(std::move(table)), stream_(make_nested_stream("mixed")) {
    for (const NamedBackend& backend : backends_) kind_ += (kind_.empty() ? "" : "|") + backend.name;
  }

  [[nodiscard]] CommBackend& first() const { return *backends_.front().backend; }
  [[nodiscard]] const std::vector<NamedBackend>& all() const { return backends_; }
  [[nodiscard]] const std::shared_ptr<const CallTable>& table() const { return table_; }
  [[nodiscard]] std::string_view kind() const { return kind_; }

  template <class Body>
  auto guarded(const Body& body) {
    return first_error_.guard(body, [this] {
      try {
        throw;
      } catch (const Error& error) {
        abort(error);  // a peer may be in a call of another backend
        throw;
      }
    });
  }

  void run(std::span<const Collective> calls) {
    const auto run_all = [&] {
      for (std::size_t begin = 0; begin < calls.size();) {
        CommBackend& backend = backend_of(calls[begin]);
        std::size_t end = begin + 1;
        while (end < calls.size() && &backend_of(calls[end]) == &backend) ++end;
        ZR_FAILPOINT("mixed.choose");
        backend.submit(calls.subspan(begin, end - begin), stream_).wait();
        begin = end;
      }
    };
    guarded(run_all);
  }

  /// Messages of one kind all have one backend: see CallTable.
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points) {
    CommBackend& backend = backend_of(points.front());
    return guarded([&] {
      return detail::also_moved_by(backend.start(points, stream_), [&](const std::weak_ptr<Progress>& progress) {
        for (const NamedBackend& other : backends_) {
          if (other.backend.get() != &backend) (void)other.backend->add_progress(progress);
        }
      });
    });
  }
  void abort(const Error& error) const noexcept {
    for (const NamedBackend& backend : backends_) backend.backend->abort(error);
  }

 private:
  [[nodiscard]] CommBackend& backend_of(const Collective& call) const {
    const std::string_view name = table_->backend_of(call.kind, table_bytes(call));
    if (name.empty()) return first();
    // There is one: looked at when the backends were put together.
    return *std::ranges::find(backends_, name, &NamedBackend::name)->backend;
  }

  std::vector<NamedBackend> backends_;
  std::shared_ptr<const CallTable> table_;
  Stream stream_;
  std::string kind_;
  detail::FirstError first_error_;
};

/// Messages of one backend, whose errors are those of the whole group.
class MixedPoints final : public PendingPoints {
 public:
  MixedPoints(std::shared_ptr<Backends> backends, std::unique_ptr<PendingPoints> points)
      : backends_(std::move(backends)), points_(std::move(points)) {}
  bool done() override {
    return backends_->guarded([this] { return points_->done(); });
  }
  void wait() override {
    backends_->guarded([this] { points_->wait(); });
  }

 private:
  std::shared_ptr<Backends> backends_;
  std::unique_ptr<PendingPoints> points_;
};

class MixedBackend final : public CommBackend {
 public:
  /// `last_call`: of this rank in a group or in its parts; each one begins after it, whoever makes it. Two ranks could
  /// else be in calls of two backends, each waiting for the other one.
  MixedBackend(std::vector<NamedBackend> backends, std::shared_ptr<const CallTable> table,
               std::shared_ptr<Event> last_call)
      : backends_(std::make_shared<Backends>(std::move(backends), std::move(table))),
        last_call_(std::move(last_call)) {}

  [[nodiscard]] int rank() const override { return first().rank(); }
  [[nodiscard]] int size() const override { return first().size(); }
  [[nodiscard]] const std::string& group_name() const override { return first().group_name(); }
  [[nodiscard]] std::string_view kind() const override { return backends_->kind(); }
  [[nodiscard]] Capabilities capabilities() const override {
    Capabilities all = first().capabilities();
    for (const NamedBackend& one : backends_->all())
      all.widens_device_sums = all.widens_device_sums && one.backend->capabilities().widens_device_sums;
    return all;
  }
  [[nodiscard]] std::span<const int> node_sizes() const override { return first().node_sizes(); }
  [[nodiscard]] std::size_t memory_bytes() const override {
    std::size_t bytes = 0;
    for (const NamedBackend& backend : backends_->all()) bytes += backend.backend->memory_bytes();
    return bytes;
  }

  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    WorkInfo info = detail::validated(collectives, rank(), size(), "comm." + std::string(kind()));
    stream.order_after(*last_call_);
    detail::enqueue_calls(stream, collectives, backends_, &Backends::run);
    *last_call_ = stream.record();
    return {*last_call_, std::move(info)};
  }

  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points,
                                                     const Stream& stream) override {
    detail::validate_points(points, rank(), size(), "comm." + std::string(kind()));
    stream.synchronize();
    last_call_->wait();
    if (points.empty()) return detail::nothing_pending();
    return std::make_unique<MixedPoints>(backends_, backends_->start(points));
  }

  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override {
    last_call_->wait();
    std::vector<NamedBackend> parts;
    try {
      for (const NamedBackend& backend : backends_->all())
        parts.push_back({backend.name, backend.backend->split(color, key, name)});
    } catch (const Error& error) {
      abort(error);
      throw;
    }
    if (parts.front().backend == nullptr) return nullptr;
    return std::make_unique<MixedBackend>(std::move(parts), backends_->table(), last_call_);
  }

  [[nodiscard]] PeerWindow attach(const Arena& arena, std::string_view name) override {
    last_call_->wait();
    return first().attach(arena, name);
  }
  void wait_until(const std::function<bool()>& predicate, const WaitContext& context) override {
    first().wait_until(predicate, context);
  }
  void notify() override { first().notify(); }
  [[nodiscard]] int add_progress(std::weak_ptr<Progress> progress) override {
    for (const NamedBackend& backend : backends_->all()) (void)backend.backend->add_progress(progress);
    return first().add_progress(std::move(progress));
  }
  void check_peers(const WaitContext& context) override {
    for (const NamedBackend& backend : backends_->all()) backend.backend->check_peers(context);
  }
  void abort(const Error& error) noexcept override { backends_->abort(error); }
  void count_one_sided(CollectiveKind kind, int peer, std::uint64_t bytes) override {
    first().count_one_sided(kind, peer, bytes);
  }
  void set_observer(std::shared_ptr<TrafficObserver> observer) override {
    for (const NamedBackend& backend : backends_->all()) backend.backend->set_observer(observer);
  }
  void set_tag_names(TagNames names) override {
    for (const NamedBackend& backend : backends_->all()) backend.backend->set_tag_names(names);
  }

 private:
  [[nodiscard]] CommBackend& first() const { return backends_->first(); }

  std::shared_ptr<Backends> backends_;
  std::shared_ptr<Event> last_call_;
};

void require_same_group(const std::vector<NamedBackend>& backends) {
  ZR_CHECK(!backends.empty(), ErrorCode::kConfig, "a mixture of no backends", {.where = "comm.mixed"});
  const CommBackend& first = *backends.front().backend;
  for (std::size_t index = 0; index < backends.size(); ++index) {
    const CommBackend& other = *backends[index].backend;
    const std::string& name = backends[index].name;
    for (std::size_t before = 0; before < index; ++before) {
      ZR_CHECK(backends[before].name != name, ErrorCode::kConfig, "two backends of a mixture have one name",
               {.where = "comm.mixed", .which = name});
    }
    ZR_CHECK(other.rank() == first.rank() && other.size() == first.size(), ErrorCode::kConfig,
             "the backends of a mixture number their ranks differently",
             {.where = "comm.mixed",
              .which = name,
              .expected = fmt::format("rank {}/{}, as in {}", first.rank(), first.size(), backends.front().name),
              .got = fmt::format("rank {}/{}", other.rank(), other.size())});
    ZR_CHECK(std::ranges::equal(other.node_sizes(), first.node_sizes()), ErrorCode::kConfig,
             "the backends of a mixture see other nodes, so that their sums differ",
             {.where = "comm.mixed",
              .which = name,
              .expected = fmt::format("[{}], as {} does", fmt::join(first.node_sizes(), ", "), backends.front().name),
              .got = fmt::format("[{}]", fmt::join(other.node_sizes(), ", "))});
  }
}

void require_same_table(CommBackend& base, const CallTable& table) {
  const Communicator ranks(std::shared_ptr<CommBackend>(&base, [](CommBackend*) {}));  // borrowed for this call
  const auto own = static_cast<std::int64_t>(digest64(table.to_json()));
  std::vector<std::int64_t> all(static_cast<std::size_t>(ranks.size()));
  ranks.all_gather(std::span(&own, 1), std::span(all));
  const auto other = std::ranges::find_if(all, [&](std::int64_t digest) { return digest != all.front(); });
  ZR_CHECK(other == all.end(), ErrorCode::kMismatch, "ranks have different call tables",
           {.where = "comm.mixed",
            .who = fmt::format("rank {}/{}", ranks.rank(), ranks.size()),
            .expected = "the table of rank 0 on all ranks",
            .got = fmt::format("another one on rank {}", other - all.begin())});
}

}  // namespace

std::unique_ptr<CommBackend> make_mixed_backend(std::vector<NamedBackend> backends, CallTable table) {
  require_same_group(backends);
  for (const CallTable::Row& row : table.rows()) {
    if (std::ranges::find(backends, row.backend, &NamedBackend::name) != backends.end()) continue;
    std::vector<std::string> names;
    for (const NamedBackend& backend : backends) names.push_back(backend.name);
    throw Error(ErrorCode::kConfig, "the call table names a backend that is not there",
                {.where = "comm.mixed",
                 .which = std::string(name_of(row.kind)),
                 .expected = "one of " + join(names, ", "),
                 .got = row.backend});
  }
  require_same_table(*backends.front().backend, table);
  return std::make_unique<MixedBackend>(std::move(backends), std::make_shared<const CallTable>(std::move(table)),
                                        std::make_shared<Event>());
}

}  // namespace zeroth
