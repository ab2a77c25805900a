// A suite as a library that each rank, a Python process with torch, loads and runs: gloo_rank.py.
#include "conformance/gloo_world.h"

#include <zeroth/comm/two_level.h>
#include <zeroth/libtorch/c10d.h>

#include <gtest/gtest.h>

#include <array>

namespace {

/// Writes the name of a new group of all ranks, and leaves the one before; an empty name where it could not.
/// Collective.
using NewGroup = void (*)(char* name, std::size_t capacity);

}  // namespace

/// Exit code of this rank. `argv`: GoogleTest's, the program's name first.
extern "C" __attribute__((visibility("default"))) int zeroth_gloo_suites(NewGroup new_group, int ranks, int argc,
                                                                         char** argv) {
  zeroth::test::gloo_ranks() = {.size = ranks, .group = [new_group](const zeroth::CommOptions& options) {
                                  std::array<char, 256> name{};
                                  new_group(name.data(), name.size());
                                  zeroth::test::require(name[0] != '\0', "Python made no group; it says why above");
                                  return std::shared_ptr<zeroth::CommBackend>(zeroth::make_backend_over_hosts(
                                      zeroth::libtorch::make_c10d_transport(name.data()), options));
                                }};
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
