#include <zeroth/base/interrupt.h>

#include <atomic>

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

}  // namespace zeroth
