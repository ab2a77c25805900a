// What hints call the engine's calls, in the language of the front end.
#pragma once

#include <zeroth/libtorch/engine.h>

namespace zeroth::libtorch {

struct Words {
  const char* gather;      ///< reads a parameter outside of its unit
  const char* units;       ///< makes other units
  const char* give_back;   ///< gives parameters their values as ordinary memory
  const char* dropped;     ///< why they have none
  const char* edit_call;   ///< the call that lets ranks write to parameters
  const char* edit;        ///< the same with arguments
  const char* edit_all;    ///< every rank writes the same
  const char* edit_first;  ///< rank 0's values are taken
  const char* not_strict;
};

inline constexpr Words kCppWords{
    .gather = "engine.gathered({parameter})",
    .units = "Unit<Block> or run_as_unit() makes other units",
    .give_back = "release_parameters()",
    .dropped = "the engine that held them is gone, and release_parameters() was not called",
    .edit_call = "gathered(parameters, writers)",
    .edit = "engine.gathered({parameter}, {.rank = ...})",
    .edit_all = "Writers::kAll",
    .edit_first = "rank = 0",
    .not_strict = "strict = false"};
inline constexpr Words kPythonWords{
    .gather = "engine.gathered(parameter)",
    .units = "units=[...] names other units when the engine is built",
    .give_back = "close()",
    .dropped = "the engine that held them was dropped, or closed with keep_parameters false",
    .edit_call = "gathered(modify_on=...)",
    .edit = "engine.gathered(parameter, modify_on=...)",
    .edit_all = "modify_on=\"all\"",
    .edit_first = "modify_on=0",
    .not_strict = "strict=False"};

[[nodiscard]] constexpr const Words& words_of(FrontEnd front_end) {
  return front_end == FrontEnd::kPython ? kPythonWords : kCppWords;
}

}  // namespace zeroth::libtorch
