// The configuration document: what is accepted reads back as itself; what is refused says where and what, in every
// problem.
#include "fuzz/fuzz_target.h"

#include <zeroth/engine/config.h>

#include <exception>
#include <string>

using zeroth::Config;
using zeroth::fuzz::expect;

namespace {

void check_accepted(const Config& config) {
  const std::string text = config.to_json();
  const Config again = Config::from_json_text(text, "again");
  expect(again == config, "an accepted configuration does not read back as itself", text);
  expect(again.to_json() == text, "its text is not the same the second time", text);
  expect(again.shared_json() == config.shared_json() && again.digest() == config.digest(), "its digest differs", text);
  config.validate();
  for (const std::string& line : config.describe())
    expect(zeroth::fuzz::is_printable(line), "a line for the log holds control characters", line);
  try {
    const zeroth::BatchSizes sizes = config.resolve(4);
    expect(sizes.train == sizes.micro * sizes.accumulate * 4, "batch sizes that do not fit each other", text);
  } catch (const zeroth::Error& error) {
    expect(error.code() == zeroth::ErrorCode::kConfig, "batch sizes are refused with another code", error.what());
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = zeroth::fuzz::text_of(data, size);
  try {
    check_accepted(Config::from_json_text(text, "fuzz.json"));
  } catch (const zeroth::ConfigError& error) {
    expect(error.code() == zeroth::ErrorCode::kConfig, "refused with another code", error.what());
    expect(!error.problems().empty(), "refused without a problem", error.what());
    for (const zeroth::ConfigProblem& problem : error.problems()) {
      expect(problem.origin.starts_with("fuzz.json"), "a problem that does not say where", problem.text());
      expect(!problem.what.empty(), "a problem that does not say what", problem.text());
      expect(zeroth::fuzz::is_printable(problem.text()), "a problem with control characters", problem.text());
    }
  } catch (const std::exception& error) {
    expect(false, "refused with something that is no ConfigError", error.what());
  }
  return 0;
}
