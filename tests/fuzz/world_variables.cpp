// The launcher's variables, as lines NAME=VALUE: a world that makes sense, and is the same from its own numbers; or
// which variable is wrong.
#include "fuzz/fuzz_target.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/factory.h>
#include <zeroth/engine/world.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <string>

using zeroth::World;
using zeroth::fuzz::expect;

namespace {

using Variables = std::map<std::string, std::string, std::less<>>;

Variables variables_of(std::string_view text) {
  Variables variables;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const std::size_t equals = line.find('=');
    // As in a real environment: no NUL, and one value a name.
    if (equals == std::string_view::npos || line.find('\0') != std::string_view::npos) continue;
    variables.insert_or_assign(std::string(line.substr(0, equals)), std::string(line.substr(equals + 1)));
  }
  return variables;
}

World world_of(const Variables& variables) {
  return World::from_variables([&](std::string_view name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = zeroth::fuzz::text_of(data, size);
  const Variables variables = variables_of(text);
  try {
    const World world = world_of(variables);
    expect(world.size() >= 1 && world.rank() >= 0 && world.rank() < world.size(), "a rank that is not in its world",
           text);
    expect(world.local_rank() >= 0 && world.local_rank() < world.size(), "a local rank that is not in its world", text);
    const std::string& backend = world.backend_name();
    const auto is_known = [](const std::string& part) { return part == "shm" || part == "mpi" || part == "shm+mpi"; };
    expect(backend == "self" || std::ranges::all_of(zeroth::backends_in(backend), is_known), "an unknown transport",
           backend);
    const World same = world_of({{"RANK", std::to_string(world.rank())},
                                 {"WORLD_SIZE", std::to_string(world.size())},
                                 {"LOCAL_RANK", std::to_string(world.local_rank())},
                                 {"ZEROTH_BACKEND", backend == "self" ? "" : backend},
                                 {"ZEROTH_JOB_ID", world.job()}});
    expect(same.rank() == world.rank() && same.size() == world.size() && same.local_rank() == world.local_rank(),
           "a world that is another one from its own numbers", text);
    expect(same.job() == world.job() && same.backend_name() == backend, "another job or transport", text);
  } catch (const zeroth::Error& error) {
    expect(error.code() == zeroth::ErrorCode::kEnvironment, "refused with another code", error.what());
    expect(error.context().where == "world" && !error.context().which.empty(), "refused without the variable",
           error.what());
    expect(!error.context().expected.empty(), "refused without what is expected", error.what());
    expect(!error.context().hint.empty(), "refused without a hint", error.what());
  } catch (const std::exception& error) {
    expect(false, "refused with something that is no Error", error.what());
  }
  return 0;
}
