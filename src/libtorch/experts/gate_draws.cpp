#include "libtorch/experts/gate_draws.h"

#include "libtorch/experts/torch_threads.h"

#include <kernels/common/dispatch.h>
#include <kernels/moe/dispatch.h>
#include <kernels/moe/dispatch_math.h>
#include <zeroth/base/dtype.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <cstddef>

namespace zeroth::libtorch {
namespace {

constexpr std::int64_t kDrawGrain = 4096;  ///< numbers a thread takes at least

/// Number `counter` of a seed.
std::uint64_t drawn_bits(std::uint64_t seed, std::uint64_t counter) {
  return kernels::priority_of(seed, 0, static_cast<std::int64_t>(counter));
}

}  // namespace

std::uint64_t seed_of_draw(GateDraw draw, std::uint64_t seed, std::int64_t forward, std::int64_t place) {
  const std::uint64_t of_draw = drawn_bits(seed, static_cast<std::uint64_t>(draw));
  return drawn_bits(drawn_bits(of_draw, static_cast<std::uint64_t>(forward)), static_cast<std::uint64_t>(place));
}

at::Tensor jitter_factors(std::int64_t tokens, std::int64_t width, float epsilon, std::uint64_t seed) {
  at::Tensor factors = at::ones({tokens, width}, at::kFloat);
  auto* const out = factors.data_ptr<float>();
  const std::int64_t grain = width > 0 ? kDrawGrain / width + 1 : 1;
  for_parts(tokens, grain, [&](std::int64_t begin, std::int64_t end) {
    kernels::JitterArgs args;
    args.dst = out + begin * width;
    args.src = args.dst;
    args.dtype = DType::kFloat32;
    args.tokens = end - begin;
    args.width = width;
    args.epsilon = epsilon;
    args.seed = seed;
    args.first_token = begin;
    kernels::jitter(args, kernels::best_isa());
  });
  return factors;
}

at::Tensor uniform_numbers(std::int64_t rows, std::int64_t columns, std::uint64_t seed) {
  at::Tensor numbers = at::empty({rows, columns}, at::kDouble);
  auto* const out = numbers.data_ptr<double>();
  for_parts(rows * columns, kDrawGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end; ++at) {
      const std::uint64_t bits = drawn_bits(seed, static_cast<std::uint64_t>(at)) >> 12U;
      out[at] = (static_cast<double>(bits) + 0.5) * 0x1p-52;
    }
  });
  return numbers;
}

}  // namespace zeroth::libtorch
