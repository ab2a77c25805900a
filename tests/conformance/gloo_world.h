// Worlds of torch's gloo in the conformance suite. Only Python can make its groups: a rank is a Python process that
// loads the suites as a library (gloo_suites.cpp, gloo_rank.py), and each world of a case is a new group.
#pragma once

#include "conformance/started_ranks.h"

#include <functional>
#include <memory>
#include <string>

namespace zeroth::test {

/// What the library knows of torch. A test program, which has none, leaves it as it is.
struct GlooRanks {
  int size = 0;
  std::function<std::shared_ptr<CommBackend>(const CommOptions&)> group{};  ///< in a new group
};

[[nodiscard]] inline GlooRanks& gloo_ranks() {
  static GlooRanks ranks;
  return ranks;
}

/// "shm+gloo" has shared memory inside nodes.
[[nodiscard]] inline bool is_gloo_world(const std::string& backend) {
  return backend == "gloo" || backend == "shm+gloo";
}

/// Runs body(rank, backend) on this rank; every rank has the report of all.
[[nodiscard]] inline RankReport run_gloo_world(const RankBody& body, const CommOptions& options,
                                               bool abort_on_failure) {
  return run_started_rank({.group = [&] { return gloo_ranks().group(options); },
                           .group_of_report = [] { return gloo_ranks().group(quick_options()); }},
                          body, abort_on_failure);
}

}  // namespace zeroth::test
