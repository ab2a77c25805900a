// Variables of launchers and schedulers that describe several ranks and yet do not make this process one of them.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace zeroth::detail {

using VariableLookup = std::function<std::optional<std::string>(std::string_view)>;

/// Whether srun has started this process as a rank of its step. Not so in a batch script and in the shell of salloc:
/// Slurm describes the whole allocation to them. Throws kEnvironment where half of the variables of a step are there.
[[nodiscard]] bool is_rank_of_srun(const VariableLookup& lookup);

/// For a process that no launcher has made a rank: the variables that speak of several ranks, why they are not taken,
/// and what to do; "" if there are none. One line.
[[nodiscard]] std::string variables_not_taken(const VariableLookup& lookup);

}  // namespace zeroth::detail
