// From an engine of Python to the one of C++ inside. Includes torch.
#pragma once

#include "bindings.h"

#include <zeroth/libtorch/engine.h>

namespace zeroth::python {

/// The engine of a _C.Engine. Throws TypeError for another object, kUsage for one that is closed. With the GIL.
[[nodiscard]] libtorch::EngineBase& engine_base_of(const py::handle& object);

}  // namespace zeroth::python
