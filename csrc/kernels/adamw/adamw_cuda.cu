#include <kernels/adamw/adamw_cuda.h>
#include <kernels/adamw/adamw_math.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace zeroth::kernels {
namespace {

constexpr int kThreads = 256;
/// Enough blocks to fill any device several times over; longer ranges go round the grid again.
constexpr std::int64_t kMaxBlocks = 16384;
/// Elements a thread handles at once: 16 bytes of fp32, the widest load of a thread.
constexpr int kPack = 4;

template <class T>
struct alignas(kPack * sizeof(T) > 16 ? 16 : kPack * sizeof(T)) Pack {
  T element[kPack];
};

/// Halves of masters, see [Note: Masters in two halves] in zeroth/base/dtype.h.
struct alignas(kPack * sizeof(std::uint16_t)) HalfPack {
  std::uint16_t element[kPack];
};

template <class T>
struct Arrays {
  T* __restrict__ param;
  BFloat16* __restrict__ high;
  std::int16_t* __restrict__ low;
  T* __restrict__ exp_avg;
  T* __restrict__ exp_avg_sq;
  const T* __restrict__ grad;
};

/// One thread a pack: neighbouring threads touch neighbouring 16-byte words, so every warp reads whole lines.
/// The last thread's pack may be short; unaligned ranges run with packs of one element.
/// kSplit: the parameters are masters in two halves.
template <bool kL2, class T, bool kSplit, int kElements, class P, class H>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(Arrays<T> a, std::int64_t n, AdamWCoefficients coefficients) {
  const auto factors = AdamWFactors<Lane<T>>::from(coefficients);
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const auto update = [&](T& param, T& exp_avg, T& exp_avg_sq, T grad) {
    const AdamWState<Lane<T>> next =
        adamw_element<kL2>(factors, Lane<T>{grad}, {{param}, {exp_avg}, {exp_avg_sq}});
    param = next.param.v;
    exp_avg = next.exp_avg.v;
    exp_avg_sq = next.exp_avg_sq.v;
  };
  const std::int64_t packs = n / kElements;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x; i < packs;
       i += stride) {
    P param;
    H high, low;
    if constexpr (kSplit) {
      high = reinterpret_cast<const H*>(a.high)[i];
      low = reinterpret_cast<const H*>(a.low)[i];
      for (int k = 0; k < kElements; ++k) {
        reinterpret_cast<T*>(&param)[k] =
            Lane<T>::join(reinterpret_cast<const BFloat16*>(&high) + k, reinterpret_cast<const std::int16_t*>(&low) + k).v;
      }
    } else {
      param = reinterpret_cast<P*>(a.param)[i];
    }
    P exp_avg = reinterpret_cast<P*>(a.exp_avg)[i];
    P exp_avg_sq = reinterpret_cast<P*>(a.exp_avg_sq)[i];
    const P grad = reinterpret_cast<const P*>(a.grad)[i];
    for (int k = 0; k < kElements; ++k) {
      update(reinterpret_cast<T*>(&param)[k],
             reinterpret_cast<T*>(&exp_avg)[k],
             reinterpret_cast<T*>(&exp_avg_sq)[k],
             reinterpret_cast<const T*>(&grad)[k]);
    }
    if constexpr (kSplit) {
      for (int k = 0; k < kElements; ++k) {
        Lane<T>{reinterpret_cast<const T*>(&param)[k]}.split(reinterpret_cast<BFloat16*>(&high) + k,
                                                             reinterpret_cast<std::int16_t*>(&low) + k);
      }
      reinterpret_cast<H*>(a.high)[i] = high;
      reinterpret_cast<H*>(a.low)[i] = low;
    } else {
      reinterpret_cast<P*>(a.param)[i] = param;
    }
    reinterpret_cast<P*>(a.exp_avg)[i] = exp_avg;
    reinterpret_cast<P*>(a.exp_avg_sq)[i] = exp_avg_sq;
  }
  const std::int64_t tail =
      packs * kElements + blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x;
  if (tail < n) {
    if constexpr (kSplit) {
      T param = Lane<T>::join(a.high + tail, a.low + tail).v;
      update(param, a.exp_avg[tail], a.exp_avg_sq[tail], a.grad[tail]);
      Lane<T>{param}.split(a.high + tail, a.low + tail);
    } else {
      update(a.param[tail], a.exp_avg[tail], a.exp_avg_sq[tail], a.grad[tail]);
    }
  }
}

bool is_aligned(const void* p, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
}

template <bool kL2, class T, bool kSplit>
cudaError_t launch(const AdamWArgs& args, cudaStream_t stream) {
  const Arrays<T> arrays{static_cast<T*>(args.param),
                         static_cast<BFloat16*>(args.param),
                         args.low,
                         static_cast<T*>(args.exp_avg),
                         static_cast<T*>(args.exp_avg_sq),
                         static_cast<const T*>(args.grad)};
  const bool packed = is_aligned(args.param, kSplit ? alignof(HalfPack) : alignof(Pack<T>)) &&
                      is_aligned(args.low, alignof(HalfPack)) &&
                      is_aligned(args.exp_avg, alignof(Pack<T>)) &&
                      is_aligned(args.exp_avg_sq, alignof(Pack<T>)) &&
                      is_aligned(args.grad, alignof(Pack<T>));
  const std::int64_t threads = packed ? (args.n + kPack - 1) / kPack : args.n;
  const auto blocks = static_cast<unsigned>(std::min((threads + kThreads - 1) / kThreads, kMaxBlocks));
  if (packed) {
    adamw_kernel<kL2, T, kSplit, kPack, Pack<T>, HalfPack>
        <<<blocks, kThreads, 0, stream>>>(arrays, args.n, args.coefficients);
  } else {
    adamw_kernel<kL2, T, kSplit, 1, T, std::uint16_t>
        <<<blocks, kThreads, 0, stream>>>(arrays, args.n, args.coefficients);
  }
  return cudaGetLastError();
}

template <class T, bool kSplit>
cudaError_t launch(const AdamWArgs& args, cudaStream_t stream) {
  return args.coefficients.l2 != 0.0 ? launch<true, T, kSplit>(args, stream)
                                     : launch<false, T, kSplit>(args, stream);
}

}  // namespace
}  // namespace zeroth::kernels

extern "C" int zeroth_cuda_adamw(const zeroth::kernels::AdamWArgs* args, void* stream) {
  using namespace zeroth::kernels;
  using zeroth::DType;
  if (args == nullptr || args->n < 0 || (args->dtype != DType::kFloat32 && args->dtype != DType::kFloat64) ||
      (args->low != nullptr && args->dtype != DType::kFloat32)) {
    return cudaErrorInvalidValue;
  }
  if (args->n == 0) {
    return cudaSuccess;
  }
  auto* const cuda_stream = static_cast<cudaStream_t>(stream);
  if (args->dtype == DType::kFloat64) {
    return launch<double, false>(*args, cuda_stream);
  }
  return args->low != nullptr ? launch<float, true>(*args, cuda_stream) : launch<float, false>(*args, cuda_stream);
}
