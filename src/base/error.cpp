#include <zeroth/base/error.h>

#include <cstring>
#include <new>
#include <system_error>

namespace zeroth {
namespace {

std::string render(ErrorCode code, const std::string& message, const ErrorContext& context) {
  std::string text = "[" + std::string(slug(code)) + "] " + message;
  const auto add = [&text](const char* name, const std::string& value) {
    if (!value.empty()) {
      text += name;
      text += value;
    }
  };
  add("; where: ", context.where);
  add("; who: ", context.who);
  add("; which: ", context.which);
  add("; expected: ", context.expected);
  add("; got: ", context.got);
  add("; hint: ", context.hint);
  return text;
}

}  // namespace

std::string_view slug(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kUsage:
      return "USAGE";
    case ErrorCode::kConfig:
      return "CONFIG";
    case ErrorCode::kModel:
      return "MODEL";
    case ErrorCode::kMismatch:
      return "MISMATCH";
    case ErrorCode::kPeerLost:
      return "PEER_LOST";
    case ErrorCode::kTimeout:
      return "TIMEOUT";
    case ErrorCode::kNonFinite:
      return "NONFINITE";
    case ErrorCode::kOutOfMemory:
      return "OUT_OF_MEMORY";
    case ErrorCode::kResource:
      return "RESOURCE";
    case ErrorCode::kIo:
      return "IO";
    case ErrorCode::kCheckpoint:
      return "CHECKPOINT";
    case ErrorCode::kLaunch:
      return "LAUNCH";
    case ErrorCode::kEnvironment:
      return "ENVIRONMENT";
    case ErrorCode::kAborted:
      return "ABORTED";
    case ErrorCode::kUser:
      return "USER";
    case ErrorCode::kInternal:
      return "INTERNAL";
  }
  return "INTERNAL";
}

std::optional<ErrorCode> code_of_slug(std::string_view text) noexcept {
  for (int code = 0; code <= static_cast<int>(ErrorCode::kInternal); ++code) {
    if (slug(static_cast<ErrorCode>(code)) == text) return static_cast<ErrorCode>(code);
  }
  return std::nullopt;
}

int exit_code(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kUser:
      return 1;
    case ErrorCode::kUsage:
      return 64;
    case ErrorCode::kModel:
    case ErrorCode::kCheckpoint:
      return 65;
    case ErrorCode::kLaunch:
      return 69;
    case ErrorCode::kInternal:
      return 70;
    case ErrorCode::kOutOfMemory:
    case ErrorCode::kResource:
      return 71;
    case ErrorCode::kNonFinite:
      return 65;
    case ErrorCode::kIo:
      return 74;
    case ErrorCode::kMismatch:
    case ErrorCode::kPeerLost:
    case ErrorCode::kTimeout:
    case ErrorCode::kAborted:
      return 76;
    case ErrorCode::kEnvironment:
      return 77;
    case ErrorCode::kConfig:
      return 78;
  }
  return 70;
}

Error::Error(ErrorCode code, const std::string& message, ErrorContext context)
    : std::runtime_error(render(code, message, context)),
      code_(code),
      message_(message),
      context_(std::move(context)) {}

Error error_of(const std::exception& exception) {
  if (const auto* error = dynamic_cast<const Error*>(&exception)) return *error;
  const std::string text = exception.what();
  if (dynamic_cast<const std::bad_alloc*>(&exception) != nullptr)
    return {ErrorCode::kOutOfMemory, "an allocation failed", {.got = text}};
  return {ErrorCode::kUser, text.substr(0, text.find('\n'))};
}

std::string errno_text(int error_number) {
  return std::generic_category().message(error_number) + " (errno " + std::to_string(error_number) + ")";
}

namespace detail {

void assertion_failed(const char* expression, const char* file, int line, const char* note) {
  const char* slash = std::strrchr(file, '/');
  throw Error(ErrorCode::kInternal, note,
              {.where = std::string(slash != nullptr ? slash + 1 : file) + ":" + std::to_string(line),
               .expected = expression,
               .hint = "this is a bug in Zeroth; please report it with this line"});
}

}  // namespace detail
}  // namespace zeroth
