// ZEROTH_FAULTS: rules read back as themselves; a refusal says the column.
#include "fuzz/fuzz_target.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>

#include <charconv>
#include <exception>
#include <string>

using zeroth::fuzz::expect;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view spec = zeroth::fuzz::text_of(data, size);
  try {
    const auto rules = zeroth::parse_failpoints(spec);
    expect(rules.empty() == spec.empty(), "a spec without a rule, or rules without a spec", spec);
    const std::string text = zeroth::to_text(rules);
    expect(zeroth::parse_failpoints(text) == rules, "rules that do not read back as themselves", text);
  } catch (const zeroth::Error& error) {
    const zeroth::ErrorContext& context = error.context();
    expect(error.code() == zeroth::ErrorCode::kEnvironment, "refused with another code", error.what());
    constexpr std::string_view kBegin = "ZEROTH_FAULTS, column ";
    expect(context.which.starts_with(kBegin), "refused without a column", error.what());
    std::size_t column = 0;
    std::from_chars(context.which.data() + kBegin.size(), context.which.data() + context.which.size(), column);
    expect(column >= 1 && column <= spec.size() + 1, "a column that is not in the text", error.what());
    expect(!context.expected.empty() && !context.got.empty(), "refused without what is expected and came",
           error.what());
    expect(zeroth::fuzz::is_printable(error.what()), "a message with control characters", error.what());
  } catch (const std::exception& error) {
    expect(false, "refused with something that is no Error", error.what());
  }
  return 0;
}
