// Engine::save_async(): a checkpoint that is written behind the training, and how all ranks hear of its end.
#include "engine/commit_vote.h"
#include "engine/own_operations.h"
#include "engine/rank_file_plan.h"
#include "engine/save_in_flight.h"
#include "engine/save_outcomes.h"
#include "engine/texts.h"

#include <zeroth/base/error.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/engine.h>

#include <nlohmann/json.hpp>

#include <cstring>
#include <utility>

namespace zeroth {
namespace {

using Json = nlohmann::ordered_json;

/// How a save that ran behind ended, for all ranks to hear.
std::string outcome_of(SaveInFlight& save) {
  const std::optional<Error>& error = save.background().error();
  return outcome_text(error ? &*error : nullptr, {});
}

std::optional<Error> error_in(const std::string& outcome) {
  const Json json = Json::parse(outcome);
  if (!json.contains("code")) return {};
  return Error(code_of_slug(json.at("code").get<std::string>()).value_or(ErrorCode::kIo),
               "a checkpoint that was written behind the training is not there",
               {.where = "engine.save_async",
                .got = json.at("text").get<std::string>(),
                .hint = "the states are as they were, and so are earlier checkpoints; this call has done nothing"});
}

}  // namespace

SaveHandle Engine::save_async(const std::string& folder, const SaveOptions& options) {
  require_between_micro_steps("engine.save_async");
  require_own_weights("save_async()");
  return together([&] {
    sync(own_->save);
    require_same_folder(folder, communicator_, "engine.save_async");
    settle_save();
    report_failed_save();
    if (follower_) follower_->settle();
    settle_accumulation();
    const std::string run = random_run_name();
    std::unique_ptr<PendingCheckpoint> pending;  // of rank 0
    const Json begun = Json::parse(on_first_rank(communicator_, "a checkpoint could not be begun", [&] {
      const CheckpointBase base = base_in(folder, options);
      pending = begin_checkpoint(folder, run, options);
      return Json{{"path", pending->path()},
                  {"final", pending->final_path()},
                  {"run", run},
                  {"base", base.name},
                  {"base_run", base.run}}
          .dump();
    }));
    const CheckpointBase base{.name = begun.at("base"), .run = begun.at("base_run")};
    BackgroundSave::Terms terms{.folder = begun.at("path"),
                                .final_path = begun.at("final"),
                                .run = begun.at("run"),
                                .rank = rank(),
                                .world = world(),
                                .timeout = options.timeout,
                                .retention = options.retention};
    const std::string path = terms.final_path;
    std::unique_ptr<BackgroundSave> background;
    (void)on_all_ranks(communicator_, "a checkpoint could not be copied", [&] {
      const RankFilePlan plan = plan_rank_file(options, base);
      const std::span<std::byte> copy = checkpoint_copy(plan.bytes);
      std::byte* next = copy.data();
      each_part(plan, [&next](std::span<const std::byte> part) {
        std::memcpy(next, part.data(), part.size());
        next += part.size();
      });
      terms.file = copy;
      background = std::make_unique<BackgroundSave>(std::move(terms), std::move(pending));
      return Files{};
    });
    background->begin(make_manifest(options, run, base));
    saving_ = std::make_shared<SaveInFlight>(path, std::move(background), [this] {
      together([&] {
        sync(own_->await_save);
        settle_save();
      });
    });
    if (base.name.empty()) {
      saving_->set_when_there([this, made = FrozenBase{.path = path, .run = begun.at("run")}] { frozen_base_ = made; });
    }
    return SaveHandle(saving_);
  });
}

std::span<std::byte> Engine::checkpoint_copy(std::size_t bytes) {
  if (checkpoint_copy_.capacity() < bytes) {
    checkpoint_copy_ = {};
    const std::uint64_t there = available_memory_bytes();
    ZR_CHECK(bytes < there, ErrorCode::kOutOfMemory, "there is no memory for the copy of a checkpoint",
             {.where = "engine.save_async",
              .expected = format_bytes(bytes),
              .got = format_bytes(there),
              .hint = "save() without a copy writes from the states and needs none"});
    checkpoint_copy_ = Arena::create(ArenaKind::kPrivate, align_up(bytes, kPageBytes), "checkpoint");
  }
  return {checkpoint_copy_.data(), bytes};
}

void Engine::settle_save() {
  if (!saving_ || saving_->is_settled()) return;
  constexpr Milliseconds kSlice{1'000};  // the others wait in a call of all ranks, which has a deadline of its own
  std::string said;
  do {
    if (rank() == 0) said = saving_->background().wait(kSlice) ? outcome_of(*saving_) : "";
    said = broadcast_text(std::move(said), 0, communicator_);
  } while (said.empty());
  saving_->settle(error_in(said));
}

void Engine::settle_save(const CommitVote& vote) {
  if (!saving_ || saving_->is_settled() || !vote.save_ended) return;
  if (!vote.save_failed) return saving_->settle({});
  std::string said;
  if (rank() == 0) said = outcome_of(*saving_);
  saving_->settle(error_in(broadcast_text(std::move(said), 0, communicator_)));
}

void Engine::report_failed_save() {
  if (saving_) saving_->throw_if_failed();
}

void Engine::finish_save() noexcept {
  if (!saving_) return;
  while (!saving_->background().wait(kWaitSlice)) {
    try {
      communicator_.backend().check_peers({.what = "a save that runs behind"});
    } catch (const std::exception&) {
      saving_->background().hurry();
    }
  }
  saving_->part_from_engine();
  try {
    saving_->throw_if_failed();
  } catch (const Error& error) {
    log_.error(error.what());
  }
}

SaveHandle::SaveHandle(std::shared_ptr<SaveInFlight> save) : save_(std::move(save)) {}

const std::string& SaveHandle::path() const {
  return save_->path();
}

bool SaveHandle::done() const {
  return save_->has_ended();
}

const std::string& SaveHandle::wait() {
  save_->settle_together();
  save_->throw_if_failed();
  return save_->committed_path();
}

void SaveHandle::finish() const {
  while (!save_->background().wait(kWaitSlice)) check_interrupt();
}

}  // namespace zeroth
