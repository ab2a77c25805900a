// A rank's file of a checkpoint: ranges that lie in their tensors, tensors that fill the file; or which rule is broken.
#include "checkpoint/rank_file.h"
#include "fuzz/fuzz_target.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

using zeroth::BoxRange;
using zeroth::CheckpointFile;
using zeroth::detail::KnownFile;
using zeroth::detail::RankEntry;
using zeroth::fuzz::expect;

namespace {

std::filesystem::path scratch() {
  const std::filesystem::path memory = "/dev/shm";
  std::error_code ignored;
  return std::filesystem::is_directory(memory, ignored) ? memory : std::filesystem::temp_directory_path();
}

CheckpointFile written(const std::string& name, std::string_view bytes) {
  std::ofstream(scratch() / name, std::ios::binary) << bytes;
  CheckpointFile about{.name = name, .bytes = bytes.size()};
  for (std::size_t at = 0; at < bytes.size(); at += zeroth::detail::kChunkBytes)
    about.chunks.push_back(zeroth::digest64(bytes.substr(at, zeroth::detail::kChunkBytes)));
  return about;
}

std::vector<RankEntry> entries_of(const std::string& name, std::string_view bytes) {
  KnownFile file(scratch().string(), written(name, bytes));
  std::filesystem::remove(scratch() / name);
  return zeroth::detail::read_header(file);
}

void check_range(const BoxRange& range) {
  expect(range.is_valid(), "a range that is none of its tensor");
  std::int64_t local = 0;
  std::int64_t logical = -1;
  for (const zeroth::Run& run : runs_of(range)) {
    expect(run.local == local && run.count > 0 && run.logical > logical, "runs that do not make up their range");
    local += run.count;
    logical = run.logical + run.count - 1;
    expect(logical < range.logical_elements(), "a run outside its tensor");
  }
  expect(local == range.size(), "runs that are not all of their range");
}

void check_accepted(std::vector<RankEntry> entries, const std::string& name, std::size_t size) {
  std::ranges::sort(entries, [](const RankEntry& a, const RankEntry& b) {
    return std::pair(a.begin, a.bytes) < std::pair(b.begin, b.bytes);
  });
  std::uint64_t next = entries.empty() ? size : entries.front().begin;
  std::uint64_t data = 0;
  for (const RankEntry& entry : entries) {
    expect(entry.begin == next, "tensors that overlap, or leave room", entry.key);
    next += entry.bytes;
    data += entry.bytes;
    check_range(entry.range);
  }
  expect(next == size, "bytes behind the last tensor");
  // Written again, it says the same.
  std::vector<RankEntry> copies = entries;
  const std::string header = zeroth::detail::make_header(copies);
  std::vector<RankEntry> again = entries_of(name, header + std::string(data, 'x'));
  expect(again.size() == entries.size(), "another number of tensors the second time");
  for (const RankEntry& entry : entries) {
    const auto found = std::ranges::find(again, entry.key, &RankEntry::key);
    expect(found != again.end() && found->dtype == entry.dtype && found->range == entry.range &&
               found->bytes == entry.bytes,
           "another tensor the second time", entry.key);
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string name = "fuzz-rank-file-" + std::to_string(::getpid());
  try {
    check_accepted(entries_of(name, zeroth::fuzz::text_of(data, size)), name, size);
  } catch (const zeroth::Error& error) {
    expect(error.code() == zeroth::ErrorCode::kCheckpoint, "refused with another code", error.what());
    expect(error.context().which.find(name) != std::string::npos, "refused without the file", error.what());
  } catch (const std::exception& error) {
    expect(false, "refused with something that is no Error", error.what());
  }
  return 0;
}
