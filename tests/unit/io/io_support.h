// Folders, engines and memory of the tests of files.
#pragma once

#include "io/memory.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/io/io_queue.h>
#include <zeroth/io/scratch_file.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth::test {

/// An empty folder, gone with the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::random_device random;
    path_ = std::filesystem::temp_directory_path() / ("zeroth-io-" + std::to_string(random()));
    std::filesystem::create_directory(path_);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }

  [[nodiscard]] std::string text() const { return path_.string(); }
  [[nodiscard]] bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::filesystem::path path_;
};

/// Arms failpoints of this process, and disarms them when it goes.
class Armed {
 public:
  explicit Armed(std::string_view spec) { arm_failpoints(parse_failpoints(spec), 0); }
  Armed(const Armed&) = delete;
  Armed& operator=(const Armed&) = delete;
  ~Armed() { disarm_failpoints(); }
};

/// The queue; null, with the reason in `why`, where this machine refuses the engine or it was not built.
inline std::unique_ptr<IoQueue> try_open(const std::string& folder, const IoQueueOptions& options, std::string& why) {
  try {
    return open_io_queue(folder, options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kIo || options.engine == IoEngineKind::kThreads) throw;
    const bool absent = error.message().find("without liburing") != std::string::npos;
    why = (absent ? "no liburing: " : "not permitted: ") + error.message();
    return nullptr;
  }
}

inline void fill(std::span<std::byte> bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
}

/// Waits again after each timeout of the queue, for 20 s: a busy disk is no failure.
inline void wait_patiently(const Work& work) {
  for (const Deadline deadline(Milliseconds{20'000});;) {
    try {
      return work.wait();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kTimeout || deadline.passed()) throw;
    }
  }
}

inline constexpr std::size_t kBlock = 4096;

}  // namespace zeroth::test

/// `queue` becomes a queue, or the test is skipped.
#define ZR_OPEN_OR_SKIP(queue, folder, options)                \
  std::string why_not_##queue;                                 \
  auto queue = try_open((folder), (options), why_not_##queue); \
  if (!(queue)) GTEST_SKIP() << why_not_##queue
