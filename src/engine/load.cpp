// Engine::load(): states from the files of a checkpoint, by name and element.
#include "checkpoint/element_reader.h"
#include "engine/early_update.h"
#include "engine/freeze_watch.h"
#include "engine/hyper_text.h"
#include "engine/own_operations.h"
#include "engine/piece_io.h"
#include "engine/save_outcomes.h"
#include "engine/shard_group.h"
#include "engine/state_pieces.h"
#include "engine/states_read.h"
#include "engine/texts.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/engine.h>
#include <zeroth/engine/safetensors.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>

namespace zeroth {
namespace {

using Json = nlohmann::ordered_json;
using detail::KnownFile;
using detail::RankEntry;
using detail::Source;

constexpr std::size_t kValuesAlignment = 64;

/// "NAME/STATE", "extra/NAME", with the plain name.
std::string plain_key(const std::string& key) {
  if (key.find("_orig_mod") == std::string::npos) return key;
  if (key.starts_with(detail::kExtraKey))
    return detail::kExtraKey + unwrapped_name(key.substr(std::string_view(detail::kExtraKey).size()));
  const std::size_t slash = std::min(key.rfind('/'), key.size());
  return unwrapped_name(key.substr(0, slash)) + key.substr(slash);
}

/// Takes the names of wrappers away that torch.compile() makes: earlier checkpoints have them. True if there were any.
bool take_wrappers_away(Manifest& manifest) {
  bool any = false;
  const auto unwrap = [&any](std::string& name) {
    std::string plain = unwrapped_name(name);
    any = any || plain != name;
    name = std::move(plain);
  };
  for (CheckpointParam& param : manifest.params) {
    unwrap(param.name);
    std::ranges::for_each(param.aliases, unwrap);
  }
  for (CheckpointState& extra : manifest.extras) unwrap(extra.name);
  return any;
}

/// Other names of tied weights of the checkpoint become the ones that it keeps them under.
void name_as_there(LoadOptions& options, const Manifest& manifest) {
  std::map<std::string, std::string> names;
  for (const CheckpointParam& param : manifest.params) {
    for (const std::string& alias : param.aliases) names[alias] = param.name;
  }
  for (auto& [_, there] : options.names) {
    if (const auto found = names.find(there); found != names.end()) there = found->second;
  }
}

/// Names that any rank has, each once, in the order of the ranks. Collective, blocks.
std::vector<std::string> on_any_rank(const std::vector<std::string>& own, const Communicator& communicator) {
  std::vector<std::string> all;
  std::set<std::string> seen;
  for (const std::string& text : gather_texts(Json(own).dump(), communicator)) {
    for (const std::string& name : Json::parse(text).get<std::vector<std::string>>()) {
      if (seen.insert(name).second) all.push_back(name);
    }
  }
  return all;
}

}  // namespace

LoadReport Engine::load(const std::string& path, const LoadOptions& given) {
  LoadOptions options = given;
  for (auto& [_, there] : options.names) there = unwrapped_name(there);
  require_between_steps("engine.load");
  require_no_local_steps(groups_, committed_steps_, "engine.load");
  require_own_weights("load()");
  return together([&] {
    sync(own_->load);
    require_same_folder(path, communicator_, "engine.load");
    settle_save();
    report_failed_save();
    if (follower_) follower_->settle();
    for (const auto& group : groups_) group->complete_uses();
    LoadReport report;
    // Rank 0 chooses, and all read the same one.
    const Json said = Json::parse(on_first_rank(communicator_, "no checkpoint could be loaded", [&] {
      const LoadReport chosen = choose_checkpoint(path, options);
      return Json{{"path", chosen.path}, {"skipped", chosen.skipped}}.dump(-1, ' ', false,
                                                                           Json::error_handler_t::replace);
    }));
    report.path = said.at("path").get<std::string>();
    report.skipped = said.at("skipped").get<std::vector<std::string>>();
    if (report.path.empty()) return report;

    // First everything is read and compared, then everything is changed, on all ranks or on none.
    StatesRead read;
    bool unwrapped = false;
    (void)on_all_ranks(communicator_, "a checkpoint could not be loaded, and nothing was changed", [&] {
      report.manifest = read_manifest(report.path);
      unwrapped = take_wrappers_away(report.manifest);
      name_as_there(options, report.manifest);
      read = read_states(report, options);
      if (follower_) follower_->require_usable(report.manifest.local, options.strict, report.path);
      return Files{};
    });
    require_any_parameter(report.manifest, report.path, options);
    settle_hypers(read, report, options);
    report.missing = on_any_rank(report.missing, communicator_);
    if (report.missing.empty()) {
      for (const auto& group : groups_) group->memory().reset_blocks();  // what a disk has damaged is not read again
    }
    take_states(read, report.manifest);
    if (follower_) follower_->restore(report.missing.empty() ? report.manifest.local : "");
    if (report.missing.empty()) {
      early_->is_torn = false;
      early_->torn_by.clear();
    }
    const Manifest& taken = report.manifest;
    frozen_base_.reset();
    if (report.missing.empty() && options.names.empty() && !unwrapped) {
      frozen_base_ = {.path = taken.base.name.empty() ? report.path : base_path(report.path, taken),
                      .run = taken.base.name.empty() ? taken.run : taken.base.run};
    }
    report.user = report.manifest.user;
    if (report.manifest.world == world())
      report.user_of_rank = report.manifest.user_of_rank[static_cast<std::size_t>(rank())];
    return report;
  });
}

LoadReport Engine::choose_checkpoint(const std::string& path, const LoadOptions& options) {
  namespace fs = std::filesystem;
  LoadReport report;
  std::error_code error;
  if (fs::exists(fs::path(path) / kManifestFile, error)) {
    (void)read_manifest(path);
    report.path = path;
    return report;
  }
  for (const CheckpointEntry& entry : list_checkpoints(path)) {
    const std::string torn = why_torn(entry.path);
    if (torn.empty()) {
      report.path = entry.path;
      return report;
    }
    report.skipped.push_back(entry.path + ": " + torn);
  }
  if (options.if_any && report.skipped.empty()) return report;
  std::vector<std::string> inside;  // saves of engines that have names
  for (fs::directory_iterator at(path, error); !error && at != fs::directory_iterator(); at.increment(error)) {
    if (at->is_directory(error) && !list_checkpoints(at->path().string()).empty())
      inside.push_back(at->path().filename().string());
  }
  std::ranges::sort(inside);
  throw Error(ErrorCode::kCheckpoint, "there is no checkpoint",
              {.where = "engine.load",
               .which = path,
               .expected = "a checkpoint, or a folder with checkpoints",
               .got = report.skipped.empty() ? "none" : zeroth::join(report.skipped, "; "),
               .hint = !inside.empty()          ? "there are some in folders inside of it: " + few(inside)
                       : report.skipped.empty() ? "if_any = true (if_any=True in Python) begins without one"
                                                : ""});
}

void Engine::require_optimizer_of(const Manifest& manifest, const std::string& path, const LoadOptions& options) const {
  const std::string own(optimizer_->name());
  const bool trained =
      std::ranges::any_of(manifest.params, [](const CheckpointParam& param) { return param.trainable; });
  ZR_CHECK(manifest.optimizer.empty() || manifest.optimizer == own || !trained || !trains(), ErrorCode::kCheckpoint,
           "a checkpoint is of another optimizer",
           {.where = "engine.load",
            .which = path,
            .expected = own,
            .got = manifest.optimizer,
            .hint = "strict = false takes weights and the states that both have, and no hyper-parameters"});
  // States of another form of the same optimizer: SGD with momentum.
  std::set<std::string> known;
  for (const std::string& type : optimizer_names()) {
    for (const bool momentum : {false, true}) {
      const std::unique_ptr<Optimizer> one = make_optimizer({.type = type, .momentum = momentum});
      for (const StateDeclaration& state : one->states()) known.insert(state.name);
    }
  }
  for (const StateDeclaration& state : optimizer_->states()) known.erase(state.name);
  std::set<std::string> trained_here;
  for (const ParamSpec& spec : layout_.params) {
    if (spec.trainable) trained_here.insert(options.name_there(spec.tensor_name()));
  }
  for (const CheckpointParam& param : manifest.params) {
    if (!trained_here.contains(param.name)) continue;
    for (const CheckpointState& state : param.states) {
      ZR_CHECK(!known.contains(state.name), ErrorCode::kCheckpoint,
               "a checkpoint has states that the optimizer does not keep",
               {.where = "engine.load",
                .which = path + ", " + detail::state_key(param.name, state.name),
                .expected = own + " as it was configured when the checkpoint was written",
                .hint = "strict = false leaves them out"});
    }
  }
}

void Engine::settle_hypers(StatesRead& read, const LoadReport& report, const LoadOptions& options) {
  const Manifest& manifest = report.manifest;
  const std::vector<GroupPair> pairs = pairs_in(gather_texts(text_of(read.pairs), communicator_));
  const auto hypers_in = [&report](const std::vector<std::string>& texts) {
    std::vector<GroupHyper> hypers;
    for (const std::string& text : texts) hypers.push_back(hyper_of(text, report.path));
    return hypers;
  };
  const std::vector<GroupHyper> there = hypers_in(manifest.groups);
  const bool of_this_optimizer = manifest.optimizer.empty() || manifest.optimizer == optimizer_->name();
  const bool takes = options.hypers && of_this_optimizer;
  const std::vector<int> chosen =
      groups_there(pairs, settings_.groups, there, options.strict && options.hypers, report.path);
  read.groups = takes ? chosen_hypers(settings_.groups, there, chosen) : settings_.groups;
  if (read.early.terms) {
    read.early.terms->groups = chosen_hypers(settings_.groups, hypers_in(read.update_groups), chosen);
  }
  if (const std::string changes = changes_of(settings_.groups, read.groups); !changes.empty())
    log_.progress("hyper-parameters of the checkpoint replace those of the configuration: " + changes);
  if (options.hypers && !of_this_optimizer)
    log_.progress("hyper-parameters of the checkpoint are of " + manifest.optimizer + ", and are not taken");
}

void Engine::require_any_parameter(const Manifest& manifest, const std::string& path,
                                   const LoadOptions& options) const {
  std::set<std::string> there;
  for (const CheckpointParam& param : manifest.params) there.insert(param.name);
  std::vector<std::string> own;
  bool any = layout_.params.empty();
  for (const ParamSpec& spec : layout_.params) {
    own.push_back(spec.tensor_name());
    any = any || there.contains(options.name_there(spec.tensor_name()));
  }
  const std::vector<std::string> said = gather_texts(any ? "1" : "", communicator_);
  ZR_CHECK(std::ranges::any_of(said, [](const std::string& one) { return !one.empty(); }), ErrorCode::kCheckpoint,
           "a checkpoint has no parameter of the model",
           {.where = "engine.load",
            .which = path,
            .expected = few(own),
            .got = few(std::vector<std::string>(there.begin(), there.end())),
            .hint = "nothing was changed; LoadOptions::names (rename= in Python) says which names belong together"});
}

Engine::StatesRead Engine::read_states(LoadReport& report, const LoadOptions& options) {
  const Manifest& manifest = report.manifest;
  StateSources all;
  std::vector<KnownFile>& files = all.files;
  std::map<std::string, std::vector<Source>>& sources = all.by_key;
  const auto open_files = [&](const std::string& path, const Manifest& of, const auto& takes) {
    for (const CheckpointFile& file : of.files) {
      files.emplace_back(path, file);
      for (RankEntry& entry : detail::read_header(files.back())) {
        std::string key = plain_key(entry.key);
        if (takes(key)) sources[std::move(key)].push_back({.file = files.size() - 1, .entry = std::move(entry)});
      }
    }
  };
  open_files(report.path, manifest, [](const std::string&) { return true; });
  std::map<std::string, const CheckpointParam*> params;
  std::set<std::string> frozen;
  for (const CheckpointParam& param : manifest.params) {
    params[param.name] = &param;
    if (!param.trainable) frozen.insert(param.name + "/weight");
  }
  if (!manifest.base.name.empty()) {
    const auto [path, base] = base_of(report.path, manifest);
    open_files(path, base, [&frozen](const std::string& key) { return frozen.contains(key); });
  }

  if (options.strict) require_optimizer_of(manifest, report.path, options);
  StatesRead read;
  const SavedUpdate update = saved_update_of(manifest.update, report.path);
  if (freeze_watch_ && update.freeze && manifest.optimizer == optimizer_->name()) {
    freeze_watch_->require_fits(*update.freeze, manifest.step, report.path);
    read.freeze = update.freeze;
  }
  const bool can_delay = settings_.update.delayed_after.has_value();
  ZR_CHECK(!update.is_delayed || can_delay || !options.strict, ErrorCode::kCheckpoint,
           "a checkpoint has gradients whose update is delayed, and this training delays none",
           {.where = "engine.load",
            .which = report.path,
            .expected = "/zeroth/update/delayed_after",
            .hint = "flush_update() before save() makes a checkpoint without them; strict = false forgets them"});
  if (update.is_delayed && !can_delay) report.missing.push_back("the update of " + std::string(kHeldGradient));
  read.early.last_norm = update.last_norm;
  read.early.is_delayed = update.is_delayed && can_delay;
  read.held.assign(layout_.params.size(), false);
  std::size_t most = 0;
  for (const auto& group : groups_) {
    for (const StatePiece& piece : pieces_of(*group, read.early.is_delayed))
      most += align_up(array_bytes(piece.has.size(), piece.dtype), kValuesAlignment);
  }
  // The copy of an earlier save is as large; no save is in flight.
  if (checkpoint_copy_.capacity() < most) read.memory = Arena::create(ArenaKind::kPrivate, most, "checkpoint");
  std::span<std::byte> memory(read.memory.capacity() > 0 ? read.memory.data() : checkpoint_copy_.data(), most);
  std::vector<std::string> other_shapes;
  for (const auto& group : groups_) {
    for (StatePiece& piece : pieces_of(*group, read.early.is_delayed)) {
      const ParamSpec& spec = layout_.params[static_cast<std::size_t>(piece.param)];
      const std::string key = options.name_there(spec.tensor_name()) + "/" + piece.state;
      const bool of_this_rank = piece.state.find('@') != std::string::npos;
      if (of_this_rank && manifest.world != world()) continue;  // nobody's: the ranks are others
      const auto found = sources.find(key);
      if (found == sources.end()) {
        if (piece.state != kHeldGradient) report.missing.push_back(key);  // else the parameter had none
        continue;
      }
      const RankEntry& first = found->second.front().entry;
      if (first.range.tensor_shape() != piece.has.tensor_shape() || first.dtype != safetensors_dtype(piece.dtype)) {
        other_shapes.push_back(key + ": " + first.dtype + " " + shape_text(first.range.tensor_shape()) + " there, " +
                               safetensors_dtype(piece.dtype) + " " + shape_text(piece.has.tensor_shape()) + " here");
        continue;
      }
      const std::size_t bytes = array_bytes(piece.has.size(), piece.dtype);
      const std::span<std::byte> values = memory.subspan(0, bytes);
      memory = memory.subspan(align_up(bytes, kValuesAlignment));
      if (!read_elements(piece.has, size_of(piece.dtype), found->second, files, values)) {
        throw Error(ErrorCode::kCheckpoint, "a checkpoint lacks elements of a state",
                    {.where = "engine.load", .which = report.path + ", " + key});
      }
      read.values.push_back(values);
      read.pieces.push_back(std::move(piece));
    }
  }
  ZR_CHECK(other_shapes.empty(), ErrorCode::kCheckpoint, "a checkpoint has states of other shapes or dtypes",
           {.where = "engine.load", .which = report.path, .got = few(other_shapes)});
  std::set<std::string> own;
  for (const ParamSpec& spec : layout_.params) own.insert(options.name_there(spec.tensor_name()));
  const bool whole_model = std::ranges::all_of(groups_, [](const auto& group) { return group->has_all_ranks(); });
  for (const CheckpointParam& param : manifest.params) {
    if (whole_model && !own.contains(param.name)) report.unexpected.push_back(param.name);
  }
  ZR_CHECK(!options.strict || (report.missing.empty() && report.unexpected.empty()), ErrorCode::kCheckpoint,
           "a checkpoint is of another model or optimizer",
           {.where = "engine.load",
            .which = report.path,
            .expected = "every parameter and state of this one, and no others",
            .got = (report.missing.empty() ? "" : "missing " + few(report.missing)) +
                   (report.missing.empty() || report.unexpected.empty() ? "" : "; ") +
                   (report.unexpected.empty() ? "" : "beyond the model " + few(report.unexpected)),
            .hint = "strict = false keeps what is there for what is missing"});
  if (!manifest.loss_scaler.empty()) read.scaler = scaler_state_of(manifest.loss_scaler, report.path);
  for (const ParamSpec& spec : layout_.params) {
    const auto found = params.find(options.name_there(spec.tensor_name()));
    if (found == params.end() || !spec.trainable) continue;
    const int there = found->second->group;
    if (there == kNoGroup) continue;  // weights from elsewhere: the group keeps its own
    ZR_CHECK(there >= 0 && static_cast<std::size_t>(there) < manifest.groups.size() &&
                 (!read.early.is_delayed || static_cast<std::size_t>(there) < update.groups.size()),
             ErrorCode::kCheckpoint, "a parameter of a checkpoint is in no group",
             {.where = "engine.load", .which = report.path + ", " + spec.name});
    const bool known = std::ranges::any_of(
        read.pairs, [&](const GroupPair& one) { return one.here == spec.group && one.there == there; });
    if (!known) read.pairs.push_back({.here = spec.group, .there = there, .param = spec.tensor_name()});
  }
  if (read.early.is_delayed) {
    read.early.terms = UpdateTerms{.factor = update.factor, .groups = {}, .lr_factor = update.lr_factor};
    read.update_groups = update.groups;
  }
  for (const CheckpointState& extra : manifest.extras) {
    const auto found = sources.find(detail::kExtraKey + extra.name);
    ZR_CHECK(found != sources.end(), ErrorCode::kCheckpoint, "a checkpoint lacks a tensor of its manifest",
             {.where = "engine.load", .which = report.path + ", " + extra.name});
    const Source& source = found->second.front();
    LoadedExtra loaded{.about = extra, .data = std::vector<std::byte>(static_cast<std::size_t>(source.entry.bytes))};
    files[source.file].read(source.entry.begin, loaded.data);
    report.extras.push_back(std::move(loaded));
  }
  read_accumulation(read, report, options, all);
  read.updates.assign(layout_.params.size(), -1);
  for (std::size_t param = 0; param < layout_.params.size(); ++param) {
    const auto found = params.find(options.name_there(layout_.params[param].tensor_name()));
    if (found == params.end()) continue;
    read.updates[param] = found->second->updates;
    read.held[param] = std::ranges::any_of(found->second->states,
                                           [](const CheckpointState& state) { return state.name == kHeldGradient; });
  }
  return read;
}

void Engine::take_states(const StatesRead& read, const Manifest& manifest) {
  for (std::size_t index = 0; index < read.pieces.size(); ++index) {
    store(read.pieces[index], read.values[index], *kernels_, resources_->gather_stream);
  }
  *early_ = read.early;
  if (read.freeze) freeze_watch_->take(*read.freeze);
  settings_.groups = read.groups;
  if (read.scaler) scaler_.set_state(*read.scaler);
  for (const auto& group : groups_) {
    std::vector<std::int64_t> updates = group->updates();
    for (std::size_t index = 0; index < updates.size(); ++index) {
      const std::int64_t said = read.updates[static_cast<std::size_t>(group->part().params[index])];
      if (said >= 0) updates[index] = said;
    }
    group->set_updates(std::move(updates));
    std::vector<bool> held;
    for (const int param : group->part().params) {
      if (read.early.is_delayed) held.push_back(read.held[static_cast<std::size_t>(param)]);
    }
    group->restore_held(std::move(held));
  }
  committed_steps_ = manifest.step;
  if (activity_) activity_->begin_at(committed_steps_);
  for (const auto& group : groups_) group->begin_round(committed_steps_);
  kernels_->settle(resources_->gather_stream);
  communicator_.barrier("the states of a checkpoint");
  for (const auto& group : groups_) group->parameters().publish();
  take_accumulation(read);
  kernels_->settle(resources_->gather_stream);
}

}  // namespace zeroth
