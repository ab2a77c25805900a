#include "offload/file_space.h"

#include <algorithm>
#include <iterator>

namespace zeroth::offload {

Extent FileSpace::take(std::uint64_t bytes) {
  for (std::size_t number = 0; number < files_.size(); ++number) {
    auto& free = files_[number].free;
    const auto found = std::ranges::find_if(free, [bytes](const auto& range) { return range.second >= bytes; });
    if (found == free.end()) continue;
    const auto [offset, length] = *found;
    free.erase(found);
    if (length > bytes) free.emplace(offset + bytes, length - bytes);
    return {number, offset, bytes};
  }
  const std::string& folder = folders_[files_.size() % folders_.size()];
  File grown{ScratchFile::create(folder, std::max(bytes, file_bytes_), options_), {}};
  grown.free.emplace(0, grown.file->bytes());
  files_.push_back(std::move(grown));
  return take(bytes);
}

void FileSpace::give_back(const Extent& extent) {
  auto& free = files_[extent.file].free;
  auto range = free.emplace(extent.offset, extent.bytes).first;
  if (const auto after = std::next(range); after != free.end() && range->first + range->second == after->first) {
    range->second += after->second;
    free.erase(after);
  }
  if (range == free.begin()) return;
  const auto before = std::prev(range);
  if (before->first + before->second != range->first) return;
  before->second += range->second;
  free.erase(range);
}

std::uint64_t FileSpace::bytes() const {
  std::uint64_t total = 0;
  for (const File& file : files_) total += file.file->bytes();
  return total;
}

std::uint64_t FileSpace::free_bytes() const {
  std::uint64_t total = 0;
  for (const File& file : files_) {
    for (const auto& [offset, bytes] : file.free) total += bytes;
  }
  return total;
}

}  // namespace zeroth::offload
