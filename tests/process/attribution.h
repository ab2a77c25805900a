// A job in which one rank does one thing wrong, all of it drawn from a seed; and whether the others have blamed the
// right one.
#pragma once

#include <cstdint>
#include <string>

namespace zeroth::test {

/// Runs the job of this seed in forked ranks. Returns "" if every innocent rank ended in time with an error of the
/// right code that names the guilty rank, and the call or unit where the fault has one; else the seed, what was done,
/// and what the ranks said.
[[nodiscard]] std::string misattribution(std::uint64_t seed);

/// What the seed stands for: "seed 17: rank 2 of 4 skips a step() in step 3, stage 1 over messages".
[[nodiscard]] std::string describe_seed(std::uint64_t seed);

}  // namespace zeroth::test
