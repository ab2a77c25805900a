// Gradients where peers read each other's memory.
//
//   bucket slot (shared) --publish--> every owner pulls its range from all ranks, in rank order -> reduced shard
//
// One reduction event is one published bucket: reduction_code(backward, event). An owner knows for each rank whether it
// took part in an event: it has published it, or it has published a later one, or it has closed the backward. So nobody
// waits for a rank that takes another path through the model, until the commit vote.
//
// With a degree of gradients all of this is among the ranks of a sub-group. At the end of the step each rank says which
// flats its sub-group has sums of, and pulls its piece of them from the ranks of the other sub-groups that have the
// same part. Where these are no local peers, on other nodes, that is a collective instead, as are the sync points.
//
// Deadlock freedom: every wait of a rank, also one in a call of another group, takes what others have published
// (Progress). A rank that waits for a slot says so (pressure). Where ranks that wait are in each other's way, owners
// copy the ranges of their slots aside (spill); ranks that go through the model in one order never need it.
#include "base/planted.h"
#include "zero/call_tags.h"
#include "zero/gradient_exchange.h"
#include "zero/layout_tag.h"
#include "zero/matched_sums.h"
#include "zero/signals.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/shard/degrees.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

/// A rank that sleeps so long for nobody knows whom counts as waiting for any.
constexpr Milliseconds kUnknownTime{200};

class OneSidedExchange final : public GradientExchange {
 public:
  explicit OneSidedExchange(const ExchangeContext& context)
      : model_(context.model),
        memory_(context.memory),
        backend_(context.backend),
        reduce_stream_(context.reduce_stream),
        ledger_(context.ledger),
        shards_(context.shards),
        kernels_(context.kernels),
        operations_(context.operations),
        sub_group_(sub_group_of(memory_.rank(), memory_.degrees().gradient, 1)),
        others_(sub_group_of(memory_.rank(), model_.world, memory_.degrees().gradient)),
        local_peers_(memory_.local_peers()),
        flats_(model_.flats.size()),
        summed_(model_.flats.size()) {
    if (!memory_.one_sided()) matched_.emplace(context);
    for (std::size_t flat = 0; flat < model_.flats.size(); ++flat) {
      if (model_.flats[flat].trainable && model_.flats[flat].length > 0)
        trainable_flats_.push_back(static_cast<int>(flat));
    }
    if (local_peers_.count == 1) return;  // owes nobody anything
    const int number = backend_.add_progress(owed_);
    memory_.signals(memory_.rank()).number().store(static_cast<std::uint64_t>(number) + 1);
  }

  void await_slot(int unit, const std::function<bool(int)>& skip) override;
  void publish(int flat, DType dtype, bool last) override;
  void set_before_wait(std::function<void()> hook) override { before_wait_ = std::move(hook); }
  void progress() override;
  void close_backward(std::uint64_t next) override;
  void sync(OperationId what, std::string_view name) override;
  void await_sums(std::uint64_t next) override;
  void combine_sums(std::uint64_t next) override;
  void share_sums() override {  // else they lie where peers can read them
    if (matched_) matched_->share(summed_);
  }
  [[nodiscard]] bool are_final(int flat) override;
  void restored(int /*flat*/) override {}
  void begin_step() override {
    if (memory_.peers_read_sums()) announce(memory_.signals(memory_.rank()).taken(), ++steps_);
  }
  [[nodiscard]] std::uint64_t spills() const override { return spills_; }
  [[nodiscard]] std::size_t transport_bytes() const override { return matched_ ? matched_->transport_bytes() : 0; }

 private:
  struct FlatState {
    std::uint64_t events = 0;         ///< events published in this backward
    std::uint64_t last_code = 0;      ///< code of the last published event
    std::uint64_t next_backward = 0;  ///< owner: next event to reduce
    std::uint64_t next_event = 0;
    bool active = false;  ///< owner: in active_
  };
  /// What a rank owes to others, as its transport knows it.
  class Owed final : public Progress {
   public:
    explicit Owed(OneSidedExchange& exchange) : exchange_(exchange) {}
    bool advance() override { return exchange_.advance(); }
    void set_awaited(int rank) override { exchange_.set_awaited(rank); }
    void clear_awaited() noexcept override { exchange_.clear_awaited(); }

   private:
    OneSidedExchange& exchange_;
  };
  /// False as long as it lives.
  class Unresting {
   public:
    explicit Unresting(bool& resting) : resting_(resting), before_(std::exchange(resting, false)) {}
    Unresting(const Unresting&) = delete;
    Unresting& operator=(const Unresting&) = delete;
    ~Unresting() { resting_ = before_; }

   private:
    bool& resting_;
    bool before_;
  };
  enum class Part : std::uint8_t { kPublished, kAbsent, kUnknown };
  /// This rank's range of a published bucket, in the memory of its rank.
  struct Pull {
    DType dtype = DType::kFloat32;
    std::span<const std::byte> data{};
  };
  /// A copy of one, for its event.
  struct Spill {
    Aside copy;
    DType dtype = DType::kFloat32;
  };

  /// `missing`: ranks that this waits for at the moment.
  void wait(const std::string& what, const std::function<bool()>& done, std::function<std::vector<int>()> missing);
  /// Local peers but this one of which `predicate` holds, as the local group counts them.
  [[nodiscard]] std::vector<int> ranks_where(const std::function<bool(int)>& predicate) const;
  [[nodiscard]] bool in_run(int rank) const { return sub_group_.index_of(rank) >= 0; }
  /// In any wait of this rank; see Progress.
  bool advance();
  void set_awaited(int rank);
  void clear_awaited() noexcept;
  /// As a task of the reduce stream.
  void announce_later(SignalWord& word, std::uint64_t value);
  void announce(SignalWord& word, std::uint64_t value);
  [[nodiscard]] bool anybody_pressed() const;
  [[nodiscard]] bool is_local(std::uint64_t number) const;
  [[nodiscard]] std::uint64_t news() const;
  /// What who waits looks at: whether it has changed.
  struct Look {
    std::uint64_t news = 0;
    std::uint64_t awaited = 0;  ///< sum of these words; 0 where nobody is pressed
    bool operator==(const Look&) const = default;
  };
  [[nodiscard]] Look look() const;
  [[nodiscard]] bool consumed_by_all(int flat) const;
  [[nodiscard]] bool sums_taken_by_all() const;
  void progress(int flat);
  void progress_all();
  /// By words that were read after `news`.
  [[nodiscard]] std::vector<int> stuck_ranks(std::uint64_t news) const;
  void serve_pressure(std::uint64_t news);
  [[nodiscard]] Pull pull_of(int flat, int source, const Publication& theirs) const;
  void spill(int flat, int source, const Publication& theirs);
  [[nodiscard]] Part part_of(int source, int flat, std::uint64_t backward, std::uint64_t event) const;
  void reduce_event(int flat, std::uint64_t code);
  /// As an owner, after an event: says so if it was the last of all ranks.
  void announce_final(int flat);
  /// What a rank sums while micro-steps accumulate.
  [[nodiscard]] Range summed_part(int flat, int rank) const {
    return model_.flat(flat).part(rank, memory_.degrees().gradient);
  }
  [[nodiscard]] bool owns(int flat) const { return memory_.micro_step_part(flat).size() > 0; }
  FlatState& state(int flat) { return flats_[static_cast<std::size_t>(flat)]; }

  const ModelLayout& model_;
  ModelMemory& memory_;
  CommBackend& backend_;
  Stream reduce_stream_;
  std::function<void()> before_wait_;
  MemoryLedger& ledger_;
  ReducedShards& shards_;
  Kernels& kernels_;
  const OperationNames& operations_;
  SubGroup sub_group_;                  ///< whose gradients this rank sums: all, or those of its sub-group
  SubGroup others_;                     ///< one rank of each sub-group, with the same part
  SubGroup local_peers_;                ///< whose memory this rank reads
  std::optional<MatchedSums> matched_;  ///< with those that are no local peers
  std::vector<FlatState> flats_;
  std::vector<int> active_;  ///< owned flats that this rank has published and not yet reduced
  std::vector<int> trainable_flats_;
  std::vector<std::uint8_t> summed_;  ///< one a flat: of this step, where sums of sub-groups are matched
  std::uint64_t backward_ = 0;
  std::uint64_t spills_ = 0;
  std::uint64_t sync_points_ = 0;
  std::uint64_t steps_ = 0;
  std::map<std::tuple<int, std::uint64_t, int>, Spill> spilled_;  ///< (flat, code, source)
  const std::shared_ptr<Owed> owed_ = std::make_shared<Owed>(*this);
  Look seen_{};                                             ///< at the last advance()
  std::optional<SteadyClock::time_point> unknown_since_{};  ///< begin of a sleep for a rank that is no local peer
  std::uint64_t announced_later_ = 0;                       ///< tasks of announce_later() that have not run
  bool in_step_ = false;                                    ///< has published what perhaps not all have summed
  bool resting_ = true;                                     ///< no call of advance() or of wait() is under way
};

bool OneSidedExchange::consumed_by_all(int flat) const {
  const std::uint64_t code = flats_[static_cast<std::size_t>(flat)].last_code;
  for (int index = 0; code != 0 && index < sub_group_.count; ++index) {
    const int owner = sub_group_.rank(index);
    if (summed_part(flat, owner).size() > 0 && memory_.signals(owner).consumed(flat, memory_.rank()) < code)
      return false;
  }
  return true;
}

bool OneSidedExchange::sums_taken_by_all() const {
  if (!memory_.peers_read_sums()) return true;
  for (int rank = 0; rank < model_.world; ++rank) {
    if (memory_.signals(rank).taken().load() < steps_) return false;
  }
  return true;
}

void OneSidedExchange::await_slot(int unit, const std::function<bool(int)>& skip) {
  const auto is_free = [&] {
    if (!sums_taken_by_all()) return false;
    return std::ranges::all_of(model_.unit_flats[static_cast<std::size_t>(unit)],
                               [&](int flat) { return skip(flat) || consumed_by_all(flat); });
  };
  if (is_free()) return;
  SignalWord& pressure = memory_.signals(memory_.rank()).pressure();
  announce(pressure, static_cast<std::uint64_t>(unit) + 1);
  const auto missing = [&] {
    return ranks_where([&](int rank) {
      if (memory_.peers_read_sums() && memory_.signals(rank).taken().load() < steps_) return true;
      return in_run(rank) && std::ranges::any_of(model_.unit_flats[static_cast<std::size_t>(unit)], [&](int flat) {
               const std::uint64_t code = state(flat).last_code;
               return !skip(flat) && code != 0 && summed_part(flat, rank).size() > 0 &&
                      memory_.signals(rank).consumed(flat, memory_.rank()).load() < code;
             });
    });
  };
  wait("a bucket slot held by unit " + model_.units[static_cast<std::size_t>(unit)].name, is_free, missing);
  announce(pressure, 0);
}

void OneSidedExchange::publish(int flat, DType dtype, bool last) {
  FlatState& own = state(flat);
  own.last_code = reduction_code(backward_, own.events++);
  const Publication publication{.code = own.last_code, .wide = dtype != memory_.bucket_dtype(flat), .last = last};
  in_step_ = true;
  announce_later(memory_.signals(memory_.rank()).published(flat), word_of(publication));
  if (owns(flat) && !own.active) {
    own.active = true;
    active_.push_back(flat);
  }
}

void OneSidedExchange::close_backward(std::uint64_t next) {
  backward_ = next;
  for (const int flat : trainable_flats_) state(flat).events = 0;
  announce_later(memory_.signals(memory_.rank()).closed(), next);
  progress_all();
}

OneSidedExchange::Part OneSidedExchange::part_of(int source, int flat, std::uint64_t backward,
                                                 std::uint64_t event) const {
  const std::uint64_t code = reduction_code(backward, event);
  if (!spilled_.empty() && spilled_.contains({flat, code, source})) return Part::kPublished;
  const Signals& signals = memory_.signals(source);
  // Order matters: a rank publishes before it closes, so "closed" must be read first.
  const std::uint64_t closed = signals.closed().load();
  const std::uint64_t published = signals.publication(flat).code;
  if (published == code) return Part::kPublished;
  // A later code means that this event was passed over: its bucket could not be reused while we had not taken it.
  if (published > code || closed > backward) return Part::kAbsent;
  return Part::kUnknown;
}

void OneSidedExchange::progress(int flat) {
  FlatState& own = state(flat);
  while (true) {
    const std::uint64_t code = reduction_code(own.next_backward, own.next_event);
    bool any = false;
    for (int index = 0; index < sub_group_.count; ++index) {
      const Part part = part_of(sub_group_.rank(index), flat, own.next_backward, own.next_event);
      if (part == Part::kUnknown) return;  // in the end always this rank itself, whose current backward is open
      any = any || part == Part::kPublished;
    }
    if (any) {
      reduce_event(flat, code);
      ++own.next_event;
      announce_final(flat);
      continue;
    }
    // Nobody took part: everybody has closed this backward. Closed first, published second, as in part_of(): what is
    // not published by then belongs to a backward that was still open when `closed` was read.
    // The next one that anybody may have taken part in: a rank's bucket is used again only after this rank has taken
    // what it held, so what a rank shows now is the first that it has published since.
    std::uint64_t next = ~std::uint64_t{0};
    for (int index = 0; index < sub_group_.count; ++index) {
      const Signals& signals = memory_.signals(sub_group_.rank(index));
      const std::uint64_t closed = signals.closed().load();
      const std::uint64_t published = signals.publication(flat).code;
      next = std::min(next, published > code ? backward_of(published) : closed);
    }
    if (const auto spill = spilled_.lower_bound({flat, code + 1, -1});
        spill != spilled_.end() && std::get<0>(spill->first) == flat)
      next = std::min(next, backward_of(std::get<1>(spill->first)));
    own.next_backward = std::max(own.next_backward + 1, next);
    own.next_event = 0;
  }
}

void OneSidedExchange::reduce_event(int flat, std::uint64_t code) {
  ZR_FAILPOINT("one_sided.reduce");
  std::vector<Summand> sources;
  std::vector<std::pair<int, std::size_t>> pulled;  // from whom, bytes
  for (int index = 0; index < sub_group_.count; ++index) {
    const int source = sub_group_.rank(index);
    const auto spill = spilled_.find({flat, code, source});
    if (spill != spilled_.end()) {
      sources.push_back({.data = spill->second.copy.data(), .dtype = spill->second.dtype, .rank = source});
    } else if (const Publication theirs = memory_.signals(source).publication(flat); theirs.code == code) {
      const Pull pull = pull_of(flat, source, theirs);
      sources.push_back({.data = pull.data.data(), .dtype = pull.dtype, .rank = source});
      pulled.emplace_back(source, pull.data.size());
    }
  }
  shards_.add(flat, sources);
  const Signals& own = memory_.signals(memory_.rank());
  for (const auto& [source, bytes] : pulled) {
    own.consumed(flat, source).store(code);
    if (source != memory_.rank()) backend_.count_one_sided(CollectiveKind::kReduceScatter, source, bytes);
  }
  for (int index = 0; index < sub_group_.count; ++index) spilled_.erase({flat, code, sub_group_.rank(index)});
  own.news().fetch_add(1);
  memory_.local_group().notify();
}

void OneSidedExchange::announce_final(int flat) {
  if (memory_.degrees().sums_groups() || shards_.is_aside(flat)) return;
  const FlatState& own = state(flat);
  const std::uint64_t taken = reduction_code(own.next_backward, own.next_event);
  const std::uint64_t step = step_after(own.next_backward);
  for (int index = 0; index < sub_group_.count; ++index) {
    const Publication theirs = memory_.signals(sub_group_.rank(index)).publication(flat);
    if (!theirs.last || theirs.code >= taken || step_after(backward_of(theirs.code)) != step) return;
  }
  announce(memory_.signals(memory_.rank()).summed(flat), step << 1U | 1U);
}

bool OneSidedExchange::are_final(int flat) {
  const FlatLayout& layout = model_.flat(flat);
  const Range updated = memory_.update_range(flat);
  for (int owner = 0; owner < model_.world; ++owner) {
    if (intersect(updated, layout.shard(owner)).size() == 0) continue;
    if (owner != memory_.rank() && !memory_.one_sided()) return false;  // they come in a call of all ranks
    if (memory_.signals(owner).summed(flat).load() != (step_after(backward_) << 1U | 1U)) return false;
  }
  return !memory_.degrees().sums_groups();
}

void OneSidedExchange::progress_all() {
  // Also what others published and this rank did not: they may be waiting for the slot.
  for (const int flat : trainable_flats_) {
    if (owns(flat)) progress(flat);
  }
}

void OneSidedExchange::progress() {
  std::erase_if(active_, [this](int flat) {
    progress(flat);
    FlatState& own = state(flat);
    // Done with everything that this rank has published so far?
    const bool pending = reduction_code(own.next_backward, own.next_event) <= own.last_code;
    if (!pending) own.active = false;
    return !pending;
  });
}

std::vector<int> OneSidedExchange::stuck_ranks(std::uint64_t news) const {
  // [Note: Stuck] A rank is stuck if it waits for a slot whose bucket some owner cannot take, because another stuck
  // rank has not said yet whether it takes part in that event; or if it has come to a collective and another stuck
  // rank has not; or if it sleeps in a call of another group for another stuck rank. The largest such set: start with
  // all that wait, drop whoever will get on. Ranks that go through the model in one order are never stuck, however slow
  // one of them is.
  //
  // [Note: Awaited] Who sleeps in a call may have got what it waits for, and not have woken yet. So its word says of
  // which news it knew when it last looked in vain, and counts only while there are no others: a rank that is pressed
  // has told so, after it had done its part in all calls before.
  const auto awaits = [&](int rank) {
    const Awaited awaited = awaited_of(memory_.signals(rank).awaited().load());
    return awaited.news == (news & Awaited::kNewsMask) ? awaited.number : 0;
  };
  const auto calls_of = [this](int rank) { return memory_.signals(rank).sync_point().load() >> 8U; };
  std::uint64_t fewest_calls = calls_of(local_peers_.rank(0));
  for (int index = 1; index < local_peers_.count; ++index)
    fewest_calls = std::min(fewest_calls, calls_of(local_peers_.rank(index)));
  std::vector<int> stuck;
  for (int index = 0; index < local_peers_.count; ++index) {
    const int rank = local_peers_.rank(index);
    const std::uint64_t pressed = memory_.signals(rank).pressure().load();
    if ((pressed != 0 && pressed <= model_.units.size()) || calls_of(rank) > fewest_calls || awaits(rank) != 0)
      stuck.push_back(rank);
  }
  const auto waits_for = [&](int rank, int other) {
    if (calls_of(rank) > calls_of(other)) return true;
    const std::uint64_t awaited = awaits(rank);
    if (awaited == Awaited::kAny ? other != rank : awaited != 0 && awaited == memory_.signals(other).number().load())
      return true;
    const std::uint64_t pressed = memory_.signals(rank).pressure().load();
    if (other == rank || pressed == 0 || pressed > model_.units.size()) return false;
    if (sub_group_of(rank, memory_.degrees().gradient, 1) != sub_group_of(other, memory_.degrees().gradient, 1))
      return false;
    return std::ranges::any_of(model_.unit_flats[pressed - 1], [&](int flat) {
      const std::uint64_t code = memory_.signals(rank).publication(flat).code;
      if (code == 0 || !model_.flat(flat).trainable) return false;
      const std::uint64_t closed = memory_.signals(other).closed().load();
      return memory_.signals(other).publication(flat).code < code && closed <= backward_of(code);
    });
  };
  for (bool shrinking = true; shrinking;) {
    const std::vector<int> before = stuck;
    shrinking = std::erase_if(stuck, [&](int rank) {
                  return std::ranges::none_of(before, [&](int other) { return waits_for(rank, other); });
                }) > 0;
  }
  return stuck;
}

void OneSidedExchange::serve_pressure(std::uint64_t news) {
  if (!anybody_pressed()) return;
  const Signals& own = memory_.signals(memory_.rank());
  for (const int source : stuck_ranks(news)) {
    const std::uint64_t pressed = memory_.signals(source).pressure().load();
    if (!in_run(source) || pressed == 0 || pressed > model_.units.size()) continue;
    for (const int flat : model_.unit_flats[pressed - 1]) {
      const Publication theirs = memory_.signals(source).publication(flat);
      if (!model_.flat(flat).trainable || !owns(flat) || theirs.code == 0) continue;
      if (own.consumed(flat, source).load() < theirs.code) spill(flat, source, theirs);
    }
  }
}

OneSidedExchange::Pull OneSidedExchange::pull_of(int flat, int source, const Publication& theirs) const {
  require_same_layout(model_, memory_, flat, source, "zero.reduce", "gradients", "bucket");
  const FlatLayout& layout = model_.flat(flat);
  const DType dtype = theirs.wide ? layout.accumulation() : memory_.bucket_dtype(flat);
  const Range own = memory_.micro_step_part(flat);
  return {.dtype = dtype,
          .data = {memory_.peer_bucket(flat, source, dtype) + array_bytes(own.begin, dtype),
                   array_bytes(own.size(), dtype)}};
}

void OneSidedExchange::spill(int flat, int source, const Publication& theirs) {
  const Pull pull = pull_of(flat, source, theirs);
  Spill spill{.copy = Aside(kernels_, ledger_, model_.flat(flat).unit, pull.data.size()), .dtype = pull.dtype};
  kernels_.copy(spill.copy.data(), pull.data.data(), pull.data.size(), reduce_stream_);
  spilled_.emplace(std::tuple{flat, theirs.code, source}, std::move(spill));
  ++spills_;
  if (source != memory_.rank()) backend_.count_one_sided(CollectiveKind::kReduceScatter, source, pull.data.size());
  announce(memory_.signals(memory_.rank()).consumed(flat, source), theirs.code);
}

bool OneSidedExchange::anybody_pressed() const {
  for (int index = 0; index < local_peers_.count; ++index) {
    if (memory_.signals(local_peers_.rank(index)).pressure().load() != 0) return true;
  }
  return false;
}

bool OneSidedExchange::is_local(std::uint64_t number) const {
  for (int index = 0; index < local_peers_.count; ++index) {
    if (memory_.signals(local_peers_.rank(index)).number().load() == number) return true;
  }
  return false;
}

OneSidedExchange::Look OneSidedExchange::look() const {
  Look look{.news = news()};
  if (!anybody_pressed()) return look;
  for (int index = 0; index < local_peers_.count; ++index)
    look.awaited += memory_.signals(local_peers_.rank(index)).awaited().load();
  return look;
}

bool OneSidedExchange::advance() {
  if (!resting_) return false;  // a wait inside of it, or the exchange's own wait, which does the same
  // Perhaps others wait for it. A task of this stream that waits, as a matched sum's, has none of these behind it.
  if (announced_later_ > 0) reduce_stream_.synchronize();
  const Look now = look();  // before the words are read: what changes afterwards is new at the next look
  if (now != seen_) {
    const bool has_news = now.news != seen_.news;
    seen_ = now;
    resting_ = false;
    // An error leaves it so: whoever waits gets it once, and the engine's own calls find it again.
    if (has_news) progress_all();
    serve_pressure(now.news);
    resting_ = true;
  }
  return in_step_ || anybody_pressed();
}

void OneSidedExchange::set_awaited(int rank) {
  if (!resting_) return;  // the other words say what the exchange waits for
  std::uint64_t number = static_cast<std::uint64_t>(rank) + 1;
  if (rank == Progress::kAnyRank || number >= Awaited::kAny || !is_local(number)) {
    // Mostly for one that computes: who then copies its gradients aside does so in vain.
    const SteadyClock::time_point now = SteadyClock::now();
    if (!unknown_since_) unknown_since_ = now;
    if (now - *unknown_since_ < kUnknownTime) return;
    number = Awaited::kAny;
  }
  SignalWord& awaited = memory_.signals(memory_.rank()).awaited();
  // News of before the look that was in vain.
  const std::uint64_t word = word_of(Awaited{.number = number, .news = seen_.news});
  if (awaited.load(std::memory_order_relaxed) == word) return;
  awaited.store(word);
  // Nobody else wants to know, and who is pressed from now on tells all.
  if (!anybody_pressed()) return;
  memory_.local_group().notify();
  advance();
}

void OneSidedExchange::clear_awaited() noexcept {
  if (!resting_) return;
  unknown_since_.reset();
  memory_.signals(memory_.rank()).awaited().store(0);
}

void OneSidedExchange::announce_later(SignalWord& word, std::uint64_t value) {
  ++announced_later_;
  reduce_stream_.enqueue([this, &word, value] {
    --announced_later_;
    announce(word, value);
  });
}

void OneSidedExchange::announce(SignalWord& word, std::uint64_t value) {
  ZR_FAILPOINT("one_sided.announce");
  word.store(value);
  memory_.signals(memory_.rank()).news().fetch_add(1);  // second, so that who sees it sees the word
  memory_.local_group().notify();
}

std::uint64_t OneSidedExchange::news() const {
  std::uint64_t sum = 0;
  for (int index = 0; index < local_peers_.count; ++index)
    sum += memory_.signals(local_peers_.rank(index)).news().load();
  return sum;
}

std::vector<int> OneSidedExchange::ranks_where(const std::function<bool(int)>& predicate) const {
  std::vector<int> ranks;
  for (int index = 0; index < local_peers_.count; ++index) {
    const int rank = local_peers_.rank(index);
    if (rank != memory_.rank() && predicate(rank)) ranks.push_back(index);
  }
  return ranks;
}

void OneSidedExchange::wait(const std::string& what, const std::function<bool()>& done,
                            std::function<std::vector<int>()> missing) {
  reduce_stream_.synchronize();  // peers may be waiting for what this rank has not yet published
  if (before_wait_) before_wait_();
  std::optional<Look> seen;
  const Unresting unresting(resting_);
  memory_.local_group().wait_until(
      [&] {
        // Read before the words: what changes after this look is new at the next one.
        const Look now = look();
        if (now == seen) return false;
        const bool has_news = !seen || now.news != seen->news;
        seen = now;
        if (has_news) {
          progress_all();
          if (done()) return true;
        }
        serve_pressure(now.news);
        return done();
      },
      {.what = what, .missing = std::move(missing)});
}

void OneSidedExchange::sync(OperationId what, std::string_view given) {
  if (model_.world == 1) return;
  const auto name = [this](std::uint64_t word) {
    return operations_ ? operations_(static_cast<OperationId>(word & 0xffU)) : std::string("a call");
  };
  const std::string quoted = given.empty() ? "" : " \"" + std::string(given) + "\"";
  const std::uint64_t own = (++sync_points_ << 8U) | static_cast<std::uint64_t>(what);
  announce(memory_.signals(memory_.rank()).sync_point(), own);
  wait(
      name(own) + quoted + " of all ranks",
      [&] {
        for (int index = 0; index < local_peers_.count; ++index) {
          const int rank = local_peers_.rank(index);
          const std::uint64_t theirs = memory_.signals(rank).sync_point().load();
          if (theirs >> 8U < sync_points_) return false;
          ZR_CHECK(theirs >> 8U > sync_points_ || theirs == own || planted("tag_compare"), ErrorCode::kMismatch,
                   "ranks come to different calls of the engine",
                   {.where = "zero.sync",
                    .who = "rank " + std::to_string(memory_.rank()) + "/" + std::to_string(model_.world),
                    .which = "collective " + std::to_string(sync_points_),
                    .expected = name(own) + quoted + " on rank " + std::to_string(memory_.rank()),
                    .got = name(theirs) + " on rank " + std::to_string(rank),
                    .hint = "all ranks must make the same calls in the same order"});
        }
        return true;
      },
      [&] {
        return ranks_where([&](int rank) { return memory_.signals(rank).sync_point().load() >> 8U < sync_points_; });
      });
  // All local peers are here: nobody needs this rank to take gradients while it waits for the others.
  if (!memory_.one_sided()) matched_sync(what, given, backend_, reduce_stream_);
}

void OneSidedExchange::await_sums(std::uint64_t next) {
  const auto open = [this, next](int flat) { return owns(flat) && state(flat).next_backward < next; };
  wait(
      "the gradients of this step", [&] { return std::ranges::none_of(trainable_flats_, open); },
      [&] {
        return ranks_where([&](int rank) {
          return in_run(rank) && std::ranges::any_of(trainable_flats_, [&](int flat) {
                   return open(flat) &&
                          part_of(rank, flat, state(flat).next_backward, state(flat).next_event) == Part::kUnknown;
                 });
        });
      });
  in_step_ = false;
}

void OneSidedExchange::combine_sums(std::uint64_t next) {
  if (!memory_.degrees().sums_groups()) return;
  ZR_FAILPOINT("one_sided.combine");
  for (const int flat : trainable_flats_) {
    summed_[static_cast<std::size_t>(flat)] = shards_.has_sums(flat) ? 1 : 0;
    memory_.signals(memory_.rank()).summed(flat).store(next << 1U | summed_[static_cast<std::size_t>(flat)]);
  }
  announce(memory_.signals(memory_.rank()).summed_all(), next);
  // All local peers, not the other sub-groups alone: sums that this one has nothing to give to may come into a bucket
  // that its ranks read till then.
  const auto is_missing = [this, next](int rank) { return memory_.signals(rank).summed_all().load() < next; };
  wait(
      "the sums of all ranks", [&] { return ranks_where(is_missing).empty(); },
      [&] { return ranks_where(is_missing); });
  if (matched_) return matched_->combine(summed_);
  for (const int flat : trainable_flats_) {
    const FlatLayout& layout = model_.flat(flat);
    const Range piece = layout.shard(memory_.rank());
    std::vector<Summand> sources;
    for (int index = 0; index < others_.count; ++index) {
      const int rank = others_.rank(index);
      if (memory_.signals(rank).summed(flat).load() != (next << 1U | 1U)) continue;
      require_same_layout(model_, memory_, flat, rank, "zero.reduce", "gradients", "sums");
      sources.push_back(
          {.data = memory_.peer_sums(flat, rank, piece.begin), .dtype = layout.accumulation(), .rank = rank});
    }
    if (sources.empty()) continue;
    shards_.combine(flat, sources);
    for (const Summand& source : sources) {
      if (source.rank == memory_.rank()) continue;
      backend_.count_one_sided(CollectiveKind::kReduceScatter, source.rank,
                               array_bytes(piece.size(), layout.accumulation()));
    }
  }
}

}  // namespace

std::unique_ptr<GradientExchange> make_one_sided_exchange(const ExchangeContext& context) {
  return std::make_unique<OneSidedExchange>(context);
}

}  // namespace zeroth
