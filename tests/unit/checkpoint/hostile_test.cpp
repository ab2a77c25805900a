// Checkpoints that somebody made to do harm: refused with the file and the reason, soon, and nothing else is opened.
#include "checkpoint/rank_file.h"
#include "support/checkpoint_folder.h"
#include "support/error_of.h"

#include <zeroth/base/text.h>

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace zeroth::test {
namespace {

namespace fs = std::filesystem;
using detail::KnownFile;

class Hostile : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_.step(1)); }
  [[nodiscard]] std::string in(const std::string& name) const { return folder_.step(1) + "/" + name; }
  /// A manifest that is whole, of one file.
  [[nodiscard]] static Manifest manifest_with(const std::string& file) {
    return {.step = 1, .user_of_rank = {""}, .files = {{.name = file, .bytes = 0}}};
  }
  /// A file, and what a manifest would say of it.
  [[nodiscard]] CheckpointFile put(const std::string& name, const std::string& bytes) const {
    std::ofstream(in(name), std::ios::binary) << bytes;
    CheckpointFile about{.name = name, .bytes = bytes.size()};
    for (std::size_t at = 0; at < bytes.size(); at += detail::kChunkBytes)
      about.chunks.push_back(digest64(std::string_view(bytes).substr(at, detail::kChunkBytes)));
    return about;
  }
  /// Of what a reader of the file says.
  [[nodiscard]] std::string header_error(const CheckpointFile& about) const {
    return error_of(ErrorCode::kCheckpoint, [&] {
      KnownFile file(folder_.step(1), about);
      (void)detail::read_header(file);
    });
  }
  CheckpointFolder folder_;
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string with_header(const std::string& json, std::uint64_t length, const std::string& data) {
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + json + data;
}

TEST_F(Hostile, NamesOfFilesThatLeadElsewhereAreRefused) {
  for (const std::string& name : {std::string("../x"), std::string("/etc/passwd"), std::string("a/b"),
                                  std::string(".."), std::string("."), std::string(), std::string("a\0b", 3)}) {
    std::ofstream(in(kManifestFile)) << to_text(manifest_with(name));
    EXPECT_TRUE(has(error_of(ErrorCode::kCheckpoint, [&] { (void)read_manifest(folder_.step(1)); }), "leads elsewhere"))
        << name;
  }
}

TEST_F(Hostile, FilesThatAreNoneAreRefusedWithoutWaiting) {
  ASSERT_EQ(::mkfifo(in("fifo").c_str(), 0600), 0);
  EXPECT_TRUE(has(
      error_of(ErrorCode::kCheckpoint, [&] { const KnownFile file(folder_.step(1), {.name = "fifo", .bytes = 0}); }),
      "no regular file"));
  ASSERT_EQ(::mkfifo(in(kManifestFile).c_str(), 0600), 0);
  EXPECT_TRUE(has(error_of(ErrorCode::kCheckpoint, [&] { (void)read_manifest(folder_.step(1)); }), "no regular file"));
  fs::remove(in(kManifestFile));

  fs::create_symlink("/etc/passwd", in("link"));
  EXPECT_TRUE(has(error_of(ErrorCode::kIo, [&] { const KnownFile file(folder_.step(1), {.name = "link"}); }), "link"));
  fs::create_symlink("/dev/zero", in(kManifestFile));
  EXPECT_TRUE(has(error_of(ErrorCode::kIo, [&] { (void)read_manifest(folder_.step(1)); }), kManifestFile));
  fs::remove(in(kManifestFile));

  fs::create_directories(in("folder"));
  EXPECT_TRUE(has(error_of(ErrorCode::kCheckpoint, [&] { const KnownFile file(folder_.step(1), {.name = "folder"}); }),
                  "no regular file"));
}

TEST_F(Hostile, HeadersThatAreHugeOrOverlapAreRefused) {
  EXPECT_TRUE(has(header_error(put("huge", with_header("{}", std::uint64_t{1} << 40U, ""))), "longer than the file"));
  EXPECT_TRUE(has(header_error(put("most", with_header("{}", ~std::uint64_t{0}, ""))), "longer than the file"));
  std::string overlap =
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},)"
      R"("__metadata__":{"zeroth":"{\"a\":{\"range\":[0,2],\"logical\":[2]},\"b\":{\"range\":[0,2],\"logical\":[2]}}"}})";
  EXPECT_TRUE(has(header_error(put("overlap", with_header(overlap, overlap.size(), std::string(12, 'x')))), "overlap"));
  // Deep JSON ends no stack.
  const std::string deep(2'000'000, '[');
  EXPECT_TRUE(has(header_error(put("deep", with_header(deep, deep.size(), ""))), "no good header"));
}

TEST_F(Hostile, AManifestOfManyParametersIsReadInItsTimeAndShapesThatOverflowAreRefused) {
  Manifest many = manifest_with("rank-00000.safetensors");
  for (int param = 0; param < 20'000; ++param)
    many.params.push_back({.name = "p" + std::to_string(param), .shape = {1}, .dtype = "F32"});
  const std::string text = to_text(many);
  EXPECT_EQ(manifest_of(text, "many"), many);
  many.params.push_back({.name = "p0", .shape = {1}, .dtype = "F32"});
  EXPECT_TRUE(has(error_of(ErrorCode::kCheckpoint, [&] { (void)manifest_of(to_text(many), "many"); }), "one name"));
  Manifest wide = manifest_with("rank-00000.safetensors");
  wide.params = {{.name = "p", .shape = {std::int64_t{1} << 40, std::int64_t{1} << 40}, .dtype = "F32"}};
  EXPECT_TRUE(has(error_of(ErrorCode::kCheckpoint, [&] { (void)manifest_of(to_text(wide), "wide"); }), "impossible"));
}

TEST_F(Hostile, NumbersThatAreNoneAreRefused) {
  const std::string good = to_text(manifest_with("rank-00000.safetensors"));
  for (const char* const number : {"1.5", "1e300", "true", "\"1\"", "9223372036854775808", "-1", "null"}) {
    std::string text = good;
    const std::string said = "\"step\": 1,";
    text.replace(text.find(said), said.size(), std::string("\"step\": ") + number + ",");
    text.resize(text.find(",\n\"digest\""));
    char digest[64];
    std::snprintf(digest, sizeof digest, ",\n\"digest\": \"%016llx\"}\n",
                  static_cast<unsigned long long>(digest64(text)));
    EXPECT_TRUE(has(error_of(ErrorCode::kCheckpoint, [&] { (void)manifest_of(text + digest, "number"); }), "number"))
        << number;
  }
}

}  // namespace
}  // namespace zeroth::test
