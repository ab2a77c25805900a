// One line a reduction: name and factory. Add yours here and in its own file (docs/how-to-add-a-reduction.md).
#pragma once

#include <zeroth/zero/message_reduction.h>

#include <memory>

namespace zeroth {

[[nodiscard]] std::unique_ptr<MessageReduction> make_one_bit(const ReductionContext& context);
[[nodiscard]] std::unique_ptr<MessageReduction> make_exact(const ReductionContext& context);
[[nodiscard]] std::unique_ptr<MessageReduction> make_coded(const ReductionContext& context);
[[nodiscard]] std::unique_ptr<MessageReduction> make_top_k(const ReductionContext& context);
[[nodiscard]] std::unique_ptr<MessageReduction> make_low_rank(const ReductionContext& context);

struct ReductionEntry {
  const char* name;
  std::unique_ptr<MessageReduction> (*make)(const ReductionContext& context);
};

inline constexpr ReductionEntry kReductions[] = {
    {"one_bit", make_one_bit}, {"exact", make_exact}, {"int8", make_coded},  {"int4", make_coded},
    {"fp8", make_coded},       {"fp4", make_coded},   {"top_k", make_top_k}, {"low_rank", make_low_rank},
};

}  // namespace zeroth
