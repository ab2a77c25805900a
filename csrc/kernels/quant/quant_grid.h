// quant.h on a grid, see common/grid.h. A warp finds the greatest magnitude of a block, as in norm_grid.h; then threads
// make codes, two elements at once.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/quant/quant_math.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Threads of a block of codes in the first launch.
inline constexpr std::int64_t kScaleLanes = 32;

template <class Element>
ZR_HOST_DEVICE ZR_INLINE Lane<float> message_at(const Element* src, const float* error, std::int64_t i) {
  const auto given = Lane<float>::load(src + i);
  return error == nullptr ? given : given + Lane<float>::load(error + i);
}

/// The number of threads is a multiple of kScaleLanes.
template <class Codes, class Element>
struct CodeScaleGrid {
  const Element* src;
  const float* error;
  float* scales;
  std::int64_t n;
  std::int64_t block;

  /// deliver(number of the block, lane, greatest magnitude of the lane's elements).
  template <class Deliver>
  ZR_HOST_DEVICE void operator()(GridThread thread, const Deliver& deliver) const {
    const std::int64_t lane = thread.index % kScaleLanes;
    const std::int64_t warps = thread.count / kScaleLanes;
    for (std::int64_t at = thread.index / kScaleLanes; at * block < n; at += warps) {
      const std::int64_t end = n - at * block < block ? n : (at + 1) * block;
      auto greatest = Lane<float>::splat(0.0F);
      for (std::int64_t i = at * block + lane; i < end; i += kScaleLanes)
        greatest = Lane<float>::greater(greatest, message_at(src, error, i).magnitude());
      deliver(at, lane, greatest.v);
    }
  }
  ZR_HOST_DEVICE void finish(std::int64_t at, float greatest) const { scales[at] = scale_of(greatest, Codes::kMost); }
};

template <class Codes, class Element>
struct CodeGrid {
  const Element* src;
  float* error;
  const float* scales;
  std::uint8_t* codes;
  std::int64_t n;
  std::int64_t block;
  Stochastic stochastic;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for (std::int64_t first = 2 * thread.index; first < n; first += 2 * thread.count) {
      const float scale = scales[first / block];
      const bool is_finite = scale == scale;
      std::int8_t code[2] = {0, 0};
      for (std::int64_t k = 0; k < 2 && first + k < n && is_finite; ++k) {
        const std::int64_t i = first + k;
        const auto message = message_at(src, error, i);
        const float divisor = divisor_of(scale);
        const auto value =
            stochastic.enabled && scale > 0.0F
                ? stochastic_value_of<Codes>(
                      message, Lane<float>::splat(divisor),
                      Lane<float>::uniforms(stochastic.seed, stochastic.first + static_cast<std::uint32_t>(i)))
                : value_of<Codes>(message, Lane<float>::splat(divisor));
        if (error != nullptr) error_of(message, value, Lane<float>::splat(scale)).store(error + i);
        Codes::store(value, code + k);
      }
      if constexpr (Codes::kHalf) {
        codes[first / 2] = pair_of(code[0], code[1]);
      } else {
        for (std::int64_t k = 0; k < 2 && first + k < n; ++k) codes[first + k] = static_cast<std::uint8_t>(code[k]);
      }
    }
  }
};

/// Sources of one launch. Between launches the running sum is in `sum`.
template <class Codes, class Element, int kMost>
struct DequantizeGrid {
  Element* dst;
  float* sum;
  std::int64_t n;
  std::int64_t block;
  float factor;
  int count;
  bool resumes;
  bool ends;
  const std::uint8_t* codes[kMost];
  const float* scales[kMost];

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for (std::int64_t i = thread.index; i < n; i += thread.count) {
      auto all = Lane<float>::splat(0.0F);
      if (resumes) all = Lane<float>::load(sum + i);
      for (int source = 0; source < count; ++source) {
        const std::int8_t code =
            Codes::kHalf ? half_of(codes[source][i / 2], i) : static_cast<std::int8_t>(codes[source][i]);
        const auto value = Codes::template load<Lane<float>>(&code) * Lane<float>::splat(scales[source][i / block]);
        all = source == 0 && !resumes ? value : all + value;
      }
      if (!ends) {
        all.store(sum + i);
        continue;
      }
      canonical(all * Lane<float>::splat(factor)).store(dst + i);
    }
  }
};

/// launch_scales(body, threads) calls body.finish(block, greatest of the lanes) once a block; then launch(body,
/// threads).
template <class LaunchScales, class Launch>
bool quantize_on_grid(const QuantizeArgs& args, LaunchScales& launch_scales, Launch& launch) {
  if (args.n < 0 || args.block <= 0 || args.block % kCodeGroup != 0 || !has_codes(args.src_dtype)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  with_coded_type(args.src_dtype, [&](auto type) {
    using Element = typename decltype(type)::Element;
    const auto* const src = static_cast<const Element*>(args.src);
    with_codes(args.format, [&](auto format) {
      using Codes = decltype(format);
      launch_scales(CodeScaleGrid<Codes, Element>{src, args.error, args.scales, args.n, args.block},
                    code_blocks(args.n, args.block) * kScaleLanes);
      launch(CodeGrid<Codes, Element>{src, args.error, args.scales, args.codes, args.n, args.block, args.stochastic},
             (args.n + 1) / 2);
    });
  });
  return true;
}

/// More than kMost sources need a dst of float32, which holds the running sum.
template <int kMost = kMostSources, class Launch>
bool dequantize_on_grid(const DequantizeArgs& args, Launch& launch) {
  if (args.n < 0 || args.block <= 0 || args.block % kCodeGroup != 0 || !has_codes(args.dst_dtype) ||
      args.num_sources < 1 || (args.num_sources > kMost && args.dst_dtype != DType::kFloat32)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  with_coded_type(args.dst_dtype, [&](auto type) {
    using Element = typename decltype(type)::Element;
    with_codes(args.format, [&](auto format) {
      using Codes = decltype(format);
      for_each_source_part<kMost>(args.num_sources, [&](const SourcePart& part) {
        DequantizeGrid<Codes, Element, kMost> grid{};
        grid.dst = static_cast<Element*>(args.dst);
        grid.sum = args.num_sources > kMost ? static_cast<float*>(args.dst) : nullptr;
        grid.n = args.n;
        grid.block = args.block;
        grid.factor = args.factor;
        grid.count = part.count;
        grid.resumes = part.resumes;
        grid.ends = part.ends;
        for (int source = 0; source < part.count; ++source) {
          grid.codes[source] = args.sources[part.first + source].codes;
          grid.scales[source] = args.sources[part.first + source].scales;
        }
        launch(grid, args.n);
      });
    });
  });
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
