// Cut: which run of layers is which chunk.
#pragma once

#include <span>
#include <vector>

namespace zeroth {

/// Bounds of `chunks` contiguous runs of layers, none of them empty: chunk c has the layers result[c] to
/// result[c + 1] - 1. `costs`: one a layer. The largest sum of a chunk is as small as it can be; among such cuts the
/// one with the least sum of squares; then the one whose last chunks begin early. Exact, by dynamic programming in
/// O(chunks n^2) for n layers. Throws kUsage for fewer layers than chunks, and for costs that are negative or not
/// finite.
[[nodiscard]] std::vector<int> cut_layers(std::span<const double> costs, int chunks);

/// The same for equal numbers of layers: those of two chunks differ by one at most, and the first chunks have one more,
/// as in DeepSpeed's partition_uniform(). Throws kUsage for fewer layers than chunks.
[[nodiscard]] std::vector<int> cut_evenly(int layers, int chunks);

}  // namespace zeroth
