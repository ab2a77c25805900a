// What ranks, zeroth-run and tests tell `zeroth doctor`: a report, status lines, rules.
#include "doctor/pretend.h"
#include "doctor/report.h"
#include "doctor/status_lines.h"
#include "fuzz/fuzz_target.h"

#include <zeroth/base/error.h>

#include <exception>
#include <string>
#include <string_view>

using zeroth::Error;
using zeroth::ErrorCode;
using zeroth::fuzz::expect;

namespace {

/// A report that is accepted is the same when it is written and read again; any other is LAUNCH.
void try_report(std::string_view text) {
  try {
    const std::string once = zeroth::doctor::to_text(zeroth::doctor::report_from(text));
    expect(zeroth::doctor::to_text(zeroth::doctor::report_from(once)) == once, "a report that changes", once);
  } catch (const Error& error) {
    expect(error.code() == ErrorCode::kLaunch, "another code for a report", error.what());
  }
}

/// Only hosts with a name are blamed, and somebody is left out if anybody is to blame.
void try_status_lines(std::string_view text) {
  const auto culprits = zeroth::doctor::culprits_of(text);
  for (const auto& culprit : culprits) expect(!culprit.host.empty(), "a host without a name", text);
  expect(culprits.empty() == zeroth::doctor::to_leave_out(culprits).empty(), "nobody is left out", text);
  (void)zeroth::doctor::end_of(text);
}

void try_rules(std::string_view text) {
  try {
    for (const auto& [pair, rate] : zeroth::doctor::parse_pretence(text).slow_bytes_per_s) {
      expect(pair.first < pair.second && rate > 0, "a pair that is none", text);
    }
  } catch (const Error& error) {
    expect(error.code() == ErrorCode::kEnvironment, "another code for rules", error.what());
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = zeroth::fuzz::text_of(data, size);
  try {
    try_report(text);
    try_status_lines(text);
    try_rules(text);
  } catch (const std::exception& error) {
    expect(false, "an exception of another kind", error.what());
  }
  return 0;
}
