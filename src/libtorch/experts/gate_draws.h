// What a gate draws, from counters: the same on every machine, whatever the threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zeroth::libtorch {

/// Each has numbers of its own.
enum class GateDraw : std::uint8_t { kDrop = 1, kJitter, kGumbel, kRouter };

/// Of one forward on one rank.
[[nodiscard]] std::uint64_t seed_of_draw(GateDraw draw, std::uint64_t seed, std::int64_t forward, std::int64_t place);

/// [tokens, width] of float32: 1 - epsilon to 1 + epsilon, those of kernels::jitter().
[[nodiscard]] at::Tensor jitter_factors(std::int64_t tokens, std::int64_t width, float epsilon, std::uint64_t seed);

/// [rows, columns] of float64 from the open interval (0, 1): number n is of the counter n, with 52 bits.
[[nodiscard]] at::Tensor uniform_numbers(std::int64_t rows, std::int64_t columns, std::uint64_t seed);

}  // namespace zeroth::libtorch
