// Which file a command runs, and by which Python.
#include "launcher/program.h"

#include "process/launcher/scratch.h"

#include <zeroth/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <vector>

namespace zeroth::launcher {
namespace {

using test::Scratch;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Words = std::vector<std::string>;

class Programs : public ::testing::Test {
 protected:
  /// An environment with these directories in PATH, and with VIRTUAL_ENV if `active` names one.
  [[nodiscard]] Words environment(const Words& directories, const std::string& active = "") const {
    std::string path;
    for (const std::string& directory : directories) path += (path.empty() ? "" : ":") + scratch.path(directory);
    Words variables{"A=1", "PATH=" + path};
    if (!active.empty()) variables.push_back("VIRTUAL_ENV=" + scratch.path(active));
    return variables;
  }
  void python(const std::string& name) const { scratch.file(name, "#!/bin/sh\n", 0755); }

  Scratch scratch;
  std::string script = scratch.file("train.py", "print()\n");
};

std::string refusal(ErrorCode code, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "not refused";
}

TEST_F(Programs, APythonOfTheEnvironmentRunsAScript) {
  python("venv/bin/python");
  python("first/python");
  python("second/python3");
  const std::string active = scratch.path("venv/bin/python");
  const Program by_venv = program_of({script, "--lr", "1"}, environment({"second"}, "venv"));
  EXPECT_EQ(by_venv.file, active);
  EXPECT_THAT(by_venv.arguments, ElementsAre(active, "-u", script, "--lr", "1"));
  EXPECT_EQ(by_venv.note, script + " is run by " + active + " -u (VIRTUAL_ENV)");
  EXPECT_EQ(program_of({script}, environment({"first", "second"})).file, scratch.path("second/python3"))
      << "python may be an old one";
  const Program by_path = program_of({script}, environment({"first"}));
  EXPECT_EQ(by_path.file, scratch.path("first/python"));
  EXPECT_THAT(by_path.note, ::testing::EndsWith(" -u (PATH)"));
}

TEST_F(Programs, AnEnvironmentThatIsGoneIsSaid) {
  python("bin/python3");
  const Program program = program_of({script}, environment({"bin"}, "gone"));
  EXPECT_EQ(program.file, scratch.path("bin/python3"));
  EXPECT_THAT(program.note, HasSubstr("(PATH; VIRTUAL_ENV=" + scratch.path("gone") + " has no bin/python)"));
}

TEST_F(Programs, NeitherExecBitNorFirstLineDecides) {
  python("bin/python3");
  const std::string executable = scratch.file("tool.py", "#!/bin/sh\n", 0755);
  EXPECT_EQ(program_of({executable}, environment({"bin"})).file, scratch.path("bin/python3"));
  const std::string other = scratch.file("tool", "#!/bin/sh\n", 0755);
  const Program as_it_is = program_of({other, "x.py"}, environment({"bin"}));
  EXPECT_EQ(as_it_is.file, other);
  EXPECT_THAT(as_it_is.arguments, ElementsAre(other, "x.py"));
  EXPECT_EQ(as_it_is.note, "");
}

TEST_F(Programs, ABareNameIsAFileHereOrAnExecutableOfPath) {
  python("bin/python3");
  scratch.file("bin/installed.py", "", 0755);
  EXPECT_THAT(program_of({"installed.py"}, environment({"bin"})).arguments,
              ElementsAre(scratch.path("bin/python3"), "-u", scratch.path("bin/installed.py")));
  const std::string missing = refusal(ErrorCode::kUsage, [&] { (void)program_of({"no.py"}, environment({"bin"})); });
  EXPECT_THAT(missing, HasSubstr("cannot start no.py: No such file or directory"));
  EXPECT_THAT(missing, HasSubstr("neither in the working directory, /"));
  EXPECT_THAT(refusal(ErrorCode::kUsage, [&] { (void)program_of({"/no/x.py"}, environment({"bin"})); }),
              HasSubstr("cannot start /no/x.py"));
  scratch.file("folder.py/file", "");
  EXPECT_THAT(
      refusal(ErrorCode::kEnvironment, [&] { (void)program_of({scratch.path("folder.py")}, environment({"bin"})); }),
      HasSubstr("Is a directory"));
  if (::geteuid() != 0) {
    const std::string secret = scratch.file("secret.py", "", 0000);
    EXPECT_THAT(refusal(ErrorCode::kEnvironment, [&] { (void)program_of({secret}, environment({"bin"})); }),
                HasSubstr("Permission denied"));
  }
}

TEST_F(Programs, AModuleIsRunByPython) {
  python("bin/python3");
  const std::string own = scratch.path("bin/python3");
  const Program program = program_of({kModule, "package.train", "-m", "x"}, environment({"bin"}));
  EXPECT_THAT(program.arguments, ElementsAre(own, "-u", "-m", "package.train", "-m", "x"));
  EXPECT_EQ(program.note, "-m package.train is run by " + own + " -u (PATH)");
  EXPECT_THAT(refusal(ErrorCode::kUsage, [&] { (void)program_of({kModule}, environment({"bin"})); }),
              HasSubstr("no module"));
}

TEST_F(Programs, WithoutAnyPythonItSaysWhereItHasLooked) {
  const std::string text =
      refusal(ErrorCode::kEnvironment, [&] { (void)program_of({script}, environment({"none"}, "gone")); });
  EXPECT_THAT(text, HasSubstr("there is no Python to run this; which: " + script));
  EXPECT_THAT(text, HasSubstr("got: VIRTUAL_ENV=" + scratch.path("gone") + ", PATH=" + scratch.path("none")));
  EXPECT_THAT(text, HasSubstr("hint: activate an environment"));
}

}  // namespace
}  // namespace zeroth::launcher
