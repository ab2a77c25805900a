#include "doctor/python_command.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
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

/// `program` runs in `interpreter`; returns only by an Error.
[[noreturn]] void become(const std::string& program, const std::vector<std::string>& arguments) {
  const std::string interpreter = python();
  // -P: no module of the current directory takes the place of another one.
  std::vector<std::string> words{interpreter, "-P", "-c", program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execvp(interpreter.c_str(), pointers.data());
  throw Error(ErrorCode::kEnvironment, "no Python could be started: " + errno_text(errno),
              {.where = "zeroth.python",
               .which = interpreter,
               .hint = std::string(kVariable) + "=PATH names the Python that has zeroth"});
}

}  // namespace

void become_ckpt(std::span<const char* const> arguments) {
  become(kProgram, {arguments.begin(), arguments.end()});
}

void become_python(const std::string& program, const std::vector<std::string>& arguments, const std::string& input) {
  // A file without a name: it is there as long as the new program reads it.
  const int file = ::memfd_create("zeroth-input", 0);
  bool well = file >= 0;
  for (std::size_t written = 0; well && written < input.size();) {
    const ssize_t count = ::write(file, input.data() + written, input.size() - written);
    well = count > 0 || (count < 0 && errno == EINTR);
    written += count > 0 ? static_cast<std::size_t>(count) : 0;
  }
  if (!well || ::lseek(file, 0, SEEK_SET) != 0 || ::dup2(file, STDIN_FILENO) < 0)
    throw Error(ErrorCode::kResource, "no input for Python: " + errno_text(errno), {.where = "zeroth.python"});
  become(program, arguments);
}

}  // namespace zeroth::doctor
