// Errors: one type, stable codes, and a context: where, who, which, expected, got, hint.
#pragma once

#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace zeroth {

/// Stable classes of failure. `slug()` gives the text form; docs/errors/<slug>.md explains each one.
enum class ErrorCode {
  kUsage,        ///< the caller broke the contract of a function
  kConfig,       ///< the configuration cannot be honoured
  kModel,        ///< the model cannot be trained as asked
  kMismatch,     ///< ranks do not agree: structure, order, size or kind of a call
  kPeerLost,     ///< another rank died, left early or froze
  kTimeout,      ///< a deadline passed and every peer is alive
  kNonFinite,    ///< too many steps in a row without a finite gradient
  kOutOfMemory,  ///< the plan or an allocation does not fit
  kResource,     ///< the kernel or container refuses a resource (memfd, pidfd, sockets, descriptors)
  kIo,           ///< a file operation failed
  kCheckpoint,   ///< a checkpoint is torn or corrupt, or does not fit the model
  kLaunch,       ///< a rank could not be started
  kEnvironment,  ///< world variables, CPU features, torch version
  kAborted,      ///< another rank reported an error; this one stops with it
  kUser,         ///< an exception of the user's program
  kInternal,     ///< a bug in Zeroth
};

/// "USAGE", "CONFIG", "PEER_LOST", ...
[[nodiscard]] std::string_view slug(ErrorCode code) noexcept;
/// The code with this text form; none if there is no such code.
[[nodiscard]] std::optional<ErrorCode> code_of_slug(std::string_view text) noexcept;
/// Process exit code of a failure: 1 user, as in Python; the others from sysexits.h: 64 usage, 65 model, non-finite or
/// checkpoint, 69 launch, 70 internal, 71 memory or resource, 74 I/O, 76 peer lost, mismatch, timeout or aborted, 77
/// environment, 78 configuration.
[[nodiscard]] int exit_code(ErrorCode code) noexcept;

/// The context of an error. Empty fields are left out of the text.
struct ErrorContext {
  std::string where{};  ///< room, operation, group: "comm.shm all_gather#841 group=dp"
  std::string who{};    ///< "rank 3/8"
  std::string which{};  ///< parameter, unit, key or file
  std::string expected{};
  std::string got{};
  std::string hint{};
};

/// The one exception type. what() is
/// "[CODE] message; where: ...; who: ...; which: ...; expected: ...; got: ...; hint: ...".
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, ErrorContext context = {});

  [[nodiscard]] ErrorCode code() const noexcept { return code_; }
  [[nodiscard]] const ErrorContext& context() const noexcept { return context_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }

 private:
  ErrorCode code_;
  std::string message_;
  ErrorContext context_;
};

/// The error that other ranks get for an exception that ends this rank: an Error unchanged, std::bad_alloc as
/// kOutOfMemory, all others as kUser with the first line of what() (torch appends a stack trace).
[[nodiscard]] Error error_of(const std::exception& exception);

/// Text of errno, thread safe.
[[nodiscard]] std::string errno_text(int error_number);

namespace detail {
[[noreturn]] void assertion_failed(const char* expression, const char* file, int line, const char* note);
}  // namespace detail

}  // namespace zeroth

/// For errors that a caller, a file, another rank or the kernel can cause. Always on. The arguments after the condition
/// build an Error: ZR_CHECK(n > 0, ErrorCode::kUsage, "empty group", ErrorContext{.where = "comm.split"}).
#define ZR_CHECK(condition, ...)          \
  do {                                    \
    if (!(condition)) [[unlikely]] {      \
      throw ::zeroth::Error(__VA_ARGS__); \
    }                                     \
  } while (false)

/// For bugs of Zeroth. Always on, because it is cheap. Throws kInternal. The condition must have no side effect.
#define ZR_ASSERT(condition, note)                                              \
  do {                                                                          \
    if (!(condition)) [[unlikely]] {                                            \
      ::zeroth::detail::assertion_failed(#condition, __FILE__, __LINE__, note); \
    }                                                                           \
  } while (false)
