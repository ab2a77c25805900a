// Engine::save(): states of all ranks to files, by name and element.
#include "checkpoint/rank_file.h"
#include "engine/accumulation.h"
#include "engine/early_update.h"
#include "engine/freeze_watch.h"
#include "engine/hyper_text.h"
#include "engine/own_operations.h"
#include "engine/piece_io.h"
#include "engine/rank_file_plan.h"
#include "engine/save_outcomes.h"
#include "engine/shard_group.h"
#include "engine/state_pieces.h"
#include "engine/texts.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/engine.h>
#include <zeroth/engine/safetensors.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <utility>

namespace zeroth {
namespace {

using Json = nlohmann::ordered_json;
using detail::RankEntry;

/// A held gradient of a parameter that had none. With the whole model's numbers.
bool is_not_held(const ShardGroup& group, const StatePiece& piece) {
  if (piece.state != kHeldGradient) return false;
  const std::vector<int>& params = group.part().params;
  return !group.held()[static_cast<std::size_t>(std::ranges::find(params, piece.param) - params.begin())];
}

}  // namespace

void Engine::require_between_steps(const char* where) const {
  ZR_CHECK(!had_backward_ && micro_step_ == 0, ErrorCode::kUsage, "a checkpoint in the middle of a step",
           {.where = where,
            .expected = "a call after the last micro-step's step(), before the next backward",
            .got = std::to_string(micro_step_) + " of " + std::to_string(settings_.micro_steps) + " micro-steps",
            .hint = "call step() or zero_grad() first"});
}

void Engine::require_between_micro_steps(const char* where) const {
  if (code_) require_between_steps(where);  // ranks may be in different micro-steps
  require_same_weights(where);
  ZR_CHECK(!had_backward_, ErrorCode::kUsage, "a checkpoint between a backward and its step()",
           {.where = where,
            .expected = "a call after step(), also that of a micro-step, before the next backward",
            .got = "gradients that step() has not been told of",
            .hint = "call step() or zero_grad() first"});
}

std::vector<StatePiece> Engine::pieces_of(const ShardGroup& group) const {
  std::vector<StatePiece> pieces = pieces_of(group, early_->is_delayed);
  if (early_->is_delayed) std::erase_if(pieces, [&](const StatePiece& piece) { return is_not_held(group, piece); });
  return pieces;
}

std::vector<StatePiece> Engine::pieces_of(const ShardGroup& group, bool with_held) const {
  std::vector<StatePiece> pieces =
      state_pieces(group.layout(), group.memory(), group.writes_states(), rank(), with_held);
  for (StatePiece& piece : pieces) piece.param = group.part().params[static_cast<std::size_t>(piece.param)];
  return pieces;
}

Manifest Engine::describe_states() const {
  Manifest manifest{.version = settings_.version,
                    .step = committed_steps_,
                    .world = world(),
                    .plan = settings_.plan.name,
                    .optimizer = std::string(optimizer_->name()),
                    .configuration = settings_.configuration};
  for (const GroupHyper& group : settings_.groups) manifest.groups.push_back(text_of(group));
  if (settings_.loss_scaling.is_dynamic()) manifest.loss_scaler = text_of(scaler_.state());
  manifest.update = text_of(*early_, freeze_watch_ ? std::optional(freeze_watch_->state()) : std::nullopt);
  if (follower_) manifest.local = follower_->saved();
  std::vector<std::size_t> places;  // one a parameter; boxes of one tensor have the same
  std::map<std::string, std::size_t> known;
  for (const ParamSpec& spec : layout_.params) {
    const auto [found, fresh] = known.try_emplace(spec.tensor_name(), manifest.params.size());
    places.push_back(found->second);
    if (!fresh) continue;
    if (!spec.memory_order.empty()) manifest.format = kOrderedFormat;
    manifest.params.push_back({.name = spec.tensor_name(),
                               .shape = spec.logical_shape.empty() ? spec.shape : spec.logical_shape,
                               .dtype = safetensors_dtype(spec.dtype),
                               .trainable = spec.trainable,
                               .group = spec.group,
                               .aliases = spec.aliases});
  }
  for (const auto& group : groups_) {
    for (std::size_t index = 0; index < group->part().params.size(); ++index) {
      std::int64_t& updates = manifest.params[places[static_cast<std::size_t>(group->part().params[index])]].updates;
      updates = std::max(updates, group->updates()[index]);
    }
    for (const StateOfParam& one : described_states(group->layout(), group->memory(), early_->is_delayed)) {
      if (one.state == kHeldGradient && !group->held()[static_cast<std::size_t>(one.param)]) continue;
      const int param = group->part().params[static_cast<std::size_t>(one.param)];
      std::vector<CheckpointState>& states = manifest.params[places[static_cast<std::size_t>(param)]].states;
      if (std::ranges::find(states, one.state, &CheckpointState::name) != states.end()) continue;
      states.push_back({.name = one.state, .dtype = safetensors_dtype(one.dtype), .shape = one.logical});
    }
  }
  return manifest;
}

std::string Engine::save(const std::string& folder, const SaveOptions& options) {
  require_between_micro_steps("engine.save");
  require_own_weights("save()");
  return together([&] {
    sync(own_->save);
    require_same_folder(folder, communicator_, "engine.save");
    require_same_writes();
    settle_save();
    report_failed_save();
    if (follower_) follower_->settle();
    settle_accumulation();
    const std::string run = random_run_name();
    std::unique_ptr<PendingCheckpoint> pending;  // of rank 0
    const Json begun = Json::parse(on_first_rank(communicator_, "a checkpoint could not be begun", [&] {
      const CheckpointBase base = base_in(folder, options);
      pending = begin_checkpoint(folder, run, options);
      return Json{{"path", pending->path()}, {"base", base.name}, {"base_run", base.run}}.dump();
    }));
    const std::string path = begun.at("path");
    const CheckpointBase base{.name = begun.at("base"), .run = begun.at("base_run")};
    const std::vector<Files> files = on_all_ranks(communicator_, "a checkpoint could not be written", [&] {
      const RankFilePlan plan = plan_rank_file(options, base);
      detail::NewFile file((std::filesystem::path(path) / rank_file_name(rank())).string(), plan.bytes);
      each_part(plan, [&file](std::span<const std::byte> part) { file.write(part); });
      return Files{file.finish()};
    });
    Manifest manifest = make_manifest(options, run, base);
    std::string known = run;  // to rank 0, which asks for it
    std::string committed = on_first_rank(communicator_, "a checkpoint could not be committed", [&] {
      for (const Files& of_rank : files) manifest.files.push_back(of_rank.at(0));
      known = pending->commit(std::move(manifest), options.retention);
      return pending->final_path();
    });
    if (base.name.empty()) frozen_base_ = {.path = committed, .run = known};
    return committed;
  });
}

std::unique_ptr<PendingCheckpoint> Engine::begin_checkpoint(const std::string& folder, const std::string& run,
                                                            const SaveOptions& options) {
  auto pending = std::make_unique<PendingCheckpoint>(folder, committed_steps_, run, micro_step_,
                                                     options.overwrite ? Existing::kReplace : Existing::kSame);
  if (!pending->later().empty() && !std::exchange(told_of_later_, true)) {
    log_.warn("the folder " + folder + " has checkpoints of later steps than " +
              std::filesystem::path(pending->final_path()).filename().string() +
              ", of another run or of one that was rolled back: " + few(pending->later()) +
              "; load() takes the one that was committed last, and keep_last counts commits");
  }
  return pending;
}

CheckpointBase Engine::base_in(const std::string& folder, const SaveOptions& options) const {
  namespace fs = std::filesystem;
  const bool any = std::ranges::any_of(layout_.params, [](const ParamSpec& spec) { return !spec.trainable; });
  if (options.frozen == Frozen::kCopy || !frozen_base_ || !any) return {};
  const fs::path path(frozen_base_->path);
  std::error_code error;
  if (!fs::equivalent(path.parent_path(), fs::path(folder), error)) return {};
  if (path.filename() == checkpoint_name(committed_steps_, micro_step_)) return {};  // it would refer to itself
  try {
    if (!why_torn(path.string()).empty() || read_manifest(path.string()).run != frozen_base_->run) return {};
  } catch (const Error&) {
    return {};  // it has gone: this save makes another one
  }
  mark_as_base(path.string());
  return {.name = path.filename().string(), .run = frozen_base_->run};
}

Manifest Engine::make_manifest(const SaveOptions& options, const std::string& run, const CheckpointBase& base) {
  std::vector<std::string> users = gather_texts(options.user_of_rank, communicator_);
  const std::string params = describe_all_params();
  const std::string accumulation = describe_accumulation();
  Manifest manifest;
  if (rank() != 0) return manifest;
  manifest = describe_states();
  add_params_of_others(manifest, params);
  manifest.run = run;
  manifest.base = base;
  manifest.accumulation = accumulation;
  manifest.user = options.user;
  manifest.user_of_rank = std::move(users);
  for (const ExtraTensor& extra : options.extras) manifest.extras.push_back(extra.about);
  return manifest;
}

Engine::RankFilePlan Engine::plan_rank_file(const SaveOptions& options, const CheckpointBase& base) {
  RankFilePlan plan;
  for (const auto& group : groups_) {
    for (StatePiece& piece : pieces_of(*group)) {
      const bool elsewhere = !base.name.empty() && !layout_.params[static_cast<std::size_t>(piece.param)].trainable;
      if (piece.writes.size() > 0 && !elsewhere) plan.pieces.push_back(std::move(piece));
    }
  }
  for (const auto& group : groups_) {
    if (micro_step_ == 0) break;
    for (StatePiece& piece : step_pieces(*group, rank())) {
      piece.param = group->part().params[static_cast<std::size_t>(piece.param)];
      if (piece.writes.size() > 0) plan.pieces.push_back(std::move(piece));
    }
  }
  std::vector<RankEntry> entries;
  for (const StatePiece& piece : plan.pieces) {
    BoxRange range = piece.has;
    range.begin = piece.writes.begin;
    range.end = piece.writes.end;
    entries.push_back({.key = piece.key(layout_.params[static_cast<std::size_t>(piece.param)]),
                       .dtype = safetensors_dtype(piece.dtype),
                       .range = std::move(range)});
  }
  if (rank() == 0) plan.extras = options.extras;
  for (const ExtraTensor& extra : plan.extras) {
    std::int64_t elements = 1;
    for (const std::int64_t extent : extra.about.shape) elements *= extent;
    const std::uint64_t element = detail::bytes_of_dtype(extra.about.dtype);
    ZR_CHECK(element > 0 && static_cast<std::uint64_t>(elements) * element == extra.data.size(), ErrorCode::kUsage,
             "a tensor for a checkpoint has bytes that do not fit it",
             {.where = "engine.save", .which = extra.about.name, .got = std::to_string(extra.data.size())});
    entries.push_back({.key = detail::kExtraKey + extra.about.name,
                       .dtype = extra.about.dtype,
                       .range = BoxRange::of_whole(extra.about.shape, 0, elements)});
  }
  plan.header = detail::make_header(entries);
  plan.bytes = plan.header.size();
  for (const RankEntry& entry : entries) plan.bytes += entry.bytes;
  return plan;
}

void Engine::each_part(const RankFilePlan& plan, const std::function<void(std::span<const std::byte>)>& write) {
  write(std::as_bytes(std::span(plan.header)));
  for (const StatePiece& piece : plan.pieces) PieceReader(piece, *kernels_, resources_->gather_stream).each(write);
  for (const ExtraTensor& extra : plan.extras) write(extra.data);
}

std::string Engine::describe_all_params() {
  // Ranks whose groups have other parameters (stages of a pipeline) name theirs; else nobody has to.
  const bool alike = std::ranges::all_of(groups_, [](const auto& group) { return group->has_all_ranks(); });
  if (alike) return "";
  Json json = Json::array();
  const Manifest own = describe_states();
  Manifest bare{
      .format = own.format, .world = 1, .params = own.params, .user_of_rank = {""}, .files = {{.name = "none"}}};
  const std::vector<std::string> all = gather_texts(to_text(bare), communicator_);
  for (const std::string& text : all) json.push_back(text);
  return json.dump();
}

void Engine::add_params_of_others(Manifest& manifest, const std::string& all) {
  if (all.empty()) return;
  std::map<std::string, std::size_t> known;
  for (std::size_t at = 0; at < manifest.params.size(); ++at) known.emplace(manifest.params[at].name, at);
  for (const Json& text : Json::parse(all)) {
    Manifest theirs = manifest_of(text.get<std::string>(), "a rank's parameters");
    manifest.format = std::max(manifest.format, theirs.format);
    for (CheckpointParam& param : theirs.params) {
      const auto [found, fresh] = known.try_emplace(param.name, manifest.params.size());
      if (fresh) {
        manifest.params.push_back(std::move(param));
        continue;
      }
      // Ranks that have no elements of a parameter, as other stages, do not update it.
      std::int64_t& updates = manifest.params[found->second].updates;
      updates = std::max(updates, param.updates);
    }
  }
}

}  // namespace zeroth
