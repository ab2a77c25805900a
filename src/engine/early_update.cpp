#include "engine/early_update.h"

#include "engine/commit_vote.h"
#include "engine/hyper_text.h"
#include "engine/own_operations.h"
#include "engine/shard_group.h"
#include "engine/step_outcome.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/engine.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace zeroth {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kInsideBackward = "/zeroth/update/inside_backward";

std::string refusal_of(const CommitVote& vote) {
  if (vote.discarding_rank >= 0) return "zero_grad() on rank " + std::to_string(vote.discarding_rank);
  if (vote.idle_rank >= 0) return "no backward on rank " + std::to_string(vote.idle_rank);
  if (vote.other_groups_rank >= 0) return "other hyper-parameters on rank " + std::to_string(vote.other_groups_rank);
  if (vote.other_trains_rank >= 0)
    return "other trainable parameters on rank " + std::to_string(vote.other_trains_rank);
  if (vote.other_writes_rank >= 0)
    return "other values written to parameters on rank " + std::to_string(vote.other_writes_rank);
  return "";
}

}  // namespace

void require_possible(const EngineSettings& settings, bool host_updates) {
  const UpdateSettings& update = settings.update;
  const auto refuse = [](const char* why, const char* expected, const std::string& got, const char* hint) {
    throw Error(ErrorCode::kConfig, why,
                {.where = "engine", .which = kInsideBackward, .expected = expected, .got = got, .hint = hint});
  };
  if (update.delayed_after) {
    ZR_CHECK(*update.delayed_after >= 0, ErrorCode::kConfig, "a number of steps is negative",
             {.where = "engine", .which = "/zeroth/update/delayed_after"});
    ZR_CHECK(host_updates, ErrorCode::kConfig, "updates of a device's own states are not delayed",
             {.where = "engine", .which = "/zeroth/update/delayed_after", .expected = "states in memory of the host"});
  }
  if (!update.inside_backward) return;
  if (update.delayed_after) {
    refuse("an update cannot be inside its own backward and inside the next one", "one of both",
           "delayed_after = " + std::to_string(*update.delayed_after), "leave out one of the two keys");
  }
  if (settings.gradient_clipping > 0 && update.clip_by == ClipBy::kExact) {
    refuse("an update inside backward is to be clipped by a norm that is known after it", "no gradient_clipping",
           "gradient_clipping = " + std::to_string(settings.gradient_clipping),
           "with zeroth.update.clip_by = previous_norm the last step's norm clips; without inside_backward the update "
           "starts with the verdict");
  }
  if (settings.loss_scaling.is_dynamic()) {
    refuse("an update inside backward beside a loss scale that is looked for by overflows", "no step that may overflow",
           "fp16.loss_scale = 0", "set fp16.loss_scale to one that stays, or train in bf16");
  }
  if (!host_updates) {
    refuse("an update inside backward on a device that keeps its states", "states in memory of the host or in files",
           "a device", "leave out inside_backward: there is no transfer to hide");
  }
}

double clip_coefficient(double clipping, double norm) {
  return clipping > 0 ? std::min(1.0, clipping / (norm + 1e-6)) : 1.0;
}

std::optional<UpdateTerms> terms_before_vote(const EngineSettings& settings, const EarlyUpdate& early,
                                             std::int64_t batches, double loss_scale, std::int64_t committed) {
  if (!settings.update.inside_backward) return std::nullopt;
  if (settings.gradient_clipping > 0 && !early.last_norm) return std::nullopt;  // the first step, by its own norm
  const double clip = clip_coefficient(settings.gradient_clipping, early.last_norm.value_or(0.0));
  return UpdateTerms{.factor = mean_factor(batches) * clip / loss_scale,
                     .groups = settings.groups,
                     .lr_factor = settings.schedule.factor(committed)};
}

std::string text_of(const EarlyUpdate& early, const std::optional<FreezeState>& freeze) {
  Json json;
  if (freeze) json["freeze_step"] = freeze->step;
  if (freeze && freeze->has_settled) json["has_settled"] = true;
  if (freeze && freeze->last_sum) json["sum_of_variances"] = hex_float(*freeze->last_sum);
  if (early.last_norm) json["last_norm"] = hex_float(*early.last_norm);
  if (early.is_delayed) {
    std::vector<std::string> groups;
    for (const GroupHyper& group : early.terms->groups) groups.push_back(text_of(group));
    json["delayed"] = {{"factor", hex_float(early.terms->factor)},
                       {"lr_factor", hex_float(early.terms->lr_factor)},
                       {"groups", std::move(groups)}};
  }
  return json.is_null() ? "" : json.dump();
}

SavedUpdate saved_update_of(const std::string& text, const std::string& where) {
  SavedUpdate saved;
  if (text.empty()) return saved;
  const auto number = [](const Json& json, const char* name) {
    const auto said = json.at(name).get<std::string>();
    std::size_t read = 0;
    const double value = std::stod(said, &read);
    if (read != said.size()) throw std::invalid_argument(said);
    return value;
  };
  try {
    const Json json = Json::parse(text);
    if (json.contains("last_norm")) saved.last_norm = number(json, "last_norm");
    if (json.contains("freeze_step")) {
      saved.freeze = FreezeState{.step = json.at("freeze_step").get<std::int64_t>(),
                                 .has_settled = json.value("has_settled", false)};
      if (json.contains("sum_of_variances")) saved.freeze->last_sum = number(json, "sum_of_variances");
    }
    if (!json.contains("delayed")) return saved;
    const Json& delayed = json.at("delayed");
    saved.is_delayed = true;
    saved.factor = number(delayed, "factor");
    saved.lr_factor = number(delayed, "lr_factor");
    saved.groups = delayed.at("groups").get<std::vector<std::string>>();
    return saved;
  } catch (const std::exception& error) {
    throw Error(ErrorCode::kCheckpoint, "the update of a checkpoint cannot be read",
                {.where = "engine.load", .which = where, .got = error.what()});
  }
}

void require_committed(const CommitVote& vote, const StepResult& result) {
  if (vote.updated_rank < 0 || (!vote.refused() && result.reason.empty())) return;
  const ErrorCode of_reason = vote.failed_rank >= 0 ? ErrorCode::kAborted : ErrorCode::kNonFinite;
  throw Error(vote.refused() ? ErrorCode::kMismatch : of_reason,
              "a step was refused after its update had begun inside backward: the weights are torn",
              {.where = "engine.vote",
               .who = "rank " + std::to_string(vote.updated_rank) + " has updated units",
               .which = result.first_offender ? result.first_offender->param : "",
               .expected = "a step that is committed",
               .got = vote.refused() ? refusal_of(vote) : result.reason,
               .hint = "go on from the last checkpoint; zeroth.update.inside_backward = false skips such a step and "
                       "changes nothing"});
}

bool Engine::updates_early() const {
  const bool last = micro_step_ + 1 == settings_.micro_steps && gathers_.empty();
  return last && !early_->has_absent && !early_->is_torn && early_->terms.has_value();
}

void Engine::begin_early_update() {
  if (early_->is_delayed || early_->begun) return;  // of the step before; or begun, and the terms stay
  early_->terms = terms_before_vote(settings_, *early_, std::int64_t{data_ranks_} * settings_.micro_steps,
                                    scaler_.scale(), committed_steps_);
}

void Engine::advance_early_update() {
  if (!updates_early()) return;
  for (const auto& group : groups_) {
    if (group->update_ended(*early_->terms, early_->is_delayed)) early_->begun = true;
  }
}

void Engine::delay_update(UpdateTerms terms) {
  for (const auto& group : groups_) group->hold_sums();
  early_->terms = std::move(terms);
  early_->is_delayed = true;
}

void Engine::finish_delayed_update() {
  if (!early_->is_delayed) return;
  for (const auto& group : groups_) group->update_held(*early_->terms);
  early_->terms.reset();
  early_->is_delayed = false;
}

void Engine::end_delayed_update() {
  if (!early_->is_delayed) return;
  std::exception_ptr failure;
  update_guarded(failure, [this] { finish_delayed_update(); });
  publish_guarded(failure);
  settle_update(failure);
}

bool Engine::has_delayed_update() const {
  return early_->is_delayed;
}

void Engine::flush_update() {
  require_own_weights("flush_update()");
  require_quiet("flush_update()");
  if (!early_->is_delayed) return;  // on all ranks
  together([&] {
    sync(own_->flush);
    for (const auto& group : groups_) group->complete_uses();
    communicator_.barrier("flush_update()");
    end_delayed_update();
  });
}

void Engine::require_whole(const char* what) const {
  require_not_torn(what);
  const bool between = had_backward_ && micro_step_ + 1 == settings_.micro_steps;
  ZR_CHECK(!between || !updates_early(), ErrorCode::kUsage,
           "parameters are needed between the last backward of a step and step(), while they are updated",
           {.where = "engine",
            .which = what,
            .expected = "a call after step()",
            .hint = "or no zeroth.update: then parameters change in step() only"});
}

}  // namespace zeroth
