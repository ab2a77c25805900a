#include "engine/local_settings.h"
#include "engine/own_operations.h"
#include "engine/piece_io.h"
#include "engine/shard_group.h"
#include "engine/state_pieces.h"
#include "engine/texts.h"
#include "zero/coded_calls.h"
#include "zero/spread_shards.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/local_updates.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <utility>

namespace zeroth {
namespace {

constexpr const char* kExchangeWhere = "engine.local_updates";
constexpr const char* kOuterParam = "outer_param";
constexpr const char* kOuterMomentum = "outer_momentum";
constexpr const char* kOuterPrevious = "outer_previous";

bool has_codes(const LocalSettings& settings) {
  return settings.payload != LocalPayload::kFull;
}

/// Of no bytes too, which may be nowhere: a rank without a piece.
void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

/// Calls body(T{}) for the dtype of masters.
template <class Body>
void with_master_type(DType dtype, const Body& body) {
  if (dtype == DType::kFloat64) return body(double{});
  body(float{});
}

struct OuterTerms {
  double lr;
  double momentum;
  bool nesterov;
};

/// One element; `m` is the momentum, null without. `y`: the mean, `d`: x - y.
template <class T>
T outer_step(T y, T d, T* m, const OuterTerms& terms) {
  const auto lr = static_cast<T>(terms.lr);
  T next = y;
  if (terms.lr != 1.0) next += static_cast<T>(1.0 - terms.lr) * d;
  if (m == nullptr) return next;
  const auto mu = static_cast<T>(terms.momentum);
  const T before = *m;
  *m = mu * before + d;
  return next - lr * (mu * (terms.nesterov ? *m : before));
}

std::string site_rank(int site, int rank) {
  return "rank " + std::to_string(rank) + " of site " + std::to_string(site);
}

using LocalJson = nlohmann::ordered_json;

/// Of two descriptions, settings and numbers of ranks.
void require_alike(const LocalJson& usual, const std::string& usual_who, const LocalJson& theirs,
                   const std::string& who) {
  const auto settings = theirs.at("settings").get<std::string>();
  const auto expected = usual.at("settings").get<std::string>();
  ZR_CHECK(settings == expected, ErrorCode::kMismatch, "ranks have different settings of local updates",
           {.where = kExchangeWhere,
            .who = who,
            .which = join(differences(expected, settings), ", "),
            .expected = expected + " (" + usual_who + ")",
            .got = settings,
            .hint = "give all ranks of all sites the same"});
  ZR_CHECK(
      theirs.at("world") == usual.at("world"), ErrorCode::kMismatch, "sites have different numbers of ranks",
      {.where = kExchangeWhere, .who = who, .expected = usual.at("world").dump(), .got = theirs.at("world").dump()});
}

/// Of ranks of one number.
void require_same_model(const LocalJson& usual, const std::string& usual_who, const LocalJson& theirs,
                        const std::string& who) {
  ZR_CHECK(theirs.at("layout") == usual.at("layout"), ErrorCode::kMismatch, "sites train different models",
           {.where = kExchangeWhere,
            .who = who,
            .expected = "the parameters, shapes and dtypes of " + usual_who,
            .hint = "all sites build the same model, with the same units and degrees of sharding"});
}

std::string names_of_sites(const std::vector<int>& sites) {
  std::string text = sites.size() == 1 ? "site" : "sites";
  for (const int site : sites) text += (site == sites.front() ? " " : ", ") + std::to_string(site);
  return text;
}

}  // namespace

/// A flat of a shard group on this rank.
struct LocalUpdates::Part {
  ShardGroup& group;
  int flat;
  int unit;         ///< of the whole model
  Range shard{};    ///< that it exchanges
  Range updated{};  ///< that it updates, and has the outer states of

  [[nodiscard]] const FlatLayout& layout() const { return group.layout().flat(flat); }
  [[nodiscard]] DType dtype() const { return layout().accumulation(); }
  /// Other ranks of the site exchange elements that this one updates.
  [[nodiscard]] bool shares() const { return group.memory().degrees().optimizer < group.size(); }

  [[nodiscard]] std::vector<StatePiece> pieces(const std::string& state) const {
    std::vector<StatePiece> all =
        state_pieces(group.layout(), group.memory(), group.writes_states(), group.rank(), /*with_held=*/false);
    std::erase_if(all, [&](const StatePiece& piece) {
      return piece.state != state || group.layout().places[static_cast<std::size_t>(piece.param)].flat != flat;
    });
    return all;
  }
  /// body(piece, elements of the parameter, first element of the flat) for what the piece has in `range` of the flat.
  template <class Body>
  void each_in(const std::vector<StatePiece>& pieces, const Range& range, const Body& body) const {
    for (const StatePiece& piece : pieces) {
      const std::int64_t offset = group.layout().segment(piece.param).offset;
      const Range has = piece.master != Master::kNone ? piece.master_range : Range{piece.has.begin, piece.has.end};
      const Range part = intersect({has.begin + offset, has.end + offset}, range);
      if (part.size() > 0) body(piece, Range{part.begin - offset, part.end - offset}, part.begin);
    }
  }
};

struct LocalUpdates::Fragment {
  int number = 0;
  int offset = 0;
  std::vector<Part> parts{};
  std::size_t bytes = 0;  ///< of a message
  // Of an exchange that is under way:
  std::int64_t due = -1;       ///< when it is taken; -1: none
  int slot = -1;               ///< of messages; -1: they have arrived, or there is none
  std::vector<int> present{};  ///< sites whose messages lie there
  std::unique_ptr<SiteExchange> exchange{};
};

namespace {

/// Values of a state in `range` of a flat; zeros where no parameter is.
template <class T, class Part>
std::vector<T> read_flat(const Part& part, const std::string& state, const Range& range, Kernels& kernels,
                         const Stream& stream) {
  std::vector<T> values(static_cast<std::size_t>(range.size()));
  part.each_in(part.pieces(state), range, [&](const StatePiece& piece, const Range& elements, std::int64_t at) {
    const std::vector<std::byte> own = PieceReader(piece, kernels, stream).all_of(elements);
    copy_bytes(values.data() + (at - range.begin), own.data(), own.size());
  });
  return values;
}

template <class T, class Part>
void write_flat(const Part& part, const std::string& state, const Range& range, const std::vector<T>& values,
                Kernels& kernels, const Stream& stream) {
  part.each_in(part.pieces(state), range, [&](const StatePiece& piece, const Range& elements, std::int64_t at) {
    const std::span<const T> own(values.data() + (at - range.begin), static_cast<std::size_t>(elements.size()));
    store_weights(piece, elements.begin, std::as_bytes(own), WeightValues::kMaster, kernels, stream);
  });
}

/// Every rank's shard, to all ranks of its site.
template <class T, class Part>
std::vector<T> whole_flat(const Part& part, const std::vector<T>& shard) {
  const FlatLayout& layout = part.layout();
  std::vector<T> whole(static_cast<std::size_t>(layout.length));
  std::ranges::copy(shard, whole.begin() + part.shard.begin);
  spread_shards(layout, part.group.communicator(), reinterpret_cast<std::byte*>(whole.data()), sizeof(T));
  return whole;
}

template <class Part>
DType dtype_of(const Part& part) {
  return part.layout().trainable ? part.layout().accumulation() : part.layout().dtype;
}

/// Bytes of this rank's shard of a state.
template <class Part>
std::vector<std::uint8_t> shard_bytes(const Part& part, const std::string& state, Kernels& kernels,
                                      const Stream& stream) {
  const std::size_t element = size_of(dtype_of(part));
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(part.shard.size()) * element);
  part.each_in(part.pieces(state), part.shard, [&](const StatePiece& piece, const Range& elements, std::int64_t at) {
    const std::vector<std::byte> values = PieceReader(piece, kernels, stream).all_of(elements);
    copy_bytes(bytes.data() + static_cast<std::size_t>(at - part.shard.begin) * element, values.data(), values.size());
  });
  return bytes;
}

/// The other way round: all ranks of the site have theirs, and each gets what it updates.
template <class Part>
void store_shards(const Part& part, const std::string& state, std::span<const std::uint8_t> own, Kernels& kernels,
                  const Stream& stream) {
  const FlatLayout& layout = part.layout();
  const std::size_t element = size_of(dtype_of(part));
  std::vector<std::uint8_t> whole(static_cast<std::size_t>(layout.length) * element);
  copy_bytes(whole.data() + static_cast<std::size_t>(part.shard.begin) * element, own.data(), own.size());
  const Degrees degrees = part.group.memory().degrees();
  if ((layout.trainable ? degrees.optimizer : degrees.parameter) < part.group.size())
    spread_shards(layout, part.group.communicator(), reinterpret_cast<std::byte*>(whole.data()), element);
  part.each_in(part.pieces(state), part.updated, [&](const StatePiece& piece, const Range& elements, std::int64_t at) {
    const std::span<const std::uint8_t> values = std::span<const std::uint8_t>(whole).subspan(
        static_cast<std::size_t>(at) * element, static_cast<std::size_t>(elements.size()) * element);
    store_weights(piece, elements.begin, std::as_bytes(values), WeightValues::kMaster, kernels, stream);
  });
}

/// The same in `updated`.
template <class T, class Part>
std::vector<T> for_update(const Part& part, std::vector<T> shard) {
  if (!part.shares()) return shard;
  std::vector<T> whole = whole_flat(part, shard);
  return {whole.begin() + part.updated.begin, whole.begin() + part.updated.end};
}

}  // namespace

LocalUpdates::LocalUpdates(Engine& engine, std::unique_ptr<SiteLine> line, const LocalSettings& settings)
    : engine_(engine), line_(std::move(line)), settings_(settings) {
  for (int site = 0; site < line_->sites(); ++site) present_.push_back(site);
}

LocalUpdates::~LocalUpdates() {
  for (Fragment& fragment : fragments_) {
    try {
      if (fragment.exchange && std::uncaught_exceptions() == 0) (void)fragment.exchange->wait();  // others may read it
    } catch (const std::exception& error) {
      engine_.log_.warn(std::string("an exchange of local updates that was under way has ended with ") + error.what());
    }
    fragment.exchange.reset();  // before its memory
  }
  if (std::uncaught_exceptions() == 0 && !failed_) line_->leave();
}

LocalUpdates& LocalUpdates::attach(Engine& engine, std::shared_ptr<CommBackend> across, const LocalSettings& settings) {
  return attach(engine, across ? make_group_line(std::move(across)) : nullptr, settings);
}

LocalUpdates& LocalUpdates::attach(Engine& engine, std::unique_ptr<SiteLine> line, const LocalSettings& settings) {
  ZR_CHECK(engine.follower_ == nullptr, ErrorCode::kUsage, "an engine has local updates already",
           {.where = kExchangeWhere,
            .expected = "one call for an engine",
            .hint = "make another engine for other settings: sites have taken over these weights"});
  engine.require_own_weights("local updates");
  engine.require_quiet("a beginning of local updates");
  std::unique_ptr<LocalUpdates> made(new LocalUpdates(engine, std::move(line), settings));
  LocalUpdates& local = *made;
  engine.together([&] {
    engine.sync(engine.own_->local_updates);
    if (local.line_->joins()) return local.join_running();
    local.require_same();
    local.require_possible();
    local.require_free_names();
    if (settings.method == LocalMethod::kNone) return;
    local.find_parts();
    local.take_first_weights();
    local.add_states();
    local.begin();
  });
  engine.follower_ = std::move(made);
  return local;
}

void LocalUpdates::require_possible() const {
  std::vector<bool> trains(engine_.layout_.units.size(), false);
  for (const FlatLayout& flat : engine_.layout_.flats) {
    if (flat.trainable && flat.length > 0) trains[static_cast<std::size_t>(flat.unit)] = true;
  }
  validate(settings_, static_cast<int>(std::ranges::count(trains, true)));
  ZR_CHECK(!engine_.settings_.update.delayed_after, ErrorCode::kConfig,
           "weights are exchanged while an update of them is delayed",
           {.where = kExchangeWhere,
            .which = "/zeroth/update/delayed_after",
            .expected = "no delayed update with local updates",
            .hint = "leave it out: the exchange itself can be late (delay, or method co2)"});
  ZR_CHECK(settings_.lost_sites == LostSites::kEnd || line_->survives(), ErrorCode::kConfig,
           "sites of one job end with each other: a rank that is lost ends the job",
           {.where = kExchangeWhere,
            .which = "lost_sites",
            .expected = "end, for sites that World::site() has cut from one job",
            .got = std::string(zeroth::name_of(settings_.lost_sites)),
            .hint = "start the sites as jobs of their own: zeroth-run --sites N"});
}

void LocalUpdates::require_free_names() const {
  for (const char* const name : {kOuterParam, kOuterMomentum, kOuterPrevious}) {
    ZR_CHECK(!engine_.has_kind(name), ErrorCode::kUsage, "the name of a state of local updates is taken",
             {.where = kExchangeWhere, .which = name, .hint = "give the average or the state another name"});
  }
}

std::string LocalUpdates::own_description() const {
  std::string layout;
  for (const auto& group : engine_.groups_) {
    for (const FlatLayout& flat : group->layout().flats) {
      layout += std::string(zeroth::name_of(flat.dtype)) + (flat.trainable ? " trains" : "") + " " +
                std::to_string(flat.length);
      for (const std::int64_t boundary : flat.boundaries) layout += " " + std::to_string(boundary);
      for (const int piece : flat.pieces) layout += " " + std::to_string(piece);
      for (const Segment& segment : flat.segments)
        layout += " " + group->layout().describe_param(segment.param) + " " + std::to_string(segment.offset);
      layout += "\n";
    }
  }
  return LocalJson{{"settings", text_of(settings_)},
                   {"world", engine_.world()},
                   {"steps", engine_.committed_steps_},
                   {"layout", digest64(layout)}}
      .dump();
}

void LocalUpdates::require_same() {
  // First the sites, then the ranks of a site, so that all ranks know of all.
  std::vector<std::string> of_sites;
  present_.clear();
  const std::vector<std::optional<std::string>> texts = line_->texts(own_description());
  for (int site = 0; site < line_->sites(); ++site) {
    const std::optional<std::string>& text = texts[static_cast<std::size_t>(site)];
    of_sites.push_back(text.value_or(""));
    if (text) present_.push_back(site);
  }
  require_allowed(present_, {});
  const std::vector<std::string> all = gather_texts(LocalJson(of_sites).dump(), engine_.communicator_);
  const auto of = [&](int site, int rank) {
    const LocalJson texts_there = LocalJson::parse(all[static_cast<std::size_t>(rank)]);
    const LocalJson text = texts_there.at(static_cast<std::size_t>(site));
    return LocalJson::parse(text.get<std::string>());
  };
  const int first = present_.front();
  const LocalJson usual = of(first, 0);
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    const LocalJson here = of(first, rank);
    for (const int site : present_) {
      const LocalJson theirs = of(site, rank);
      const std::string who = site_rank(site, rank);
      require_alike(usual, site_rank(first, 0), theirs, who);
      ZR_CHECK(theirs.at("steps") == usual.at("steps"), ErrorCode::kMismatch,
               "sites begin local updates after different numbers of steps",
               {.where = kExchangeWhere,
                .who = who,
                .expected = usual.at("steps").dump(),
                .got = theirs.at("steps").dump(),
                .hint = "load checkpoints of one step in all sites"});
      require_same_model(here, site_rank(first, rank), theirs, who);
    }
  }
}

void LocalUpdates::find_parts() {
  const std::vector<int> offsets = offsets_of(settings_);
  for (int fragment = 0; fragment < settings_.fragments; ++fragment)
    fragments_.push_back({.number = fragment, .offset = offsets[static_cast<std::size_t>(fragment)]});
  std::map<int, int> numbers;  // of units that train
  for (const FlatLayout& flat : engine_.layout_.flats) {
    if (flat.trainable && flat.length > 0) numbers.emplace(flat.unit, 0);
  }
  int next = 0;
  for (auto& [_, number] : numbers) number = next++;
  for (const auto& group : engine_.groups_) {
    for (int flat = 0; flat < static_cast<int>(group->layout().flats.size()); ++flat) {
      const FlatLayout& layout = group->layout().flat(flat);
      if (!layout.trainable || layout.length == 0) continue;
      const int unit = group->part().units[static_cast<std::size_t>(layout.unit)];
      Fragment& fragment = fragments_[static_cast<std::size_t>(numbers.at(unit) % settings_.fragments)];
      fragment.parts.push_back({.group = *group,
                                .flat = flat,
                                .unit = unit,
                                .shard = layout.shard(group->rank()),
                                .updated = group->memory().update_range(flat)});
      fragment.bytes += message_bytes(fragment.parts.back());
    }
  }
  messages_.resize(held_bytes());
  hold_ = engine_.device_.ledger().hold({-1, MemoryState::kStaging}, messages_.size());
}

std::uint64_t LocalUpdates::held_bytes() const {
  std::size_t most = 0;
  for (const Fragment& fragment : fragments_) most = std::max(most, fragment.bytes);
  return most * static_cast<std::size_t>(line_->sites()) * static_cast<std::size_t>(most_under_way(settings_));
}

std::size_t LocalUpdates::message_bytes(const Part& part) const {
  if (!has_codes(settings_)) return align_up(array_bytes(part.shard.size(), part.dtype()), kSegmentAlignBytes);
  return static_cast<std::size_t>(coder().form().bytes(part.shard.size()));
}

bool LocalUpdates::has_outer() const {
  const bool plain = settings_.outer_lr == 1.0 && settings_.outer_momentum == 0.0 && settings_.keep_local == 0.0;
  return !plain || has_codes(settings_) || is_late(settings_);
}

void LocalUpdates::add_states() {
  for (const auto& group : engine_.groups_) {
    ModelMemory& memory = group->memory();
    if (has_outer()) memory.add_state(*engine_.kernels_, StateKind::kOuter, kOuterParam);
    if (settings_.outer_momentum > 0) memory.add_state(*engine_.kernels_, StateKind::kOuter, kOuterMomentum);
    if (settings_.method == LocalMethod::kCo2) memory.add_state(*engine_.kernels_, StateKind::kOuter, kOuterPrevious);
  }
}

template <class Body>
void LocalUpdates::each_part(const Body& body) const {
  for (const auto& group : engine_.groups_) {
    for (int flat = 0; flat < static_cast<int>(group->layout().flats.size()); ++flat) {
      const FlatLayout& layout = group->layout().flat(flat);
      if (layout.length == 0) continue;
      const ModelMemory& memory = group->memory();
      body(Part{.group = *group,
                .flat = flat,
                .unit = layout.unit,
                .shard = layout.shard(group->rank()),
                .updated = layout.trainable ? memory.update_range(flat) : memory.rest_range(flat, group->rank())});
    }
  }
}

// Frozen parameters as well. Values of site 0.
void LocalUpdates::take_first_weights() {
  Kernels& kernels = *engine_.kernels_;
  const Stream& stream = engine_.resources_->gather_stream;
  bool differed = false;
  each_part([&](const Part& part) {
    std::vector<std::uint8_t> own = shard_bytes(part, "weight", kernels, stream);
    const std::vector<std::uint8_t> before = own;
    line_->take_first(own);
    differed = differed || before != own;
    store_shards(part, "weight", own, kernels, stream);
  });
  engine_.republish("the weights of site 0");
  if (differed) engine_.log_.warn("initial weights of the sites differed; site 0's are used");
}

std::vector<std::string> LocalUpdates::given_states(const Part& part) const {
  if (!part.layout().trainable || !has_outer()) return {"weight"};
  std::vector<std::string> states{kOuterParam};
  if (settings_.outer_momentum > 0) states.emplace_back(kOuterMomentum);
  if (settings_.method == LocalMethod::kCo2) states.emplace_back(kOuterPrevious);
  return states;
}

// "<length of a description> <description><shard of each state>".
std::string LocalUpdates::state_to_give() {
  Kernels& kernels = *engine_.kernels_;
  const Stream& stream = engine_.resources_->gather_stream;
  kernels.settle(stream);
  LocalJson description = LocalJson::parse(own_description());
  description["begun"] = anchor_;
  description["site"] = line_->site();
  description["present"] = present_;
  const std::string text = description.dump();
  std::string state = std::to_string(text.size()) + " " + text;
  each_part([&](const Part& part) {
    for (const std::string& name : given_states(part)) {
      const std::vector<std::uint8_t> bytes = shard_bytes(part, name, kernels, stream);
      state.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
  });
  return state;
}

void LocalUpdates::give_states() {
  if (joiners_.empty()) return;
  settle();  // what is under way is in the outer states, and is yet to be taken by its step
  const std::string state = state_to_give();
  for (const std::uint64_t joiner : std::exchange(joiners_, {})) line_->give_state(joiner, state);
}

void LocalUpdates::join_running() {
  require_possible();
  require_free_names();
  has_joined_ = true;
  if (settings_.method == LocalMethod::kNone) return;
  if (engine_.rank() == 0) {
    engine_.log_.warn("other sites train already: " + names_of_sites({line_->site()}) +
                      " waits for their next exchange, and goes on from their state");
  }
  joined_ = line_->take_state();
  find_parts();
  add_states();
  take_joined();
}

void LocalUpdates::take_joined() {
  const std::size_t space = joined_.find(' ');
  const std::size_t length = std::stoull(joined_.substr(0, space));
  const LocalJson given = LocalJson::parse(joined_.substr(space + 1, length));
  const LocalJson own = LocalJson::parse(own_description());
  const std::string giver = site_rank(given.at("site").get<int>(), engine_.rank());
  const std::string who = site_rank(line_->site(), engine_.rank());
  require_alike(given, giver, own, who);
  require_same_model(given, giver, own, who);
  Kernels& kernels = *engine_.kernels_;
  const Stream& stream = engine_.resources_->gather_stream;
  std::span<const std::uint8_t> rest(reinterpret_cast<const std::uint8_t*>(joined_.data()), joined_.size());
  rest = rest.subspan(space + 1 + length);
  each_part([&](const Part& part) {
    const std::size_t bytes = static_cast<std::size_t>(part.shard.size()) * size_of(dtype_of(part));
    for (const std::string& name : given_states(part)) {
      ZR_CHECK(rest.size() >= bytes, ErrorCode::kMismatch, "a site has given a state that is too short",
               {.where = kExchangeWhere, .who = giver, .which = name});
      store_shards(part, name, rest.first(bytes), kernels, stream);
      rest = rest.subspan(bytes);
    }
    if (!part.layout().trainable || !has_outer()) return;
    // A window begins there. Of CO2 what the last one has moved is in outer_param already.
    const char* const begun = settings_.method == LocalMethod::kCo2 ? kOuterPrevious : kOuterParam;
    with_master_type(part.dtype(), [&](auto type) {
      using T = decltype(type);
      write_flat(part, "weight", part.updated, read_flat<T>(part, begun, part.updated, kernels, stream), kernels,
                 stream);
    });
  });
  engine_.committed_steps_ = given.at("steps").get<std::int64_t>();
  if (engine_.activity_) engine_.activity_->begin_at(engine_.committed_steps_);
  for (const auto& group : engine_.groups_) group->begin_round(engine_.committed_steps_);
  anchor_ = given.at("begun").get<std::int64_t>();
  present_ = given.at("present").get<std::vector<int>>();
  kernels.settle(stream);
  find_due();
  engine_.republish("the outer weights of another site");
}

// What has arrived, and is yet to be taken.
void LocalUpdates::find_due() {
  for (Fragment& fragment : fragments_) {
    const std::int64_t sent = last_exchange(settings_, fragment.offset, now());
    fragment.due = sent > 0 && now() < sent + settings_.delay ? sent + settings_.delay : -1;
  }
}

void LocalUpdates::require_allowed(const std::vector<int>& present, const std::vector<std::string>& news) {
  if (settings_.lost_sites == LostSites::kLeave || static_cast<int>(present.size()) == line_->sites()) return;
  failed_ = true;
  throw Error(ErrorCode::kPeerLost, "an exchange of local updates without all sites",
              {.where = kExchangeWhere,
               .who = names_of_sites({line_->site()}),
               .expected = std::to_string(line_->sites()) + " sites",
               .got = names_of_sites(present) + (news.empty() ? "" : "; " + join(news, "; ")),
               .hint = "look at the output of the ranks of the site that is missing; lost_sites=\"leave\" goes on "
                       "without it"});
}

void LocalUpdates::hear(const SiteOutcome& outcome) {
  joiners_.insert(joiners_.end(), outcome.joiners.begin(), outcome.joiners.end());
  require_allowed(outcome.present, outcome.news);
  if (engine_.rank() == 0) {
    for (const std::string& news : outcome.news)
      engine_.log_.warn(news + ", going on with " + names_of_sites(outcome.staying));
  }
  present_ = outcome.present;
}

void LocalUpdates::begin() {
  anchor_ = engine_.committed_steps_;
  Kernels& kernels = *engine_.kernels_;
  const Stream& stream = engine_.resources_->gather_stream;
  for (Fragment& fragment : fragments_) {
    fragment.due = -1;
    for (const Part& part : fragment.parts) {
      with_master_type(part.dtype(), [&](auto type) {
        using T = decltype(type);
        if (settings_.outer_momentum > 0)
          write_flat(part, kOuterMomentum, part.updated, std::vector<T>(static_cast<std::size_t>(part.updated.size())),
                     kernels, stream);
        if (!has_outer()) return;
        const std::vector<T> values = read_flat<T>(part, "weight", part.updated, kernels, stream);
        write_flat(part, kOuterParam, part.updated, values, kernels, stream);
        if (settings_.method == LocalMethod::kCo2)
          write_flat(part, kOuterPrevious, part.updated, values, kernels, stream);
      });
    }
  }
  kernels.settle(stream);
}

std::int64_t LocalUpdates::now() const {
  return engine_.committed_steps_ - anchor_;
}

LocalReport LocalUpdates::report() const {
  LocalReport report{.sites = line_->sites(),
                     .site = line_->site(),
                     .present = present_,
                     .joined = has_joined_,
                     .step = now(),
                     .exchanges = exchanges_,
                     .received_bytes = received_,
                     .offsets = offsets_of(settings_)};
  for (const Fragment& fragment : fragments_)
    report.bytes_per_exchange.push_back(fragment.bytes * static_cast<std::uint64_t>(line_->sites() - 1));
  if (settings_.method == LocalMethod::kNone) report.offsets.clear();
  return report;
}

void LocalUpdates::after_step(StepResult& result) {
  if (settings_.method == LocalMethod::kNone) return;
  joined_ = {};
  const std::int64_t step = now();
  const bool whole_late = settings_.method == LocalMethod::kCo2;
  bool changed = false;
  for (Fragment& fragment : fragments_) {
    if (whole_late || fragment.due != step) continue;
    take(fragment);
    changed = true;
  }
  for (Fragment& fragment : fragments_) {
    if (last_exchange(settings_, fragment.offset, step) != step) continue;
    if (whole_late) arrive(fragment);
    send(fragment);
    if (is_late(settings_) && !whole_late) continue;
    take(fragment);
    changed = true;
  }
  give_states();
  if (!changed) return;
  engine_.publish_updates();
  result.changed = true;
}

std::byte* LocalUpdates::messages_of(const Fragment& fragment) {
  const std::size_t slot_bytes = messages_.size() / static_cast<std::size_t>(most_under_way(settings_));
  return messages_.data() + static_cast<std::size_t>(fragment.slot) * slot_bytes;
}

Coder LocalUpdates::coder() const {
  return Coder({.format = code_format_named(name_of(settings_.payload)),
                .block = settings_.block,
                .align = static_cast<std::int64_t>(kSegmentAlignBytes)},
               engine_.host_kernels(), engine_.resources_->gather_stream);
}

void LocalUpdates::send(Fragment& fragment) {
  Kernels& kernels = *engine_.kernels_;
  kernels.settle(engine_.resources_->gather_stream);
  fragment.due = now() + settings_.delay;
  for (int slot = 0; fragment.slot < 0; ++slot) {
    const auto has_it = [slot](const Fragment& other) { return other.slot == slot; };
    if (std::ranges::none_of(fragments_, has_it)) fragment.slot = slot;
  }
  std::byte* const all = messages_of(fragment);
  std::byte* const own = all + fragment.bytes * static_cast<std::size_t>(line_->site());
  std::byte* at = own;
  for (const Part& part : fragment.parts) {
    with_master_type(part.dtype(), [&](auto type) { pack<decltype(type)>(part, at); });
    at += message_bytes(part);
  }
  ++exchanges_;
  fragment.present = {line_->site()};
  if (line_->sites() == 1) return;
  const std::size_t all_bytes = fragment.bytes * static_cast<std::size_t>(line_->sites());
  fragment.exchange = line_->start({.unit = fragment.number, .label = static_cast<std::uint32_t>(now())},
                                   std::span(all, all_bytes), fragment.bytes);
}

template <class T>
void LocalUpdates::pack(const Part& part, std::byte* message) {
  Kernels& kernels = *engine_.kernels_;
  const Stream& stream = engine_.resources_->gather_stream;
  if (const std::size_t bytes = message_bytes(part); bytes > 0) std::memset(message, 0, bytes);
  const std::vector<T> local = read_flat<T>(part, "weight", part.shard, kernels, stream);
  if (!has_codes(settings_)) {
    copy_bytes(message, local.data(), local.size() * sizeof(T));
    return;
  }
  // Of CO2 the window that ends now began there: outer_param is where the next one begins.
  const char* const begun = settings_.method == LocalMethod::kCo2 ? kOuterPrevious : kOuterParam;
  const std::vector<T> outer = read_flat<T>(part, begun, part.shard, kernels, stream);
  std::vector<float> moved(local.size());
  for (std::size_t i = 0; i < local.size(); ++i) moved[i] = static_cast<float>(outer[i] - local[i]);
  coder().code(message, reinterpret_cast<const std::byte*>(moved.data()), DType::kFloat32, nullptr, part.shard.size());
}

void LocalUpdates::arrive(Fragment& fragment) {
  if (fragment.slot < 0) return;
  if (fragment.exchange) {
    failed_ = true;
    const SiteOutcome outcome = fragment.exchange->wait();
    failed_ = false;
    fragment.exchange.reset();
    hear(outcome);
    fragment.present = outcome.present;
  }
  received_ += fragment.bytes * static_cast<std::uint64_t>(fragment.present.size() - 1);
  for (const Part& part : fragment.parts)
    with_master_type(part.dtype(), [&](auto type) { update<decltype(type)>(part, fragment); });
  fragment.slot = -1;
}

template <class T>
void LocalUpdates::update(const Part& part, const Fragment& fragment) {
  Kernels& kernels = *engine_.kernels_;
  const Stream& stream = engine_.resources_->gather_stream;
  const std::vector<int>& present = fragment.present;
  const std::byte* all = messages_of(fragment);
  for (const Part& other : fragment.parts) {
    if (&other == &part) break;
    all += message_bytes(other);
  }
  const auto n = static_cast<std::size_t>(part.shard.size());
  std::vector<T> mean(n);  // of what was sent
  if (has_codes(settings_) && n > 0) {
    std::vector<const std::byte*> sent;
    for (const int site : present) sent.push_back(all + fragment.bytes * static_cast<std::size_t>(site));
    std::vector<float> moved(n);
    coder().value(reinterpret_cast<std::byte*>(moved.data()), DType::kFloat32, sent, part.shard.size(),
                  1.0F / static_cast<float>(present.size()));
    std::ranges::copy(moved, mean.begin());
  } else {
    for (const int site : present) {
      const auto* const theirs = reinterpret_cast<const T*>(all + fragment.bytes * static_cast<std::size_t>(site));
      for (std::size_t i = 0; i < n; ++i) mean[i] = site == present.front() ? theirs[i] : mean[i] + theirs[i];
    }
    for (T& value : mean) value /= static_cast<T>(present.size());
  }
  mean = for_update(part, std::move(mean));
  if (!has_outer()) return write_flat(part, "weight", part.updated, mean, kernels, stream);

  const bool late = settings_.method == LocalMethod::kCo2;
  const bool remembers = settings_.outer_momentum > 0;
  std::vector<T> outer = read_flat<T>(part, kOuterParam, part.updated, kernels, stream);
  std::vector<T> momentum, previous;
  if (remembers) momentum = read_flat<T>(part, kOuterMomentum, part.updated, kernels, stream);
  if (late) previous = read_flat<T>(part, kOuterPrevious, part.updated, kernels, stream);
  const OuterTerms terms{
      .lr = settings_.outer_lr, .momentum = settings_.outer_momentum, .nesterov = settings_.nesterov};
  const auto lr = static_cast<T>(terms.lr);
  const auto mu = static_cast<T>(terms.momentum);
  const auto most = static_cast<T>(settings_.clip);
  const auto scale = static_cast<T>(settings_.gap_scale);
  for (std::size_t i = 0; i < outer.size(); ++i) {
    const T from = late ? previous[i] : outer[i];
    const T d = has_codes(settings_) ? mean[i] : from - mean[i];
    if (!late) {
      const T y = has_codes(settings_) ? from - mean[i] : mean[i];
      outer[i] = outer_step(y, d, remembers ? &momentum[i] : nullptr, terms);
      continue;
    }
    T m = remembers ? mu * momentum[i] + d : d;
    if (settings_.clip > 0) m = std::clamp(m, -most, most);
    if (remembers) momentum[i] = m;
    if (settings_.gap_scale > 0) m /= T{1} + std::abs(outer[i] - previous[i]) / scale;
    previous[i] = outer[i];
    outer[i] -= lr * m;
  }
  write_flat(part, kOuterParam, part.updated, outer, kernels, stream);
  if (remembers) write_flat(part, kOuterMomentum, part.updated, momentum, kernels, stream);
  if (late) write_flat(part, kOuterPrevious, part.updated, previous, kernels, stream);
}

void LocalUpdates::take(Fragment& fragment) {
  const bool late = settings_.method == LocalMethod::kCo2;
  if (!late) arrive(fragment);
  fragment.due = -1;
  if (!has_outer()) return;
  for (const Part& part : fragment.parts)
    with_master_type(part.dtype(), [&](auto type) { take_part<decltype(type)>(part); });
}

template <class T>
void LocalUpdates::take_part(const Part& part) {
  Kernels& kernels = *engine_.kernels_;
  const Stream& stream = engine_.resources_->gather_stream;
  std::vector<T> outer = read_flat<T>(part, kOuterParam, part.updated, kernels, stream);
  if (settings_.keep_local > 0) {
    const std::vector<T> local = read_flat<T>(part, "weight", part.updated, kernels, stream);
    const auto keep = static_cast<T>(settings_.keep_local);
    const auto give = static_cast<T>(1.0 - settings_.keep_local);
    for (std::size_t i = 0; i < outer.size(); ++i) outer[i] = keep * local[i] + give * outer[i];
  }
  write_flat(part, "weight", part.updated, outer, kernels, stream);
}

void LocalUpdates::settle() {
  for (Fragment& fragment : fragments_) arrive(fragment);
}

std::string LocalUpdates::saved() const {
  return text_of(SavedLocal{.settings = text_of(settings_), .begun = anchor_});
}

void LocalUpdates::require_usable(const std::string& saved, bool strict, const std::string& where) const {
  if (saved.empty() || !strict) return;
  const SavedLocal there = saved_local_of(saved, where);
  const std::vector<std::string> other = window_differences(text_of(settings_), there.settings);
  ZR_CHECK(other.empty(), ErrorCode::kCheckpoint, "a checkpoint is of other windows of local updates",
           {.where = kExchangeWhere,
            .which = where + ": " + join(other, ", "),
            .expected = text_of(settings_),
            .got = there.settings,
            .hint = "the same settings go on in the middle of a window; strict = false begins a new one"});
}

void LocalUpdates::restore(const std::string& saved) {
  if (settings_.method == LocalMethod::kNone) return;
  if (!joined_.empty()) return take_joined();  // of the checkpoint remain the states of the inner optimizer
  const bool goes_on =
      !saved.empty() && window_differences(text_of(settings_), saved_local_of(saved, "").settings).empty();
  if (!goes_on) {
    take_first_weights();
    begin();
  } else {
    anchor_ = saved_local_of(saved, "").begun;
    find_due();
  }
  std::uint64_t digest = 0;
  for (const Fragment& fragment : fragments_) {
    for (const Part& part : fragment.parts) {
      if (!has_outer()) continue;
      const std::vector<std::uint8_t> outer =
          shard_bytes(part, kOuterParam, *engine_.kernels_, engine_.resources_->gather_stream);
      digest = digest * 31 + digest64(std::string_view(reinterpret_cast<const char*>(outer.data()), outer.size()));
    }
  }
  const std::vector<std::optional<std::string>> all =
      line_->texts(std::to_string(now()) + " " + std::to_string(digest));
  std::optional<std::string> first;
  present_.clear();
  for (int site = 0; site < line_->sites(); ++site) {
    const std::optional<std::string>& text = all[static_cast<std::size_t>(site)];
    if (!text) continue;
    present_.push_back(site);
    if (!first) first = text;
    const std::string step = text->substr(0, text->find(' '));
    const std::string usual = first->substr(0, first->find(' '));
    ZR_CHECK(
        *text == *first, ErrorCode::kMismatch, "sites have loaded different outer states",
        {.where = kExchangeWhere,
         .who = "site " + std::to_string(site),
         .expected = "those of " + names_of_sites({present_.front()}) + ", at step " + usual + " of its local updates",
         .got = step == usual ? "other values" : "step " + step,
         .hint = "every site loads its own checkpoint of the same step"});
  }
  require_allowed(present_, {});
}

}  // namespace zeroth
