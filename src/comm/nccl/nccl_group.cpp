#include "comm/nccl/nccl_group.h"

#include "comm/control/end_of_job.h"
#include "comm/device_buffers.h"
#include "comm/matched_calls.h"
#include "comm/nccl/nccl_calls.h"
#include "device/cuda/cuda_runtime.h"
#include "device/polling.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/device/device.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace zeroth::detail {
namespace {

constexpr Milliseconds kGrace{200};  // for what a peer that has left had done before
constexpr Milliseconds kLeaveTime{1'000};

/// Over the base: the world's number of each rank of the group.
std::vector<std::int32_t> world_ranks_of(CommBackend& base, std::int32_t own) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(base.size()));
  const auto device = make_cpu_device();
  const Collective call{.kind = CollectiveKind::kAllGather,
                        .in_dtype = DType::kInt32,
                        .out_dtype = DType::kInt32,
                        .send = reinterpret_cast<const std::byte*>(&own),
                        .recv = reinterpret_cast<std::byte*>(all.data()),
                        .counts = std::vector<std::int64_t>(all.size(), 1)};
  base.submit({&call, 1}, device->make_stream("introduction")).wait();
  return all;
}

/// What one NCCL group holds: a run of collectives, or of messages between two ranks. By kinds alone, so that all
/// ranks form the same ones.
template <class Body>
void for_each_nccl_group(std::span<const Collective> calls, const Body& body) {
  for (std::size_t begin = 0; begin < calls.size();) {
    const bool points = is_point_to_point(calls[begin].kind);
    std::size_t end = begin;
    while (end < calls.size() && is_point_to_point(calls[end].kind) == points) ++end;
    body(calls.subspan(begin, end - begin), points);
    begin = end;
  }
}

}  // namespace

NcclJob::NcclJob(const NcclTable& nccl_table, const CudaTable& cuda_table, int gpu, int rank,
                 const CommOptions& comm_options)
    : nccl(nccl_table),
      cuda(cuda_table),
      device(gpu),
      world_rank(rank),
      options(comm_options),
      watched(comm_options),
      events(std::make_shared<EventCache>(cuda_table, gpu, "comm.nccl")) {
  const CudaDeviceScope scope(cuda, device, "comm.nccl");
  check_cuda(cuda, cuda.allocate(&scratch_, sizeof(std::int32_t)), "4 bytes", "comm.nccl");
  const CudaStatus status = cuda.stream_create(&stream_, kCudaStreamNonBlocking);
  if (status != kCudaSuccess) (void)cuda.release(scratch_);
  check_cuda(cuda, status, "a stream", "comm.nccl");
}

NcclJob::~NcclJob() {
  (void)cuda.stream_destroy(stream_);  // comes back at once
  // This one waits for all that runs on the device. 4 bytes are a small price.
  if (!leaves_device_.load()) (void)cuda.release(scratch_);
}

void NcclJob::add(const std::shared_ptr<NcclGroup>& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& known) { return known.expired(); });
  groups_.push_back(group);
}

void NcclJob::abort(std::string_view text) noexcept {
  ZR_FAILPOINT("abort.nccl");
  std::vector<std::weak_ptr<NcclGroup>> groups;
  {
    const std::lock_guard lock(mutex_);
    if (abort_text_.empty()) abort_text_ = text.empty() ? "no reason given" : std::string(text);
    aborted_.store(true);  // before any kernel can see that it shall end: who sees that it has ended sees this
    groups = groups_;
  }
  const Deadline deadline(end_time());
  for (const auto& known : groups) {
    if (const std::shared_ptr<NcclGroup> group = known.lock()) group->end(deadline);
  }
}

void NcclJob::throw_aborted(std::string_view where, std::string_view who) const {
  const std::lock_guard lock(mutex_);
  throw Error(ErrorCode::kAborted, "this rank stopped the job: " + detail::without_who(abort_text_),
              {.where = std::string(where), .who = std::string(who)});
}

/// Done when its event has happened on the device, and then all that was found out about it until then is in it.
struct NcclGroup::Point : Completion {
  Awaited awaited{};
};

NcclGroup::NcclGroup(std::shared_ptr<NcclJob> job, CommBackend& base)
    : job_(std::move(job)),
      base_(&base),
      name_(base.group_name()),
      where_(fmt::format("comm.nccl group={}", name_)),
      who_(fmt::format("rank {}/{}", base.rank(), base.size())),
      rank_(base.rank()),
      size_(base.size()),
      world_ranks_(world_ranks_of(base, job_->world_rank)),
      communicator_(std::make_shared<NcclCommunicator>(
          job_->nccl, [&cuda = job_->cuda, device = job_->device] { (void)cuda.set_device(device); }, where_, who_)) {
  int node = 0;
  nodes_.sizes.assign(base.node_sizes().begin(), base.node_sizes().end());
  for (const int ranks : nodes_.sizes)
    nodes_.of_rank.insert(nodes_.of_rank.end(), static_cast<std::size_t>(ranks), node++);
  if (base.capabilities().one_sided) {
    board_ = std::make_unique<CallBoard>(base, where_);
    if (job_->options.ledger) board_hold_ = job_->options.ledger->hold({-1, MemoryState::kControl}, CallBoard::bytes());
  }
  if (job_->options.check_calls) gate_ = std::make_unique<CallGate>(base);
  if (RankActivity* const activity = job_->watched.activity()) begun_ = activity->calls_begun("nccl:" + name_);
}

void NcclGroup::set_observer(std::shared_ptr<TrafficObserver> observer) {
  if (gate_) gate_->set_observer(observer);
  observer_ = std::move(observer);
}

void NcclGroup::set_tag_names(TagNames names) {
  if (gate_) gate_->set_tag_names(names);
  tag_names_ = std::move(names);
}

void NcclGroup::open(const NcclId& id) {
  guarded([&] {
    const CudaDeviceScope scope(job_->cuda, job_->device, where_);
    ZR_FAILPOINT("nccl.open");
    communicator_->join(size_, id, rank_);
    await([&](Milliseconds slice) { return settled(*communicator_, slice); },
          {.what = "NCCL's communicator", .opens = true});
    if (board_) board_->set_open();
  });
}

void NcclGroup::open_part(int color, int key, NcclGroup* part) {
  guarded([&] {
    const CudaDeviceScope scope(job_->cuda, job_->device, where_);
    // With a negative color no communicator comes; this one is a place to put none.
    NcclCommunicator none(job_->nccl, [] {}, where_, who_);
    ZR_FAILPOINT("nccl.open");
    communicator_->split(color, key, part == nullptr ? none : *part->communicator_);
    const Awaited awaited{.what = "NCCL's communicator of a new group", .through = next_sequence_};
    await([&](Milliseconds slice) { return settled(*communicator_, slice); }, awaited);
    if (part == nullptr) return;
    await([&](Milliseconds slice) { return settled(*part->communicator_, slice); }, awaited);
    if (part->board_) part->board_->set_open();
  });
}

bool NcclGroup::settled(NcclCommunicator& communicator, Milliseconds slice) {
  return poll_for(slice, [&] { return communicator.settled(); });
}

void NcclGroup::check_calls(std::span<const Collective> calls) const {
  for (const Collective& call : calls) {
    check_nccl_can(call, size_, job_->options.reduction, where_, who_);
    check_device_buffers(job_->cuda, job_->device, call, rank_, where_, who_);
  }
  for_each_nccl_group(calls, [&](std::span<const Collective> run, bool points) {
    if (!points) check_independent(run, rank_, where_, who_);
  });
}

void NcclGroup::check_host_pointers(std::span<const Collective> calls) const {
  for (const Collective& call : calls) validate(call, rank_, size_, where_);
  check_host_buffers(job_->cuda, calls, rank_, where_, who_);
}

void NcclGroup::pass_gate(std::string_view call, std::string_view name) {
  if (!gate_) return;
  guarded([&] { gate_->pass(stand_in(call, name)); });
}

std::shared_ptr<Completion> NcclGroup::submit(std::span<const Collective> calls, void* stream) {
  check_calls(calls);
  auto point = std::make_shared<Point>();
  point->source = shared_from_this();
  try {
    guarded([&] { launch(calls, stream, *point); });
    last_ = point;
  } catch (...) {
    point->error = std::current_exception();
    point->done = true;
  }
  return point;
}

/// [Note: Two streams] The calls wait for what the caller's stream holds, and the caller's stream for them: by events,
/// on the device. The host waits for neither.
void NcclGroup::launch(std::span<const Collective> calls, void* stream, Point& point) {
  const CudaTable& cuda = job_->cuda;
  const CudaDeviceScope scope(cuda, job_->device, where_);
  const auto check = [&](CudaStatus status, std::string_view call) { check_cuda(cuda, status, call, where_, who_); };
  const std::shared_ptr<void> before = job_->events->take();
  check(cuda.event_record(before.get(), stream), "to record an event");
  check(cuda.stream_wait_event(job_->stream(), before.get(), 0), "to order a stream after an event");
  for_each_nccl_group(calls, [&](std::span<const Collective> run, bool points) {
    if (points || !gate_) return launch_run(run, points, point.awaited);
    // One by one, however a rank puts them together: else one could wait in the gate of a second call for a rank that
    // waits for the first.
    for (const Collective& call : run) {
      gate_->pass(call);
      launch_run({&call, 1}, points, point.awaited);
    }
  });
  point.native = job_->events->take();
  check(cuda.event_record(point.native.get(), job_->stream()), "to record an event");
  check(cuda.stream_wait_event(stream, point.native.get(), 0), "to order a stream after an event");
}

void NcclGroup::launch_run(std::span<const Collective> calls, bool points, Awaited& awaited) {
  for (const Collective& call : calls) {
    const CallDescriptor about = describe_call(call, next_sequence_);
    awaited.what = text_of(about);
    awaited.tag = call.tag;
    awaited.peer = points ? call.root : -1;
    if (points) continue;
    if (board_) board_->post(about);
    ++next_sequence_;
    if (begun_) begun_->store(next_sequence_);
  }
  awaited.through = next_sequence_;
  ZR_FAILPOINT("nccl.give");
  communicator_->in_group([&](NcclComm comm) {
    const NcclPlace place{.nccl = job_->nccl,
                          .cuda = job_->cuda,
                          .comm = comm,
                          .stream = job_->stream(),
                          .scratch = job_->scratch(),
                          .rank = rank_,
                          .size = size_,
                          .where = where_,
                          .who = who_};
    for (const Collective& call : calls) give_to_nccl(place, call);
  });
  // What NCCL has taken is on the stream only now: an event that is recorded before would come before the calls.
  await([&](Milliseconds slice) { return settled(*communicator_, slice); }, awaited);
  for (const Collective& call : calls) report(call);
}

void NcclGroup::report(const Collective& call) noexcept {
  if (!observer_) return;
  const CountedAs counted(call);
  TrafficEvent event{.group = name_, .kind = counted.kind, .calls = counted.calls};
  for (int peer = 0; peer < size_; ++peer) {
    const std::uint64_t bytes = received_from(call, rank_, size_, peer);
    event.bytes += bytes;
    if (nodes_.is_far(rank_, peer)) event.far_bytes += bytes;
  }
  observer_->observe(event);
}

void NcclGroup::finish() {
  if (last_ && !last_->done) run_until(*last_);
  first_error_.throw_again();
}

void NcclGroup::register_buffer(const Arena& arena) {
  guarded([&] {
    const CudaDeviceScope scope(job_->cuda, job_->device, where_);
    communicator_->add_buffer(arena.data(), arena.capacity(), arena.keep_alive());
  });
}

void NcclGroup::run_until(Completion& completion) {
  if (completion.done) return;
  const Point& point = static_cast<Point&>(completion);
  try {
    guarded([&] {
      ZR_FAILPOINT("nccl.wait");
      await(
          [&](Milliseconds slice) {
            return poll_for(slice, [&] {
              const bool happened = event_happened(job_->cuda, point.native.get(), where_);
              if (happened && left_quietly_) return true;
              // Also of one that has happened, and afterwards: a kernel that was made to end has left no result.
              (void)communicator_->settled();
              return happened;
            });
          },
          point.awaited);
      if (board_ && base_ != nullptr) board_->compare(point.awaited.through, tag_names_);
    });
  } catch (...) {
    completion.error = std::current_exception();
  }
  completion.done = true;
}

void NcclGroup::look(Completion& completion) {
  guarded([&] {
    try {
      look_up(static_cast<Point&>(completion).awaited);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kPeerLost || !poll_for(kGrace, [&] { return ready(completion); })) throw;
    }
  });
}

bool NcclGroup::ready(Completion& completion) {
  return completion.done || job_->cuda.event_query(completion.native.get()) != kCudaNotReady;
}

void NcclGroup::await(FunctionRef<bool(Milliseconds)> done, const Awaited& awaited) {
  const Deadline deadline(job_->watched.patience(job_->options.timeout));
  WatchedWait watched(job_->watched.activity());
  WaitProgress owed(job_->progress);
  const auto report = [&] { return report_of(deadline, awaited); };
  while (!done(owed.slice(deadline.slice()))) {
    try {
      look_up(awaited);
    } catch (const Error& error) {
      // A peer may have left after it had done all that this rank waits for.
      if (error.code() != ErrorCode::kPeerLost || !done(kGrace)) throw;
      return;
    }
    if (!deadline.passed()) {
      watched.look(report);
      if (!owed.idle()) owed.sleeps_for(awaited_rank(awaited));
      owed.advance();
      continue;
    }
    watched.expire(report);
    throw_timeout(deadline, awaited);
  }
}

void NcclGroup::throw_if_aborted(std::string_view what) const {
  if (!job_->aborted()) [[likely]]
    return;
  if (base_ != nullptr) base_->check_peers({.what = std::string(what)});
  job_->throw_aborted(where_, who_);
}

void NcclGroup::look_up(const Awaited& awaited) {
  throw_if_aborted(awaited.what);
  ZR_CHECK(base_ != nullptr, ErrorCode::kAborted, "the group was given up before its work was done",
           {.where = where_, .who = who_});
  check_interrupt();
  if (board_) board_->compare(awaited.through, tag_names_);
  WaitContext context{.what = awaited.what};
  if (awaited.peer >= 0) context.ranks = {awaited.peer};
  base_->check_peers(context);
}

std::vector<int> NcclGroup::missing(const Awaited& awaited) const {
  std::vector<int> ranks;
  if (awaited.peer >= 0) return {awaited.peer};
  for (int rank = 0; board_ && rank < size_; ++rank) {
    if (rank == rank_) continue;
    if (awaited.opens ? !board_->open(rank) : board_->posted(rank) < awaited.through) ranks.push_back(rank);
  }
  return ranks;
}

int NcclGroup::awaited_rank(const Awaited& awaited) const {
  const std::vector<int> ranks = missing(awaited);
  if (ranks.empty()) return Progress::kAnyRank;
  return job_->watched.job_rank(world_ranks_[static_cast<std::size_t>(ranks.front())]);
}

WaitReport NcclGroup::report_of(const Deadline& deadline, const Awaited& awaited) const {
  std::vector<int> ranks;
  for (const int rank : missing(awaited))
    ranks.push_back(job_->watched.job_rank(world_ranks_[static_cast<std::size_t>(rank)]));
  const bool counts = awaited.peer < 0 && !awaited.opens && awaited.through > 0;
  return {.group = name_,
          .call = awaited.what,
          .ranks = std::move(ranks),
          .calls_of = counts ? "nccl:" + name_ : "",
          .sequence = counts ? awaited.through - 1 : 0,
          .waited = deadline.timeout() - deadline.remaining(),
          .timeout = deadline.timeout()};
}

void NcclGroup::throw_timeout(const Deadline& deadline, const Awaited& awaited) const {
  const std::vector<int> ranks = missing(awaited);
  std::string got = "NCCL does not say who is missing";
  if (awaited.peer >= 0) {
    got = "nothing, and NCCL does not say what that rank does";
  } else if (board_ && ranks.empty()) {
    got = awaited.opens ? "all ranks but this one have it"
                        : "all ranks have made the call: their devices or the network have not";
  } else if (board_ && awaited.opens) {
    got = fmt::format("not yet there either: rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
  } else if (board_) {
    std::vector<std::string> counts;
    for (const int rank : ranks)
      counts.push_back(fmt::format("rank {} has made {} of {} calls", rank, board_->posted(rank), awaited.through));
    got = fmt::format("{}", fmt::join(counts, ", "));
  }
  const double seconds = std::chrono::duration<double>(deadline.timeout()).count();
  const CallDescriptor about{.unit = awaited.tag.unit, .label = awaited.tag.label};
  const std::string_view alive =
      board_ ? ", and every peer is alive" : "";  // else the base does not see whether they are
  throw Error(
      ErrorCode::kTimeout,
      fmt::format("{} within {:.1f} s{}", awaited.opens ? "NCCL has not connected the ranks" : "no end", seconds,
                  alive),
      {.where = where_,
       .who = who_,
       .which = awaited.opens ? "" : meaning_of(about, tag_names_),
       .expected = awaited.what,
       .got = std::move(got),
       .hint =
           awaited.opens
               ? "a rank hangs, or the network between the GPUs does not connect: NCCL_DEBUG=INFO shows how far it is"
               : "that rank computes longer than the timeout, hangs, or takes another path"});
}

void NcclGroup::fail() {
  // An abort ends the communicator, and who finds it ended is to hear why.
  try {
    throw_if_aborted("");
    throw;
  } catch (...) {
    // Else its kernels would spin, and whoever waits for the device would wait for ever.
    end(Deadline(job_->end_time()));
    throw;
  }
}

void NcclGroup::end(const Deadline& deadline) noexcept {
  if (!communicator_->end(NcclCommunicator::End::kAbort, deadline)) job_->leave_device();
}

void NcclGroup::leave() noexcept {
  const bool quiet = !last_ || last_->done || ready(*last_);
  const Deadline deadline(std::min(kLeaveTime, job_->options.timeout));
  left_quietly_ = quiet && !first_error_;
  const auto how = left_quietly_ ? NcclCommunicator::End::kClean : NcclCommunicator::End::kAbort;
  if (!communicator_->end(how, deadline)) job_->leave_device();
  gate_.reset();  // it holds a group of the base, too
  base_ = nullptr;
  last_.reset();  // which holds this group
}

}  // namespace zeroth::detail
