// Operation: one row of an engine's table of calls that all ranks make together.
//
// Who adds such a call writes its row and the call, and names it nowhere else. The row gives its name in errors and
// traces, the tag that ranks compare, the announcement to ranks without a batch, and their part in it or its refusal.
#pragma once

#include <zeroth/zero/operation_id.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace zeroth {

/// The next action of a rank; see Engine::next_batch().
enum class Next : std::uint8_t {
  kBatch,  ///< train with its batch
  kEnd,    ///< end its epoch
  kStep,   ///< without a batch: call step(), as the other ranks do, then join()
};

struct Operation {
  /// The number that is announced with a call: a digest of the call's name, a unit, or a flat; -1: none.
  enum class Subject : std::uint8_t { kName, kUnit, kFlat };

  std::string name{};  ///< "average()", "an export"; no other row has it
  Subject subject = Subject::kName;
  /// On a rank without a batch, when the others have announced the call: makes it, with nothing of this rank's own.
  /// What it returns, if anything, the front end does next. Unset: there is no such part, and the call is refused while
  /// some ranks have no batch.
  std::function<std::optional<Next>(int subject)> join{};
  bool offered = true;  ///< if it can be joined: the refusal of another call names it
};

}  // namespace zeroth
