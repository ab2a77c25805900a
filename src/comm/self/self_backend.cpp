#include "comm/self/self_backend.h"

#include "comm/call_descriptor.h"
#include "comm/control/end_of_job.h"
#include "comm/matched_calls.h"
#include "comm/shm/peers.h"
#include "comm/started_points.h"

#include <kernels/copy/copy.h>
#include <zeroth/base/interrupt.h>

#include <fmt/format.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::detail {
namespace {

/// What all groups of the rank share.
struct Job {
  Milliseconds timeout{};
  JobControl control{};
  std::mutex mutex;
  std::string abort_text;  // under mutex
};

class SelfBackend final : public CommBackend {
 public:
  SelfBackend(std::shared_ptr<Job> job, std::string group, std::shared_ptr<TrafficObserver> observer)
      : job_(std::move(job)), group_(std::move(group)), observer_(std::move(observer)) {}

  [[nodiscard]] int rank() const override { return 0; }
  [[nodiscard]] int size() const override { return 1; }
  [[nodiscard]] const std::string& group_name() const override { return group_; }
  [[nodiscard]] std::string_view kind() const override { return "self"; }
  [[nodiscard]] Capabilities capabilities() const override {
    return {.one_sided = true, .window_kind = ArenaKind::kPrivate, .separate_processes = false};
  }
  [[nodiscard]] std::size_t memory_bytes() const override { return 0; }

  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    for (const Collective& collective : collectives) validate_alone(collective);
    stream.enqueue([job = job_, group = group_, observer = observer_,
                    calls = std::vector<Collective>(collectives.begin(), collectives.end())] {
      for (const Collective& call : calls) {
        throw_if_aborted(*job, group);
        run(call);
        if (observer) observer->observe({.group = group, .kind = call.kind, .calls = 1});
      }
    });
    return {stream.record(), {.what = collectives.empty() ? "" : std::string(name_of(collectives.front().kind))}};
  }

  /// Refuses every message: there is nobody to send to.
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points,
                                                     const Stream& /*stream*/) override {
    validate_points(points, 0, 1, "comm.self");
    throw_if_aborted(*job_, group_);
    return nothing_pending();
  }

  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int /*key*/, std::string_view name) override {
    throw_if_aborted(*job_, group_);
    if (color < 0) return nullptr;
    return std::make_unique<SelfBackend>(job_, group_ + "/" + std::string(name), observer_);
  }

  [[nodiscard]] PeerWindow attach(const Arena& arena, std::string_view name) override {
    throw_if_aborted(*job_, group_);
    ZR_CHECK(arena.kind() != ArenaKind::kDevice, ErrorCode::kUsage, "an arena of a device is no window of the host",
             {.where = "comm.self.attach", .which = std::string(name), .hint = "attach it to a group over NCCL"});
    return {.ranks = {{arena.data(), arena.capacity()}}, .keep = {arena.keep_alive()}};
  }

  void wait_until(const std::function<bool()>& predicate, const WaitContext& context) override {
    const Deadline deadline(job_->timeout);
    SharedFlag& doorbell = job_->control.doorbell;
    for (;;) {
      const std::uint32_t rung = doorbell.load();
      if (predicate()) return;
      throw_if_aborted(*job_, group_);
      ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout,
               fmt::format("nothing came within {:.1f} s", std::chrono::duration<double>(job_->timeout).count()),
               {.where = "comm.self group=" + group_,
                .who = "rank 0/1",
                .which = context.unit,
                .expected = context.what,
                .got = context.progress ? context.progress() : "",
                .hint = "this rank is alone: nobody else can fulfil what it waits for"});
      futex_wait(doorbell, rung, deadline.slice());
      check_interrupt();
    }
  }

  void notify() override {}                                                                    // nobody else waits
  [[nodiscard]] int add_progress(std::weak_ptr<Progress> /*progress*/) override { return 0; }  // owes nobody anything
  void check_peers(const WaitContext& /*context*/) override { throw_if_aborted(*job_, group_); }

  void abort(const Error& error) noexcept override {
    const std::lock_guard lock(job_->mutex);
    if (job_->control.first_abort.load() != 0) return;
    job_->abort_text = error.what();
    job_->control.first_abort.store(1);
    job_->control.doorbell.fetch_add(1);
    futex_wake_all(job_->control.doorbell);
  }

  [[nodiscard]] std::span<const int> node_sizes() const override {
    static constexpr int kAlone = 1;
    return {&kAlone, 1};
  }
  void count_one_sided(CollectiveKind kind, int /*peer*/, std::uint64_t bytes) override {
    if (observer_) observer_->observe({.group = group_, .kind = kind, .one_sided = true, .calls = 1, .bytes = bytes});
  }
  void set_observer(std::shared_ptr<TrafficObserver> observer) override { observer_ = std::move(observer); }
  void set_tag_names(TagNames /*names*/) override {}  // one rank agrees with itself

 private:
  static void throw_if_aborted(Job& job, const std::string& group) {
    if (job.control.first_abort.load() == 0) return;
    const std::lock_guard lock(job.mutex);
    throw Error(ErrorCode::kAborted, "rank 0 stopped the job: " + detail::without_who(job.abort_text),
                {.where = "comm.self group=" + group, .who = "rank 0/1"});
  }

  static void validate_alone(const Collective& call) {
    validate(call, 0, 1, "comm.self");
    if (call.counts == call.recv_counts || call.kind != CollectiveKind::kAllToAll) return;
    throw parts_error(describe_call(call, 0), {0, 0, call.counts.front(), call.recv_counts.front()}, 0, 1, "comm.self",
                      {});
  }

  static void run(const Collective& call) {
    if (call.kind == CollectiveKind::kBarrier || call.counts.front() == 0) return;  // and nobody to send to
    const bool sums = call.kind == CollectiveKind::kReduceScatter || call.kind == CollectiveKind::kAllReduce;
    const kernels::Isa isa = kernels::best_isa();
    const std::int64_t elements = call.counts.front();
    if (!sums) {
      if (call.send == call.recv) return;
      kernels::copy_stream(call.recv, call.send, elements * static_cast<std::int64_t>(size_of(call.in_dtype)), isa);
      return;
    }
    Summands own;
    own.add(call.send, call.in_dtype);
    reduce_in_rank_order(call, 0, call.recv, own, elements, {}, isa);
  }

  std::shared_ptr<Job> job_;
  std::string group_;
  std::shared_ptr<TrafficObserver> observer_;
};

}  // namespace

std::unique_ptr<CommBackend> make_self_backend(const CommOptions& options) {
  auto job = std::make_shared<Job>();
  job->timeout = options.timeout;
  return std::make_unique<SelfBackend>(std::move(job), "world", nullptr);
}

}  // namespace zeroth::detail
