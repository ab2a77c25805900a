// File systems that nobody else sees, for tests of disks that are full or go away. Needs root.
#pragma once

#include <zeroth/base/error.h>

#include <fcntl.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>

namespace zeroth::test {

enum class FileSystemKind : std::uint8_t {
  kTmpfs,
  kExt4,  ///< in a file, behind a loop device
};

/// "" or why not. The mount is seen by this thread, and by threads and processes that it starts.
inline std::string mount_for_this_thread(FileSystemKind kind, std::uint64_t bytes, const std::filesystem::path& image,
                                         const std::string& folder) {
  if (::unshare(CLONE_NEWNS) != 0 || ::mount("", "/", nullptr, MS_PRIVATE | MS_REC, nullptr) != 0)
    return "not permitted: unshare: " + errno_text(errno);
  if (kind == FileSystemKind::kTmpfs) {
    const std::string size = "size=" + std::to_string(bytes);
    if (::mount("zeroth", folder.c_str(), "tmpfs", 0, size.c_str()) == 0) return "";
    return "not permitted: mount: " + errno_text(errno);
  }
  std::ofstream(image).close();
  std::filesystem::resize_file(image, bytes);
  const std::string command = "PATH=$PATH:/usr/sbin:/sbin; { mkfs.ext4 -q '" + image.string() +
                              "' && mount -n -o loop '" + image.string() + "' '" + folder + "'; } >/dev/null 2>&1";
  return std::system(command.c_str()) == 0 ? "" : "not permitted: ext4 on a loop device";
}

/// Calls `body` with the folder of a file system of `bytes`, on a thread of its own. Returns why that is not possible,
/// for GTEST_SKIP; "" if the body ran. The file system is gone when the body's files are closed.
template <class Body>
[[nodiscard]] std::string on_own_file_system(FileSystemKind kind, std::uint64_t bytes, const Body& body) {
  if (::geteuid() != 0) return "not root: a file system of its own";
  std::random_device random;
  const std::filesystem::path place =
      std::filesystem::temp_directory_path() / ("zeroth-fs-" + std::to_string(random()));
  const std::filesystem::path folder = place / "mounted";
  std::filesystem::create_directories(folder);
  std::string problem;
  std::thread([&] {
    problem = mount_for_this_thread(kind, bytes, place / "image", folder.string());
    if (!problem.empty()) return;
    body(folder.string());
    (void)::umount2(folder.c_str(), MNT_DETACH);
  }).join();
  std::filesystem::remove_all(place);
  return problem;
}

/// From now on every read and write of this ext4 fails with EIO, as on a disk that was pulled out.
[[nodiscard]] inline bool shut_down_ext4(const std::string& folder) {
  constexpr unsigned long kShutdown = _IOR('X', 125, std::uint32_t);  // EXT4_IOC_SHUTDOWN
  std::uint32_t without_log = 2;                                      // EXT4_GOING_FLAGS_NOLOGFLUSH
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool done = descriptor >= 0 && ::ioctl(descriptor, kShutdown, &without_log) == 0;
  if (descriptor >= 0) (void)::close(descriptor);
  return done;
}

}  // namespace zeroth::test
