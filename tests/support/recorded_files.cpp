#include "support/recorded_files.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <mutex>
#include <utility>

namespace zeroth::test {
namespace {

// The calls have no other way to know: they are those of the C library.
std::mutex mutex;
FileRecording* active = nullptr;

std::string normal(const char* path) {
  return std::filesystem::absolute(path).lexically_normal().string();
}

std::string path_of(int fd) {
  char path[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = ::readlink(link.c_str(), path, sizeof path);
  return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : std::string();
}

/// Makes the call, and logs it if it went well; both as one.
template <class Result>
Result logged(const std::function<Result()>& call, const std::function<std::string()>& path,
              const std::function<FileOp(const std::string&, Result)>& op) {
  const std::unique_lock lock(mutex);
  if (active == nullptr) return call();
  const std::string where = path();
  const Result result = call();
  const int error_number = errno;
  if (result >= 0 && active->concerns(where)) active->add(op(where, result));
  errno = error_number;
  return result;
}

int make_file(const char* path, int flags, mode_t mode) {
  const auto call = [&] { return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode)); };
  if ((flags & O_CREAT) == 0) return call();
  const bool is_new = ::access(path, F_OK) != 0;
  if (!is_new) return call();
  return logged<int>(
      call, [&] { return normal(path); },
      [](const std::string& where, int) { return FileOp{FileOp::Kind::kMakeFile, where}; });
}

ssize_t write_at(int fd, const void* data, std::size_t bytes, off_t offset, bool at_end) {
  const auto call = [&] {
    return static_cast<ssize_t>(at_end ? ::syscall(SYS_write, fd, data, bytes)
                                       : ::syscall(SYS_pwrite64, fd, data, bytes, offset));
  };
  if (fd <= STDERR_FILENO) return call();
  return logged<ssize_t>(
      call, [&] { return path_of(fd); },
      [&](const std::string& where, ssize_t count) {
        return FileOp{.kind = FileOp::Kind::kWrite,
                      .path = where,
                      .offset = static_cast<std::uint64_t>(at_end ? ::lseek(fd, 0, SEEK_CUR) - count : offset),
                      .data = {static_cast<const char*>(data), static_cast<std::size_t>(count)}};
      });
}

int rename_to(const char* from, const char* to, unsigned flags) {
  return logged<int>([&] { return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flags)); },
                     [&] { return normal(from); },
                     [&](const std::string& where, int) {
                       const bool exchanges = (flags & RENAME_EXCHANGE) != 0;
                       return FileOp{.kind = exchanges ? FileOp::Kind::kExchange : FileOp::Kind::kRename,
                                     .path = where,
                                     .to = normal(to)};
                     });
}

int remove_at(const char* path, int flags) {
  return logged<int>([&] { return static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, flags)); },
                     [&] { return normal(path); },
                     [](const std::string& where, int) { return FileOp{FileOp::Kind::kRemove, where}; });
}

int resize(int fd, off_t bytes, const std::function<int()>& call) {
  return logged<int>(
      call, [&] { return path_of(fd); },
      [&](const std::string& where, int) {
        return FileOp{.kind = FileOp::Kind::kResize, .path = where, .offset = static_cast<std::uint64_t>(bytes)};
      });
}

}  // namespace

FileRecording::FileRecording(std::string root) : root_(normal(root.c_str()) + "/") {
  const std::unique_lock lock(mutex);
  active = this;
}

FileRecording::~FileRecording() {
  const std::unique_lock lock(mutex);
  active = nullptr;
}

void FileRecording::acknowledge(std::int64_t step) {
  const std::unique_lock lock(mutex);
  ops_.push_back({.kind = FileOp::Kind::kAcknowledge, .offset = static_cast<std::uint64_t>(step)});
}

std::vector<FileOp> FileRecording::take() {
  const std::unique_lock lock(mutex);
  return std::exchange(ops_, {});
}

bool FileRecording::concerns(const std::string& path) const {
  return (path + "/").starts_with(root_);
}

}  // namespace zeroth::test

using namespace zeroth::test;  // NOLINT(google-build-using-namespace): the C library's functions follow

extern "C" {

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  return make_file(path, flags, mode);
}
ssize_t write(int fd, const void* data, size_t bytes) {
  return write_at(fd, data, bytes, 0, true);
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  return write_at(fd, data, bytes, offset, false);
}
int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  return resize(fd, offset + bytes,
                [&] { return static_cast<int>(::syscall(SYS_fallocate, fd, mode, offset, bytes)); });
}
int ftruncate(int fd, off_t bytes) noexcept {
  return resize(fd, bytes, [&] { return static_cast<int>(::syscall(SYS_ftruncate, fd, bytes)); });
}
int fsync(int fd) {
  // Not the call: what lies in memory needs none, and the model decides what was synced.
  return logged<int>([] { return 0; }, [&] { return path_of(fd); },
                     [](const std::string& where, int) { return FileOp{FileOp::Kind::kSync, where}; });
}
int mkdir(const char* path, mode_t mode) noexcept {
  return logged<int>([&] { return static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode)); },
                     [&] { return normal(path); },
                     [](const std::string& where, int) { return FileOp{FileOp::Kind::kMakeFolder, where}; });
}
int rename(const char* from, const char* to) noexcept {
  return rename_to(from, to, 0);
}
int renameat2(int /*from_folder*/, const char* from, int /*to_folder*/, const char* to, unsigned flags) noexcept {
  return rename_to(from, to, flags);
}
int unlink(const char* path) noexcept {
  return remove_at(path, 0);
}
int rmdir(const char* path) noexcept {
  return remove_at(path, AT_REMOVEDIR);
}
int remove(const char* path) noexcept {
  const int removed = remove_at(path, 0);
  return removed != 0 && errno == EISDIR ? remove_at(path, AT_REMOVEDIR) : removed;
}

}  // extern "C"
