// Conditions and types as template arguments. Internal linkage, see arch.h.
#pragma once

#include <kernels/common/arch.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Names a vector type in a call of a generic lambda.
template <class V>
struct Width {
  using Vector = V;
};

struct Yes {
  static constexpr bool kValue = true;
};
struct No {
  static constexpr bool kValue = false;
};

/// Calls body(Yes{}) or body(No{}): turns a condition that holds for a whole range into a template argument. A branch
/// that the compiler leaves inside a loop has cost up to a factor of two, depending only on the placement of the code.
template <class Body>
ZR_INLINE void with_flag(bool flag, const Body& body) {
  if (flag) {
    body(Yes{});
  } else {
    body(No{});
  }
}

}  // namespace
}  // namespace zeroth::kernels
