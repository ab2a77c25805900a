// The number of a call that all ranks of an engine make together.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace zeroth {

/// A row of an engine's table of such calls (zeroth/engine/operation.h); the same on all ranks, which compare it.
enum class OperationId : std::uint8_t {};

/// The name of each row, for errors: "step()", "an export". Any number: that of a peer may have no row.
using OperationNames = std::function<std::string(OperationId)>;

}  // namespace zeroth
