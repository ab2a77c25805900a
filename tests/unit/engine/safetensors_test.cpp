// The writer's files, read back byte by byte by a parser of this test.
#include <zeroth/base/error.h>
#include <zeroth/engine/safetensors.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace zeroth {
namespace {

namespace fs = std::filesystem;

class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "zeroth-safetensors-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  [[nodiscard]] std::string path() const { return (folder_ / "model.safetensors").string(); }
  [[nodiscard]] std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.push_back(entry.path().filename());
    return names;
  }
  static std::string read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  static std::span<const std::byte> bytes(const std::string& text) { return std::as_bytes(std::span(text)); }
  static Error error_of(const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "did not throw";
    return {ErrorCode::kInternal, ""};
  }

  fs::path folder_;
};

const std::vector<SafetensorsEntry> kEntries{{"z.weight", "F32", {2, 3}, 24},
                                             {"a.bias \"ü\"", "BF16", {3}, 6},
                                             {"scalar", "F64", {}, 8},
                                             {"empty", "I64", {0, 4}, 0}};

TEST_F(Safetensors, WritesTheFormat) {
  std::string data;
  for (int byte = 0; byte < 38; ++byte) data.push_back(static_cast<char>(byte * 7));
  SafetensorsWriter writer(path(), kEntries, {{"format", "pt"}, {"tied", "z.weight"}});
  EXPECT_FALSE(fs::exists(path())) << "not before commit";
  writer.write(bytes(data).first(1));  // pieces need not fit the tensors
  writer.write({});
  writer.write(bytes(data).subspan(1, 30));
  writer.write(bytes(data).subspan(31));
  writer.commit();
  EXPECT_EQ(files(), std::vector<std::string>{"model.safetensors"});

  const std::string file = read(path());
  std::uint64_t length = 0;
  for (int byte = 7; byte >= 0; --byte)
    length = length * 256 + static_cast<unsigned char>(file[static_cast<std::size_t>(byte)]);
  EXPECT_EQ(length % 8, 0U) << "data is aligned";
  ASSERT_EQ(file.size(), 8 + length + 38);
  EXPECT_EQ(file[8], '{');
  const auto header = nlohmann::json::parse(file.substr(8, length));
  EXPECT_EQ(header.size(), 5U);
  EXPECT_EQ(header["__metadata__"], (nlohmann::json{{"format", "pt"}, {"tied", "z.weight"}}));
  std::uint64_t offset = 0;
  for (const SafetensorsEntry& entry : kEntries) {
    const auto& tensor = header.at(entry.name);
    EXPECT_EQ(tensor.size(), 3U);
    EXPECT_EQ(tensor["dtype"], entry.dtype);
    EXPECT_EQ(tensor["shape"], nlohmann::json(entry.shape)) << entry.name;
    EXPECT_EQ(tensor["data_offsets"], (nlohmann::json{offset, offset + entry.bytes})) << entry.name;
    offset += entry.bytes;
  }
  EXPECT_EQ(file.substr(8 + length), data);
}

TEST_F(Safetensors, NothingIsAFileToo) {
  SafetensorsWriter writer(path(), {}, {});
  writer.commit();
  EXPECT_EQ(read(path()), std::string("\x08\0\0\0\0\0\0\0{}      ", 16));
}

TEST_F(Safetensors, DestroyedBeforeCommitLeavesWhatWasThere) {
  std::ofstream(path()) << "previous";
  {
    SafetensorsWriter writer(path(), kEntries, {});
    writer.write(bytes(std::string(20, 'x')));
    EXPECT_EQ(files().size(), 2U);
  }
  EXPECT_EQ(files(), std::vector<std::string>{"model.safetensors"});
  EXPECT_EQ(read(path()), "previous");
}

TEST_F(Safetensors, CommitReplacesWhatWasThere) {
  std::ofstream(path()) << "previous";
  SafetensorsWriter writer(path(), {{"w", "U8", {3}, 3}}, {});
  writer.write(bytes("abc"));
  writer.commit();
  EXPECT_TRUE(read(path()).ends_with("abc"));
  EXPECT_EQ(error_of([&] { writer.commit(); }).code(), ErrorCode::kUsage);
  EXPECT_EQ(error_of([&] { writer.write(bytes("d")); }).code(), ErrorCode::kUsage);
  EXPECT_TRUE(read(path()).ends_with("abc"));
}

TEST_F(Safetensors, TooMuchOrTooLittleDataIsRefused) {
  std::ofstream(path()) << "previous";
  {
    SafetensorsWriter writer(path(), {{"w", "U8", {3}, 3}}, {});
    EXPECT_EQ(error_of([&] { writer.write(bytes("abcd")); }).code(), ErrorCode::kUsage);
    writer.write(bytes("ab"));
    const Error error = error_of([&] { writer.commit(); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_EQ(error.context().got, "2");
    EXPECT_EQ(error_of([&] { writer.write(bytes("cd")); }).code(), ErrorCode::kUsage);
  }
  EXPECT_EQ(read(path()), "previous");
  EXPECT_EQ(files().size(), 1U);
}

TEST_F(Safetensors, EntriesThatNoReaderTakesAreRefusedBeforeAnyFile) {
  const std::vector<std::vector<SafetensorsEntry>> table{
      {{"w", "F32", {1}, 4}, {"w", "F32", {1}, 4}},
      {{"__metadata__", "U8", {1}, 1}},
      {{"w", "F32", {2}, 4}},
      {{"w", "F32", {}, 0}},
      {{"w", "float32", {1}, 4}},
      {{"\xff\xfe", "U8", {1}, 1}},
  };
  for (const auto& entries : table) {
    EXPECT_EQ(error_of([&] { const SafetensorsWriter writer(path(), entries, {}); }).code(), ErrorCode::kUsage)
        << entries[0].name;
    EXPECT_TRUE(files().empty());
  }
}

TEST_F(Safetensors, DtypesHaveTheFormatsNames) {
  EXPECT_EQ(safetensors_dtype(DType::kFloat64), "F64");
  EXPECT_EQ(safetensors_dtype(DType::kFloat32), "F32");
  EXPECT_EQ(safetensors_dtype(DType::kBFloat16), "BF16");
  EXPECT_EQ(safetensors_dtype(DType::kInt64), "I64");
  EXPECT_EQ(safetensors_dtype(DType::kInt32), "I32");
  EXPECT_EQ(safetensors_dtype(DType::kUInt8), "U8");
  for (const char* dtype : {"C64", "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
                            "F8_E8M0", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}) {
    SafetensorsWriter writer(path(), {{"none", dtype, {0}, 0}}, {});
    EXPECT_NO_THROW(writer.commit()) << dtype;
  }
}

TEST_F(Safetensors, NoSuchFolderIsAnError) {
  const std::string missing = (folder_ / "missing" / "model.safetensors").string();
  const Error error = error_of([&] { const SafetensorsWriter writer(missing, kEntries, {}); });
  EXPECT_EQ(error.code(), ErrorCode::kIo);
  EXPECT_NE(error.message().find("No such file"), std::string::npos);
  EXPECT_TRUE(error.context().which.starts_with(missing));
}

TEST_F(Safetensors, AFolderThatCannotBeWrittenIsAnError) {
  // Not by permissions: root may write anywhere. /proc takes no files.
  const Error error = error_of([&] { const SafetensorsWriter writer("/proc/model.safetensors", kEntries, {}); });
  EXPECT_EQ(error.code(), ErrorCode::kIo);
}

TEST_F(Safetensors, ATargetThatIsAFolderIsAnErrorAndLeavesNothing) {
  fs::create_directories(path());
  std::ofstream(fs::path(path()) / "inside") << "x";
  {
    SafetensorsWriter writer(path(), {{"w", "U8", {1}, 1}}, {});
    writer.write(bytes("a"));
    EXPECT_EQ(error_of([&] { writer.commit(); }).code(), ErrorCode::kIo);
  }
  EXPECT_EQ(files(), std::vector<std::string>{"model.safetensors"});
  EXPECT_TRUE(fs::exists(fs::path(path()) / "inside"));
}

TEST_F(Safetensors, AFullDiskIsAnErrorAndLeavesWhatWasThere) {
  std::ofstream(path()) << "previous";
  // Full at once, inside the header, and inside the data.
  for (const rlim_t room : {rlim_t{0}, rlim_t{20}, rlim_t{4096}}) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      ::signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{room, room};  // writes beyond fail, as they do on a full disk
      ::setrlimit(RLIMIT_FSIZE, &limit);
      int code = 10;
      try {
        SafetensorsWriter writer(path(), {{"w", "U8", {100000}, 100000}}, {});
        writer.write(bytes(std::string(100000, 'x')));
      } catch (const Error& error) {
        code = error.code() == ErrorCode::kIo ? 0 : 11;
      }
      ::_exit(code);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    EXPECT_EQ(files(), std::vector<std::string>{"model.safetensors"}) << room;
    EXPECT_EQ(read(path()), "previous");
  }
}

TEST_F(Safetensors, TwoWritersOfOnePathDoNotMix) {
  SafetensorsWriter a(path(), {{"w", "U8", {1}, 1}}, {});
  SafetensorsWriter b(path(), {{"w", "U8", {1}, 1}}, {});
  a.write(bytes("a"));
  b.write(bytes("b"));
  b.commit();
  EXPECT_TRUE(read(path()).ends_with("b"));
  a.commit();
  EXPECT_TRUE(read(path()).ends_with("a"));
  EXPECT_EQ(files().size(), 1U);
}

}  // namespace
}  // namespace zeroth
