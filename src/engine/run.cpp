#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/run.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <optional>

namespace zeroth {
namespace {

std::string line_of(const Error& error, const std::string& who) {
  const std::string code = "[" + std::string(slug(error.code())) + "]";
  std::string text = error.what();
  if (text.starts_with(code + " ")) text.erase(0, code.size() + 1);
  return "ZEROTH ERROR " + code + " " + who + ": " + text + "\n";
}

std::string name_of_rank(int rank, int size) {
  return "rank=" + std::to_string(rank) + "/" + std::to_string(size);
}

int end_rank(const std::exception& cause, const std::optional<World>& world) {
  const Error error = error_of(cause);
  std::cout.flush();
  (void)std::fflush(nullptr);  // what the program has said so far stands before its end
  const std::string line = line_of(error, world ? name_of_rank(world->rank(), world->size()) : "rank=?/?");
  (void)std::fwrite(line.data(), 1, line.size(), stderr);  // at once: lines of ranks do not mix
  (void)std::fflush(stderr);
  if (world) world->abort(cause);
  return exit_code(error.code());
}

}  // namespace

std::string error_line(const std::exception& cause, int rank, int size) {
  return line_of(error_of(cause), name_of_rank(rank, size));
}

int run_program(const std::function<int(const World& world)>& program) noexcept {
  std::optional<World> world;
  try {
    world = World::from_environment();
    return program(*world);
  } catch (const std::exception& cause) {
    return end_rank(cause, world);
  } catch (...) {
    return end_rank(Error(ErrorCode::kUser, "an exception left the program that is no std::exception"), world);
  }
}

}  // namespace zeroth
