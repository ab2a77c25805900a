#include "checkpoint/rank_file.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/engine/safetensors.h>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <set>
#include <utility>

namespace zeroth {
namespace {

constexpr const char* kUnchanged = "the previous file, if any, is unchanged";
constexpr const char* kRenamed = "the file is complete and in its place, but a power failure could still undo that";

[[noreturn]] void fail(const char* what, const std::string& path, const char* hint = kUnchanged) {
  const int error_number = errno;
  throw Error(ErrorCode::kIo, what + (": " + errno_text(error_number)),
              {.where = "engine.safetensors", .which = path, .hint = hint});
}

/// Every reader refuses a file whose tensors do not fill their ranges; better not to write it.
void check_size(const SafetensorsEntry& entry) {
  std::uint64_t bytes = detail::bytes_of_dtype(entry.dtype);
  ZR_CHECK(bytes != 0, ErrorCode::kUsage, "an unknown dtype",
           {.where = "engine.safetensors", .which = entry.name, .got = entry.dtype});
  for (const std::int64_t extent : entry.shape) bytes *= static_cast<std::uint64_t>(extent);
  ZR_CHECK(bytes == entry.bytes, ErrorCode::kUsage, "the size of a tensor does not fit its shape and dtype",
           {.where = "engine.safetensors",
            .which = entry.name,
            .expected = std::to_string(bytes) + " bytes",
            .got = std::to_string(entry.bytes)});
}

}  // namespace

std::string safetensors_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "F64";
    case DType::kFloat32:
      return "F32";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat16:
      return "F16";
    case DType::kInt64:
      return "I64";
    case DType::kInt32:
      return "I32";
    case DType::kUInt8:
      return "U8";
  }
  return "U8";
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<SafetensorsEntry> entries,
                                     const std::map<std::string, std::string>& metadata)
    : path_(std::move(path)) {
  nlohmann::json header;
  std::set<std::string> names;
  for (const SafetensorsEntry& entry : entries) {
    ZR_CHECK(names.insert(entry.name).second, ErrorCode::kUsage,
             "two tensors of one name cannot be written to one file",
             {.where = "engine.safetensors", .which = entry.name});
    ZR_CHECK(entry.name != "__metadata__", ErrorCode::kUsage, "the format keeps this name for itself",
             {.where = "engine.safetensors", .which = entry.name});
    check_size(entry);
    header[entry.name] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {expected_, expected_ + entry.bytes}}};
    expected_ += entry.bytes;
  }
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::string text;
  try {
    text = header.is_null() ? "{}" : header.dump();
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kUsage, "a name or the metadata is not UTF-8",
                {.where = "engine.safetensors", .which = path_, .got = error.what()});
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data starts at a multiple of 8

  std::random_device random;
  temporary_ = path_ + ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(random());
  fd_ = ZR_FAILPOINT_ERRNO("export.open")
            ? -1
            : ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd_ < 0) fail("the file cannot be made", temporary_);
  const auto length = static_cast<std::uint64_t>(text.size());
  try {
    write_all(&length, sizeof(length));
    write_all(text.data(), text.size());
  } catch (...) {
    ::close(fd_);
    ::unlink(temporary_.c_str());
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void SafetensorsWriter::write_all(const void* data, std::size_t bytes) {
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t count = ZR_FAILPOINT_ERRNO("export.write")
                              ? -1
                              : ::write(fd_, next, std::min<std::size_t>(bytes, std::size_t{1} << 30U));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("writing failed", temporary_);
    next += count;
    bytes -= static_cast<std::size_t>(count);
  }
}

void SafetensorsWriter::write(std::span<const std::byte> data) {
  ZR_CHECK(written_ + data.size() <= expected_, ErrorCode::kUsage, "more data than the entries say",
           {.where = "engine.safetensors", .which = path_});
  write_all(data.data(), data.size());
  written_ += data.size();
}

void SafetensorsWriter::flush() {
  constexpr std::uint64_t kWorthIt = std::uint64_t{64} << 20U;
  if (written_ - flushed_ < kWorthIt) return;
  if (ZR_FAILPOINT_ERRNO("export.flush") || ::fdatasync(fd_) != 0) fail("syncing failed", temporary_);
  flushed_ = written_;
}

void SafetensorsWriter::commit() {
  ZR_CHECK(fd_ >= 0, ErrorCode::kUsage, "the file has been committed, or could not be",
           {.where = "engine.safetensors", .which = path_});
  ZR_CHECK(written_ == expected_, ErrorCode::kUsage, "less data than the entries say",
           {.where = "engine.safetensors",
            .which = path_,
            .expected = std::to_string(expected_) + " bytes",
            .got = std::to_string(written_)});
  if (ZR_FAILPOINT_ERRNO("export.sync") || ::fsync(fd_) != 0) fail("syncing failed", temporary_);
  const int closed = ::close(std::exchange(fd_, -1));
  if (ZR_FAILPOINT_ERRNO("export.close") || closed != 0) fail("closing failed", temporary_);
  if (ZR_FAILPOINT_ERRNO("export.rename") || ::rename(temporary_.c_str(), path_.c_str()) != 0)
    fail("renaming failed", path_);
  temporary_.clear();
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  const int folder_fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_fd < 0) fail("the folder cannot be opened to be synced", folder, kRenamed);
  const int synced = ZR_FAILPOINT_ERRNO("export.folder") ? -1 : ::fsync(folder_fd);
  const int saved = errno;
  ::close(folder_fd);
  errno = saved;
  if (synced != 0) fail("syncing the folder failed", folder, kRenamed);
}

}  // namespace zeroth
