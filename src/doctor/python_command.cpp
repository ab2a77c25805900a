#include "doctor/python_command.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

namespace zeroth::doctor {
namespace {

constexpr const char* kVariable = "ZEROTH_PYTHON";
constexpr const char* kProgram = R"(import sys
try:
    from zeroth.ckpt.command import main
except ImportError as error:
    print(f"zeroth: [ENVIRONMENT] Python cannot import zeroth.ckpt: {error}; which: {sys.executable}; "
          "hint: ZEROTH_PYTHON=PATH names the Python that has zeroth", file=sys.stderr)
    sys.exit(77)
sys.exit(main(sys.argv[1:]))
)";

std::string python() {
  const std::string said = variable_or_empty(kVariable);
  if (!said.empty()) return said;
  std::error_code error;
  const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  if (!error && ::access((here / "python3").c_str(), X_OK) == 0) return (here / "python3").string();
  return "python3";
}

}  // namespace

void become_ckpt(std::span<const char* const> arguments) {
  const std::string program = python();
  // -P: no module of the current directory takes the place of another one.
  std::vector<std::string> words{program, "-P", "-c", kProgram};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execvp(program.c_str(), pointers.data());
  throw Error(ErrorCode::kEnvironment, "no Python could be started: " + errno_text(errno),
              {.where = "zeroth.ckpt",
               .which = program,
               .hint = std::string(kVariable) + "=PATH names the Python that has zeroth"});
}

}  // namespace zeroth::doctor
