// Errors: one type, stable codes, and a context that says where, who, which, what was expected, what came, what to do.
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
  kModel,        ///< the model holds something that cannot be trained as asked
  kMismatch,     ///< ranks do not agree: structure, order, size or kind of a call
  kPeerLost,     ///< another rank died, left early or froze
  kTimeout,      ///< a deadline passed and every peer is alive
  kNonFinite,    ///< too many steps in a row without a finite gradient
  kOutOfMemory,  ///< the plan or an allocation does not fit
  kResource,     ///< the kernel or container refuses what is needed (memfd, pidfd, sockets, file descriptors)
  kIo,           ///< a file operation failed
  kLaunch,       ///< a rank could not be started
  kEnvironment,  ///< world variables, CPU features, torch version
  kAborted,      ///< another rank reported an error; this one stops with it
  kUser,         ///< an exception of the program around Zeroth
  kInternal,     ///< a bug in Zeroth
};

/// "USAGE", "CONFIG", "PEER_LOST", ...
[[nodiscard]] std::string_view slug(ErrorCode code) noexcept;
/// The code that has this text form; none if there is no such code.
[[nodiscard]] std::optional<ErrorCode> code_of_slug(std::string_view text) noexcept;
/// Process exit code of a failure: 1 user, as Python ends with; else of sysexits.h: 64 usage, 65 model or non-finite,
/// 69 launch, 70 internal, 71 memory or resource, 74 I/O, 76 peer lost, mismatch, timeout or aborted, 77 environment,
/// 78 configuration.
[[nodiscard]] int exit_code(ErrorCode code) noexcept;

/// The six questions a reader of an error asks. Empty fields are left out of the text.
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

/// What an exception that ends a rank is to the others: an Error as it is, std::bad_alloc kOutOfMemory, all else kUser
/// with the first line of what() (torch appends a stack trace).
[[nodiscard]] Error error_of(const std::exception& exception);

/// Text of errno, thread safe.
[[nodiscard]] std::string errno_text(int error_number);

namespace detail {
[[noreturn]] void assertion_failed(const char* expression, const char* file, int line, const char* note);
}  // namespace detail

}  // namespace zeroth

/// Always on: for all that a caller, a file, a peer or the kernel can cause. Arguments after the condition build an
/// Error: ZR_CHECK(n > 0, ErrorCode::kUsage, "empty group", ErrorContext{.where = "comm.split"}).
#define ZR_CHECK(condition, ...)          \
  do {                                    \
    if (!(condition)) [[unlikely]] {      \
      throw ::zeroth::Error(__VA_ARGS__); \
    }                                     \
  } while (false)

/// For our own bugs; always on as well (it is cheap), throws kInternal. Never put an effect inside.
#define ZR_ASSERT(condition, note)                                              \
  do {                                                                          \
    if (!(condition)) [[unlikely]] {                                            \
      ::zeroth::detail::assertion_failed(#condition, __FILE__, __LINE__, note); \
    }                                                                           \
  } while (false)
