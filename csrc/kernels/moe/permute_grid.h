// permute.h and the jitter of dispatch.h on a grid, see common/grid.h. A thread has packs of columns; of
// unpermute_weights it has an entry.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/moe/dispatch_math.h>
#include <kernels/moe/permute_math.h>

#include <cstdint>
#include <limits>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <class T, int kLanes, bool kWeights>
struct PermuteGrid {
  T* out;
  const T* in;
  const std::int32_t* source_of;
  const RowNumber<T>* weights;
  std::int64_t width, slots, k;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for_each_pack<kLanes>(thread, slots * width, [&](auto lanes, std::int64_t i) {
      constexpr int kHere = decltype(lanes)::kValue;
      const std::int32_t source = source_of[i / width];
      const T* const from = in + source / k * width + i % width;
      if constexpr (kWeights) {
        using W = PackOf<RowNumber<T>, kHere>;
        weighted(W::load(from), W::splat(weights[source])).store(out + i);
      } else if constexpr (kHere == 1) {
        out[i] = *from;
      } else {
        store_elements(out + i, load_elements<kHere>(from));
      }
    });
  }
};

template <class T, int kLanes>
struct UnpermuteGrid {
  T* out;
  const T* in;
  const std::int32_t* slot_of;
  const RowNumber<T>* weights;
  std::int64_t width, tokens, k;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for_each_pack<kLanes>(thread, tokens * width, [&](auto lanes, std::int64_t i) {
      using W = PackOf<RowNumber<T>, decltype(lanes)::kValue>;
      const std::int64_t first = i / width * k;
      combined<W>(in, width, i % width, slot_of + first, weights == nullptr ? nullptr : weights + first, k)
          .store(out + i);
    });
  }
};

template <class T>
struct UnpermuteWeightsGrid {
  RowNumber<T>* out;
  const T* in;
  const T* d_out;
  const std::int32_t* slot_of;
  std::int64_t width, entries, k;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for (std::int64_t entry = thread.index; entry < entries; entry += thread.count) {
      const std::int32_t slot = slot_of[entry];
      out[entry] = slot < 0 ? RowNumber<T>{0}
                            : row_product<Lane<RowNumber<T>>>(d_out + entry / k * width, in + slot * width, width);
    }
  }
};

template <class T>
struct JitterGrid {
  T* dst;
  const T* src;
  std::int64_t width, tokens, first_token;
  std::uint64_t seed;
  float twice, least;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    using W = Lane<float>;
    for (std::int64_t i = thread.index; i < tokens * width; i += thread.count) {
      const auto of_row = static_cast<std::uint32_t>(priority_of(seed, first_token + i / width, 0));
      const W uniform = W::uniforms(of_row, static_cast<std::uint32_t>(i % width));
      jittered(W::load(src + i), uniform, W::splat(twice), W::splat(least)).store(dst + i);
    }
  }
};

template <class Body>
bool with_grid_rows(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat64:
      return body(double{});
    case DType::kFloat32:
      return body(float{});
    case DType::kBFloat16:
      return body(BFloat16{});
    case DType::kFloat16:
      return body(Float16{});
    default:
      return false;
  }
}

template <class Args>
bool are_grid_rows(const Args& args) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  return args.tokens >= 0 && args.slots >= 0 && args.slots <= kMost && args.width >= 0 && args.width <= kMost &&
         args.k >= 1 && args.k <= 64 && args.tokens <= kMost / args.k;
}

/// Rows whose packs are whole and aligned.
template <class T>
bool has_packs(const void* a, const void* b, std::int64_t width) {
  constexpr std::uintptr_t kAlign = alignof(Elements<T, kPack>);
  return width % kPack == 0 &&
         (reinterpret_cast<std::uintptr_t>(a) | reinterpret_cast<std::uintptr_t>(b)) % kAlign == 0;
}

/// Places are not looked at.
template <class Launch>
bool permute_on_grid(const PermuteArgs& args, Launch& launch) {
  if (!are_grid_rows(args)) return false;
  return with_grid_rows(args.dtype, [&](auto type) {
    using T = decltype(type);
    const std::int64_t n = args.slots * args.width;
    const auto run = [&](auto lanes, auto has_weights) {
      constexpr int kLanes = decltype(lanes)::kValue;
      const PermuteGrid<T, kLanes, decltype(has_weights)::kValue> body{static_cast<T*>(args.out),
                                                                       static_cast<const T*>(args.in),
                                                                       args.source_of,
                                                                       static_cast<const RowNumber<T>*>(args.weights),
                                                                       args.width,
                                                                       args.slots,
                                                                       args.k};
      launch(body, threads_for<kLanes>(n));
    };
    if (n == 0) return true;
    with_flag(args.weights != nullptr, [&](auto has_weights) {
      if (has_packs<T>(args.out, args.in, args.width)) {
        run(Count<kPack>{}, has_weights);
      } else {
        run(Count<1>{}, has_weights);
      }
    });
    return true;
  });
}

/// Places are not looked at.
template <class Launch>
bool unpermute_on_grid(const UnpermuteArgs& args, Launch& launch) {
  if (!are_grid_rows(args)) return false;
  return with_grid_rows(args.dtype, [&](auto type) {
    using T = decltype(type);
    const std::int64_t n = args.tokens * args.width;
    const auto run = [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::kValue;
      const UnpermuteGrid<T, kLanes> body{static_cast<T*>(args.out),
                                          static_cast<const T*>(args.in),
                                          args.slot_of,
                                          static_cast<const RowNumber<T>*>(args.weights),
                                          args.width,
                                          args.tokens,
                                          args.k};
      launch(body, threads_for<kLanes>(n));
    };
    if (n == 0) return true;
    if (has_packs<T>(args.out, args.in, args.width)) {
      run(Count<kPack>{});
    } else {
      run(Count<1>{});
    }
    return true;
  });
}

/// Places are not looked at.
template <class Launch>
bool unpermute_weights_on_grid(const UnpermuteArgs& args, Launch& launch) {
  if (!are_grid_rows(args)) return false;
  return with_grid_rows(args.dtype, [&](auto type) {
    using T = decltype(type);
    const UnpermuteWeightsGrid<T> body{static_cast<RowNumber<T>*>(args.out),
                                       static_cast<const T*>(args.in),
                                       static_cast<const T*>(args.d_out),
                                       args.slot_of,
                                       args.width,
                                       args.tokens * args.k,
                                       args.k};
    if (body.entries > 0) launch(body, body.entries);
    return true;
  });
}

template <class Launch>
bool jitter_on_grid(const JitterArgs& args, Launch& launch) {
  const bool good = args.tokens >= 0 && args.width >= 0 && args.width <= std::numeric_limits<std::uint32_t>::max() &&
                    args.epsilon >= 0.0F && args.epsilon <= 1.0F && args.dtype != DType::kFloat64;
  return good && with_grid_rows(args.dtype, [&](auto type) {
           using T = decltype(type);
           if constexpr (sizeof(T) < 8) {
             const JitterGrid<T> body{static_cast<T*>(args.dst),
                                      static_cast<const T*>(args.src),
                                      args.width,
                                      args.tokens,
                                      args.first_token,
                                      args.seed,
                                      2.0F * args.epsilon,
                                      1.0F - args.epsilon};
             if (args.tokens * args.width > 0) launch(body, args.tokens * args.width);
           }
           return true;
         });
}

}  // namespace
}  // namespace zeroth::kernels
