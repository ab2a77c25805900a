// An update that fails between the commit vote and the end of the step: some units are updated, others are not.
//
// All ranks have to know, or some go on from a step that others have not made. Where states rest in files, whose reads
// and writes may fail, ranks tell each other at the end of each update, and all refuse what would use such weights
// until load() has replaced them. Elsewhere an update has nothing that fails as a rule: the rank that fails stops the
// job.
#include "engine/early_update.h"
#include "engine/shard_group.h"
#include "engine/texts.h"

#include <zeroth/base/error.h>
#include <zeroth/engine/engine.h>

#include <algorithm>
#include <exception>
#include <string>

namespace zeroth {
namespace {

/// What a rank tells of an error; "" for none.
std::string text_of(const std::exception_ptr& failure) {
  if (!failure) return "";
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception without a text";
  }
}

/// The same, for the job to end with.
Error error_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return error;
  } catch (...) {
    return {ErrorCode::kInternal, "an update failed in its middle: " + text_of(failure), {.where = "engine.step"}};
  }
}

/// The error is of the calls between ranks: no further call will come through.
bool is_of_ranks(const std::exception_ptr& failure) {
  try {
    if (failure) std::rethrow_exception(failure);
    return false;
  } catch (const Error& error) {
    switch (error.code()) {
      case ErrorCode::kPeerLost:
      case ErrorCode::kTimeout:
      case ErrorCode::kAborted:
      case ErrorCode::kMismatch:
        return true;
      default:
        return false;
    }
  } catch (...) {
    return false;
  }
}

}  // namespace

void Engine::update_guarded(std::exception_ptr& failure, const std::function<void()>& part) {
  if (failure) return;
  try {
    part();
  } catch (...) {
    failure = std::current_exception();
  }
}

void Engine::publish_guarded(std::exception_ptr& failure) {
  if (is_of_ranks(failure)) return;
  std::exception_ptr own;
  update_guarded(own, [this] { publish_updates(); });  // also after an error: others wait for this rank's shards
  if (!failure) failure = own;
}

void Engine::settle_update(const std::exception_ptr& failure) {
  const ResidencyPlan& residency = settings_.plan.residency;
  const bool in_files = residency.optimizer == Residency::kFiles || residency.parameter == Residency::kFiles;
  std::string cause = text_of(failure);
  int failed = failure ? rank() : -1;
  if (in_files && world() > 1 && !is_of_ranks(failure)) {
    std::vector<std::int64_t> words(static_cast<std::size_t>(world()), 0);
    words[static_cast<std::size_t>(rank())] = failure ? 1 : 0;
    communicator_.all_reduce(std::span<std::int64_t>(words));
    const auto first = std::ranges::find_if(words, [](std::int64_t word) { return word != 0; });
    if (first == words.end()) return;
    failed = static_cast<int>(first - words.begin());
    cause = broadcast_text(std::move(cause), failed, communicator_);
  } else if (!failure) {
    return;
  } else if (world() > 1 && !is_of_ranks(failure)) {
    communicator_.backend().abort(error_of(failure));
  }
  forget_gradients();
  early_->terms.reset();
  early_->is_delayed = false;
  early_->is_torn = true;
  early_->torn_by = "rank " + std::to_string(failed) + ": " + cause;
  if (failure) std::rethrow_exception(failure);
  throw Error(ErrorCode::kAborted, "the update failed on another rank, so the weights of all are torn",
              {.where = "engine.step",
               .who = "rank " + std::to_string(failed) + "/" + std::to_string(world()),
               .got = cause,
               .hint = "load() of a checkpoint brings all ranks to one step again"});
}

void Engine::require_not_torn(const char* what) const {
  ZR_CHECK(!early_->is_torn, ErrorCode::kUsage,
           early_->torn_by.empty() ? "the weights are torn by an update that was refused"
                                   : "the weights are torn by an update that failed",
           {.where = "engine",
            .which = what,
            .got = early_->torn_by,
            .hint = "load() of a whole checkpoint brings all ranks to one step again"});
}

void require_no_local_steps(const ShardGroups& groups, std::int64_t committed, const char* what) {
  const bool differ = std::ranges::any_of(groups, [](const auto& group) { return group->has_local_steps(); });
  ZR_CHECK(!differ, ErrorCode::kUsage, "the weights of ranks differ between two synchronisations",
           {.where = "engine",
            .which = what,
            .expected = "a call after a step in which ranks synchronise",
            .got = std::to_string(committed) + " steps",
            .hint = "of ZeroOneAdam these are multiples of its interval, see docs/slow-links.md"});
}

void Engine::require_same_weights(const char* what) const {
  require_not_torn(what);
  require_no_local_steps(groups_, committed_steps_, what);
}

}  // namespace zeroth
