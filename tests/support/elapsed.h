// How long a test has waited.
#pragma once

#include <chrono>

namespace zeroth::test {

/// Time since it was made.
class Elapsed {
 public:
  [[nodiscard]] bool below(int milliseconds) const {
    return std::chrono::steady_clock::now() - begin_ < std::chrono::milliseconds(milliseconds);
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace zeroth::test
