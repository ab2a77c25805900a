#include "engine/piece_io.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace zeroth {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{1} << 20U;

template <class T>
void scale(std::span<const std::byte> from, std::span<std::byte> to, double factor) {
  const auto by = static_cast<T>(factor);  // as the update rounds it
  const auto* in = reinterpret_cast<const T*>(from.data());
  auto* out = reinterpret_cast<T*>(to.data());
  for (std::size_t i = 0; i < from.size() / sizeof(T); ++i) out[i] = in[i] * by;
}

using HalfBits = std::uint16_t;

/// The parameter of a master, and what is kept of the master beside it, at index `i` of `kept`.
void put_master(Master form, float master, HalfBits& param, std::byte* kept, std::size_t i) {
  if (form == Master::kWhole) {
    param = Float16(master).bits;
    std::memcpy(kept + i * sizeof(float), &master, sizeof master);
    return;
  }
  BFloat16 high;
  std::int16_t low = 0;
  split_master(std::isnan(master) ? std::numeric_limits<float>::quiet_NaN() : master, high, low);
  param = high.bits;
  std::memcpy(kept + i * sizeof low, &low, sizeof low);
}

/// What is kept of the master that has the parameter's own value.
void put_master_of(Master form, HalfBits param, std::byte* kept, std::size_t i) {
  if (form == Master::kWhole) {
    const float master = std::bit_cast<float>(Float16::widen_bits(param));
    std::memcpy(kept + i * sizeof(float), &master, sizeof master);
  } else {
    std::memset(kept + i * sizeof(std::int16_t), 0, sizeof(std::int16_t));
  }
}

void get(const StateBytes& from, std::span<std::byte> values, Kernels& kernels, const Stream& stream) {
  if (from.in_memory() == nullptr) return from.read(values);
  kernels.copy(values.data(), from.in_memory(), values.size(), stream);
}

void put(const StateBytes& to, std::span<const std::byte> values, Kernels& kernels, const Stream& stream) {
  if (to.in_memory() == nullptr) return to.write(values);
  kernels.copy(to.in_memory(), values.data(), values.size(), stream);
}

}  // namespace

void PieceReader::each(const std::function<void(std::span<const std::byte>)>& write) {
  each_of(piece_.writes, write);
}

void PieceReader::each_of(const Range& range, const std::function<void(std::span<const std::byte>)>& write) {
  const auto step = static_cast<std::int64_t>(kPieceBytes / size_of(piece_.dtype));
  for (std::int64_t at = range.begin; at < range.end; at += step) write(values(at, std::min(step, range.end - at)));
}

std::vector<std::byte> PieceReader::all_of(const Range& range) {
  std::vector<std::byte> all;
  all.reserve(array_bytes(range.size(), piece_.dtype));
  each_of(range, [&all](std::span<const std::byte> part) { all.insert(all.end(), part.begin(), part.end()); });
  return all;
}

std::span<const std::byte> PieceReader::values(std::int64_t at, std::int64_t n) {
  const std::int64_t in_piece = at - piece_.has.begin;
  const std::int64_t in_masters = at - piece_.master_range.begin;
  const std::size_t bytes = array_bytes(n, piece_.dtype);
  switch (piece_.master) {
    case Master::kNone: {
      const auto own = on_host(piece_.data.after(in_piece, piece_.dtype), bytes, values_);
      return piece_.scaled ? scaled(own) : own;
    }
    case Master::kWhole:
      return on_host(piece_.master_data.after(in_masters, piece_.dtype), bytes, values_);
    case Master::kLowerHalf:
      break;
  }
  const std::size_t half_bytes = array_bytes(n, DType::kBFloat16);
  const std::span<const std::byte> high = on_host(piece_.data.after(in_piece, DType::kBFloat16), half_bytes, high_);
  const std::span<const std::byte> low =
      on_host(piece_.master_data.after(in_masters, DType::kBFloat16), half_bytes, low_);
  masters_.resize(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    masters_[static_cast<std::size_t>(i)] = join_master(reinterpret_cast<const BFloat16*>(high.data())[i],
                                                        reinterpret_cast<const std::int16_t*>(low.data())[i]);
  }
  return std::as_bytes(std::span(masters_));
}

std::span<const std::byte> PieceReader::on_host(const StateBytes& from, std::size_t bytes,
                                                std::vector<std::byte>& copy) {
  if (from.in_memory() != nullptr && kernels_.on_host()) return {from.in_memory(), bytes};
  copy.resize(bytes);
  if (from.in_memory() == nullptr) {
    from.read(copy);
  } else {
    kernels_.copy(copy.data(), from.in_memory(), bytes, stream_);
  }
  return copy;
}

std::span<const std::byte> PieceReader::scaled(std::span<const std::byte> sums) {
  high_.resize(sums.size());
  if (piece_.dtype == DType::kFloat64) {
    scale<double>(sums, high_, piece_.factor);
  } else {
    scale<float>(sums, high_, piece_.factor);
  }
  return high_;
}

void store(const StatePiece& piece, std::span<const std::byte> values, Kernels& kernels, const Stream& stream) {
  if (piece.master == Master::kNone) return put(piece.data, values, kernels, stream);
  store_weights(piece, piece.has.begin, values, WeightValues::kMaster, kernels, stream);
}

void store_weights(const StatePiece& piece, std::int64_t begin, std::span<const std::byte> values, WeightValues kind,
                   Kernels& kernels, const Stream& stream) {
  if (values.empty()) return;
  if (piece.master == Master::kNone) {
    put(piece.data.after(begin - piece.has.begin, piece.dtype), values, kernels, stream);
    return kernels.settle(stream);
  }
  // Elements of the parameter at rest; of their masters this rank may have a part.
  const DType kept = piece.master == Master::kWhole ? DType::kFloat32 : DType::kBFloat16;
  const bool masters = kind == WeightValues::kMaster;
  const std::size_t n = values.size() / size_of(masters ? DType::kFloat32 : DType::kBFloat16);
  const Range updated = intersect({begin, begin + static_cast<std::int64_t>(n)}, piece.master_range);
  const StateBytes at_rest = piece.data.after(begin - piece.has.begin, DType::kBFloat16);
  const StateBytes at_masters = piece.master_data.after(updated.begin - piece.master_range.begin, kept);
  const std::size_t kept_bytes = array_bytes(updated.size(), kept);
  const std::size_t first = updated.size() > 0 ? array_bytes(updated.begin - begin, kept) : 0;  // of `own`
  std::vector<HalfBits> params(n);
  std::vector<std::byte> own(n * size_of(kept));
  if (masters) {
    for (std::size_t i = 0; i < n; ++i)
      put_master(piece.master, reinterpret_cast<const float*>(values.data())[i], params[i], own.data(), i);
  } else {
    std::vector<HalfBits> before(n);
    get(at_rest, std::as_writable_bytes(std::span(before)), kernels, stream);
    if (kept_bytes > 0) get(at_masters, std::span(own).subspan(first, kept_bytes), kernels, stream);
    kernels.settle(stream);
    std::memcpy(params.data(), values.data(), values.size());
    for (std::size_t i = 0; i < n; ++i) {
      if (params[i] != before[i]) put_master_of(piece.master, params[i], own.data(), i);
    }
  }
  put(at_rest, std::as_bytes(std::span(params)), kernels, stream);
  if (kept_bytes > 0) put(at_masters, std::span(own).subspan(first, kept_bytes), kernels, stream);
  kernels.settle(stream);
}

}  // namespace zeroth
