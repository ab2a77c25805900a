#include "io/memory.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/secret.h>
#include <zeroth/base/text.h>
#include <zeroth/io/scratch_file.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

namespace zeroth {
namespace {

constexpr std::size_t kSmallestAlignment = 4096;
constexpr std::uint64_t kLargestFile = std::uint64_t{1} << 62U;

[[noreturn]] void fail(const std::string& message, const std::string& folder, int error_number,
                       const std::string& hint = {}) {
  throw Error(ErrorCode::kIo, message + ": " + errno_text(error_number),
              {.where = "io.scratch_file", .which = folder, .hint = hint});
}

/// For file systems without O_TMPFILE: a name that nobody has, and that goes at once.
int open_named(const std::string& folder) {
  std::random_device random;
  for (int attempt = 0; attempt < 8; ++attempt) {
    const std::string path = fmt::format("{}/.zeroth-scratch-{}-{:08x}{:08x}", folder, ::getpid(), random(), random());
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor < 0 && errno == EEXIST) continue;
    if (descriptor >= 0 && ::unlink(path.c_str()) != 0) {
      const int error_number = errno;
      ::close(descriptor);
      fail("the name of a scratch file cannot be removed", path, error_number);
    }
    return descriptor;
  }
  return -1;
}

int open_without_name(const std::string& folder) {
  int descriptor = ZR_FAILPOINT_ERRNO("io.tmpfile") ? -1 : ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  // EISDIR: of kernels that do not know the flag.
  if (descriptor < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) descriptor = open_named(folder);
  if (descriptor < 0)
    fail("a scratch file cannot be made in a folder", folder, errno, "the folder must exist and be writable");
  return descriptor;
}

bool set_direct(int descriptor, bool direct) {
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags < 0) return false;
  if (direct && ZR_FAILPOINT_ERRNO("io.direct")) return false;
  return ::fcntl(descriptor, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

/// What the file system asks of direct transfers, by statx(2) since Linux 6.1; 0 if it does not say. The structure is
/// read by its layout, because headers of older distributions end before these fields.
std::size_t stated_alignment(int descriptor) noexcept {
  constexpr std::uint32_t kDirectAlignment = 0x2000;  // STATX_DIOALIGN
  struct Layout {
    std::uint32_t mask;
    std::array<std::uint32_t, 37> between;
    std::uint32_t memory;  // stx_dio_mem_align
    std::uint32_t offset;  // stx_dio_offset_align
    std::array<std::uint32_t, 24> rest;
  };
  static_assert(sizeof(Layout) == 256);
  Layout facts{};
  constexpr int kEmptyPath = 0x1000;  // AT_EMPTY_PATH
  if (::syscall(SYS_statx, descriptor, "", kEmptyPath, kDirectAlignment, &facts) != 0) return 0;
  if ((facts.mask & kDirectAlignment) == 0) return 0;
  return std::max(facts.memory, facts.offset);
}

ssize_t write_block(int descriptor, std::span<const std::byte> block) noexcept {
  ssize_t done = 0;
  do done = ::pwrite(descriptor, block.data(), block.size(), 0);
  while (done < 0 && errno == EINTR);
  return done;
}

ssize_t read_block(int descriptor, std::span<std::byte> block) noexcept {
  ssize_t done = 0;
  do done = ::pread(descriptor, block.data(), block.size(), 0);
  while (done < 0 && errno == EINTR);
  return done;
}

/// Writes the first block, reads it back, compares, and leaves zeros. Returns what is wrong; "" if nothing is.
std::string probe(int descriptor, std::size_t alignment) {
  const detail::AlignedMemory written(alignment, alignment);
  const detail::AlignedMemory read(alignment, alignment);
  std::minstd_rand random(20'240'607);
  for (std::byte& byte : written.bytes()) byte = static_cast<std::byte>(random());
  std::ranges::fill(read.bytes(), std::byte{0});
  const auto whole = static_cast<ssize_t>(alignment);
  const auto problem = [&](const char* call, ssize_t done) {
    return fmt::format("a direct {} of {} bytes: {}", call, alignment,
                       done < 0 ? errno_text(errno) : fmt::format("moved {}", done));
  };
  if (const ssize_t done = write_block(descriptor, written.bytes()); done != whole) return problem("write", done);
  if (const ssize_t done = read_block(descriptor, read.bytes()); done != whole) return problem("read", done);
  const bool same = std::ranges::equal(written.bytes(), read.bytes());
  std::ranges::fill(read.bytes(), std::byte{0});
  if (const ssize_t done = write_block(descriptor, read.bytes()); done != whole) return problem("write", done);
  return same ? "" : "a block that was written directly does not read back";
}

}  // namespace

std::string_view name_of(FileAccess access) noexcept {
  return access == FileAccess::kDirect ? "direct" : "buffered";
}

std::shared_ptr<const ScratchFile> ScratchFile::create(const std::string& folder, std::uint64_t bytes,
                                                       const ScratchOptions& options) {
  ZR_CHECK(bytes > 0 && bytes <= kLargestFile, ErrorCode::kUsage, "a scratch file of no possible size",
           {.where = "io.scratch_file", .which = folder, .expected = "1 to 2^62 bytes", .got = std::to_string(bytes)});
  std::shared_ptr<ScratchFile> file(new ScratchFile(folder, open_without_name(folder)));
  const std::size_t stated = stated_alignment(file->descriptor_);
  file->alignment_ = std::bit_ceil(std::max(stated, kSmallestAlignment));
  file->reserve((bytes + file->alignment_ - 1) / file->alignment_ * file->alignment_);
  file->choose_access(options.access);
  return file;
}

ScratchFile::ScratchFile(std::string folder, int descriptor) : folder_(std::move(folder)), descriptor_(descriptor) {}

ScratchFile::~ScratchFile() {
  ::close(descriptor_);
}

void ScratchFile::reserve(std::uint64_t bytes) {
  bytes_ = bytes;
  struct rlimit limit{};
  const bool is_limited = ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  // Past it the kernel sends SIGXFSZ, which ends a program that does not expect it.
  ZR_CHECK(!is_limited || bytes <= limit.rlim_cur, ErrorCode::kIo,
           "a scratch file is larger than this process may make files",
           {.where = "io.scratch_file",
            .which = folder_,
            .expected = fmt::format("a limit of {} ({} bytes) at least", format_bytes(bytes), bytes),
            .got = fmt::format("{}, RLIMIT_FSIZE", format_bytes(limit.rlim_cur)),
            .hint = "ulimit -f unlimited, in the shell that starts the ranks"});
  const auto length = static_cast<off_t>(bytes);
  int done = 0;
  do done = ZR_FAILPOINT_ERRNO("io.reserve") ? -1 : ::fallocate(descriptor_, 0, 0, length);
  while (done != 0 && errno == EINTR);
  int error_number = done == 0 ? 0 : errno;
  reserved_ = done == 0;
  if (error_number == EOPNOTSUPP || error_number == ENOSYS) {
    error_number = ::ftruncate(descriptor_, length) == 0 ? 0 : errno;
  }
  if (error_number == 0) return;
  struct statvfs facts{};
  const bool known = ::fstatvfs(descriptor_, &facts) == 0;
  throw Error(ErrorCode::kIo, "no room for a scratch file: " + errno_text(error_number),
              {.where = "io.scratch_file",
               .which = folder_,
               .expected = fmt::format("{} ({} bytes) free", format_bytes(bytes), bytes),
               .got = known ? format_bytes(std::uint64_t{facts.f_bavail} * facts.f_frsize) + " free" : "unknown",
               .hint = error_number == EDQUOT ? "the user's quota of this file system is used up" : ""});
}

void ScratchFile::choose_access(FileAccess wanted) {
  if (wanted == FileAccess::kBuffered) return;
  if (!set_direct(descriptor_, true)) {
    reason_ = "O_DIRECT: " + errno_text(errno);
    return;
  }
  reason_ = probe(descriptor_, alignment_);
  if (reason_.empty()) {
    access_ = FileAccess::kDirect;
  } else if (!set_direct(descriptor_, false)) {
    fail("a file that takes no direct transfers cannot be made buffered", folder_, errno);
  }
}

}  // namespace zeroth
