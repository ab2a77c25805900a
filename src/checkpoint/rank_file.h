// A rank's file: one dimension a tensor, each a range of a logical tensor. Any reader of safetensors opens it.
#pragma once

#include "checkpoint/files.h"

#include <zeroth/checkpoint/box_range.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zeroth::detail {

inline constexpr const char* kExtraKey = "extra/";  ///< before the names of the caller's tensors

/// "blocks.0.weight/exp_avg"
[[nodiscard]] std::string state_key(const std::string& param, const std::string& state);

struct RankEntry {
  std::string key{};    ///< "blocks.0.weight/exp_avg"
  std::string dtype{};  ///< of the format
  BoxRange range{};
  std::uint64_t begin = 0;  ///< bytes, from the begin of the file
  std::uint64_t bytes = 0;
};

/// Bytes of an element; 0 for a dtype that no checkpoint has.
[[nodiscard]] std::uint64_t bytes_of_dtype(const std::string& dtype);

/// Length, JSON and padding of a file with these entries one after the other; sets where each begins.
[[nodiscard]] std::string make_header(std::vector<RankEntry>& entries);

/// Throws kIo, and kCheckpoint for a header that cannot be: everything in it is checked before it is used.
[[nodiscard]] std::vector<RankEntry> read_header(KnownFile& file);

}  // namespace zeroth::detail
