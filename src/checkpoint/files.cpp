#include "checkpoint/files.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/secret.h>
#include <zeroth/base/text.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>
#include <utility>

namespace zeroth::detail {
namespace {

constexpr std::size_t kDirectAlignment = 4096;  // of memory and file: a multiple of what any disk asks for
constexpr std::uint64_t kDirectFrom = kChunkBytes;
constexpr std::size_t kBlockBytes = 4 * kChunkBytes;
constexpr std::size_t kLongestWrite = std::size_t{1} << 30U;

/// Of a file of this size: whole chunks, and whole blocks of a disk.
std::size_t block_bytes(std::uint64_t bytes) {
  const std::uint64_t whole = (bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
  return static_cast<std::size_t>(std::clamp<std::uint64_t>(whole, kChunkBytes, kBlockBytes));
}

AlignedBytes aligned_bytes(std::size_t bytes) {
  void* memory = std::aligned_alloc(kDirectAlignment, bytes);  // NOLINT(cppcoreguidelines-no-malloc)
  if (memory == nullptr) throw std::bad_alloc();
  return AlignedBytes(static_cast<std::byte*>(memory));
}

std::uint64_t digest_of(std::span<const std::byte> chunk) {
  return digest64({reinterpret_cast<const char*>(chunk.data()), chunk.size()});
}

}  // namespace

void fail_io(const char* what, const std::string& path, const char* hint) {
  const int error_number = errno;
  throw Error(ErrorCode::kIo, what + (": " + errno_text(error_number)),
              {.where = "checkpoint", .which = path, .hint = hint});
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
  if (bytes >= kDirectFrom) set_direct(true);
}

NewFile::~NewFile() {
  writer_.reset();
  if (fd_ >= 0) ::close(fd_);
}

void NewFile::set_direct(bool direct) noexcept {
  const int flags = ::fcntl(fd_, F_GETFL);
  if (flags >= 0 && ::fcntl(fd_, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0) direct_ = direct;
}

void NewFile::write(std::span<const std::byte> data) {
  const std::size_t block = block_bytes(expected_);
  while (!data.empty()) {
    if (!filling_) filling_ = aligned_bytes(block);
    const std::size_t count = std::min(block - filled_, data.size());
    std::memcpy(filling_.get() + filled_, data.data(), count);
    filled_ += count;
    data = data.subspan(count);
    if (filled_ == block) flush();
  }
}

void NewFile::write_kept(std::span<const std::byte> data) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(data.data()) % kDirectAlignment == 0 && filled_ == 0;
  if (!aligned) return write(data);
  for (const std::size_t block = block_bytes(expected_); data.size() >= block; data = data.subspan(block))
    hand_over(data.first(block));
  if (!data.empty()) hand_over(data);
}

/// Writes the block that was filled; the other one, which is written, is filled next.
void NewFile::flush() {
  if (filled_ == 0) return;
  hand_over({filling_.get(), filled_});
  std::swap(filling_, writing_);
  filled_ = 0;
}

/// A block that is not whole is the last one.
void NewFile::hand_over(std::span<const std::byte> block) {
  ZR_CHECK(block.size() <= expected_ - handed_over_, ErrorCode::kInternal, "more data than a file was made for",
           {.where = "checkpoint", .which = path_});
  ZR_ASSERT(handed_over_ % kChunkBytes == 0, "a block that is not whole was not the last one");
  for (std::size_t at = 0; at < block.size(); at += kChunkBytes)
    digests_.push_back(digest_of(block.subspan(at, std::min(kChunkBytes, block.size() - at))));
  const std::uint64_t offset = std::exchange(handed_over_, handed_over_ + block.size());
  if (expected_ < kDirectFrom) return write_at(block, offset);
  if (!writer_) {
    writer_ = std::make_unique<BlockWriter>(
        [this](std::span<const std::byte> bytes, std::uint64_t at) { write_at(bytes, at); });
  }
  writer_->write(block, offset);
}

void NewFile::write_at(std::span<const std::byte> data, std::uint64_t offset) {
  while (!data.empty()) {
    if (direct_ && data.size() < kDirectAlignment) set_direct(false);
    const std::size_t whole = direct_ ? data.size() / kDirectAlignment * kDirectAlignment : data.size();
    const ssize_t count = ZR_FAILPOINT_ERRNO("checkpoint.write")
                              ? -1
                              : ::pwrite(fd_, data.data(), std::min(whole, kLongestWrite), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EINVAL && direct_) {  // it took the flag, and does not take the write
      set_direct(false);
      continue;
    }
    if (count < 0) fail_io("writing failed", path_);
    data = data.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
    if (direct_ && offset % kDirectAlignment != 0) set_direct(false);  // a short write
  }
}

CheckpointFile NewFile::finish(bool synced) {
  flush();
  if (writer_) writer_->finish();
  writer_.reset();
  ZR_CHECK(handed_over_ == expected_, ErrorCode::kInternal, "less data than a file was made for",
           {.where = "checkpoint", .which = path_});
  if (synced && (ZR_FAILPOINT_ERRNO("checkpoint.sync") || ::fsync(fd_) != 0)) fail_io("syncing failed", path_);
  const int closed = ::close(std::exchange(fd_, -1));
  if (ZR_FAILPOINT_ERRNO("checkpoint.close") || closed != 0) fail_io("closing failed", path_);
  return {.name = std::filesystem::path(path_).filename().string(), .bytes = expected_, .chunks = std::move(digests_)};
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
      loaded_(std::exchange(other.loaded_, ~std::size_t{0})),
      trusting_(other.trusting_) {}

KnownFile::~KnownFile() {
  if (fd_ >= 0) ::close(fd_);
}

std::size_t KnownFile::bytes_of(std::size_t chunk) const {
  return static_cast<std::size_t>(
      std::min<std::uint64_t>(kChunkBytes, file_.bytes - std::uint64_t{chunk} * kChunkBytes));
}

void KnownFile::load(std::size_t chunk, std::span<std::byte> into) {
  const std::uint64_t begin = std::uint64_t{chunk} * kChunkBytes;
  for (std::size_t read = 0; read < into.size();) {
    const ssize_t count = ZR_FAILPOINT_ERRNO("checkpoint.read")
                              ? -1
                              : ::pread(fd_, into.data() + read, into.size() - read, static_cast<off_t>(begin + read));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_io("reading failed", path_);
    ZR_CHECK(count > 0, ErrorCode::kCheckpoint, "a file of the checkpoint has become shorter",
             {.where = "checkpoint", .which = path_});
    read += static_cast<std::size_t>(count);
  }
  ZR_CHECK(trusting_ || digest_of(into) == file_.chunks[chunk], ErrorCode::kCheckpoint,
           "a file of the checkpoint is corrupt",
           {.where = "checkpoint",
            .which = path_ + ", bytes " + std::to_string(begin) + " to " + std::to_string(begin + into.size()),
            .expected = "the bytes that were written",
            .got = "others: their digest differs from the manifest's",
            .hint = "nothing was loaded; take an older checkpoint"});
}

void KnownFile::read(std::uint64_t offset, std::span<std::byte> into) {
  ZR_CHECK(offset <= file_.bytes && into.size() <= file_.bytes - offset, ErrorCode::kCheckpoint,
           "a tensor lies beyond the end of its file", {.where = "checkpoint", .which = path_});
  // The disk begins with all of it, while the first chunks are compared.
  if (into.size() > kChunkBytes)
    (void)::posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(into.size()), POSIX_FADV_WILLNEED);
  while (!into.empty()) {
    const auto chunk = static_cast<std::size_t>(offset / kChunkBytes);
    const auto at = static_cast<std::size_t>(offset % kChunkBytes);
    const std::size_t whole = bytes_of(chunk);
    const std::size_t count = std::min(into.size(), whole - at);
    if (count == whole) {  // straight to where it belongs
      load(chunk, into.first(count));
    } else {
      if (loaded_ != chunk) {
        loaded_ = ~std::size_t{0};
        chunk_.resize(whole);
        load(chunk, chunk_);
        loaded_ = chunk;
      }
      std::memcpy(into.data(), chunk_.data() + at, count);
    }
    into = into.subspan(count);
    offset += count;
  }
}

namespace {

struct Closing {
  int fd;
  ~Closing() { ::close(fd); }
};

}  // namespace

std::string read_tail(const std::string& path, std::size_t most) noexcept {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return "";
  const Closing closing{fd};
  struct stat about{};
  if (::fstat(fd, &about) != 0 || !S_ISREG(about.st_mode)) return "";
  std::string text(std::min(most, static_cast<std::size_t>(about.st_size)), '\0');
  const ssize_t count = ::pread(fd, text.data(), text.size(), about.st_size - static_cast<off_t>(text.size()));
  return count == static_cast<ssize_t>(text.size()) ? text : "";
}

std::string read_small_file(const std::string& path, std::uint64_t most) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) fail_io("a file of the checkpoint cannot be opened", path);
  const Closing closing{fd};
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

std::string random_run() {
  std::array<std::uint64_t, 1> number{};
  fill_random(std::as_writable_bytes(std::span(number)), "the name of a save");
  std::array<char, 20> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(number[0]));
  return text.data();
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
