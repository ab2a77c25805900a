#include "safetensors_file.h"

#include "temp_folder.h"

#include <zeroth/base/error.h>
#include <zeroth/engine/safetensors.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>

namespace gpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using zeroth::Error;
using zeroth::ErrorCode;

// The header's length, the header, and `data_bytes` bytes of data.
std::string file_of(const std::string& header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  std::string text(sizeof(length), '\0');
  std::memcpy(text.data(), &length, sizeof(length));
  return text + header + std::string(data_bytes, 'x');
}

std::pair<ErrorCode, std::string> error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {ErrorCode::kInternal, "nothing thrown"};
}

std::string refusal_of(const std::string& content) {
  const test::TempFolder folder;
  const auto path = folder.write("weights.safetensors", content);
  const auto [code, text] = error_of([&] { const SafetensorsFile file(path); });
  EXPECT_EQ(code, ErrorCode::kIo) << text;
  EXPECT_THAT(text, HasSubstr(path.string()));
  return text;
}

TEST(SafetensorsFile, ReadsWhatTheExportWrites) {
  const test::TempFolder folder;
  const std::string path = folder.path() / "weights.safetensors";
  const std::array<float, 6> matrix = {1, 2, 3, 4, 5, 6};
  const std::array<std::uint16_t, 1> scalar = {0x3f80};
  zeroth::SafetensorsWriter writer(
      path, {{"matrix", "F32", {2, 3}, 24}, {"none", "F32", {0, 7}, 0}, {"scalar", "BF16", {}, 2}}, {{"format", "pt"}});
  writer.write(std::as_bytes(std::span(matrix)));
  writer.write(std::as_bytes(std::span(scalar)));
  writer.commit();

  const SafetensorsFile file(path);

  ASSERT_EQ(file.tensors().size(), 3U);
  EXPECT_THAT(file.tensors().at("matrix").shape, ElementsAre(2, 3));
  EXPECT_EQ(std::memcmp(file.tensors().at("matrix").data.data(), matrix.data(), 24), 0);
  EXPECT_EQ(file.tensors().at("none").data.size(), 0U);
  EXPECT_EQ(file.tensors().at("scalar").dtype, "BF16");
  EXPECT_EQ(file.tensors().at("scalar").data.size(), 2U);
}

TEST(SafetensorsFile, RefusesEveryEntryThatLeavesTheFile) {
  const auto refusal = [](const std::string& entry) { return refusal_of(file_of(R"({"w": )" + entry + "}", 8)); };
  const auto at = [](const std::string& shape, const std::string& offsets) {
    return R"({"dtype": "F32", "shape": )" + shape + R"(, "data_offsets": )" + offsets + "}";
  };
  EXPECT_THAT(refusal(at("[2]", "[4, 12]")), HasSubstr("w: data_offsets that do not lie in the file"));
  EXPECT_THAT(refusal(at("[2]", "[8, 0]")), HasSubstr("do not lie in the file"));
  EXPECT_THAT(refusal(at("[2]", "[0]")), HasSubstr("do not lie in the file"));
  EXPECT_THAT(refusal(at("[2]", "[-8, 0]")), HasSubstr("something else than sizes"));
  EXPECT_THAT(refusal(at("[3]", "[0, 8]")), HasSubstr("do not fit dtype and shape"));
  EXPECT_THAT(refusal(at("[2.0]", "[0, 8]")), HasSubstr("something else than sizes"));
  EXPECT_THAT(refusal(at("[18446744073709551615]", "[0, 8]")), HasSubstr("something else than sizes"));
  EXPECT_THAT(refusal(at("[4611686018427387904, 4611686018427387904]", "[0, 0]")), HasSubstr("more than 2^64 bytes"));
  EXPECT_THAT(refusal(at("{}", "[0, 8]")), HasSubstr("no list"));
  EXPECT_THAT(refusal(R"({"dtype": "F5", "shape": [2], "data_offsets": [0, 8]})"), HasSubstr("the dtype F5"));
  EXPECT_THAT(refusal(R"({"dtype": 3, "shape": [2], "data_offsets": [0, 8]})"), HasSubstr("no text"));
  EXPECT_THAT(refusal(R"({"dtype": "F32", "shape": [2]})"), HasSubstr("without dtype, shape or data_offsets"));
  EXPECT_THAT(refusal("[]"), HasSubstr("without dtype, shape or data_offsets"));
}

TEST(SafetensorsFile, RefusesBytesOfNoTensorOrOfTwo) {
  const auto refusal = [](const std::string& first, const std::string& second) {
    const auto entry = [](const std::string& offsets) {
      return R"({"dtype": "F32", "shape": [1], "data_offsets": )" + offsets + "}";
    };
    return refusal_of(file_of(R"({"a": )" + entry(first) + R"(, "b": )" + entry(second) + "}", 12));
  };
  EXPECT_THAT(refusal("[0, 4]", "[0, 4]"), HasSubstr("overlap"));
  EXPECT_THAT(refusal("[0, 4]", "[2, 6]"), HasSubstr("overlap"));
  EXPECT_THAT(refusal("[0, 4]", "[8, 12]"), HasSubstr("leave bytes between them"));
  EXPECT_THAT(refusal("[4, 8]", "[8, 12]"), HasSubstr("leave bytes between them"));
  EXPECT_THAT(refusal("[4, 8]", "[0, 4]"), HasSubstr("bytes after the last tensor"));
}

TEST(SafetensorsFile, RefusesWhatHasNoHeader) {
  EXPECT_THAT(refusal_of(""), HasSubstr("fewer than 8 bytes"));
  EXPECT_THAT(refusal_of(std::string(8, '\xff')), HasSubstr("longer than the file"));
  EXPECT_THAT(refusal_of(file_of("[1]", 0)), HasSubstr("no JSON object"));
  EXPECT_THAT(refusal_of(file_of(R"({"w": )", 0)), HasSubstr("no JSON object"));
  const test::TempFolder folder;
  EXPECT_THAT(error_of([&] { const SafetensorsFile file(folder.path() / "missing"); }).second, HasSubstr("errno 2"));
  EXPECT_EQ(error_of([&] { const SafetensorsFile file(folder.path()); }).first, ErrorCode::kIo);
}

TEST(SafetensorsFile, NamesWhatIsNotOfTheModel) {
  const test::TempFolder folder;
  const SafetensorsFile file(folder.write("weights.safetensors", file_of(R"({
      "same": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
      "turned": {"dtype": "F32", "shape": [1, 2], "data_offsets": [4, 12]},
      "counts": {"dtype": "I64", "shape": [1], "data_offsets": [12, 20]},
      "stranger": {"dtype": "F32", "shape": [1], "data_offsets": [20, 24]}})",
                                                                         24)));
  std::map<std::string, Shape> shapes{{"same", {1}}, {"turned", {2, 1}}, {"counts", {1}}};
  for (const char* name : {"m1", "m2", "m3", "m4", "m5", "m6", "m7"}) {
    shapes[name] = {1};
  }

  const auto [code, text] = error_of([&] { file.require_weights(shapes); });

  EXPECT_EQ(code, ErrorCode::kUsage);
  EXPECT_THAT(text,
              HasSubstr("missing: m1, m2, m3, m4, m5 and 2 more; not in the model: stranger; "
                        "of another shape: turned [1, 2] instead of [2, 1]; no floating-point numbers: counts (I64)"));
  EXPECT_THAT(text, Not(HasSubstr("same")));
}

}  // namespace
}  // namespace gpt
