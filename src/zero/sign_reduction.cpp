#include "zero/sign_reduction.h"

#include "zero/reductions/table.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <numeric>
#include <utility>

namespace zeroth {

SignReduction::SignReduction(const FlatLayout& flat, Communicator communicator, Kernels& kernels, Stream stream)
    : segments_(flat.segments),
      dtype_(flat.accumulation()),
      communicator_(std::move(communicator)),
      messages_(kernels.on_host() ? communicator_ : Communicator(communicator_.shared_backend(), stream)),
      kernels_(kernels),
      stream_(std::move(stream)) {
  ZR_ASSERT(flat.world() == communicator_.size(), "a piece for each rank");
  std::int64_t bytes = 0;
  for (int rank = 0; rank < flat.world(); ++rank) {
    const Range piece = flat.shard(rank);
    ZR_ASSERT(piece.begin % kernels::kSignGroup == 0 || piece.size() == 0, "pieces begin at whole bytes of signs");
    pieces_.push_back(piece);
    piece_bytes_.push_back(kernels::sign_bytes(piece.size()));
    bits_at_.push_back(bytes);
    std::vector<Part> parts;
    for (std::size_t segment = 0; segment < segments_.size(); ++segment) {
      const Range of_segment = segments_[segment].range();
      const Range range{std::max(piece.begin, of_segment.begin), std::min(piece.end, of_segment.end)};
      if (range.size() <= 0) continue;
      parts.push_back({.segment = static_cast<int>(segment),
                       .range = range,
                       .bits_at = bytes + (range.begin - piece.begin) / kernels::kSignGroup,
                       .number = static_cast<int>(parts.size())});
    }
    part_counts_.push_back(static_cast<std::int64_t>(parts.size()));
    parts_.push_back(std::move(parts));
    bytes += piece_bytes_.back();
  }
}

std::int64_t SignReduction::all_bits() const {
  return bits_at_.back() + piece_bytes_.back();
}

std::int64_t SignReduction::all_parts() const {
  return std::accumulate(part_counts_.begin(), part_counts_.end(), std::int64_t{0});
}

MessageWire SignReduction::wire() const {
  const auto world = static_cast<std::int64_t>(pieces_.size());
  const auto rank = static_cast<std::size_t>(communicator_.rank());
  if (world == 1) return {};
  const auto scale = static_cast<std::int64_t>(sizeof(double));
  return {.all_to_all = piece_bytes_[rank] * (world - 1),
          .all_gather = all_bits() - piece_bytes_[rank] + scale * (all_parts() - part_counts_[rank]) +
                        scale * static_cast<std::int64_t>(segments_.size()) * (world - 1)};
}

std::vector<double> SignReduction::scales_of(const std::vector<Range>& ranges, std::byte* array, std::int64_t first) {
  std::deque<PendingNorm> norms(ranges.size());
  for (std::size_t number = 0; number < ranges.size(); ++number) {
    if (ranges[number].size() == 0) continue;
    kernels_.measure(at(array, ranges[number].begin - first), dtype_, ranges[number].size(), 1.0, norms[number],
                     stream_);
  }
  kernels_.settle(stream_);
  std::vector<double> scales;
  for (std::size_t number = 0; number < ranges.size(); ++number) {
    const auto n = static_cast<double>(std::max<std::int64_t>(ranges[number].size(), 1));
    scales.push_back(ranges[number].size() == 0 ? 0.0 : std::sqrt(norms[number].value().sum_of_squares() / n));
  }
  return scales;
}

void SignReduction::pack(const Range& range, std::byte* array, std::int64_t first, std::uint8_t* bits, double scale) {
  // Pieces for threads begin at whole bytes of signs.
  const std::int64_t bytes = kernels::sign_bytes(range.size());
  kernels_.for_ranges(bytes, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t from = begin * kernels::kSignGroup;
    kernels_.sign_pack({.error = at(array, range.begin - first + from),
                        .bits = bits + begin,
                        .n = std::min(end * kernels::kSignGroup, range.size()) - from,
                        .dtype = dtype_,
                        .scale = scale},
                       stream_);
  });
}

void SignReduction::sum(const Range& range, const std::vector<kernels::SignSource>& sources, std::byte* target,
                        std::int64_t first, const std::byte* error, double factor) {
  const std::int64_t bytes = kernels::sign_bytes(range.size());
  kernels_.for_ranges(bytes, [&](std::int64_t begin, std::int64_t end) {
    std::vector<kernels::SignSource> from_byte = sources;
    for (kernels::SignSource& source : from_byte) source.bits += begin;
    const std::int64_t from = range.begin - first + begin * kernels::kSignGroup;
    kernels_.sign_sum({.dst = at(target, from),
                       .error = error == nullptr ? nullptr : error + array_bytes(from, dtype_),
                       .sources = from_byte.data(),
                       .num_sources = static_cast<int>(from_byte.size()),
                       .n = std::min(end * kernels::kSignGroup, range.size()) - begin * kernels::kSignGroup,
                       .dtype = dtype_,
                       .factor = factor},
                      stream_);
  });
}

void SignReduction::reduce(const Message& message, const std::vector<std::optional<MessageFactors>>& factors,
                           std::byte* worker_error, std::byte* server_error, std::byte* result) {
  ZR_ASSERT(factors.size() == segments_.size(), "factors of each parameter, or none");
  const auto world = pieces_.size();
  const auto rank = static_cast<std::size_t>(communicator_.rank());
  const auto is_active = [&factors](int segment) { return factors[static_cast<std::size_t>(segment)].has_value(); };
  std::vector<Range> ranges;
  for (std::size_t segment = 0; segment < segments_.size(); ++segment) {
    ranges.push_back(factors[segment] ? segments_[segment].range() : Range{});
    if (ranges.back().size() > 0)
      form(message, *factors[segment], ranges.back(), worker_error, dtype_, kernels_, stream_);
  }
  if (world == 1) {
    for (const Range& range : ranges) {
      if (range.size() == 0) continue;
      const std::size_t bytes = array_bytes(range.size(), dtype_);
      kernels_.copy(at(result, range.begin), at(worker_error, range.begin), bytes, stream_);
      kernels_.zero(at(worker_error, range.begin), bytes, stream_);
    }
    return kernels_.settle(stream_);
  }
  const Scratch sent = kernels_.make_scratch(static_cast<std::size_t>(all_bits()));
  const Scratch received = kernels_.make_scratch(world * static_cast<std::size_t>(piece_bytes_[rank]));
  const auto bits_of = [](const Scratch& scratch) { return reinterpret_cast<std::uint8_t*>(scratch.bytes.data()); };
  kernels_.zero(sent.bytes.data(), sent.bytes.size(), stream_);  // what is not active

  // To the owners of the pieces.
  const std::vector<double> own = scales_of(ranges, worker_error, 0);
  for (const std::vector<Part>& parts : parts_) {
    for (const Part& part : parts) {
      if (is_active(part.segment))
        pack(part.range, worker_error, 0, bits_of(sent) + part.bits_at, own[static_cast<std::size_t>(part.segment)]);
    }
  }
  kernels_.settle(stream_);
  ZR_FAILPOINT("signs.send");
  std::vector<double> scales(world * segments_.size());
  communicator_.all_gather(std::span<const double>(own), std::span(scales));
  messages_.all_to_all(std::span<const std::uint8_t>(bits_of(sent), sent.bytes.size()),
                       std::span(bits_of(received), received.bytes.size()), piece_bytes_,
                       std::vector<std::int64_t>(world, piece_bytes_[rank]));

  // Sums with what the last call missed, and back.
  const std::int64_t first = pieces_[rank].begin;
  const Scratch packed = kernels_.make_scratch(static_cast<std::size_t>(piece_bytes_[rank]));
  kernels_.zero(packed.bytes.data(), packed.bytes.size(), stream_);
  std::vector<Range> own_ranges;
  for (const Part& part : parts_[rank]) {
    own_ranges.push_back(is_active(part.segment) ? part.range : Range{});
    if (own_ranges.back().size() == 0) continue;
    std::vector<kernels::SignSource> sources;
    for (std::size_t source = 0; source < world; ++source) {
      sources.push_back({.bits = bits_of(received) + static_cast<std::int64_t>(source) * piece_bytes_[rank] +
                                 (part.bits_at - bits_at_[rank]),
                         .scale = scales[source * segments_.size() + static_cast<std::size_t>(part.segment)]});
    }
    sum(part.range, sources, server_error, first, server_error, 1.0 / static_cast<double>(world));
  }
  const std::vector<double> means = scales_of(own_ranges, server_error, first);
  for (const Part& part : parts_[rank]) {
    if (is_active(part.segment))
      pack(part.range, server_error, first, bits_of(packed) + (part.bits_at - bits_at_[rank]),
           means[static_cast<std::size_t>(part.number)]);
  }
  kernels_.settle(stream_);
  ZR_FAILPOINT("signs.sum");
  std::vector<double> all_means(static_cast<std::size_t>(all_parts()));
  communicator_.all_gather(std::span<const double>(means), std::span(all_means), part_counts_);
  messages_.all_gather(std::span<const std::uint8_t>(bits_of(packed), packed.bytes.size()),
                       std::span(bits_of(sent), sent.bytes.size()), piece_bytes_);
  std::size_t number = 0;
  for (const std::vector<Part>& parts : parts_) {
    for (const Part& part : parts) {
      const double scale = all_means[number++];
      if (is_active(part.segment))
        sum(part.range, {{.bits = bits_of(sent) + part.bits_at, .scale = scale}}, result, 0, nullptr, 1.0);
    }
  }
  kernels_.settle(stream_);
}

std::unique_ptr<MessageReduction> make_one_bit(const ReductionContext& context) {
  return std::make_unique<SignReduction>(context.layout(), context.communicator, context.kernels, context.stream);
}

}  // namespace zeroth
