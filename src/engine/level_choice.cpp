#include "engine/level_choice.h"

#include "zero/coded_calls.h"

#include <kernels/signs/signs.h>
#include <zeroth/base/error.h>
#include <zeroth/program/compression_plan.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace zeroth {
namespace {

constexpr int kSigns = 2;

CodeForm form_of(int level) {
  return {.format = code_format_named(kCompressionLevels[static_cast<std::size_t>(level)])};
}

/// Of a message, one way.
std::uint64_t bytes_at_level(const FlatLayout& flat, int level) {
  std::int64_t bytes = 0;
  for (const Segment& segment : flat.segments) {
    bytes += level == kSigns ? kernels::sign_bytes(segment.numel) + static_cast<std::int64_t>(sizeof(double))
                             : form_of(level).bytes(segment.numel);
  }
  return static_cast<std::uint64_t>(bytes);
}

bool has_levels(const FlatLayout& flat) {
  return flat.trainable && flat.length > 0 && flat.accumulation() == DType::kFloat32;
}

}  // namespace

LevelChoice::LevelChoice(const ModelLayout& model, Kernels& kernels, Stream stream)
    : model_(model), kernels_(kernels), stream_(std::move(stream)), levels_(model.flats.size(), kUniformLevel) {}

double LevelChoice::missed(const FlatLayout& flat, int level, const float* values) {
  double all = 0;
  for (const Segment& segment : flat.segments) {
    if (segment.numel == 0) continue;
    const std::size_t bytes = array_bytes(segment.numel, DType::kFloat32);
    const Scratch scratch = kernels_.make_scratch(bytes);
    std::byte* const error = scratch.bytes.data();
    Scratch message;
    PendingNorm norm;
    if (level == kSigns) {
      kernels_.copy(error, values + segment.offset, bytes, stream_);
      kernels_.measure(error, DType::kFloat32, segment.numel, 1.0, norm, stream_);
      kernels_.settle(stream_);
      const double scale = std::sqrt(norm.value().sum_of_squares() / static_cast<double>(segment.numel));
      message = kernels_.make_scratch(static_cast<std::size_t>(kernels::sign_bytes(segment.numel)));
      kernels_.sign_pack({.error = error,
                          .bits = reinterpret_cast<std::uint8_t*>(message.bytes.data()),
                          .n = segment.numel,
                          .scale = scale},
                         stream_);
    } else {
      kernels_.zero(error, bytes, stream_);
      const Coder coder(form_of(level), kernels_, stream_);
      message = kernels_.make_scratch(static_cast<std::size_t>(coder.form().bytes(segment.numel)));
      coder.code(message.bytes.data(), reinterpret_cast<const std::byte*>(values + segment.offset), DType::kFloat32,
                 reinterpret_cast<float*>(error), segment.numel);
    }
    kernels_.measure(error, DType::kFloat32, segment.numel, 1.0, norm, stream_);
    kernels_.settle(stream_);
    all += norm.value().sum_of_squares();
  }
  return all;
}

void LevelChoice::choose(std::span<const std::byte* const> momenta) {
  std::vector<CompressionUnit> units;
  std::vector<std::size_t> flats;
  for (std::size_t number = 0; number < model_.flats.size(); ++number) {
    const FlatLayout& flat = model_.flats[number];
    if (!has_levels(flat)) continue;
    CompressionUnit unit{.name = model_.units[static_cast<std::size_t>(flat.unit)].name};
    for (int level = 0; level < static_cast<int>(kCompressionLevels.size()); ++level) {
      const double error = missed(flat, level, reinterpret_cast<const float*>(momenta[number]));
      if (!std::isfinite(error)) return;  // of a run that has diverged: levels stay
      unit.levels.push_back({.bytes = bytes_at_level(flat, level), .squared_error = error});
    }
    units.push_back(std::move(unit));
    flats.push_back(number);
  }
  const double budget = uniform_error(units, kUniformLevel);
  if (units.empty() || budget <= 0) return;  // no momentum yet
  std::vector<int> chosen = plan_compression(units, budget).levels;
  // Errors count as whole parts there: the uniform levels may be beyond that by a part, and are no worse then.
  const std::vector<int> uniform(units.size(), kUniformLevel);
  if (compression_of(units, chosen).bytes > compression_of(units, uniform).bytes) chosen = uniform;
  for (std::size_t i = 0; i < flats.size(); ++i) levels_[flats[i]] = chosen[i];
}

}  // namespace zeroth
