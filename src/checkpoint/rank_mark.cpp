#include "checkpoint/rank_mark.h"

#include "checkpoint/files.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <utility>

namespace zeroth::detail {
namespace {

constexpr off_t kReserved = 4096;
constexpr std::uint64_t kMostMarkBytes = std::uint64_t{1} << 31U;
constexpr std::size_t kDigestDigits = 16;

/// Of a text, as its last line.
std::string digest_line(const std::string& text) {
  char line[kDigestDigits + 3];
  std::snprintf(line, sizeof line, "\n%016llx\n", static_cast<unsigned long long>(digest64(text)));
  return line;
}

bool write_all(int fd, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t count = ::pwrite(fd, text.data() + done, text.size() - done, static_cast<off_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    done += static_cast<std::size_t>(count);
  }
  return ::ftruncate(fd, static_cast<off_t>(text.size())) == 0;
}

enum class Lock { kHeld, kFree, kNoFile };

Lock look_at_lock(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return Lock::kNoFile;
  const bool held = ::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(fd);
  return held ? Lock::kHeld : Lock::kFree;
}

}  // namespace

std::string rank_mark_name(int rank) {
  char name[32];
  std::snprintf(name, sizeof name, "rank-%05d.mark", rank);
  return name;
}

RankMark::RankMark(const std::string& folder, int rank) {
  const std::string path = (std::filesystem::path(folder) / rank_mark_name(rank)).string();
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd_ < 0) fail_io("a mark of the checkpoint cannot be made", path);
  // So that a full disk can be told.
  const bool reserved = ::fallocate(fd_, 0, 0, kReserved) == 0 || errno == EOPNOTSUPP || errno == ENOSYS;
  if (reserved && ::flock(fd_, LOCK_EX | LOCK_NB) == 0) return;
  const int saved = errno;
  ::close(std::exchange(fd_, -1));
  errno = saved;
  fail_io("a mark of the checkpoint cannot be reserved and locked", path);
}

RankMark::~RankMark() {
  if (fd_ < 0) return;
  (void)::flock(fd_, LOCK_UN);  // a forked child may have the descriptor, too
  ::close(fd_);
}

bool RankMark::tell(const std::string& text) noexcept {
  try {
    if (fd_ < 0 || !write_all(fd_, text + digest_line(text))) return false;
  } catch (const std::bad_alloc&) {
    return false;
  }
  (void)::flock(fd_, LOCK_UN);
  ::close(std::exchange(fd_, -1));
  return true;
}

SeenMark look_at_mark(const std::string& folder, int rank) {
  const std::string path = (std::filesystem::path(folder) / rank_mark_name(rank)).string();
  if (look_at_lock(path) == Lock::kHeld) return {.locked = true};
  try {
    std::string text = read_small_file(path, kMostMarkBytes);
    const std::size_t line = kDigestDigits + 2;
    if (text.size() < line) return {};
    const std::string digest = text.substr(text.size() - line);
    text.resize(text.size() - line);
    if (digest != digest_line(text)) return {};
    return {.text = std::move(text)};
  } catch (const Error&) {
    return {};
  }
}

Committer look_at_committer(const std::string& folder) {
  const auto is_there = [&folder] {
    struct stat about{};
    return ::stat(folder.c_str(), &about) == 0 || (errno != ENOENT && errno != ENOTDIR);
  };
  if (!is_there()) return Committer::kEnded;
  // The file of the lock goes just before the folder gets its name.
  if (look_at_lock((std::filesystem::path(folder) / kLockFile).string()) != Lock::kFree) return Committer::kWorks;
  return is_there() ? Committer::kDied : Committer::kEnded;
}

}  // namespace zeroth::detail
