// What ranks tell each other of their part in a checkpoint: an error, or files. All hear the same.
#pragma once

#include <zeroth/base/error.h>
#include <zeroth/checkpoint/manifest.h>
#include <zeroth/comm/communicator.h>

#include <functional>
#include <string>
#include <vector>

namespace zeroth {

using Files = std::vector<CheckpointFile>;

/// JSON of what a rank has done. `error`: null where it did.
[[nodiscard]] std::string outcome_text(const Error* error, const Files& files);

/// What `work` returns, as above; its errors, and std::bad_alloc, become a text as well.
[[nodiscard]] std::string outcome_of_call(const std::function<Files()>& work);

/// The files that a rank's text names.
[[nodiscard]] Files files_of(const std::string& outcome);

/// Throws what the first rank that failed says, on every rank alike. `outcomes`: of the ranks from `first` on, of so
/// many of the job. `what`: message of that error.
void throw_if_any_failed(const std::vector<std::string>& outcomes, const char* what, int first, int world);

/// Collective, blocks. Runs `work` on every rank; throws as above, or returns the files of every rank.
std::vector<Files> on_all_ranks(const Communicator& communicator, const char* what, const std::function<Files()>& work);

/// Collective, blocks. Runs `work` on rank 0 only, and all ranks get what it returns, or throw what it throws.
std::string on_first_rank(const Communicator& communicator, const char* what, const std::function<std::string()>& work);

/// Throws kMismatch on every rank, with the odd one and both folders, if ranks name other folders. Collective, blocks.
void require_same_folder(const std::string& folder, const Communicator& communicator, const char* where);

/// The name of one save, that no other has.
[[nodiscard]] std::string random_run_name();

}  // namespace zeroth
