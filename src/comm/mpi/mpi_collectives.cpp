#include "comm/mpi/mpi_collectives.h"

#include "comm/call_descriptor.h"
#include "comm/control/watched.h"
#include "comm/first_error.h"
#include "comm/matched_calls.h"
#include "comm/progress_list.h"
#include "comm/started_points.h"

#include <kernels/common/dispatch.h>
#include <kernels/copy/copy.h>
#include <kernels/reduce/reduce.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/device/device.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::detail {
namespace {

// [Note: Few ranks] Up to so many, parts travel between each two ranks, and the kernels of the other backends add them
// up: with 2 ranks on one host that is about as fast as MPI's calls where these are good, and faster where they are not
// (benchmarks/comm/mpi_bench.cpp). With many ranks it is n messages for each of them, where MPI needs log n. Where the
// limit is best is a guess: nobody has measured between hosts.
constexpr int kFewRanks = 8;
constexpr std::size_t kSmallReduceBytes =
    std::size_t{2} << 10U;      // of an all_reduce in one step; below what MPI copies at once, not kInlineBytes
constexpr int kCloseRanks = 4;  // which move hardly more bytes in one step than in two,
constexpr std::size_t kCloseReduceBytes = std::size_t{32}
                                          << 10U;  // and do so up to here where parts are not copied at once either
constexpr std::size_t kSmallPartBytes = std::size_t{64} << 10U;
constexpr std::size_t kTinyPartBytes = std::size_t{4} << 10U;  // about what MPI copies at once
constexpr std::size_t kLargePartBytes = std::size_t{8}
                                        << 20U;  // that few ranks gather as well by MPI's own call, and a fifth faster
constexpr std::int64_t kMostElements = std::int64_t{1} << 30;  // of one call of MPI, which counts with an int

/// What MPI sums by itself.
std::optional<MpiNumber> number_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return MpiNumber::kFloat;
    case DType::kFloat64:
      return MpiNumber::kDouble;
    case DType::kInt32:
      return MpiNumber::kUInt32;
    case DType::kInt64:
      return MpiNumber::kUInt64;
    default:
      return std::nullopt;
  }
}

/// Each rank may give fp32 or bf16 to a sum in fp32, and none knows what the others give: so it goes as fp32.
DType type_on_the_way(const Collective& call) {
  const bool mixed =
      call.kind == CollectiveKind::kReduceScatter && call.op == ReduceOp::kSum && call.out_dtype == DType::kFloat32;
  return mixed && call.in_dtype == DType::kBFloat16 ? DType::kFloat32 : call.in_dtype;
}

/// Memory that grows with what calls need, and is counted.
class Scratch {
 public:
  std::byte* reserve(std::size_t bytes, const std::shared_ptr<MemoryLedger>& ledger) {
    if (memory_.size() < bytes) {
      hold_ = MemoryHold();
      memory_ = std::vector<std::byte>();  // the old bytes go first
      memory_.resize(bytes);
      if (ledger) hold_ = ledger->hold({-1, MemoryState::kControl}, bytes);
    }
    return memory_.data();
  }
  [[nodiscard]] std::size_t size() const { return memory_.size(); }

 private:
  std::vector<std::byte> memory_;
  MemoryHold hold_;
};

/// One group. Run by one thread at a time.
class MpiGroup {
 public:
  /// `handle`: the group as MPI knows it; `members`: ranks of the world; `number`: the same on all of them, and no
  /// other group's of a rank.
  MpiGroup(std::shared_ptr<MpiWorld> mpi, void* handle, std::shared_ptr<CommBackend> messages,
           const CommOptions& options, std::vector<int> members, int number)
      : mpi_(std::move(mpi)),
        handle_(handle),
        messages_(std::move(messages)),
        options_(options),
        watched_(options),
        members_(std::move(members)),
        nodes_(options_.nodes, members_),
        number_(number),
        stream_(make_nested_stream("mpi")),
        isa_(kernels::best_isa()) {
    if (RankActivity* const activity = watched_.activity()) begun_ = activity->calls_begun(watched_as());
  }

  [[nodiscard]] int rank() const { return messages_->rank(); }
  [[nodiscard]] int size() const { return static_cast<int>(members_.size()); }
  [[nodiscard]] CommBackend& messages() const { return *messages_; }
  [[nodiscard]] const NodeMap& nodes() const { return nodes_; }
  [[nodiscard]] int add_progress(const std::weak_ptr<Progress>& progress) {
    progress_->add(progress);
    return messages_->add_progress(progress);
  }
  [[nodiscard]] std::size_t memory_bytes() const {
    return messages_->memory_bytes() + staging_.size() + widened_.size() + sum_.size();
  }
  void set_observer(std::shared_ptr<TrafficObserver> observer) {
    messages_->set_observer(observer);
    observer_ = std::move(observer);
  }
  void set_tag_names(TagNames names) {
    messages_->set_tag_names(names);
    tag_names_ = std::move(names);
  }
  void report(const TrafficEvent& event) noexcept {
    if (observer_) observer_->observe(event);
  }

  void run_all(std::span<const Collective> calls) {
    first_error_.guard([&] {
      for_each_run(
          calls, [&](std::span<const Collective> points) { messages_->submit(points, stream_).wait(); },
          [&](const Collective& call) { run_matched(call); });
    });
  }

  /// Over messages, and in the waits for MPI's calls.
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points) {
    return first_error_.guard([&] {
      return also_moved_by(messages_->start(points, stream_),
                           [this](const std::weak_ptr<Progress>& progress) { progress_->add(progress); });
    });
  }

  /// `groups_made`: by this rank so far.
  [[nodiscard]] std::shared_ptr<MpiGroup> split(int color, int key, std::string_view name, int& groups_made) {
    return first_error_.guard([&]() -> std::shared_ptr<MpiGroup> {
      // All have come, and agree: so MPI's call, which knows no deadline, finds them there.
      const std::shared_ptr<CommBackend> part = messages_->split(color, key, name);
      void* const handle = mpi_->split(handle_, color, key, patience());
      if (!part) return nullptr;
      const std::array<std::int32_t, 2> own{members_[static_cast<std::size_t>(rank())], groups_made};
      std::vector<std::int32_t> all(own.size() * static_cast<std::size_t>(part->size()));
      Communicator(part).all_gather(std::span<const std::int32_t>(own), std::span(all));
      std::vector<int> members;
      for (std::size_t index = 0; index < all.size(); index += own.size()) {
        members.push_back(all[index]);
        groups_made = std::max(groups_made, all[index + 1]);
      }
      ++groups_made;
      auto group = std::make_shared<MpiGroup>(mpi_, handle, part, options_, std::move(members), groups_made);
      group->observer_ = observer_;
      group->progress_ = progress_;
      return group;
    });
  }

 private:
  /// A piece of every rank's part of a sum on its way: what this rank gives to and takes from each.
  struct Posted {
    std::vector<MpiPiece> given{};
    std::vector<MpiPiece> taken{};
    MpiRequests requests{};
  };

  void run_matched(const Collective& call) {
    call_ = describe_call(call, next_sequence_++);
    if (begun_) begun_->store(next_sequence_, std::memory_order_relaxed);
    received_ = far_ = 0;
    move(call);
    const CountedAs counted(call);
    report({.group = messages_->group_name(),
            .kind = counted.kind,
            .calls = counted.calls,
            .bytes = received_,
            .far_bytes = far_});
  }

  void move(const Collective& call) {
    switch (call.kind) {
      case CollectiveKind::kSend:
      case CollectiveKind::kRecv:
        return;
      case CollectiveKind::kBarrier:
        return barrier();
      case CollectiveKind::kAllGather:
        return all_gather(call.send, call.recv, call.counts, size_of(call.in_dtype));
      case CollectiveKind::kReduceScatter:
        return reduce_scatter(call);
      case CollectiveKind::kAllReduce:
        return all_reduce(call);
      case CollectiveKind::kBroadcast:
        return broadcast(call);
      case CollectiveKind::kGather:
        return gather(call);
      case CollectiveKind::kScatter:
        return scatter(call);
      case CollectiveKind::kAllToAll:
        return all_to_all(call);
    }
  }

  /// A call of MPI, until it is done.
  template <class Start>
  void make(std::size_t bytes, const Start& start) {
    run([&] { return mpi_->start_call(name_of(call_.kind), bytes, start); }, [] {});
  }

  /// Starts something and waits for it. `meanwhile`: what this rank does once it has started.
  template <class Start, class Meanwhile>
  void run(const Start& start, const Meanwhile& meanwhile) {
    or_stop([&] {
      MpiRequests requests = start();
      meanwhile();
      await(requests);
    });
  }

  /// An error inside stops the job for the others.
  template <class Body>
  void or_stop(const Body& body) {
    try {
      body();
    } catch (const Error& error) {
      // While the buffers are still there; afterwards nothing moves any more. Without effect where a peer's abort was
      // heard.
      const Error named = in_this_call(error);
      mpi_->abort(named.what());
      if (dynamic_cast<const JobVerdict*>(&error) != nullptr) throw;
      throw named;
    } catch (...) {  // an interrupt
      mpi_->abort(fmt::format("{} was interrupted", text_of(call_)));
      throw;
    }
  }

  void await(MpiRequests& requests) {
    WatchedWait watched(watched_.activity());
    if (mpi_->wait(requests, Milliseconds{1}, MpiPatience::kEager)) [[likely]]
      return;
    const Deadline deadline(patience());
    WaitProgress owed(*progress_);
    while (!mpi_->wait(requests, owed.slice(deadline.slice()), MpiPatience::kEager)) {
      owed.sleeps_for(awaited());
      owed.advance();
      check_interrupt();
      const auto report = [&] { return report_of(deadline); };
      deadline.passed() ? watched.expire(report) : watched.look(report);
      ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout,
               fmt::format("MPI did not end a call within {:.1f} s",
                           std::chrono::duration<double>(deadline.timeout()).count()),
               {.hint = "a rank computes longer than the timeout, hangs, or makes another call; MPI does not say "
                        "which: zeroth.check_calls "
                        "compares the calls of all ranks"});
    }
  }

  /// MPI does not say who is missing.
  [[nodiscard]] int awaited() const {
    if (size() != 2) return Progress::kAnyRank;
    return watched_.job_rank(members_[static_cast<std::size_t>(1 - rank())]);
  }

  /// MpiWorld knows the world; whoever reads its error also wants the call.
  [[nodiscard]] Error in_this_call(const Error& error) const {
    ErrorContext context = error.context();
    if (context.where.empty() || context.where == "comm.mpi")
      context.where = fmt::format("comm.mpi group={}", messages_->group_name());
    if (context.who.empty()) context.who = fmt::format("rank {}/{}", rank(), size());
    if (context.which.empty()) context.which = meaning_of(call_, tag_names_);
    if (context.expected.empty())
      context.expected = fmt::format("{} by all ranks of group={}", text_of(call_), messages_->group_name());
    return Error(error.code(), error.message(), std::move(context));
  }

  [[nodiscard]] std::string watched_as() const { return fmt::format("{}#mpi{}", messages_->group_name(), number_); }
  [[nodiscard]] Milliseconds patience() const { return watched_.patience(options_.timeout); }
  [[nodiscard]] WaitReport report_of(const Deadline& deadline) const {
    const std::string meaning = meaning_of(call_, tag_names_);
    std::vector<int> others;
    for (const int member : members_) {
      if (member != mpi_->rank()) others.push_back(watched_.job_rank(member));
    }
    return {.group = messages_->group_name(),
            .call = text_of(call_) + (meaning.empty() ? "" : ", " + meaning),
            .ranks = std::move(others),
            .calls_of = watched_as(),
            .sequence = call_.sequence,
            .waited = deadline.timeout() - deadline.remaining(),
            .timeout = deadline.timeout()};
  }

  void count(int peer, std::size_t bytes) {
    received_ += bytes;
    if (nodes_.is_far(rank(), peer)) far_ += bytes;
  }
  /// `each[r]` times `element` bytes from rank r.
  void count(const std::vector<std::int64_t>& each, std::size_t element) {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) count(peer, static_cast<std::size_t>(each[static_cast<std::size_t>(peer)]) * element);
    }
  }

  void barrier() {
    make(0, [&](const MpiTable& table, void** request) { return table.barrier(handle_, request); });
  }

  /// Lengths and offsets in bytes, as MPI counts them; none if it cannot.
  struct ByteParts {
    std::vector<int> bytes{};
    std::vector<int> offsets{};
    [[nodiscard]] MpiParts view() const { return {bytes.data(), offsets.data()}; }
  };
  [[nodiscard]] static std::optional<ByteParts> byte_parts(const std::vector<std::int64_t>& counts,
                                                           std::size_t element) {
    ByteParts parts;
    parts.bytes.reserve(counts.size());
    parts.offsets.reserve(counts.size());
    std::int64_t end = 0;
    for (const std::int64_t each : counts) {
      const std::int64_t bytes = each * static_cast<std::int64_t>(element);
      if (end + bytes > INT_MAX) return std::nullopt;
      parts.offsets.push_back(static_cast<int>(end));
      parts.bytes.push_back(static_cast<int>(bytes));
      end += bytes;
    }
    return parts;
  }
  [[nodiscard]] static std::size_t total_bytes(const std::vector<std::int64_t>& counts, std::size_t element) {
    return static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0})) * element;
  }
  /// MPI takes a null pointer for "in place", and what a rank without elements has may be null.
  template <class Byte>
  [[nodiscard]] static Byte* not_null(Byte* data) {
    static std::byte nothing{};
    return data == nullptr ? &nothing : data;
  }
  [[nodiscard]] std::size_t index() const { return static_cast<std::size_t>(rank()); }

  /// Where each rank's part of a whole lies.
  template <class Byte>
  static void set_parts(std::vector<MpiPiece>& pieces, Byte* whole, const std::vector<std::int64_t>& counts,
                        std::size_t element) {
    pieces.clear();
    std::int64_t begin = 0;
    for (const std::int64_t each : counts) {
      pieces.push_back({const_cast<std::byte*>(whole) + static_cast<std::size_t>(begin) * element,
                        static_cast<std::size_t>(each) * element});
      begin += each;
    }
  }
  [[nodiscard]] MpiPiece own_part(std::byte* whole, const std::vector<std::int64_t>& counts,
                                  std::size_t element) const {
    const std::int64_t before = std::accumulate(counts.begin(), counts.begin() + rank(), std::int64_t{0});
    return {whole + static_cast<std::size_t>(before) * element, static_cast<std::size_t>(counts[index()]) * element};
  }
  /// The same piece, or none, for every rank.
  void set_all(std::vector<MpiPiece>& pieces, const MpiPiece& piece = {}) const {
    pieces.assign(members_.size(), piece);
  }

  /// to_[r] to rank r, from_[r] from it, and nothing to and from this one but by `meanwhile`.
  void exchange() {
    exchange([] {});
  }
  template <class Meanwhile>
  void exchange(const Meanwhile& meanwhile) {
    to_[index()] = from_[index()] = {};
    for (int peer = 0; peer < size(); ++peer) count(peer, from_[static_cast<std::size_t>(peer)].bytes);
    run([&] { return mpi_->start_exchange(handle_, rank(), to_, from_); }, meanwhile);
  }

  /// Below it an all_gather or all_to_all is MPI's own call, which needs fewer messages than there are ranks.
  [[nodiscard]] std::size_t small_part() const {
    return size() > kFewRanks ? kSmallPartBytes : size() > 2 ? kTinyPartBytes : 0;
  }

  void all_gather(const std::byte* own, std::byte* whole, const std::vector<std::int64_t>& counts,
                  std::size_t element) {
    const MpiPiece place = own_part(whole, counts, element);
    const bool in_place = own == place.data;
    const std::size_t total = total_bytes(counts, element);
    const std::size_t part = total / members_.size();
    if (part < small_part() || (size() > 2 && size() <= kFewRanks && part >= kLargePartBytes)) {
      if (const std::optional<ByteParts> parts = byte_parts(counts, element)) {
        make(total, [&](const MpiTable& table, void** request) {
          return table.all_gather(handle_, in_place ? nullptr : not_null(own), not_null(whole), parts->view(), request);
        });
        return count(counts, element);
      }
    }
    set_all(to_, {const_cast<std::byte*>(own), place.bytes});
    set_parts(from_, whole, counts, element);
    exchange([&] {
      if (!in_place) copy(place.data, own, place.bytes);
    });
  }

  void gather(const Collective& call) {
    const std::size_t element = size_of(call.in_dtype);
    const bool root = rank() == call.root;
    const MpiPiece place = own_part(call.recv, call.counts, element);
    const bool in_place = root && call.send == place.data;
    if (const std::optional<ByteParts> parts = byte_parts(call.counts, element)) {
      make(total_bytes(call.counts, element), [&](const MpiTable& table, void** request) {
        return table.gather(handle_, in_place ? nullptr : not_null(call.send), not_null(call.recv), parts->view(),
                            call.root, request);
      });
      if (root) count(call.counts, element);
      return;
    }
    set_all(to_);
    set_all(from_);
    if (root) {
      set_parts(from_, call.recv, call.counts, element);
    } else {
      to_[static_cast<std::size_t>(call.root)] = {const_cast<std::byte*>(call.send), place.bytes};
    }
    exchange();
    if (root && !in_place) copy(place.data, call.send, place.bytes);
  }

  void scatter(const Collective& call) {
    const std::size_t element = size_of(call.in_dtype);
    const bool root = rank() == call.root;
    const MpiPiece place = own_part(const_cast<std::byte*>(call.send), call.counts, element);
    const bool in_place = root && call.recv == place.data;
    if (const std::optional<ByteParts> parts = byte_parts(call.counts, element)) {
      make(total_bytes(call.counts, element), [&](const MpiTable& table, void** request) {
        return table.scatter(handle_, not_null(call.send), in_place ? nullptr : not_null(call.recv), parts->view(),
                             call.root, request);
      });
      if (!root) count(call.root, place.bytes);
      return;
    }
    set_all(to_);
    set_all(from_);
    if (root) {
      set_parts(to_, call.send, call.counts, element);
    } else {
      from_[static_cast<std::size_t>(call.root)] = {call.recv, place.bytes};
    }
    exchange();
    if (root && !in_place) copy(call.recv, place.data, place.bytes);
  }

  void all_to_all(const Collective& call) {
    set_parts(to_, call.send, call.counts, size_of(call.in_dtype));
    set_parts(from_, call.recv, call.recv_counts, size_of(call.in_dtype));
    const MpiPiece given = to_[index()];
    const MpiPiece taken = from_[index()];
    if (given.bytes != taken.bytes) {
      const Error error = parts_error(call_, {rank(), rank(), call.counts[index()], call.recv_counts[index()]}, rank(),
                                      size(), "comm.mpi group=" + messages_->group_name(), tag_names_);
      mpi_->abort(error.what());  // the others are in this call
      throw error;
    }
    if (call.equal_parts &&
        given.bytes < small_part()) {  // of others nobody but two ranks knows how large the parts are
      make(members_.size() * given.bytes, [&](const MpiTable& table, void** request) {
        return table.all_to_all(handle_, not_null(call.send), not_null(call.recv), static_cast<int>(given.bytes),
                                request);
      });
      return count(call.recv_counts, size_of(call.in_dtype));
    }
    exchange([&] { copy(taken.data, given.data, taken.bytes); });
  }

  void broadcast(const Collective& call) {
    const std::size_t bytes = static_cast<std::size_t>(call.counts.front()) * size_of(call.in_dtype);
    const bool root = rank() == call.root;
    if (size() == 2) {  // one message: MPI's call does no less, and begins later
      set_all(to_, root ? MpiPiece{const_cast<std::byte*>(call.send), bytes} : MpiPiece{});
      set_all(from_);
      if (!root) from_[static_cast<std::size_t>(call.root)] = {call.recv, bytes};
      return exchange([&] {
        if (root && call.recv != call.send) copy(call.recv, call.send, bytes);
      });
    }
    if (root && call.recv != call.send) copy(call.recv, call.send, bytes);
    constexpr auto kMost = static_cast<std::size_t>(kMostElements);
    for (std::size_t done = 0; done < bytes; done += kMost) {
      const auto piece = static_cast<int>(std::min(kMost, bytes - done));
      make(static_cast<std::size_t>(piece), [&](const MpiTable& table, void** request) {
        return table.broadcast(handle_, call.recv + done, piece, call.root, request);
      });
    }
    if (!root) count(call.root, bytes);
  }

  /// Whether MPI forms the sum, see [Note: Few ranks]. Only what all ranks know may decide: not what this one gives, or
  /// whether it accumulates.
  [[nodiscard]] bool sums_itself(const Collective& call) const {
    if (size() <= kFewRanks || call.op != ReduceOp::kSum || type_on_the_way(call) != call.out_dtype ||
        !number_of(call.out_dtype))
      return false;
    return call.kind == CollectiveKind::kAllReduce ||
           (call.offsets.empty() && offsets_of(call.counts).back() <= INT_MAX);
  }

  [[nodiscard]] bool in_one_step(std::size_t bytes) const {
    return bytes <= kSmallReduceBytes ||
           (size() <= kCloseRanks && bytes >= members_.size() * kTinyPartBytes && bytes <= kCloseReduceBytes);
  }

  void all_reduce(const Collective& call) {
    const std::size_t in_size = size_of(call.in_dtype);
    const std::size_t out_size = size_of(call.out_dtype);
    const std::int64_t elements = call.counts.front();
    const auto bytes = static_cast<std::size_t>(elements) * in_size;
    const std::vector<std::int64_t> shares = even_parts(elements, size());
    if (sums_itself(call)) {
      for (std::int64_t done = 0; done < elements; done += kMostElements) {
        const std::size_t begin = static_cast<std::size_t>(done) * out_size;
        const auto piece = static_cast<int>(std::min(kMostElements, elements - done));
        make(2 * static_cast<std::size_t>(piece) * out_size, [&](const MpiTable& table, void** request) {
          const std::byte* const from = call.send == call.recv ? nullptr : call.send + begin;
          return table.all_reduce(handle_, from, call.recv + begin, piece, *number_of(call.out_dtype), request);
        });
      }
      count(shares, out_size);
      count(std::vector<std::int64_t>(members_.size(), shares[index()]), out_size);
      return;
    }
    if (in_one_step(bytes)) {
      std::byte* const all = staging_.reserve(bytes * members_.size(), options_.ledger);
      all_gather(call.send, all, std::vector<std::int64_t>(members_.size(), elements), in_size);
      Summands sources;
      for (std::size_t peer = 0; peer < members_.size(); ++peer) sources.add(all + peer * bytes, call.in_dtype);
      return reduce(call, call.recv, sources, elements);
    }
    // A rank's own part goes to nobody, so its sum may take that place while other parts are still under way.
    std::byte* const own = own_part(call.recv, shares, out_size).data;
    reduce_here(call, own, shares, offsets_of(shares));
    all_gather(own, call.recv, shares, out_size);
  }

  void reduce_scatter(const Collective& call) {
    if (!sums_itself(call)) return reduce_here(call, call.recv, call.counts, offsets_of(call));
    const std::size_t element = size_of(call.out_dtype);
    const std::int64_t total = offsets_of(call.counts).back();
    const std::int64_t own = call.counts[index()];
    const std::byte* from = call.send;
    if (call.in_dtype != call.out_dtype) {
      std::byte* const wide = widened_.reserve(static_cast<std::size_t>(total) * element, options_.ledger);
      widen(wide, call.send, total);
      from = wide;
    }
    const std::byte* const end = from + static_cast<std::size_t>(total) * element;
    const bool aside = call.accumulate || (call.recv >= from && call.recv < end);
    std::byte* const to = aside ? sum_.reserve(static_cast<std::size_t>(own) * element, options_.ledger) : call.recv;
    std::vector<int> counts;
    for (const std::int64_t each : call.counts) counts.push_back(static_cast<int>(each));
    make(2 * static_cast<std::size_t>(total) * element, [&](const MpiTable& table, void** request) {
      return table.reduce_scatter(handle_, not_null(from), not_null(to), counts.data(), *number_of(call.out_dtype),
                                  request);
    });
    count(std::vector<std::int64_t>(members_.size(), own), element);
    if (call.accumulate) {
      add(call.recv, to, call.out_dtype, own);
    } else if (aside) {
      copy(call.recv, to, static_cast<std::size_t>(own) * element);
    }
  }

  /// MPI moves the parts, in pieces of staging_bytes, and the kernels of the other backends add them up, in rank order
  /// along the nodes. A piece is on its way while the one before it is added up.
  void reduce_here(const Collective& call, std::byte* to, const std::vector<std::int64_t>& counts,
                   const std::vector<std::int64_t>& offsets) {
    const DType type = type_on_the_way(call);
    const std::size_t in_size = size_of(call.in_dtype);
    const std::size_t size_on_the_way = size_of(type);
    const auto piece =
        static_cast<std::int64_t>(options_.staging_bytes / std::max(size_on_the_way, size_of(call.out_dtype)));
    const std::int64_t pieces = (*std::ranges::max_element(counts) + piece - 1) / piece;
    if (pieces == 0) return;
    const bool widens = type != call.in_dtype;
    const std::size_t place = static_cast<std::size_t>(piece) * size_on_the_way;
    const std::size_t half = place * members_.size();
    std::byte* const staging = staging_.reserve(2 * half, options_.ledger);
    std::byte* const wide = widens ? widened_.reserve(2 * half, options_.ledger) : nullptr;
    const auto first_of = [&](std::size_t owner, std::int64_t number) {
      return std::min(number * piece, counts[owner]);
    };
    const auto length_of = [&](std::size_t owner, std::int64_t number) {
      return std::min(piece, counts[owner] - first_of(owner, number));
    };
    const auto post = [&](std::int64_t number) {
      Posted& next = posted_[number % 2];
      set_all(next.given);
      set_all(next.taken);
      const std::size_t begin = static_cast<std::size_t>(number % 2) * half;
      const auto own_bytes = static_cast<std::size_t>(length_of(index(), number)) * size_on_the_way;
      for (std::size_t peer = 0; peer < members_.size(); ++peer) {
        const std::int64_t length = length_of(peer, number);
        const std::byte* from = call.send + static_cast<std::size_t>(offsets[peer] + first_of(peer, number)) * in_size;
        if (widens) {
          widen(wide + begin + peer * place, from, length);
          from = wide + begin + peer * place;
        }
        next.given[peer] = {const_cast<std::byte*>(from), static_cast<std::size_t>(length) * size_on_the_way};
        next.taken[peer] = {staging + begin + peer * place, own_bytes};
        if (peer != index()) count(static_cast<int>(peer), own_bytes);
      }
      next.requests =
          mpi_->start_exchange(handle_, rank(), next.given, next.taken);  // leaves out what this rank has for itself
    };
    or_stop([&] {
      post(0);
      for (std::int64_t number = 0; number < pieces; ++number) {
        if (number + 1 < pieces) post(number + 1);
        Posted& done = posted_[number % 2];
        await(done.requests);
        Summands sources;
        for (std::size_t peer = 0; peer < members_.size(); ++peer) {
          sources.add(peer == index() ? done.given[peer].data : done.taken[peer].data, type);
        }
        reduce(call, to + static_cast<std::size_t>(first_of(index(), number)) * size_of(call.out_dtype), sources,
               length_of(index(), number));
      }
    });
  }

  void reduce(const Collective& call, std::byte* to, const Summands& sources, std::int64_t elements) const {
    reduce_in_rank_order(call, rank(), to, sources, elements, nodes_, isa_);
  }
  void widen(std::byte* to, const std::byte* from, std::int64_t elements) const {
    const void* const source = from;
    kernels::sum_sources({.dst = to,
                          .dst_dtype = DType::kFloat32,
                          .sources = &source,
                          .num_sources = 1,
                          .src_dtype = DType::kBFloat16,
                          .n = elements},
                         isa_);
  }
  void add(std::byte* to, const std::byte* more, DType dtype, std::int64_t elements) const {
    const void* const source = more;
    kernels::sum_sources({.dst = to,
                          .dst_dtype = dtype,
                          .accumulate = true,
                          .sources = &source,
                          .num_sources = 1,
                          .src_dtype = dtype,
                          .n = elements},
                         isa_);
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
    if (bytes > 0) kernels::copy_stream(to, from, static_cast<std::int64_t>(bytes), isa_);
  }

  std::shared_ptr<MpiWorld> mpi_;
  void* handle_;
  std::shared_ptr<CommBackend> messages_;
  CommOptions options_;
  Watched watched_;
  std::vector<int> members_;
  NodeMap nodes_;
  int number_;
  std::shared_ptr<ProgressList> progress_ = std::make_shared<ProgressList>();  ///< of all groups of the rank
  Stream stream_;
  kernels::Isa isa_;
  std::shared_ptr<TrafficObserver> observer_;
  TagNames tag_names_;
  CallDescriptor call_{};       // the one that runs
  std::uint64_t received_ = 0;  // by it
  std::uint64_t far_ = 0;       // from other nodes
  std::uint64_t next_sequence_ = 0;
  std::shared_ptr<std::atomic<std::uint64_t>> begun_;  // next_sequence_, for others to see
  std::vector<MpiPiece> to_;                           // of an exchange: by rank
  std::vector<MpiPiece> from_;
  Posted posted_[2];
  Scratch staging_;
  Scratch widened_;
  Scratch sum_;
  FirstError first_error_;
};

/// What all groups of the rank share.
struct MpiCalls {
  Event last_call{};    ///< matched calls run in the order of their submission, across groups
  int groups_made = 0;  ///< not below that of any rank of a group that this one is in
};

class MpiCollectives final : public CommBackend {
 public:
  MpiCollectives(std::shared_ptr<MpiGroup> group, std::shared_ptr<MpiCalls> calls)
      : group_(std::move(group)), calls_(std::move(calls)) {}

  [[nodiscard]] int rank() const override { return group_->rank(); }
  [[nodiscard]] int size() const override { return group_->size(); }
  [[nodiscard]] const std::string& group_name() const override { return group_->messages().group_name(); }
  [[nodiscard]] std::string_view kind() const override { return "mpi with its own sums"; }
  [[nodiscard]] Capabilities capabilities() const override { return group_->messages().capabilities(); }
  [[nodiscard]] std::span<const int> node_sizes() const override { return group_->nodes().sizes; }
  [[nodiscard]] std::size_t memory_bytes() const override { return group_->memory_bytes(); }

  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    WorkInfo info = validated(collectives, rank(), size(), "comm.mpi");
    stream.order_after(calls_->last_call);
    enqueue_calls(stream, collectives, group_, &MpiGroup::run_all);
    calls_->last_call = stream.record();
    return {calls_->last_call, std::move(info)};
  }

  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points,
                                                     const Stream& stream) override {
    validate_points(points, rank(), size(), "comm.mpi");
    stream.synchronize();
    calls_->last_call.wait();
    return group_->start(points);
  }

  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override {
    calls_->last_call.wait();
    std::shared_ptr<MpiGroup> part = group_->split(color, key, name, calls_->groups_made);
    return part ? std::make_unique<MpiCollectives>(std::move(part), calls_) : nullptr;
  }

  [[nodiscard]] PeerWindow attach(const Arena& arena, std::string_view name) override {
    return group_->messages().attach(arena, name);
  }
  void wait_until(const std::function<bool()>& predicate, const WaitContext& context) override {
    group_->messages().wait_until(predicate, context);
  }
  void notify() override {}
  [[nodiscard]] int add_progress(std::weak_ptr<Progress> progress) override { return group_->add_progress(progress); }
  void check_peers(const WaitContext& context) override { group_->messages().check_peers(context); }
  void abort(const Error& error) noexcept override { group_->messages().abort(error); }

  void count_one_sided(CollectiveKind kind, int peer, std::uint64_t bytes) override {
    group_->messages().count_one_sided(kind, peer, bytes);
  }
  void set_observer(std::shared_ptr<TrafficObserver> observer) override { group_->set_observer(std::move(observer)); }
  void set_tag_names(TagNames names) override { group_->set_tag_names(std::move(names)); }

 private:
  std::shared_ptr<MpiGroup> group_;
  std::shared_ptr<MpiCalls> calls_;
};

}  // namespace

std::unique_ptr<CommBackend> make_mpi_collectives(std::shared_ptr<MpiWorld> mpi, std::unique_ptr<CommBackend> messages,
                                                  const CommOptions& options) {
  std::vector<int> members(static_cast<std::size_t>(mpi->size()));
  std::iota(members.begin(), members.end(), 0);
  void* const world = mpi->world();
  auto group = std::make_shared<MpiGroup>(std::move(mpi), world, std::move(messages), options, std::move(members), 0);
  return std::make_unique<MpiCollectives>(std::move(group), std::make_shared<MpiCalls>());
}

}  // namespace zeroth::detail
