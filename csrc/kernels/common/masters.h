// The storage of a kernel's parameters: whole, masters in two halves ([Note: Masters in two halves] in
// zeroth/base/dtype.h), or whole masters beside 16-bit parameters. Internal linkage, see arch.h.
#pragma once

#include <kernels/common/arch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <class T>
struct WholeParams {
  using Value = T;
  T* param;

  template <class W>
  ZR_HOST_DEVICE ZR_INLINE W load(std::int64_t i) const {
    return W::load(param + i);
  }
  template <class W>
  ZR_HOST_DEVICE ZR_INLINE void store(W value, std::int64_t i) const {
    value.store(param + i);
  }
};

struct SplitMasters {
  using Value = float;
  BFloat16* high;
  std::int16_t* low;

  template <class W>
  ZR_HOST_DEVICE ZR_INLINE W load(std::int64_t i) const {
    return W::join(high + i, low + i);
  }
  template <class W>
  ZR_HOST_DEVICE ZR_INLINE void store(W value, std::int64_t i) const {
    value.split(high + i, low + i);
  }
};

/// fp16: the parameter is the master rounded to nearest even.
struct WholeMasters {
  using Value = float;
  float* master;
  Float16* param;

  template <class W>
  ZR_HOST_DEVICE ZR_INLINE W load(std::int64_t i) const {
    return W::load(master + i);
  }
  template <class W>
  ZR_HOST_DEVICE ZR_INLINE void store(W value, std::int64_t i) const {
    value.store(master + i);
    value.store(param + i);
  }
};

/// What with_params() takes.
constexpr bool are_params(DType dtype, const std::int16_t* low, const float* master) {
  const bool whole = low == nullptr && master == nullptr;
  return dtype == DType::kFloat32 ? low == nullptr || master == nullptr : dtype == DType::kFloat64 && whole;
}

/// Calls body(params), for states of `dtype` (kFloat32 or kFloat64). At most one of `low` and `master` is not null;
/// both are if parameters are whole.
template <class Body>
ZR_INLINE void with_params(DType dtype, void* param, std::int16_t* low, float* master, const Body& body) {
  if (dtype == DType::kFloat64) {
    body(WholeParams<double>{static_cast<double*>(param)});
  } else if (master != nullptr) {
    body(WholeMasters{master, static_cast<Float16*>(param)});
  } else if (low != nullptr) {
    body(SplitMasters{static_cast<BFloat16*>(param), low});
  } else {
    body(WholeParams<float>{static_cast<float*>(param)});
  }
}

}  // namespace
}  // namespace zeroth::kernels
