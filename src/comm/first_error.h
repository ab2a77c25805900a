// FirstError: a group that has failed once stays so.
#pragma once

#include <exception>
#include <utility>

namespace zeroth::detail {

/// Its ranks are no longer at one place, so every call after the first error throws that error again.
class FirstError {
 public:
  /// Returns what body() does. Throws, and remembers, what it throws.
  template <class Body>
  decltype(auto) guard(Body&& body) {
    return guard(std::forward<Body>(body), [] { throw; });
  }
  /// failed() runs while the error of body() is handled, and throws what is remembered: `throw;`, or another one.
  template <class Body, class Failed>
  decltype(auto) guard(Body&& body, const Failed& failed) {
    throw_again();
    try {
      return std::forward<Body>(body)();
    } catch (...) {
      remember(failed);
    }
  }
  void throw_again() const {
    if (first_) std::rethrow_exception(first_);
  }
  /// As in guard(), for an error that is being handled.
  template <class Failed>
  [[noreturn]] void remember(const Failed& failed) {
    try {
      failed();
    } catch (...) {
      first_ = std::current_exception();
    }
    std::rethrow_exception(first_);
  }
  /// For one that nobody catches: what is given up breaks the group.
  void set(const std::exception_ptr& error) noexcept {
    if (!first_) first_ = error;
  }
  [[nodiscard]] explicit operator bool() const noexcept { return first_ != nullptr; }

 private:
  std::exception_ptr first_;
};

}  // namespace zeroth::detail
