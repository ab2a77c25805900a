#include "engine/piece_values.h"

#include <algorithm>
#include <cstdint>

namespace zeroth {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{1} << 20U;

/// Elements [begin, end) of the box, as they lie in a file.
class PieceReader {
 public:
  PieceReader(const StatePiece& piece, Kernels& kernels, const Stream& stream)
      : piece_(piece), kernels_(kernels), stream_(stream) {}

  /// Calls write(bytes) for parts that make up piece.writes, in order.
  template <class Write>
  void each(const Write& write) {
    const std::size_t element = size_of(piece_.dtype);
    const auto step = static_cast<std::int64_t>(kPieceBytes / element);
    for (std::int64_t at = piece_.writes.begin; at < piece_.writes.end; at += step) {
      const std::int64_t n = std::min(step, piece_.writes.end - at);
      write(values(at, n));
    }
  }

 private:
  std::span<const std::byte> values(std::int64_t at, std::int64_t n) {
    const std::int64_t in_piece = at - piece_.has.begin;
    const std::size_t bytes = array_bytes(n, piece_.dtype);
    if (piece_.master == Master::kNone)
      return on_host(piece_.data + array_bytes(in_piece, piece_.dtype), bytes, values_);
    const std::int64_t in_masters = at - piece_.master_range.begin;
    if (piece_.master == Master::kWhole)
      return on_host(piece_.master_data + array_bytes(in_masters, piece_.dtype), bytes, values_);
    const std::span<const std::byte> high =
        on_host(piece_.data + array_bytes(in_piece, DType::kBFloat16), array_bytes(n, DType::kBFloat16), high_);
    const std::span<const std::byte> low =
        on_host(piece_.master_data + array_bytes(in_masters, DType::kBFloat16), array_bytes(n, DType::kBFloat16), low_);
    masters_.resize(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) {
      masters_[static_cast<std::size_t>(i)] = join_master(reinterpret_cast<const BFloat16*>(high.data())[i],
                                                          reinterpret_cast<const std::int16_t*>(low.data())[i]);
    }
    return std::as_bytes(std::span(masters_));
  }
  std::span<const std::byte> on_host(const std::byte* data, std::size_t bytes, std::vector<std::byte>& copy) {
    if (kernels_.on_host()) return {data, bytes};
    copy.resize(bytes);
    kernels_.copy(copy.data(), data, bytes, stream_);
    return copy;
  }

  const StatePiece& piece_;
  Kernels& kernels_;
  const Stream& stream_;
  std::vector<std::byte> values_;
  std::vector<std::byte> high_;
  std::vector<std::byte> low_;
  std::vector<float> masters_;
};

}  // namespace

void each_written_part(const StatePiece& piece, Kernels& kernels, const Stream& stream,
                       const std::function<void(std::span<const std::byte>)>& write) {
  PieceReader(piece, kernels, stream).each(write);
}

void store(const StatePiece& piece, std::span<const std::byte> values, Kernels& kernels, const Stream& stream) {
  if (piece.master == Master::kNone) return kernels.copy(piece.data, values.data(), values.size(), stream);
  const std::span masters(reinterpret_cast<const float*>(values.data()), static_cast<std::size_t>(piece.has.size()));
  const auto first = static_cast<std::size_t>(std::max<std::int64_t>(piece.master_range.begin - piece.has.begin, 0));
  const auto kept = static_cast<std::size_t>(piece.master_range.size());
  if (piece.master == Master::kWhole) {
    std::vector<Float16> rounded(masters.begin(), masters.end());
    kernels.copy(piece.data, rounded.data(), rounded.size() * sizeof(Float16), stream);
    kernels.copy(piece.master_data, masters.data() + first, kept * sizeof(float), stream);
  } else {
    std::vector<BFloat16> high(masters.size());
    std::vector<std::int16_t> low(masters.size());
    for (std::size_t i = 0; i < masters.size(); ++i) split_master(masters[i], high[i], low[i]);
    kernels.copy(piece.data, high.data(), high.size() * sizeof(BFloat16), stream);
    kernels.copy(piece.master_data, low.data() + first, kept * sizeof(std::int16_t), stream);
  }
  kernels.settle(stream);
}

}  // namespace zeroth
