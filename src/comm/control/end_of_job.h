// How the error of one rank reads on the others.
#pragma once

#include <zeroth/base/error.h>

namespace zeroth::detail {

/// Of a transport's "rank 1 stopped the job: [PEER_LOST] rank 2 was killed ...": the loss, for that is what happened,
/// with the words of rank 1. What is an error of rank 1's own stays as it is.
[[nodiscard]] Error cause_of_stop(const Error& stopped);

}  // namespace zeroth::detail
