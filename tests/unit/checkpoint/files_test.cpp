// Files of a checkpoint: what is written is what is read, in whatever parts, and each chunk has its digest.
#include "checkpoint/files.h"

#include "support/checkpoint_folder.h"
#include "support/error_of.h"

#include <zeroth/base/text.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

using detail::KnownFile;
using detail::NewFile;

constexpr std::size_t kMiB = detail::kChunkBytes;
constexpr std::size_t kPage = 4096;

/// At a multiple of 4 KiB.
class Data {
 public:
  explicit Data(std::size_t bytes)
      : bytes_(bytes), memory_(static_cast<std::byte*>(std::aligned_alloc(kPage, bytes / kPage * kPage + kPage))) {
    std::mt19937_64 random(bytes);
    for (std::size_t at = 0; at + 8 <= bytes; at += 8) {
      const std::uint64_t word = random();
      std::memcpy(memory_.get() + at, &word, 8);
    }
    for (std::size_t at = bytes / 8 * 8; at < bytes; ++at) memory_[at] = static_cast<std::byte>(random());
  }
  [[nodiscard]] std::span<const std::byte> all() const { return {memory_.get(), bytes_}; }

 private:
  std::size_t bytes_;
  detail::AlignedBytes memory_;
};

std::vector<std::byte> bytes_in(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

/// Sizes around the sector, the page, the chunk and the block of eight chunks.
const std::vector<std::size_t> kSizes{0,
                                      1,
                                      kPage - 1,
                                      kPage,
                                      kMiB - 1,
                                      kMiB,
                                      kMiB + 1,
                                      kMiB + kPage,
                                      3 * kMiB + 511,
                                      8 * kMiB,
                                      8 * kMiB + 1,
                                      17 * kMiB + 12'345};

class Files : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_.text()); }
  [[nodiscard]] std::string path(const std::string& name) const { return folder_.text() + "/" + name; }
  CheckpointFolder folder_;
};

void expect_file_of(const CheckpointFile& file, const std::string& path, std::span<const std::byte> data) {
  const std::vector<std::byte> there = bytes_in(path);
  ASSERT_EQ(there.size(), data.size());
  EXPECT_TRUE(std::ranges::equal(there, data)) << data.size();
  EXPECT_EQ(file.bytes, data.size());
  ASSERT_EQ(file.chunks.size(), (data.size() + kMiB - 1) / kMiB);
  for (std::size_t chunk = 0; chunk < file.chunks.size(); ++chunk) {
    const auto part = data.subspan(chunk * kMiB, std::min(kMiB, data.size() - chunk * kMiB));
    EXPECT_EQ(file.chunks[chunk], digest64({reinterpret_cast<const char*>(part.data()), part.size()})) << chunk;
  }
}

TEST_F(Files, HaveTheBytesThatWereWrittenInAnyParts) {
  for (const std::size_t size : kSizes) {
    const Data data(size);
    for (const std::size_t part : {std::size_t{977}, kMiB, 20 * kMiB}) {
      if (size / part > 5'000) continue;
      const std::string name = path(std::to_string(size) + "-" + std::to_string(part));
      NewFile file(name, size);
      for (std::size_t at = 0; at < size; at += part) file.write(data.all().subspan(at, std::min(part, size - at)));
      expect_file_of(file.finish(), name, data.all());
      std::filesystem::remove(name);
    }
    const std::string name = path("kept");
    NewFile file(name, size);
    file.write_kept(data.all());
    expect_file_of(file.finish(), name, data.all());
    std::filesystem::remove(name);
  }
}

TEST_F(Files, LargerThanTheirBlocksMayEndInUnalignedMemory) {
  const Data data(10 * kMiB + 3);
  NewFile file(path("unaligned"), data.all().size() - 1);
  file.write_kept(data.all().subspan(1));
  expect_file_of(file.finish(), path("unaligned"), data.all().subspan(1));
}

TEST_F(Files, OfAnotherSizeThanWasSaidAreBugs) {
  const Data data(2 * kMiB);
  EXPECT_NE(error_of(ErrorCode::kInternal,
                     [&] {
                       NewFile file(path("long"), kMiB);
                       file.write(data.all());
                       (void)file.finish();
                     })
                .find("more data than a file was made for"),
            std::string::npos);
  EXPECT_NE(error_of(ErrorCode::kInternal,
                     [&] {
                       NewFile file(path("short"), 3 * kMiB);
                       file.write(data.all());
                       (void)file.finish();
                     })
                .find("less data than a file was made for"),
            std::string::npos);
}

TEST_F(Files, AreReadInAnyPartsAndEveryChunkIsCompared) {
  const Data data(3 * kMiB + 100);
  const std::string name = "known";
  NewFile made(path(name), data.all().size());
  made.write(data.all());
  const CheckpointFile about = made.finish();
  std::mt19937 random(5);
  for (int trial = 0; trial < 200; ++trial) {
    KnownFile file(folder_.text(), about);
    std::size_t begin = random() % data.all().size();
    std::size_t end = begin + random() % (data.all().size() - begin + 1);
    if (trial % 3 == 0) begin = begin / kMiB * kMiB;
    if (trial % 4 == 0) end = std::min(data.all().size(), (end + kMiB - 1) / kMiB * kMiB);
    std::vector<std::byte> got(end - begin);
    file.read(begin, got);
    ASSERT_TRUE(std::ranges::equal(got, data.all().subspan(begin, end - begin))) << begin << " " << end;
  }
  // A bit in the third chunk.
  std::fstream stream(path(name), std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(static_cast<std::streamoff>(2 * kMiB + 7));
  stream.put(static_cast<char>(static_cast<unsigned char>(data.all()[2 * kMiB + 7]) ^ 4U));
  stream.close();
  KnownFile file(folder_.text(), about);
  std::vector<std::byte> got(2 * kMiB);
  file.read(0, got);
  for (const std::size_t part : {kMiB, std::size_t{5}}) {  // whole, or in part
    got.resize(part);
    EXPECT_NE(error_of(ErrorCode::kCheckpoint, [&] { file.read(2 * kMiB, got); }).find("bytes 2097152 to 3145728"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace zeroth::test
