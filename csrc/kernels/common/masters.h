// Where a kernel's parameters are: whole, or masters in two halves ([Note: Masters in two halves] in
// zeroth/base/dtype.h). Internal linkage, see arch.h.
#pragma once

#include <kernels/common/arch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <class T>
struct WholeParams {
  T* param;

  static WholeParams of(void* param, std::int16_t* /*low*/) { return {static_cast<T*>(param)}; }
  template <class W>
  ZR_INLINE W load(std::int64_t i) const {
    return W::load(param + i);
  }
  template <class W>
  ZR_INLINE void store(W value, std::int64_t i) const {
    value.store(param + i);
  }
};

struct SplitMasters {
  BFloat16* high;
  std::int16_t* low;

  static SplitMasters of(void* param, std::int16_t* low) { return {static_cast<BFloat16*>(param), low}; }
  template <class W>
  ZR_INLINE W load(std::int64_t i) const {
    return W::join(high + i, low + i);
  }
  template <class W>
  ZR_INLINE void store(W value, std::int64_t i) const {
    value.split(high + i, low + i);
  }
};

}  // namespace
}  // namespace zeroth::kernels
