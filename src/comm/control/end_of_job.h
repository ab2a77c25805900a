// How the error of one rank reads on the others.
#pragma once

#include <zeroth/base/error.h>

#include <string>

namespace zeroth::detail {

/// Of a transport's "rank 1 stopped the job: [PEER_LOST] rank 2 was killed ...": the loss, for that is what happened,
/// with the words of rank 1. What is an error of rank 1's own stays as it is.
[[nodiscard]] Error cause_of_stop(const Error& stopped);

/// The text of an error without the field that says who, for an error that has one of its own.
[[nodiscard]] std::string without_who(std::string text);

/// Whether an error is of the rank that throws it, not of what it saw of another one.
[[nodiscard]] bool is_own_error(const Error& error) noexcept;
/// An error of the rank's own, with the action of a pipeline that it ended.
[[nodiscard]] Error with_action(const Error& error, const std::string& action);

}  // namespace zeroth::detail
