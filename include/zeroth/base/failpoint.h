// Failpoints: named places at which a test, or the variable ZEROTH_FAULTS, makes this process fail. Always
// compiled in; a place that nothing is asked of costs one load and a branch. (base/planted.h is another
// thing: wrong results, in builds made for that.)
//
//   ZEROTH_FAULTS="shm.reduce_scatter.mid@rank=1,hit=3:kill;export.write:errno=ENOSPC"
//
//   spec   = rule *(";" rule)
//   rule   = site ["@" condition *("," condition)] ":" action
//   condition = rank=N         on this rank only
//             | hit=N          at the N-th time that the process comes by, counted from 1; without it at each
//             | p=X [,seed=N]  at each time with this probability, 0 < X <= 1; not with hit
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

/// What a site is to do, and when.
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
/// The spec of these rules: parse_failpoints() gives them back.
[[nodiscard]] std::string to_text(std::span<const FailpointRule> rules);

/// For the whole process, which is rank `rank`: replaces what was asked for before, and counts from the
/// start. Rules must be such as parse_failpoints() gives.
void arm_failpoints(std::vector<FailpointRule> rules, int rank);
/// Nothing is asked of any site.
void disarm_failpoints() noexcept;
/// Arms what ZEROTH_FAULTS asks for, once in a process; the rank is that of RANK, OMPI_COMM_WORLD_RANK or
/// SLURM_PROCID, 0 without them. Every World and make_backend() call it. Throws as parse_failpoints() does,
/// each time.
void arm_failpoints_of_environment();

namespace detail {

/// Whether any site is asked for anything. Hidden: read without a detour through the table of addresses of a
/// shared library.
extern std::atomic<bool> failpoints_armed [[gnu::visibility("hidden")]];

/// The row of a site in `file`; the compiler refuses a name that the table does not have there.
consteval std::size_t failpoint_row(std::string_view name, std::string_view file) {
  for (std::size_t row = 0; row < kFailpoints.size(); ++row) {
    if (kFailpoints[row].name != name) continue;
    if (!file.ends_with(kFailpoints[row].file)) throw "the table says that this failpoint is in another file";
    return row;
  }
  throw "this failpoint is not in include/zeroth/base/failpoint_table.h";
}

/// `member`: what the star stands for; else empty. False unless a system call is to fail; then errno is set.
[[gnu::cold, gnu::noinline]] bool pass_failpoint(std::size_t row, std::string_view member, int line);

}  // namespace detail
}  // namespace zeroth

/// A site: the name of its row in the table.
#define ZR_FAILPOINT(name) ZR_FAILPOINT_OF(name, ::std::string_view())

/// A site of a row with a star, which stands for `member` here.
#define ZR_FAILPOINT_OF(name, member)                                                                      \
  do {                                                                                                     \
    if (::zeroth::detail::failpoints_armed.load(::std::memory_order_relaxed)) [[unlikely]] {               \
      ::zeroth::detail::pass_failpoint(::zeroth::detail::failpoint_row(name, __FILE__), member, __LINE__); \
    }                                                                                                      \
  } while (false)

/// At a system call: true if it shall fail, with errno set. `const int fd = ZR_FAILPOINT_ERRNO("export.open")
/// ? -1 : ::open(...)`.
#define ZR_FAILPOINT_ERRNO(name)                                           \
  (::zeroth::detail::failpoints_armed.load(::std::memory_order_relaxed) && \
   ::zeroth::detail::pass_failpoint(::zeroth::detail::failpoint_row(name, __FILE__), ::std::string_view(), __LINE__))
