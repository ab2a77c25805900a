// An executor of programs that shares nothing with the verifier: ranks with queues, and values that say what they were
// computed from.
#pragma once

#include <zeroth/program/step_program.h>

#include <string>

namespace zeroth::test {

/// Runs the ranks until none comes further. "" if all come to their end, and every chunk then has the gradients of
/// every micro-batch once, computed from the right values, reduced and stepped; else what went wrong.
[[nodiscard]] std::string run_by_queues(const StepProgram& program);

}  // namespace zeroth::test
