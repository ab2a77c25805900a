#include "launcher/program.h"

#include "launcher/environment.h"
#include "launcher/spawn.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

namespace zeroth::launcher {
namespace {

struct Python {
  std::string path;
  std::string from;  ///< the variable that led to it
};

Python find_python(const std::string& what, const std::vector<std::string>& environment) {
  const std::optional<std::string> active = variable_in(environment, "VIRTUAL_ENV");
  const bool has_active = active && !active->empty();
  if (has_active) {
    for (const char* name : {"/bin/python", "/bin/python3"}) {
      if (is_runnable(*active + name)) return {.path = *active + name, .from = "VIRTUAL_ENV"};
    }
  }
  const std::string search_path = search_path_of(environment);
  for (const char* name : {"python3", "python"}) {
    if (const std::optional<std::string> path = look_up(name, search_path)) {
      return {.path = *path, .from = has_active ? "PATH; VIRTUAL_ENV=" + *active + " has no bin/python" : "PATH"};
    }
  }
  throw Error(
      ErrorCode::kEnvironment, "there is no Python to run this",
      {.which = what,
       .expected = "bin/python of VIRTUAL_ENV, or python3 or python in PATH",
       .got = fmt::format("{}, PATH={}", has_active ? "VIRTUAL_ENV=" + *active : "no VIRTUAL_ENV", search_path),
       .hint =
           "activate an environment, or write the interpreter before it: zeroth-run -n N /usr/bin/python3 " + what});
}

/// The path for Python: as it was written, where it is a file.
std::string find_script(const std::string& script, const std::string& search_path) {
  struct stat info{};
  if (::stat(script.c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) cannot_start(script, EISDIR, "name a file");
    if (::access(script.c_str(), R_OK) != 0) cannot_start(script, errno, "Python must be able to read it");
    return script;
  }
  if (script.find('/') != std::string::npos) cannot_start(script, errno);
  if (const std::optional<std::string> path = look_up(script, search_path)) return *path;
  std::error_code ignored;
  cannot_start(script, ENOENT,
               fmt::format("it is neither in the working directory, {}, nor an executable in PATH",
                           std::filesystem::current_path(ignored).string()));
}

}  // namespace

bool runs_by_python(const std::vector<std::string>& command) {
  return command.front() == kModule || command.front().ends_with(".py");
}

Program program_of(const std::vector<std::string>& command, const std::vector<std::string>& environment) {
  const std::string search_path = search_path_of(environment);
  if (!runs_by_python(command)) return {.file = find_program(command.front(), search_path), .arguments = command};
  const bool is_module = command.front() == kModule;
  ZR_CHECK(!is_module || command.size() > 1, ErrorCode::kUsage, "no module to run was given",
           {.which = kModule, .hint = "zeroth-run -n N -m MODULE [arguments...]"});
  const std::string what = is_module ? "-m " + command.at(1) : command.front();
  std::vector<std::string> arguments = command;
  if (!is_module) arguments.front() = find_script(command.front(), search_path);
  const Python python = find_python(what, environment);
  arguments.insert(arguments.begin(), {python.path, "-u"});
  return {.file = python.path,
          .arguments = std::move(arguments),
          .note = fmt::format("{} is run by {} -u ({})", what, python.path, python.from)};
}

}  // namespace zeroth::launcher
