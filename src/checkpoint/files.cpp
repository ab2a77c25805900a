#include "checkpoint/files.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/text.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

namespace zeroth::detail {
namespace {

std::uint64_t digest_of(std::span<const std::byte> chunk) {
  return digest64({reinterpret_cast<const char*>(chunk.data()), chunk.size()});
}

}  // namespace

void fail_io(const char* what, const std::string& path, const char* hint) {
  const int error_number = errno;
  throw Error(ErrorCode::kIo, what + (": " + errno_text(error_number)),
              {.where = "checkpoint", .which = path, .hint = hint});
}

void ChunkDigests::add(std::span<const std::byte> data) {
  while (!data.empty()) {
    if (open_.empty() && data.size() >= kChunkBytes) {
      digests_.push_back(digest_of(data.first(kChunkBytes)));
      data = data.subspan(kChunkBytes);
      continue;
    }
    const std::size_t taken = std::min(kChunkBytes - open_.size(), data.size());
    open_.insert(open_.end(), data.begin(), data.begin() + static_cast<std::ptrdiff_t>(taken));
    data = data.subspan(taken);
    if (open_.size() < kChunkBytes) continue;
    digests_.push_back(digest_of(open_));
    open_.clear();
  }
}

std::vector<std::uint64_t> ChunkDigests::finish() {
  if (!open_.empty()) digests_.push_back(digest_of(open_));
  open_.clear();
  return std::exchange(digests_, {});
}

NewFile::NewFile(std::string path, std::uint64_t bytes) : path_(std::move(path)), expected_(bytes) {
  fd_ = ZR_FAILPOINT_ERRNO("checkpoint.open")
            ? -1
            : ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd_ < 0) fail_io("a file of the checkpoint cannot be made", path_);
  if (bytes == 0) return;
  // Room for all of it before the first byte. File systems without such a call find out when they write.
  const int reserved =
      ZR_FAILPOINT_ERRNO("checkpoint.reserve") ? -1 : ::fallocate(fd_, 0, 0, static_cast<off_t>(bytes));
  if (reserved != 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
    const int error_number = errno;
    ::close(std::exchange(fd_, -1));
    errno = error_number;
    fail_io(("there is no room for " + format_bytes(bytes)).c_str(), path_);
  }
}

NewFile::~NewFile() {
  if (fd_ >= 0) ::close(fd_);
}

void NewFile::write(std::span<const std::byte> data) {
  ZR_CHECK(written_ + data.size() <= expected_, ErrorCode::kInternal, "more data than a file was made for",
           {.where = "checkpoint", .which = path_});
  digests_.add(data);
  written_ += data.size();
  while (!data.empty()) {
    const ssize_t count = ZR_FAILPOINT_ERRNO("checkpoint.write")
                              ? -1
                              : ::write(fd_, data.data(), std::min<std::size_t>(data.size(), std::size_t{1} << 30U));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_io("writing failed", path_);
    data = data.subspan(static_cast<std::size_t>(count));
  }
}

CheckpointFile NewFile::finish() {
  ZR_CHECK(written_ == expected_, ErrorCode::kInternal, "less data than a file was made for",
           {.where = "checkpoint", .which = path_});
  if (ZR_FAILPOINT_ERRNO("checkpoint.sync") || ::fsync(fd_) != 0) fail_io("syncing failed", path_);
  const int closed = ::close(std::exchange(fd_, -1));
  if (ZR_FAILPOINT_ERRNO("checkpoint.close") || closed != 0) fail_io("closing failed", path_);
  return {.name = std::filesystem::path(path_).filename().string(), .bytes = expected_, .chunks = digests_.finish()};
}

KnownFile::KnownFile(const std::string& folder, CheckpointFile file)
    : path_((std::filesystem::path(folder) / file.name).string()), file_(std::move(file)) {
  fd_ = ZR_FAILPOINT_ERRNO("checkpoint.reopen") ? -1
                                                : ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd_ < 0) fail_io("a file of the checkpoint cannot be opened", path_);
  struct stat about{};
  const bool seen = ::fstat(fd_, &about) == 0;
  const bool fits = seen && S_ISREG(about.st_mode) && static_cast<std::uint64_t>(about.st_size) == file_.bytes;
  if (fits) return;
  ::close(std::exchange(fd_, -1));
  if (!seen) fail_io("a file of the checkpoint cannot be looked at", path_);
  throw Error(ErrorCode::kCheckpoint, "a file of the checkpoint is torn",
              {.where = "checkpoint",
               .which = path_,
               .expected = "a regular file of " + std::to_string(file_.bytes) + " bytes",
               .got = S_ISREG(about.st_mode) ? std::to_string(about.st_size) + " bytes" : "no regular file"});
}

KnownFile::KnownFile(KnownFile&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::move(other.file_)),
      fd_(std::exchange(other.fd_, -1)),
      chunk_(std::move(other.chunk_)),
      loaded_(std::exchange(other.loaded_, ~std::size_t{0})) {}

KnownFile::~KnownFile() {
  if (fd_ >= 0) ::close(fd_);
}

void KnownFile::load(std::size_t chunk) {
  const std::uint64_t begin = std::uint64_t{chunk} * kChunkBytes;
  loaded_ = ~std::size_t{0};
  chunk_.resize(static_cast<std::size_t>(std::min<std::uint64_t>(kChunkBytes, file_.bytes - begin)));
  for (std::size_t read = 0; read < chunk_.size();) {
    const ssize_t count =
        ZR_FAILPOINT_ERRNO("checkpoint.read")
            ? -1
            : ::pread(fd_, chunk_.data() + read, chunk_.size() - read, static_cast<off_t>(begin + read));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_io("reading failed", path_);
    ZR_CHECK(count > 0, ErrorCode::kCheckpoint, "a file of the checkpoint has become shorter",
             {.where = "checkpoint", .which = path_});
    read += static_cast<std::size_t>(count);
  }
  ZR_CHECK(digest_of(chunk_) == file_.chunks[chunk], ErrorCode::kCheckpoint, "a file of the checkpoint is corrupt",
           {.where = "checkpoint",
            .which = path_ + ", bytes " + std::to_string(begin) + " to " + std::to_string(begin + chunk_.size()),
            .expected = "the bytes that were written",
            .got = "others: their digest differs from the manifest's",
            .hint = "nothing was loaded; take an older checkpoint"});
  loaded_ = chunk;
}

void KnownFile::read(std::uint64_t offset, std::span<std::byte> into) {
  ZR_CHECK(offset <= file_.bytes && into.size() <= file_.bytes - offset, ErrorCode::kCheckpoint,
           "a tensor lies beyond the end of its file", {.where = "checkpoint", .which = path_});
  while (!into.empty()) {
    const auto chunk = static_cast<std::size_t>(offset / kChunkBytes);
    if (loaded_ != chunk) load(chunk);
    const auto at = static_cast<std::size_t>(offset % kChunkBytes);
    const std::size_t count = std::min(into.size(), chunk_.size() - at);
    std::memcpy(into.data(), chunk_.data() + at, count);
    into = into.subspan(count);
    offset += count;
  }
}

std::string read_small_file(const std::string& path, std::uint64_t most) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) fail_io("a file of the checkpoint cannot be opened", path);
  struct Closing {
    int fd;
    ~Closing() { ::close(fd); }
  } closing{fd};
  struct stat about{};
  if (::fstat(fd, &about) != 0) fail_io("a file of the checkpoint cannot be looked at", path);
  ZR_CHECK(
      S_ISREG(about.st_mode) && static_cast<std::uint64_t>(about.st_size) <= most, ErrorCode::kCheckpoint,
      "a file of the checkpoint is none",
      {.where = "checkpoint",
       .which = path,
       .expected = "a regular file of at most " + format_bytes(most),
       .got = S_ISREG(about.st_mode) ? format_bytes(static_cast<std::uint64_t>(about.st_size)) : "no regular file"});
  std::string text(static_cast<std::size_t>(about.st_size), '\0');
  for (std::size_t read = 0; read < text.size();) {
    const ssize_t count = ::read(fd, text.data() + read, text.size() - read);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_io("reading failed", path);
    if (count == 0) text.resize(read);
    read += static_cast<std::size_t>(count);
  }
  return text;
}

void sync_folder(const std::string& path) {
  const int fd = ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_io("a folder cannot be opened to be synced", path);
  const int synced = ZR_FAILPOINT_ERRNO("checkpoint.folder") ? -1 : ::fsync(fd);
  const int saved = errno;
  ::close(fd);
  errno = saved;
  if (synced != 0) fail_io("syncing a folder failed", path);
}

}  // namespace zeroth::detail
