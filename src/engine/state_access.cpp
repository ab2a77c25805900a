// Engine::read_states(), local_states() and write_weights(): states by name, whole, while the engine lives.
#include "engine/early_update.h"
#include "engine/own_operations.h"
#include "engine/piece_io.h"
#include "engine/shard_group.h"
#include "engine/state_pieces.h"
#include "engine/step_outcome.h"
#include "engine/texts.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/engine.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <type_traits>
#include <utility>

namespace zeroth {
namespace {

using StateJson = nlohmann::json;

constexpr std::size_t kWriteBytes = std::size_t{8} << 20U;  // of what is written, at once on every rank
constexpr const char* kStateWhere = "engine.state";

/// A range of a state on one rank, as that rank says.
struct RemotePiece {
  std::size_t name = 0;  ///< of the batch
  BoxRange range{};
  DType dtype = DType::kFloat32;
  int rank = 0;
  std::size_t offset = 0;  ///< bytes, in what the rank gives
};

/// What a rank has of a batch.
struct StateBatch {
  std::vector<RemotePiece> pieces{};
  std::vector<bool> known{};          ///< one a name
  std::vector<bool> has_grad{};       ///< the same, on any rank
  std::vector<std::int64_t> bytes{};  ///< one a rank
};

std::size_t bytes_of_piece(const RemotePiece& piece) {
  return array_bytes(piece.range.size(), piece.dtype);
}

/// Reads what ranks say of themselves. Throws kMismatch for what cannot be.
StateBatch batch_of(const std::vector<std::string>& texts, std::size_t names) {
  StateBatch batch{.known = std::vector<bool>(names, false), .has_grad = std::vector<bool>(names, false)};
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const auto refuse = [rank](const std::string& got) {
      throw Error(ErrorCode::kMismatch, "a rank describes a state that cannot be",
                  {.where = kStateWhere, .who = "rank " + std::to_string(rank), .got = got});
    };
    std::size_t offset = 0;
    try {
      const StateJson said = StateJson::parse(texts[rank]);
      for (const std::size_t name : said.at("known").get<std::vector<std::size_t>>()) batch.known.at(name) = true;
      for (const std::size_t name : said.at("grads").get<std::vector<std::size_t>>()) batch.has_grad.at(name) = true;
      for (const StateJson& one : said.at("pieces")) {
        const auto range = one.at("r").get<std::array<std::int64_t, 2>>();
        const auto dtype = one.at("d").get<int>();
        RemotePiece piece{.name = one.at("n").get<std::size_t>(),
                          .range = {.logical = one.at("l").get<std::vector<std::int64_t>>(),
                                    .offset = one.at("o").get<std::vector<std::int64_t>>(),
                                    .shape = one.at("s").get<std::vector<std::int64_t>>(),
                                    .begin = range[0],
                                    .end = range[1],
                                    .viewed = one.at("t").get<std::vector<std::int64_t>>()},
                          .dtype = static_cast<DType>(dtype),
                          .rank = static_cast<int>(rank),
                          .offset = offset};
        if (piece.name >= names || dtype < 0 || dtype > 255 || !piece.range.is_valid()) refuse(one.dump());
        offset += bytes_of_piece(piece);
        batch.pieces.push_back(std::move(piece));
      }
    } catch (const std::exception& error) {
      if (dynamic_cast<const Error*>(&error) != nullptr) throw;
      refuse(error.what());
    }
    batch.bytes.push_back(static_cast<std::int64_t>(offset));
  }
  return batch;
}

std::string list_text(const std::vector<std::string>& names) {
  if (names.empty()) return "all parameters";
  return names.front() + (names.size() > 1 ? " and " + std::to_string(names.size() - 1) + " more" : "");
}

std::vector<int> readers_of(const StateQuery& query, int world) {
  std::vector<int> readers = query.ranks;
  for (int rank = 0; query.ranks.empty() && rank < world; ++rank) readers.push_back(rank);
  std::ranges::sort(readers);
  readers.erase(std::ranges::unique(readers).begin(), readers.end());
  ZR_CHECK(readers.front() >= 0 && readers.back() < world, ErrorCode::kUsage, "there is no such rank to read a state",
           {.where = kStateWhere,
            .expected = "0 to " + std::to_string(world - 1),
            .got = std::to_string(readers.front() < 0 ? readers.front() : readers.back())});
  return readers;
}

template <class From, class To>
void convert(std::span<const std::byte> from, std::vector<std::byte>& into) {
  const std::size_t n = from.size() / sizeof(From);
  into.resize(n * sizeof(To));
  for (std::size_t i = 0; i < n; ++i) {
    From value;
    std::memcpy(&value, from.data() + i * sizeof(From), sizeof(From));
    To other;
    if constexpr (std::is_same_v<From, To>) {
      other = value;
    } else {
      other = static_cast<To>(static_cast<float>(value));
    }
    std::memcpy(into.data() + i * sizeof(To), &other, sizeof(To));
  }
}

template <class From>
void convert_to(std::span<const std::byte> from, DType to, std::vector<std::byte>& into) {
  switch (to) {
    case DType::kFloat64:
      return convert<From, double>(from, into);
    case DType::kFloat32:
      return convert<From, float>(from, into);
    case DType::kBFloat16:
      return convert<From, BFloat16>(from, into);
    default:
      return convert<From, Float16>(from, into);
  }
}

/// Floating-point values of one dtype as those of another, in `into`.
std::span<const std::byte> converted(std::span<const std::byte> values, DType from, DType to,
                                     std::vector<std::byte>& into) {
  switch (from) {
    case DType::kFloat64:
      convert_to<double>(values, to, into);
      break;
    case DType::kFloat32:
      convert_to<float>(values, to, into);
      break;
    case DType::kBFloat16:
      convert_to<BFloat16>(values, to, into);
      break;
    default:
      convert_to<Float16>(values, to, into);
      break;
  }
  return into;
}

/// Puts the elements of a piece where the whole tensor has them; returns their number.
std::int64_t put_piece(const RemotePiece& piece, const std::byte* from, std::vector<std::byte>& whole) {
  const std::size_t element = size_of(piece.dtype);
  for (const Run& run : runs_of(piece.range)) {
    std::memcpy(whole.data() + static_cast<std::size_t>(run.logical) * element,
                from + static_cast<std::size_t>(run.local) * element, static_cast<std::size_t>(run.count) * element);
  }
  return piece.range.size();
}

}  // namespace

void Engine::meet(OperationId what, const std::string& text) {
  sync(what, text);
  compare_names(what, uneven_join_->num_out() == 0 ? text : std::string());
}

std::vector<std::string> Engine::state_kinds() const {
  std::vector<std::string> kinds{"param", "master", "grad"};
  std::set<std::string> known(kinds.begin(), kinds.end());
  for (const auto& group : groups_) {
    for (const StatePiece& piece : pieces_of(*group)) {
      if (piece.state != "weight" && known.insert(piece.state).second) kinds.push_back(piece.state);
    }
    for (const auto& [row, _] : group->memory().states()) {  // also where this rank has no element
      const bool added = row.kind == StateKind::kAverage || row.kind == StateKind::kOuter;
      if (added && known.insert(row.name).second) kinds.push_back(row.name);
    }
  }
  for (const StateDeclaration& state : optimizer_->states()) {
    if (state.shape != StateShape::kRank && known.insert(state.name).second) kinds.push_back(state.name);
  }
  return kinds;
}

bool Engine::has_kind(const std::string& kind) const {
  const std::vector<std::string> kinds = state_kinds();
  return std::ranges::find(kinds, kind) != kinds.end() || kind.find('@') != std::string::npos;
}

void Engine::require_kind(const std::string& kind) const {
  if (has_kind(kind)) return;
  const std::vector<std::string> kinds = state_kinds();
  const std::string near = nearest_name(kind, kinds);
  throw Error(ErrorCode::kUsage, "there is no such kind of state",
              {.where = kStateWhere,
               .which = kind,
               .expected = zeroth::join(kinds, ", "),
               .hint = near.empty() ? "" : "did you mean \"" + near + "\"?"});
}

void Engine::require_quiet(const char* what) const {
  require_same_weights(what);
  ZR_CHECK(!had_backward_ && micro_step_ == 0, ErrorCode::kUsage, std::string(what) + " in the middle of a step",
           {.where = kStateWhere,
            .expected = "a call after the last micro-step's step(), before the next backward",
            .got = std::to_string(micro_step_) + " of " + std::to_string(settings_.micro_steps) + " micro-steps" +
                   (had_backward_ ? ", and a backward" : ""),
            .hint = "call step() or zero_grad() first"});
}

std::vector<int> Engine::params_named(const std::string& name) const {
  std::vector<int> params;
  for (std::size_t param = 0; param < layout_.params.size(); ++param) {
    const ParamSpec& spec = layout_.params[param];
    if (spec.tensor_name() == name || std::ranges::find(spec.aliases, name) != spec.aliases.end())
      params.push_back(static_cast<int>(param));
  }
  return params;
}

std::vector<StatePiece> Engine::pieces_of_kind(const std::string& kind, double factor) {
  std::vector<StatePiece> all;
  for (const auto& group : groups_) {
    const bool first = group->writes_states();
    std::vector<StatePiece> pieces;
    if (kind == "param") {
      pieces = parameter_pieces(group->layout(), group->memory(), first);
    } else if (kind == "grad") {
      const auto has_sums = [&group](int flat) { return group->gradients().has_sums(flat); };
      pieces = gradient_pieces(group->layout(), group->memory(), first, has_sums, factor);
    } else {
      const std::string state = kind == "master" ? "weight" : kind;
      pieces = state_pieces(group->layout(), group->memory(), first, rank(), early_->is_delayed);
      std::erase_if(pieces, [&state](const StatePiece& piece) { return piece.state != state; });
    }
    for (StatePiece& piece : pieces) {
      piece.param = group->part().params[static_cast<std::size_t>(piece.param)];
      all.push_back(std::move(piece));
    }
  }
  return all;
}

std::optional<double> Engine::complete_gradients() {
  ZR_CHECK(std::ranges::none_of(groups_, [](const auto& group) { return group->has_own_norms(); }), ErrorCode::kUsage,
           "gradients stay with their ranks in this step, which exchange messages instead",
           {.where = kStateWhere,
            .which = "grad, optimizer " + std::string(optimizer_->name()),
            .hint = "before its freeze_step there are sums of gradients; afterwards read exp_avg after step()"});
  const auto world_size = static_cast<std::size_t>(world());
  enum : std::size_t { kMicroStep, kBackward, kFailed, kJoined, kWords };
  const std::array<std::int64_t, kWords> own{micro_step_, had_backward_ ? 1 : 0, backward_failed_ ? 1 : 0,
                                             leads_batch_ ? uneven_join_->joined() : 0};
  std::vector<std::int64_t> all(world_size * kWords);
  communicator_.all_gather(std::span<const std::int64_t>(own), std::span(all));
  std::vector<int> without;
  std::int64_t joined = 0;
  for (std::size_t rank = 0; rank < world_size; ++rank) {
    const std::int64_t* const theirs = &all[rank * kWords];
    joined += theirs[kJoined];
    if (theirs[kBackward] == 0) without.push_back(static_cast<int>(rank));
    ZR_CHECK(theirs[kMicroStep] == all[kMicroStep], ErrorCode::kMismatch, "ranks are in different micro-steps",
             {.where = kStateWhere,
              .who = "rank " + std::to_string(rank),
              .expected = std::to_string(all[kMicroStep]) + " (rank 0)",
              .got = std::to_string(theirs[kMicroStep])});
    ZR_CHECK(theirs[kFailed] == 0, ErrorCode::kUsage, "gradients of a backward that failed",
             {.where = kStateWhere,
              .who = "rank " + std::to_string(rank),
              .hint = "step() skips this step on all ranks; zero_grad() drops the gradients"});
  }
  if (without.size() == world_size && all[kMicroStep] == 0) return std::nullopt;
  ZR_CHECK(without.empty() && all[kMicroStep] + 1 == settings_.micro_steps, ErrorCode::kUsage,
           "gradients are not complete",
           {.where = kStateWhere,
            .who = without.empty() ? "" : ranks_text(without) + " without a backward in this micro-step",
            .expected = "a call after the backward of the last micro-step, before its step()",
            .got = "micro-step " + std::to_string(all[kMicroStep] + 1) + " of " + std::to_string(settings_.micro_steps),
            .hint = "gradients of earlier micro-steps are not summed over the ranks yet"});
  for (const auto& group : groups_) group->gradients().complete();
  gradient_factor_ = mean_factor(std::int64_t{data_ranks_} * settings_.micro_steps - joined) / loss_scale();
  return gradient_factor_;
}

std::vector<std::vector<std::string>> Engine::state_batches() const {
  std::vector<std::vector<std::string>> batches;
  std::set<std::string> seen;  // boxes of one tensor may be in several units
  for (const UnitSpec& unit : layout_.units) {
    std::vector<std::string> names;
    for (const int param : unit.params) {
      const std::string& name = layout_.params[static_cast<std::size_t>(param)].tensor_name();
      if (seen.insert(name).second) names.push_back(name);
    }
    if (!names.empty()) batches.push_back(std::move(names));
  }
  return batches;
}

void Engine::read_states(const StateQuery& query, const std::function<void(StateTensor)>& take) {
  require_kind(query.kind);
  if (query.kind != "grad") require_whole("a read of states");
  const std::vector<int> readers = readers_of(query, world());
  together([&] {
    meet(own_->read, query.kind + " of " + list_text(query.names) + " for " + ranks_text(readers));
    require_same_writes();
    if (follower_ && query.kind.starts_with("outer_")) follower_->settle();
    std::optional<double> factor;
    if (query.kind == "grad") {
      factor = complete_gradients();
      if (!factor) return;
    }
    const std::vector<StatePiece> pieces = pieces_of_kind(query.kind, factor.value_or(1.0));
    if (!query.names.empty()) return read_batch(query, query.names, pieces, take);
    std::vector<std::vector<std::string>> batches = state_batches();
    if (!std::ranges::all_of(groups_, [](const auto& group) { return group->has_all_ranks(); })) {
      // Ranks have other units: all batches of all of them, each name once.
      std::set<std::string> seen;
      const std::vector<std::string> texts = gather_texts(StateJson(batches).dump(), communicator_);
      batches.clear();
      for (const std::string& text : texts) {
        for (auto& batch : StateJson::parse(text).get<std::vector<std::vector<std::string>>>()) {
          std::erase_if(batch, [&seen](const std::string& name) { return !seen.insert(name).second; });
          if (!batch.empty()) batches.push_back(std::move(batch));
        }
      }
    }
    for (const std::vector<std::string>& batch : batches) read_batch(query, batch, pieces, take);
  });
}

void Engine::read_batch(const StateQuery& query, const std::vector<std::string>& names,
                        const std::vector<StatePiece>& pieces, const std::function<void(StateTensor)>& take) {
  const bool grads = query.kind == "grad";
  std::map<int, std::size_t> wanted;  // name of the batch, by parameter
  StateJson said{{"known", StateJson::array()}, {"grads", StateJson::array()}, {"pieces", StateJson::array()}};
  for (std::size_t name = 0; name < names.size(); ++name) {
    bool has_grad = false;
    for (const int param : params_named(names[name])) {
      wanted.emplace(param, name);
      const auto [group, index] = param_at(param);
      has_grad = has_grad || (grads && group.gradients().has_grad(index));
    }
    if (!params_named(names[name]).empty()) said["known"].push_back(name);
    if (has_grad) said["grads"].push_back(name);
  }
  std::vector<const StatePiece*> own;
  for (const StatePiece& piece : pieces) {
    const auto found = wanted.find(piece.param);
    if (found == wanted.end() || piece.writes.size() == 0) continue;
    own.push_back(&piece);
    said["pieces"].push_back({{"n", found->second},
                              {"l", piece.has.logical},
                              {"t", piece.has.viewed},
                              {"o", piece.has.offset},
                              {"s", piece.has.shape},
                              {"r", {piece.writes.begin, piece.writes.end}},
                              {"d", static_cast<int>(piece.dtype)}});
  }
  const StateBatch batch = batch_of(gather_texts(said.dump(), communicator_), names.size());

  // All ranks judge by the same words.
  std::vector<bool> there(names.size(), false);
  for (const RemotePiece& piece : batch.pieces) there[piece.name] = true;
  for (std::size_t name = 0; name < names.size() && !query.names.empty() && !query.partial; ++name) {
    std::vector<std::string> known;
    for (const ParamSpec& spec : layout_.params) {
      known.push_back(spec.tensor_name());
      known.insert(known.end(), spec.aliases.begin(), spec.aliases.end());
    }
    const std::string near = nearest_name(names[name], known);
    ZR_CHECK(batch.known[name], ErrorCode::kUsage, "there is no such parameter",
             {.where = kStateWhere,
              .which = names[name],
              .expected = "a name of the model's state_dict()",
              .hint = near.empty() ? "" : "did you mean \"" + near + "\"?"});
    const std::vector<int> params = params_named(names[name]);
    const bool empty = !params.empty() && std::ranges::all_of(params, [this](int param) {
      return layout_.params[static_cast<std::size_t>(param)].numel() == 0;
    });
    ZR_CHECK(there[name] || grads || empty, ErrorCode::kUsage, "a parameter has no such state",
             {.where = kStateWhere,
              .which = names[name] + ", " + query.kind,
              .expected = "param, master or grad",
              .got = "a parameter that does not train"});
  }

  std::vector<std::byte> payload;
  for (const StatePiece* piece : own) {
    PieceReader(*piece, *kernels_, resources_->gather_stream).each([&payload](std::span<const std::byte> part) {
      payload.insert(payload.end(), part.begin(), part.end());
    });
  }
  const std::vector<int> readers = readers_of(query, world());
  const bool reads = std::ranges::find(readers, rank()) != readers.end();
  std::int64_t total = 0;
  for (const std::int64_t bytes : batch.bytes) total += bytes;
  std::vector<std::byte> all(reads ? static_cast<std::size_t>(total) : 0);
  const std::span<const std::uint8_t> part(reinterpret_cast<const std::uint8_t*>(payload.data()), payload.size());
  const std::span<std::uint8_t> whole(reinterpret_cast<std::uint8_t*>(all.data()), all.size());
  if (total > 0 && readers.size() == static_cast<std::size_t>(world())) {
    communicator_.all_gather(part, whole, batch.bytes);
  } else if (total > 0) {
    for (const int reader : readers) {
      communicator_.gather(part, rank() == reader ? whole : std::span<std::uint8_t>(), batch.bytes, reader);
    }
  }
  if (!reads) return;
  payload = {};

  std::vector<std::size_t> begins;  // of each rank in `all`
  std::size_t begin = 0;
  for (const std::int64_t bytes : batch.bytes) {
    begins.push_back(begin);
    begin += static_cast<std::size_t>(bytes);
  }
  for (std::size_t name = 0; name < names.size(); ++name) {
    const std::vector<int> params = params_named(names[name]);
    const ParamSpec* const spec = params.empty() ? nullptr : &layout_.params[static_cast<std::size_t>(params.front())];
    if (grads && !batch.has_grad[name]) continue;
    StateTensor tensor{.name = spec != nullptr ? spec->tensor_name() : names[name]};
    std::int64_t elements = 0;
    std::int64_t found = 0;
    for (const RemotePiece& piece : batch.pieces) {
      if (piece.name != name) continue;
      if (tensor.data.empty()) {
        tensor.shape = piece.range.tensor_shape();
        tensor.dtype = piece.dtype;
        elements = piece.range.logical_elements();
        tensor.data.resize(array_bytes(elements, piece.dtype));
      }
      ZR_CHECK(piece.range.tensor_shape() == tensor.shape && piece.dtype == tensor.dtype, ErrorCode::kMismatch,
               "ranks have boxes of different tensors under one name", {.where = kStateWhere, .which = names[name]});
      found += put_piece(piece, all.data() + begins[static_cast<std::size_t>(piece.rank)] + piece.offset, tensor.data);
    }
    if (tensor.data.empty()) {
      const bool empty = spec != nullptr && spec->numel() == 0 &&
                         (query.kind == "param" || query.kind == "master" || !query.names.empty());
      if (!empty && !grads) continue;
      if (spec == nullptr) continue;
      tensor.shape = spec->logical_shape.empty() ? spec->shape : spec->logical_shape;
      tensor.dtype = query.kind == "param" || !spec->trainable ? spec->dtype : accumulation_dtype(spec->dtype);
      tensor.data.resize(array_bytes(spec->numel(), tensor.dtype));
    }
    // Boxes without sums have no gradient in this step: zeros.
    ZR_CHECK(grads || found == elements, ErrorCode::kMismatch, "no rank has some elements of a state",
             {.where = kStateWhere,
              .which = names[name] + ", " + query.kind,
              .expected = std::to_string(elements),
              .got = std::to_string(found)});
    take(std::move(tensor));
  }
}

std::vector<StatePart> Engine::local_states(const std::string& kind) {
  require_kind(kind);
  ZR_CHECK(kind != "grad" || gradient_factor_ || !had_backward_, ErrorCode::kUsage,
           "gradients of this rank alone are not summed yet",
           {.where = kStateWhere,
            .hint = "a read of gradients on all ranks, of any name, sums them; then this rank has its own"});
  if (kind == "grad" && !gradient_factor_) return {};
  std::vector<StatePart> parts;
  for (const StatePiece& piece : pieces_of_kind(kind, gradient_factor_.value_or(1.0))) {
    const Range range = piece.master != Master::kNone ? piece.master_range : Range{piece.has.begin, piece.has.end};
    if (range.size() == 0) continue;
    StatePart part{.name = layout_.params[static_cast<std::size_t>(piece.param)].name,
                   .range = piece.has,
                   .dtype = piece.dtype,
                   .data = PieceReader(piece, *kernels_, resources_->gather_stream).all_of(range)};
    part.range.begin = range.begin;
    part.range.end = range.end;
    parts.push_back(std::move(part));
  }
  return parts;
}

void Engine::require_own_weights(const char* what) const {
  ZR_CHECK(applied_average_.empty(), ErrorCode::kUsage, std::string(what) + " while an average of weights is applied",
           {.where = kStateWhere,
            .which = applied_average_,
            .expected = "the model's own weights",
            .hint = "leave the block that applies the average first"});
}

void Engine::republish(std::string_view what) {
  kernels_->settle(resources_->gather_stream);
  communicator_.barrier(what);
  for (const auto& group : groups_) group->parameters().publish();
  kernels_->settle(resources_->gather_stream);
}

void Engine::write_weights(const WeightWrite& write) {
  require_own_weights("a write of weights");
  ZR_CHECK(!early_->is_delayed, ErrorCode::kUsage, "weights are written while an update of them is delayed",
           {.where = kStateWhere, .hint = "call flush_update() first: it would change what is written"});
  require_quiet("a write of weights");
  std::vector<std::vector<int>> params;
  for (const std::string& name : write.names) {
    params.push_back(params_named(name));
    ZR_CHECK(!params.back().empty(), ErrorCode::kUsage, "there is no such parameter",
             {.where = kStateWhere, .which = name});
  }
  ZR_CHECK(write.source >= -1 && write.source < world(), ErrorCode::kUsage, "there is no such rank with values",
           {.where = kStateWhere, .got = std::to_string(write.source)});
  together([&] {
    const bool any_frozen = std::ranges::any_of(params, [this](const std::vector<int>& of_name) {
      return !layout_.params[static_cast<std::size_t>(of_name.front())].trainable;
    });
    if (any_frozen) frozen_base_.reset();
    meet(own_->write, "values of " + list_text(write.names) + " from rank " + std::to_string(write.source));
    for (const auto& group : groups_) group->complete_uses();
    std::map<int, StatePiece> pieces;
    for (StatePiece& piece : pieces_of_kind("master", 1.0)) pieces.emplace(piece.param, std::move(piece));
    const bool has_values = write.source < 0 || write.source == rank();
    std::vector<std::byte> buffer;
    std::vector<std::byte> conversion;
    for (std::size_t index = 0; index < params.size(); ++index) {
      const ParamSpec& spec = layout_.params[static_cast<std::size_t>(params[index].front())];
      const bool masters = write.masters && spec.trainable;
      const DType dtype = masters ? accumulation_dtype(spec.dtype) : spec.dtype;
      const DType from = write.dtype && write.source < 0 ? write.dtype(index) : dtype;
      const std::size_t element = size_of(from);
      const std::vector<std::int64_t>& shape = spec.logical_shape.empty() ? spec.shape : spec.logical_shape;
      std::int64_t elements = 1;
      for (const std::int64_t extent : shape) elements *= extent;
      std::span<const std::byte> given;
      if (has_values) {
        given = write.values(index);
        ZR_ASSERT(given.size() == array_bytes(elements, from), "values of a weight do not fit it");
      }
      const auto step = static_cast<std::int64_t>(kWriteBytes / element);
      for (std::int64_t begin = 0; begin < elements; begin += step) {
        const std::int64_t end = std::min(elements, begin + step);
        std::span<const std::byte> chunk;
        if (has_values)
          chunk =
              given.subspan(static_cast<std::size_t>(begin) * element, static_cast<std::size_t>(end - begin) * element);
        if (write.source >= 0 && world() > 1) {
          buffer.assign(chunk.begin(), chunk.end());
          buffer.resize(static_cast<std::size_t>(end - begin) * element);
          communicator_.broadcast(std::span(reinterpret_cast<std::uint8_t*>(buffer.data()), buffer.size()),
                                  write.source);
          chunk = buffer;
        }
        for (const int param : params[index]) {
          const auto found = pieces.find(param);
          if (found == pieces.end()) continue;
          for (const Run& run : runs_of(found->second.has)) {
            const std::int64_t first = std::max(run.logical, begin);
            const std::int64_t last = std::min(run.logical + run.count, end);
            if (first >= last) continue;
            const std::span<const std::byte> part = chunk.subspan(static_cast<std::size_t>(first - begin) * element,
                                                                  static_cast<std::size_t>(last - first) * element);
            store_weights(found->second, found->second.has.begin + run.local + (first - run.logical),
                          from == dtype ? part : converted(part, from, dtype, conversion),
                          masters ? WeightValues::kMaster : WeightValues::kParameter, *kernels_,
                          resources_->gather_stream);
          }
        }
      }
    }
    republish("weights that were written");
  });
}

}  // namespace zeroth
