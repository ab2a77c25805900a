// signs.h on a grid, see common/grid.h. A thread handles the elements of one byte of signs.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/signs/signs_math.h>

#include <type_traits>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <bool kMomentum, class Types, int kLanes>
struct SignMessageGrid {
  using T = typename Types::Sum;
  T* error;
  const T* momentum;
  const typename Types::In* grad;
  std::int64_t n;
  T momentum_factor;
  T grad_factor;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for_each_pack<kLanes>(thread, n, [&](auto lanes, std::int64_t i) {
      using W = PackOf<T, decltype(lanes)::kValue>;
      W before = W::splat(T(0));
      if constexpr (kMomentum) before = W::load(momentum + i);
      message_of<kMomentum>(W::load(error + i), before, W::load(grad + i), W::splat(momentum_factor),
                            W::splat(grad_factor))
          .store(error + i);
    });
  }
};

template <class T>
struct SignPackGrid {
  T* error;
  std::uint8_t* bits;
  std::int64_t n;
  T scale;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for (std::int64_t byte = thread.index; byte < sign_bytes(n); byte += thread.count) {
      unsigned word = 0;
      for (std::int64_t k = 0; k < kSignGroup && byte * kSignGroup + k < n; ++k) {
        T* const at = error + byte * kSignGroup + k;
        const auto message = Lane<T>::load(at);
        const unsigned positive = positive_in(message);
        left_of(message, positive, Lane<T>::splat(scale)).store(at);
        word |= positive << static_cast<unsigned>(k);
      }
      bits[byte] = static_cast<std::uint8_t>(word);
    }
  }
};

/// Sources of one launch. Between launches the running sum is in dst, which no error lies over then.
template <bool kError, class T, int kMost>
struct SignSumGrid {
  T* dst;
  const T* error;
  std::int64_t n;
  T factor;
  int count;     ///< sources
  bool resumes;  ///< dst has the sum of earlier ones
  bool ends;
  const std::uint8_t* bits[kMost];
  T scale[kMost];

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for (std::int64_t byte = thread.index; byte < sign_bytes(n); byte += thread.count) {
      Lane<T> sum[kSignGroup]{};
      const std::int64_t first = byte * kSignGroup;
      const std::int64_t most = n - first < kSignGroup ? n - first : kSignGroup;
      for (std::int64_t k = 0; resumes && k < most; ++k) sum[k] = Lane<T>::load(dst + first + k);
      for (int source = 0; source < count; ++source) {
        const unsigned word = bits[source][byte];
        for (std::int64_t k = 0; k < most; ++k) {
          const auto value = Lane<T>::signed_by(word >> static_cast<unsigned>(k), Lane<T>::splat(scale[source]));
          sum[k] = source == 0 && !resumes ? value : sum[k] + value;
        }
      }
      for (std::int64_t k = 0; k < most; ++k) {
        if (!ends) {
          sum[k].store(dst + first + k);
          continue;
        }
        Lane<T> value = sum[k] * Lane<T>::splat(factor);
        if constexpr (kError) value = value + Lane<T>::load(error + first + k);
        canonical(value).store(dst + first + k);
      }
    }
  }
};

template <class Launch>
bool sign_message_on_grid(const SignMessageArgs& args, Launch& launch) {
  if (args.n < 0 || !is_sign_message(args.grad_dtype, args.dtype)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  with_sign_types(args.grad_dtype, [&](auto types) {
    using Types = decltype(types);
    using T = typename Types::Sum;
    auto* const error = static_cast<T*>(args.error);
    const auto* const momentum = static_cast<const T*>(args.momentum);
    const auto* const grad = static_cast<const typename Types::In*>(args.grad);
    with_flag(momentum != nullptr, [&](auto has_momentum) {
      with_packs(is_packable(error) && is_packable(momentum) && is_packable(grad), [&](auto lanes) {
        constexpr int kLanes = decltype(lanes)::kValue;
        launch(
            SignMessageGrid<decltype(has_momentum)::kValue, Types, kLanes>{
                error, momentum, grad, args.n, static_cast<T>(args.momentum_factor), static_cast<T>(args.grad_factor)},
            threads_for<kLanes>(args.n));
      });
    });
  });
  return true;
}

template <class Launch>
bool sign_pack_on_grid(const SignPackArgs& args, Launch& launch) {
  if (args.n < 0 || !has_signs(args.dtype)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  const auto run = [&](auto* error) {
    using T = std::remove_pointer_t<decltype(error)>;
    launch(SignPackGrid<T>{error, args.bits, args.n, static_cast<T>(args.scale)}, sign_bytes(args.n));
  };
  args.dtype == DType::kFloat64 ? run(static_cast<double*>(args.error)) : run(static_cast<float*>(args.error));
  return true;
}

/// More than kMost sources need a dst of their own: false if it is `error` then.
template <int kMost = kMostSources, class Launch>
bool sign_sum_on_grid(const SignSumArgs& args, Launch& launch) {
  if (args.n < 0 || args.num_sources < 1 || !has_signs(args.dtype) ||
      (args.num_sources > kMost && args.dst == args.error)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  const auto run = [&](auto* dst, auto has_error) {
    using T = std::remove_pointer_t<decltype(dst)>;
    for_each_source_part<kMost>(args.num_sources, [&](const SourcePart& part) {
      SignSumGrid<decltype(has_error)::kValue, T, kMost> grid{};
      grid.dst = dst;
      grid.error = static_cast<const T*>(args.error);
      grid.n = args.n;
      grid.factor = static_cast<T>(args.factor);
      grid.count = part.count;
      grid.resumes = part.resumes;
      grid.ends = part.ends;
      for (int source = 0; source < part.count; ++source) {
        grid.bits[source] = args.sources[part.first + source].bits;
        grid.scale[source] = static_cast<T>(args.sources[part.first + source].scale);
      }
      launch(grid, sign_bytes(args.n));
    });
  };
  with_flag(args.error != nullptr, [&](auto has_error) {
    args.dtype == DType::kFloat64 ? run(static_cast<double*>(args.dst), has_error)
                                  : run(static_cast<float*>(args.dst), has_error);
  });
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
