#include "launcher/records.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>

namespace zeroth::launcher {
namespace {

std::string record_of(const std::string& directory, int rank) {
  return fmt::format("{}/trace-rank{}.jsonl", directory, rank);
}

}  // namespace

void forget_records(const std::string& directory, int num_ranks) noexcept {
  std::error_code ignored;
  for (int rank = 0; rank < num_ranks; ++rank) std::filesystem::remove(record_of(directory, rank), ignored);
}

std::string find_record(const std::string& directory, int rank, int num_ranks) {
  std::error_code ignored;
  if (std::string own = record_of(directory, rank); std::filesystem::exists(own, ignored)) return own;
  for (int other = 0; other < num_ranks; ++other) {
    if (std::string path = record_of(directory, other); std::filesystem::exists(path, ignored)) return path;
  }
  return "";
}

}  // namespace zeroth::launcher
