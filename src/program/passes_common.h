// What passes check first.
#pragma once

#include "program/structure.h"

namespace zeroth {

/// Throws kUsage for a program whose structure is not valid, and for one with an action of which `is_it` holds.
void require_none(const StepProgram& program, const char* pass, bool (*is_it)(const Action&));

}  // namespace zeroth
