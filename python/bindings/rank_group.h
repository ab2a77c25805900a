// From zeroth.Communicator to what models call. Includes torch.
#pragma once

#include "bindings.h"

#include <zeroth/libtorch/rank_group.h>

namespace zeroth::python {

/// The group of a zeroth.Communicator; its errors in backward are Python's. Throws TypeError for another object. With
/// the GIL; the result needs none.
[[nodiscard]] libtorch::RankGroup rank_group_of(const py::handle& object);

}  // namespace zeroth::python
