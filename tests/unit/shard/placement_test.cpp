#include <zeroth/base/error.h>
#include <zeroth/shard/placement.h>

#include <gtest/gtest.h>

#include <optional>
#include <string>

namespace zeroth {
namespace {

using P = Placement;
using T = Transition;

struct Row {
  P from;
  P to;
  std::optional<T> transition;  // nothing: no meaning
};

constexpr Row kTable[] = {
    {P::kReplicate, P::kReplicate, T::kNone},
    {P::kReplicate, P::kPartial, std::nullopt},
    {P::kReplicate, P::kFlat, T::kLocalSlice},
    {P::kPartial, P::kReplicate, T::kAllReduce},
    {P::kPartial, P::kPartial, T::kNone},
    {P::kPartial, P::kFlat, T::kReduceScatter},
    {P::kFlat, P::kReplicate, T::kAllGather},
    {P::kFlat, P::kPartial, std::nullopt},
    {P::kFlat, P::kFlat, T::kNone},
};

TEST(Transition, TableIsComplete) {
  EXPECT_EQ(std::size(kTable), 9U);
  for (const Row& row : kTable) {
    const std::string name = std::string(name_of(row.from)) + " -> " + std::string(name_of(row.to));
    if (row.transition) {
      EXPECT_EQ(transition(row.from, row.to), *row.transition) << name;
      continue;
    }
    try {
      (void)transition(row.from, row.to);
      ADD_FAILURE() << name << " did not throw";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_EQ(error.context().got, name);
    }
  }
}

}  // namespace
}  // namespace zeroth
