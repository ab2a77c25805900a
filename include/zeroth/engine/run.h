// run(): the main() of a rank's program.
//
//   int main() { return zeroth::run(train); }    // void train(const zeroth::World& world), or int
#pragma once

#include <zeroth/engine/world.h>

#include <exception>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>

namespace zeroth {

/// The line with which a rank ends, on its standard error: "ZEROTH ERROR [CODE] rank=r/n: text". zeroth-run reads it
/// and names it as the cause.
[[nodiscard]] std::string error_line(const std::exception& cause, int rank, int size);

/// Makes the world from the launcher's variables and calls program(world). Returns what that returns, the exit code of
/// the process. If an exception leaves it: standard output is flushed, error_line() written to standard error, the
/// other ranks are told (World::abort()), and the exit code of the error is returned: exit_code(error_of(e).code()).
/// Throws nothing.
[[nodiscard]] int run_program(const std::function<int(const World& world)>& program) noexcept;

/// The same for any callable; one that returns nothing ends with 0.
template <class Program>
[[nodiscard]] int run(Program&& program) noexcept {
  return run_program([&program](const World& world) -> int {
    if constexpr (std::is_void_v<std::invoke_result_t<Program&, const World&>>) {
      program(world);
      return 0;
    } else {
      return program(world);
    }
  });
}

}  // namespace zeroth
