#include "comm/control/end_of_job.h"

#include <zeroth/comm/control_plane.h>
#include <zeroth/comm/rank_activity.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace zeroth {
namespace {

/// What transports say of a rank that has stopped the job.
constexpr std::string_view kStopped = " stopped the job: ";

constexpr std::string_view kWho = "; who: ";

/// The error whose what() has this text behind its code.
Error parsed(ErrorCode code, std::string_view text) {
  ErrorContext context;
  std::string message;
  std::string* part = &message;
  for (const auto& [name, field] :
       {std::pair("; where: ", &context.where), std::pair("; who: ", &context.who),
        std::pair("; which: ", &context.which), std::pair("; expected: ", &context.expected),
        std::pair("; got: ", &context.got), std::pair("; hint: ", &context.hint)}) {
    const std::size_t end = text.find(name);
    if (end == std::string_view::npos) continue;
    *part = text.substr(0, end);
    text.remove_prefix(end + std::string_view(name).size());
    part = field;
  }
  *part = text;
  return Error(code, std::move(message), std::move(context));
}

/// A rank throws it because of what another one did.
bool is_about_others(ErrorCode code) {
  return code == ErrorCode::kMismatch || code == ErrorCode::kPeerLost || code == ErrorCode::kTimeout;
}

}  // namespace

Error end_of_job(int rank, const Error& error) {
  const bool judged = dynamic_cast<const JobVerdict*>(&error) != nullptr;
  const bool heard = error.code() == ErrorCode::kAborted && error.message().find(kStopped) != std::string::npos;
  const std::string& who = error.context().who;
  const std::string own = fmt::format("rank {}", rank);
  const bool of_another = !who.empty() && who != own && !who.starts_with(own + "/");
  if (judged || heard || of_another || is_about_others(error.code())) return error;
  return Error(ErrorCode::kAborted, fmt::format("{}{}{}", own, kStopped, detail::without_who(error.what())),
               {.who = who});
}

namespace detail {

std::string without_who(std::string text) {
  const std::size_t begin = text.find(kWho);
  if (begin == std::string::npos) return text;
  std::size_t end = text.size();
  for (const std::string_view next : {"; which: ", "; expected: ", "; got: ", "; hint: "})
    end = std::min(end, text.find(next, begin + kWho.size()));
  return text.erase(begin, end - begin);
}

bool is_own_error(const Error& error) noexcept {
  return !is_about_others(error.code()) && error.code() != ErrorCode::kAborted &&
         dynamic_cast<const JobVerdict*>(&error) == nullptr;
}

Error with_action(const Error& error, const std::string& action) {
  ErrorContext context = error.context();
  const bool names_it = action.starts_with("action " + context.which + " ");  // as "1F0"
  context.which = context.which.empty() || names_it ? action : context.which + ", in " + action;
  return Error(error.code(), error.message(), std::move(context));
}

Error cause_of_stop(const Error& stopped) {
  Error cause = stopped;
  for (std::string_view text = stopped.message(); text.starts_with("rank ");) {
    const std::size_t begin = text.find(kStopped);
    if (begin == std::string_view::npos) break;
    text.remove_prefix(begin + kStopped.size());
    const std::size_t end = text.find("] ");
    if (!text.starts_with('[') || end == std::string_view::npos) break;
    const std::optional<ErrorCode> code = code_of_slug(text.substr(1, end - 1));
    text.remove_prefix(end + 2);
    const bool passed_on =
        code == ErrorCode::kAborted && text.starts_with("rank ") && text.find(kStopped) != std::string_view::npos;
    if (!passed_on && !(code && is_about_others(*code))) break;
    cause = parsed(*code, text);
  }
  if (cause.code() != ErrorCode::kAborted) return cause;
  return Error(cause.code(), without_who(cause.message()), cause.context());
}

}  // namespace detail
}  // namespace zeroth
