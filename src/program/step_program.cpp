#include <zeroth/program/step_program.h>

namespace zeroth {

std::vector<int> StepProgram::chunks_of(int rank) const {
  std::vector<int> own;
  for (int chunk = 0; chunk < chunks(); ++chunk) {
    if (rank_of_chunk[static_cast<std::size_t>(chunk)] == rank) own.push_back(chunk);
  }
  return own;
}

}  // namespace zeroth
