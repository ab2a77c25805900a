#include <zeroth/base/interrupt.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <string_view>

namespace zeroth {
namespace {

std::atomic<InterruptCheck> the_check{nullptr};

}  // namespace

void set_interrupt_check(InterruptCheck check) noexcept {
  the_check.store(check);
}

void check_interrupt() {
  if (const InterruptCheck check = the_check.load()) check();
}

std::string interrupted_text() {
  constexpr std::size_t kLongest = 500;
  std::string text = "a call of all ranks was interrupted there";
  try {
    if (const std::exception_ptr handled = std::current_exception()) std::rethrow_exception(handled);
  } catch (const std::exception& error) {
    std::string_view what = error.what();
    what = what.substr(0, std::min(what.find('\n'), kLongest));
    if (!what.empty()) text.append(": ").append(what);
  } catch (...) {  // it has no text
  }
  return text;
}

}  // namespace zeroth
