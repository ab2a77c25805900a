// What zeroth-run wrote with --json about a job that did not run to its end: whose fault it was.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace zeroth::doctor {

struct Culprit {
  std::string host{};
  std::string text{};
  bool late = false;  ///< only because it was not there yet when another failed, or until the deadline

  bool operator==(const Culprit&) const = default;
};

/// Hosts that could not take part, or else the host of the first cause. Lines that are no status are left out.
[[nodiscard]] std::vector<Culprit> culprits_of(std::string_view lines);
/// Those to leave out in another attempt: who is only late gets another chance as long as somebody else is to blame.
[[nodiscard]] std::vector<Culprit> to_leave_out(const std::vector<Culprit>& culprits);
/// Text of the job's end, "" if there is none.
[[nodiscard]] std::string end_of(std::string_view lines);

}  // namespace zeroth::doctor
