// ZEROTH_DOCTOR_PRETEND: what tests make up, because a machine has no broken clock when one is needed. Rules separated
// by ';':
//   version=RANK:TEXT     that rank says that it is another Zeroth
//   clock=RANK:MS         its clock is so far ahead
//   slow=A-B:BYTES        what those two ranks of one host send each other takes as long as over a link of so many
//   bytes a second silent=RANK           it does not come to the meeting
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace zeroth::doctor {

struct Pretence {
  std::map<int, std::string> versions{};
  std::map<int, double> clocks_ms{};
  std::map<std::pair<int, int>, double> slow_bytes_per_s{};  ///< lower rank first
  std::map<int, bool> silent{};

  [[nodiscard]] double slow(int a, int b) const;
};

/// Throws Error(kEnvironment) for what is no rule.
[[nodiscard]] Pretence parse_pretence(std::string_view text);

}  // namespace zeroth::doctor
