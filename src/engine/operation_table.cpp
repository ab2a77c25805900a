#include "engine/operation_table.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace zeroth {

OperationId OperationTable::add(Operation row) {
  ZR_CHECK(!row.name.empty() && std::ranges::find(rows_, row.name, &Operation::name) == rows_.end(), ErrorCode::kUsage,
           "an operation needs a name that no other one has", {.where = "engine.operations", .which = row.name});
  ZR_CHECK(rows_.size() < kMostRows, ErrorCode::kUsage, "an engine has too many operations",
           {.where = "engine.operations", .which = row.name, .expected = std::to_string(kMostRows) + " at most"});
  rows_.push_back(std::move(row));
  return static_cast<OperationId>(rows_.size() - 1);
}

const Operation* OperationTable::find(OperationId id) const noexcept {
  const auto index = static_cast<std::size_t>(id);
  return index < rows_.size() ? &rows_[index] : nullptr;
}

std::string OperationTable::name(OperationId id) const {
  const Operation* const row = find(id);
  return row != nullptr ? row->name : "an unknown call";
}

std::string OperationTable::offered() const {
  std::vector<std::string> names{"forward"};
  for (const Operation& row : rows_) {
    if (row.join && row.offered) names.push_back(row.name);
  }
  const std::string last = names.back();
  names.pop_back();
  return join(names, ", ") + " or " + last;
}

}  // namespace zeroth
