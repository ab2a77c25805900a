#include "comm/call_descriptor.h"
#include "comm/first_error.h"
#include "comm/matched_calls.h"
#include "comm/started_points.h"

#include <zeroth/base/text.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/device/device.h>

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace zeroth {

using detail::CallDescriptor;

namespace {

template <class T>
std::span<const std::uint8_t> bytes_of(const T& value) {
  return {reinterpret_cast<const std::uint8_t*>(&value), sizeof value};
}
template <class T>
std::span<std::uint8_t> bytes_of_all(std::vector<T>& values) {
  return {reinterpret_cast<std::uint8_t*>(values.data()), values.size() * sizeof(T)};
}

/// Equal for calls that same_call() takes for the same.
struct Fingerprint {
  std::uint64_t sequence = 0;
  std::uint64_t digest = 0;
  bool operator==(const Fingerprint&) const = default;
};

Fingerprint fingerprint_of(CallDescriptor call) {
  static_assert(std::has_unique_object_representations_v<CallDescriptor>,
                "bytes between members would be part of the digest");
  const bool sum_in_fp32 = call.kind == detail::PostKind::kReduceScatter &&
                           call.op == static_cast<std::uint8_t>(ReduceOp::kSum) &&
                           call.out_dtype == static_cast<std::uint8_t>(DType::kFloat32);
  if (sum_in_fp32 && call.in_dtype == static_cast<std::uint8_t>(DType::kBFloat16)) call.in_dtype = call.out_dtype;
  if (call.kind == detail::PostKind::kAllToAll) {  // each rank's own
    call.counts_digest = 0;
    call.elements = 0;
  }
  // Of the whole call that it is a step of its digest is compared, the rest is for the text.
  call.whole_kind = detail::PostKind::kBarrier;
  call.whole_in_dtype = call.whole_out_dtype = call.whole_op = 0;
  call.whole_root = 0;
  call.whole_elements = 0;
  return {call.sequence, digest64({reinterpret_cast<const char*>(&call), sizeof call})};
}

}  // namespace

/// What ranks say to each other over the side group. Run by one thread at a time.
class CheckedBackend::Comparison {
 public:
  Comparison(std::unique_ptr<CommBackend> side, std::string group, std::string_view kind)
      : side_(std::move(side)),
        comm_(side_, make_nested_stream("checks")),
        group_(std::move(group)),
        where_(fmt::format("comm.{} group={}", kind, group_)) {}

  [[nodiscard]] CommBackend& side() const { return *side_; }
  [[nodiscard]] const std::string& where() const { return where_; }
  void set_observer(std::shared_ptr<TrafficObserver> observer) { observer_ = std::move(observer); }
  void set_tag_names(TagNames names) { tag_names_ = std::move(names); }

  void compare(const Collective& collective) {
    first_error_.guard([&] { compare_described(collective, detail::describe_call(collective, next_sequence_++)); });
  }

 private:
  void compare_described(const Collective& collective, const CallDescriptor& own) {
    const std::vector<Fingerprint> prints = tell(fingerprint_of(own), own);
    const bool same = std::ranges::all_of(prints, [&](const Fingerprint& theirs) { return theirs == prints.front(); });
    if (!same) {  // which every rank sees
      const std::vector<CallDescriptor> all = tell(own, own);
      for (int peer = 0; peer < comm_.size(); ++peer) {
        const CallDescriptor& theirs = all[static_cast<std::size_t>(peer)];
        if (fingerprint_of(theirs) != fingerprint_of(own)) {
          throw detail::mismatch_error({own, comm_.rank()}, {theirs, peer}, comm_.size(), where_, tag_names_);
        }
      }
      throw Error(ErrorCode::kInternal, "fingerprints of calls differ and their descriptions do not",
                  {.where = where_});
    }
    if (collective.kind == CollectiveKind::kAllToAll) compare_parts(collective, own);
  }

  /// What each rank gives to each, and what it takes from each.
  void compare_parts(const Collective& collective, const CallDescriptor& own) {
    const auto size = static_cast<std::size_t>(comm_.size());
    std::vector<std::int64_t> mine = collective.counts;
    mine.insert(mine.end(), collective.recv_counts.begin(), collective.recv_counts.end());
    std::vector<std::int64_t> all(mine.size() * size);
    in_call(own, [&] { comm_.all_gather(std::span<const std::int64_t>(mine), std::span(all)); });
    observe(mine.size() * sizeof(std::int64_t));
    for (std::size_t from = 0; from < size; ++from) {
      for (std::size_t to = 0; to < size; ++to) {
        const detail::PartSize part{static_cast<int>(from), static_cast<int>(to), all[from * mine.size() + to],
                                    all[to * mine.size() + size + from]};
        if (part.given != part.taken)
          throw detail::parts_error(own, part, comm_.rank(), comm_.size(), where_, tag_names_);
      }
    }
  }

  /// `mine` to every rank, everybody's back.
  template <class T>
  std::vector<T> tell(const T& mine, const CallDescriptor& about) {
    std::vector<T> all(static_cast<std::size_t>(comm_.size()));
    in_call(about, [&] { comm_.all_gather(bytes_of(mine), bytes_of_all(all)); });
    observe(sizeof mine);
    return all;
  }

  /// Whoever reads that a rank has not come also wants to know to what.
  template <class Body>
  void in_call(const CallDescriptor& call, const Body& body) const {
    try {
      body();
    } catch (const JobVerdict&) {
      throw;
    } catch (const Error& error) {
      ErrorContext context = error.context();
      context.where = where_;
      context.which = detail::meaning_of(call, tag_names_);
      context.expected = fmt::format("every rank at {}; {}", detail::text_of(call), context.expected);
      throw Error(error.code(), error.message(), std::move(context));
    }
  }

  void observe(std::size_t bytes) {
    if (observer_)
      observer_->observe({.group = group_, .control_bytes = bytes * static_cast<std::uint64_t>(comm_.size() - 1)});
  }

  std::shared_ptr<CommBackend> side_;
  Communicator comm_;
  std::string group_;
  std::string where_;
  std::shared_ptr<TrafficObserver> observer_;
  TagNames tag_names_;
  std::uint64_t next_sequence_ = 0;
  detail::FirstError first_error_;
};

CheckedBackend::CheckedBackend(std::unique_ptr<CommBackend> inner, std::unique_ptr<CommBackend> side)
    : CheckedBackend(std::move(inner), std::move(side), std::make_shared<Event>()) {}

CheckedBackend::CheckedBackend(std::unique_ptr<CommBackend> inner, std::unique_ptr<CommBackend> side,
                               std::shared_ptr<Event> last_call)
    : ForwardingBackend(std::move(inner)),
      comparison_(std::make_shared<Comparison>(std::move(side), group_name(), kind())),
      last_call_(std::move(last_call)) {}

std::size_t CheckedBackend::memory_bytes() const {
  return inner().memory_bytes() + comparison_->side().memory_bytes();
}

Work CheckedBackend::submit(std::span<const Collective> collectives, const Stream& stream) {
  WorkInfo info = detail::validated(collectives, rank(), size(), comparison_->where());
  stream.order_after(*last_call_);
  // One after the other, however a rank puts them together: else one could compare its second call while another one
  // makes its first.
  detail::for_each_run(
      collectives, [&](std::span<const Collective> points) { follow(inner().submit(points, stream), stream); },
      [&](const Collective& call) {
        stream.enqueue([comparison = comparison_, call] { comparison->compare(call); });
        follow(inner().submit({&call, 1}, stream), stream);
      });
  return {stream.record(), std::move(info)};
}

std::unique_ptr<PendingPoints> CheckedBackend::start(std::span<const Collective> points, const Stream& stream) {
  detail::validate_points(points, rank(), size(), comparison_->where());
  last_call_->wait();
  return detail::also_moved_by(inner().start(points, stream), [this](const std::weak_ptr<Progress>& progress) {
    (void)comparison_->side().add_progress(progress);
  });
}

void CheckedBackend::follow(const Work& work, const Stream& stream) {
  *last_call_ = work.event();
  work.order_before(stream);  // an error is the stream's again, and nothing follows it
}

std::unique_ptr<CommBackend> CheckedBackend::split(int color, int key, std::string_view name) {
  last_call_->wait();
  comparison_->compare(detail::stand_in("split", name));
  std::unique_ptr<CommBackend> side = comparison_->side().split(color, key, name);
  std::unique_ptr<CommBackend> part = inner().split(color, key, name);
  if (!part) return nullptr;
  return std::unique_ptr<CommBackend>(new CheckedBackend(std::move(part), std::move(side), last_call_));
}

int CheckedBackend::add_progress(std::weak_ptr<Progress> progress) {
  (void)comparison_->side().add_progress(progress);
  return inner().add_progress(std::move(progress));
}

void CheckedBackend::abort(const Error& error) noexcept {
  inner().abort(error);
  comparison_->side().abort(error);
}

void CheckedBackend::set_observer(std::shared_ptr<TrafficObserver> observer) {
  comparison_->set_observer(observer);
  inner().set_observer(std::move(observer));
}

void CheckedBackend::set_tag_names(TagNames names) {
  comparison_->set_tag_names(names);
  inner().set_tag_names(std::move(names));
}

}  // namespace zeroth
