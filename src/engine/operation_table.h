// OperationTable: the rows of an engine's operations, in the order in which they were added.
#pragma once

#include <zeroth/engine/operation.h>

#include <cstddef>
#include <deque>
#include <string>

namespace zeroth {

class OperationTable {
 public:
  /// A number for an announcement must fit a byte, with one more for none.
  static constexpr std::size_t kMostRows = 255;

  /// Throws kUsage for a row without a name of its own, or one too many.
  [[nodiscard]] OperationId add(Operation row);
  /// Null for a number without a row.
  [[nodiscard]] const Operation* find(OperationId id) const noexcept;
  /// "an unknown call" for a number without a row.
  [[nodiscard]] std::string name(OperationId id) const;
  /// Calls of a script that ranks without a batch can take part in: "forward, backward, step() or barrier()".
  [[nodiscard]] std::string offered() const;

 private:
  std::deque<Operation> rows_;  ///< a row that is being joined stays where it is
};

}  // namespace zeroth
