// Failpoints: named places (sites) at which a test, or the variable ZEROTH_FAULTS, makes this process fail. They are
// always compiled in; an unarmed site costs one load and one branch. (base/planted.h is different: wrong results, in
// special builds.)
//
//   ZEROTH_FAULTS="shm.reduce_scatter.mid@rank=1,hit=3:kill;export.write:errno=ENOSPC"
//
//   spec   = rule *(";" rule)
//   rule   = site ["@" condition *("," condition)] ":" action
//   condition = rank=N         on this rank only
//             | hit=N          at the N-th pass of the process, counted from 1; without it at every pass
//             | p=X [,seed=N]  at every pass with this probability, 0 < X <= 1; not with hit
//   action = kill | stop       SIGKILL, SIGSTOP
//          | exit=N            _exit(N), 0 to 255
//          | throw             Error{kInternal} "planted failure at SITE"
//          | sleep=MS          at most an hour
//          | errno=NAME        the system call fails with it; sites at a system call only
#pragma once

#include <zeroth/base/failpoint_table.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

enum class FailpointAction { kKill, kStop, kExit, kThrow, kSleep, kErrno };

/// The action of a site, and its conditions.
struct FailpointRule {
  std::string site{};
  std::optional<int> rank{};            ///< none: on every rank
  std::uint64_t hit = 0;                ///< 0: every time
  std::optional<double> probability{};  ///< none: always
  std::uint64_t seed = 0;               ///< of the probability
  FailpointAction action = FailpointAction::kThrow;
  int argument = 0;  ///< exit code, milliseconds or errno

  bool operator==(const FailpointRule&) const = default;
};

/// One site, as `zeroth-run --list-failpoints` prints it.
struct Failpoint {
  std::string name{};
  std::string_view file{};
  int line = 0;  ///< of the first place with this name
  std::string_view what{};
  FailpointKind kind = FailpointKind::kThrowing;
};

/// All sites, in the order of the table.
[[nodiscard]] std::vector<Failpoint> failpoints();

inline constexpr const char* kFailpointVariable = "ZEROTH_FAULTS";

/// Reads a spec as above. Throws kEnvironment with the column, what is expected there, and the nearest name.
[[nodiscard]] std::vector<FailpointRule> parse_failpoints(std::string_view spec);
/// The spec of these rules; parse_failpoints() of it returns equal rules.
[[nodiscard]] std::string to_text(std::span<const FailpointRule> rules);

/// Arms these rules for the whole process, which is rank `rank`. Replaces earlier rules and restarts the counts. The
/// rules must come from parse_failpoints().
void arm_failpoints(std::vector<FailpointRule> rules, int rank);
/// Disarms all sites.
void disarm_failpoints() noexcept;
/// Arms the rules in ZEROTH_FAULTS, once per process. The rank comes from RANK, OMPI_COMM_WORLD_RANK or SLURM_PROCID; 0
/// without them. Every World and make_backend() call it. Throws the errors of parse_failpoints() at each call.
void arm_failpoints_of_environment();

namespace detail {

/// True if any site is armed. Hidden visibility: read without the global offset table of a shared library.
extern std::atomic<bool> failpoints_armed [[gnu::visibility("hidden")]];

/// The row of a site in `file`. A name that the table does not have for that file does not compile.
consteval std::size_t failpoint_row(std::string_view name, std::string_view file) {
  for (std::size_t row = 0; row < kFailpoints.size(); ++row) {
    if (kFailpoints[row].name != name) continue;
    if (!file.ends_with(kFailpoints[row].file)) throw "the table says that this failpoint is in another file";
    return row;
  }
  throw "this failpoint is not in include/zeroth/base/failpoint_table.h";
}

/// `member`: the text of the star; empty for a row without a star. Returns true, with errno set, if a system call shall
/// fail; else false.
[[gnu::cold, gnu::noinline]] bool pass_failpoint(std::size_t row, std::string_view member, int line);

}  // namespace detail
}  // namespace zeroth

/// A site: the name of its row in the table.
#define ZR_FAILPOINT(name) ZR_FAILPOINT_OF(name, ::std::string_view())

/// A site of a row with a star; `member` replaces the star.
#define ZR_FAILPOINT_OF(name, member)                                                                      \
  do {                                                                                                     \
    if (::zeroth::detail::failpoints_armed.load(::std::memory_order_relaxed)) [[unlikely]] {               \
      ::zeroth::detail::pass_failpoint(::zeroth::detail::failpoint_row(name, __FILE__), member, __LINE__); \
    }                                                                                                      \
  } while (false)

/// A site at a system call: true, with errno set, if the call shall fail. Example:
/// `const int fd = ZR_FAILPOINT_ERRNO("export.open") ? -1 : ::open(...)`.
#define ZR_FAILPOINT_ERRNO(name)                                           \
  (::zeroth::detail::failpoints_armed.load(::std::memory_order_relaxed) && \
   ::zeroth::detail::pass_failpoint(::zeroth::detail::failpoint_row(name, __FILE__), ::std::string_view(), __LINE__))
