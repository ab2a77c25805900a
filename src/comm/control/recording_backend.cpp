#include "comm/control/watched.h"

#include <zeroth/comm/control_plane.h>
#include <zeroth/comm/decorators.h>

#include <numeric>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

/// Their records end when somebody sees that they are done; after an error they stay open.
class RecordedPoints final : public PendingPoints {
 public:
  RecordedPoints(std::unique_ptr<PendingPoints> points, std::shared_ptr<RankActivity> activity,
                 std::vector<std::uint64_t> tickets)
      : points_(std::move(points)), activity_(std::move(activity)), tickets_(std::move(tickets)) {}

  bool done() override {
    activity_->check();
    if (!points_->done()) return false;
    end();
    return true;
  }
  void wait() override {
    points_->wait();
    end();
  }

 private:
  void end() {
    for (const std::uint64_t ticket : tickets_) activity_->recorder().end(ticket);
    tickets_.clear();
  }

  std::unique_ptr<PendingPoints> points_;
  std::shared_ptr<RankActivity> activity_;
  std::vector<std::uint64_t> tickets_;
};

}  // namespace

RecordingBackend::RecordingBackend(std::unique_ptr<CommBackend> inner, std::shared_ptr<RankActivity> activity,
                                   std::shared_ptr<ControlPlane> control)
    : ForwardingBackend(std::move(inner)),
      control_(std::move(control)),
      activity_(std::move(activity)),
      group_(activity_->recorder().group(group_name())) {
  activity_->take_group();
}

RecordingBackend::~RecordingBackend() {
  activity_->give_group();
}

Work RecordingBackend::submit(std::span<const Collective> collectives, const Stream& stream) {
  activity_->check();
  std::vector<std::uint64_t> tickets = begin(collectives);
  const Work work = inner().submit(collectives, stream);
  work.order_before(stream);  // an error is the stream's again, and leaves the records open
  stream.enqueue([activity = activity_, tickets = std::move(tickets)] {
    for (const std::uint64_t ticket : tickets) activity->recorder().end(ticket);
  });
  return {stream.record(), work.info()};
}

std::unique_ptr<PendingPoints> RecordingBackend::start(std::span<const Collective> points, const Stream& stream) {
  activity_->check();
  std::vector<std::uint64_t> tickets = begin(points);
  return std::make_unique<RecordedPoints>(inner().start(points, stream), activity_, std::move(tickets));
}

std::vector<std::uint64_t> RecordingBackend::begin(std::span<const Collective> calls) {
  std::vector<std::uint64_t> tickets;
  tickets.reserve(calls.size());
  for (const Collective& call : calls) {
    tickets.push_back(activity_->recorder().begin(
        {.sequence = calls_++,
         .elements = std::accumulate(call.counts.begin(), call.counts.end(), std::int64_t{0}),
         .group = group_,
         .name = call.name.empty() ? -1 : activity_->recorder().name(call.name),
         .about = about(call.tag),
         .unit = call.tag.unit,
         .label = call.tag.label,
         .kind = call.kind,
         .dtype = call.in_dtype}));
  }
  return tickets;
}

std::unique_ptr<CommBackend> RecordingBackend::split(int color, int key, std::string_view name) {
  activity_->check();
  std::unique_ptr<CommBackend> part = inner().split(color, key, name);
  if (!part) return nullptr;
  return std::make_unique<RecordingBackend>(std::move(part), activity_, control_);
}

void RecordingBackend::wait_until(const std::function<bool()>& predicate, const WaitContext& context) {
  activity_->check();
  FlightRecorder& recorder = activity_->recorder();
  const std::uint64_t ticket = recorder.begin(
      {.sequence = waits_.fetch_add(1), .group = group_, .about = recorder.name(context.what), .wait = true});
  try {
    inner().wait_until(predicate, context);
    recorder.end(ticket);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kMismatch || !control_) throw;
    if (inner().size() == activity_->size()) {  // its ranks are the job's
      activity_->tell_and_await(activity_->dated(error), detail::kWordOfCause);
    } else {
      control_->tell(error);
    }
    throw;
  }
}

void RecordingBackend::set_tag_names(TagNames names) {
  tag_names_ = names;
  abouts_.clear();
  inner().set_tag_names(std::move(names));
}

std::int32_t RecordingBackend::about(const MessageTag& tag) {
  if (!tag_names_.name) return -1;
  const auto [place, is_new] =
      abouts_.try_emplace(std::uint64_t{static_cast<std::uint32_t>(tag.unit)} << 32U | tag.label, -1);
  if (is_new) {
    const std::string text = tag_names_.name(tag);
    if (!text.empty()) place->second = activity_->recorder().name(text);
  }
  return place->second;
}

void RecordingBackend::abort(const Error& error) noexcept {
  inner().abort(error);
  if (!control_) return;
  try {
    control_->tell(end_of_job(activity_->rank(), error));
  } catch (...) {  // no memory to say so
  }
}

}  // namespace zeroth
