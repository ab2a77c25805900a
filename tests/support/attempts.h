// For what a machine that stands still, or a busy one, may spoil: times, and who comes together with whom.
#pragma once

namespace zeroth::test {

/// The result of run(), which is called again, `attempts` times at most, until `is_good` of its result. What never is
/// good is returned all the same: the test says of it what it expects.
template <class Run, class IsGood>
[[nodiscard]] auto attempted(const Run& run, const IsGood& is_good, int attempts = 3) {
  auto result = run();
  for (int left = attempts - 1; left > 0 && !is_good(result); --left) result = run();
  return result;
}

}  // namespace zeroth::test
