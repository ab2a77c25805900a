// What `zeroth schedule` prints.
#pragma once

#include "doctor/schedule_options.h"

#include <zeroth/program/simulate.h>
#include <zeroth/program/step_program.h>

#include <string>

namespace zeroth::doctor {

/// The program that the command asks for, verified; of a file, if `program` is said. Throws kUsage where the verifier
/// refutes it, and kIo for a file that cannot be read.
[[nodiscard]] StepProgram program_of(const ScheduleCommand& command);
/// The same; of late gradients several steps, so that they are seen.
[[nodiscard]] StepProgram shown_of(const StepProgram& program);
[[nodiscard]] Costs costs_of(const ScheduleCommand& command);
/// Times, waits and held activations beside their closed forms, a line a rank; messages of each link. `simulation`: of
/// shown_of().
[[nodiscard]] std::string table_of(const ScheduleCommand& command, const StepProgram& program,
                                   const Simulation& simulation);
/// Throws kIo.
void write_file(const std::string& path, const std::string& text);

}  // namespace zeroth::doctor
