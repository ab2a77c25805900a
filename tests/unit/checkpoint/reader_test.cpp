// CheckpointWriter and CheckpointReader: logical tensors of one process into files and back, and what is found wrong.
#include "checkpoint/element_reader.h"

#include <zeroth/base/error.h>
#include <zeroth/checkpoint/folder.h>
#include <zeroth/checkpoint/reader.h>
#include <zeroth/checkpoint/writer.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <tuple>
#include <vector>

namespace zeroth {
namespace {

namespace fs = std::filesystem;
using detail::Coverage;
using detail::Source;

class ReaderTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) /
              ("checkpoint-reader-" + std::string(testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  static Manifest manifest_of_step(std::int64_t step) {
    Manifest manifest{.version = "1", .step = step, .plan = "none", .groups = {"{}"}};
    manifest.params.push_back({.name = "w",
                               .shape = {3, 5},
                               .dtype = "F32",
                               .states = {{.name = "weight", .dtype = "F32", .shape = {3, 5}},
                                          {.name = "exp_avg", .dtype = "F64", .shape = {3, 5}}}});
    manifest.params.push_back({.name = "none", .shape = {0}, .dtype = "F32", .states = {{"weight", "F32", {0}}}});
    manifest.extras.push_back({.name = "seen", .dtype = "I64", .shape = {}});
    return manifest;
  }

  std::string write(std::int64_t step) const {
    CheckpointWriter writer(folder_.string(), manifest_of_step(step));
    EXPECT_THAT(writer.keys(), testing::ElementsAre("w/weight", "w/exp_avg", "none/weight", "extra/seen"));
    std::vector<float> weight(15);
    std::iota(weight.begin(), weight.end(), 1.0F);
    const std::vector<double> moment(15, 0.5);
    const std::int64_t seen = 7;
    writer.write(std::as_bytes(std::span(weight)));
    writer.write(std::as_bytes(std::span(moment)));
    writer.write(std::as_bytes(std::span(&seen, 1)));
    return writer.commit({});
  }

  static ErrorCode code_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  }

  fs::path folder_;
};

Source part(std::int64_t elements, std::int64_t begin, std::int64_t end) {
  return {.entry = {.key = "w", .dtype = "F32", .range = BoxRange::of_whole({elements}, begin, end)}};
}

TEST_F(ReaderTest, WhatWasWrittenIsReadByRange) {
  CheckpointReader reader(write(4));
  EXPECT_EQ(reader.manifest().step, 4);
  EXPECT_EQ(reader.manifest().world, 1);
  std::vector<float> values(4);
  reader.read("w/weight", 6, 10, std::as_writable_bytes(std::span(values)));
  EXPECT_THAT(values, testing::ElementsAre(7, 8, 9, 10));
  std::int64_t seen = 0;
  reader.read("extra/seen", 0, 1, std::as_writable_bytes(std::span(&seen, 1)));
  EXPECT_EQ(seen, 7);
  EXPECT_TRUE(find_damage((folder_ / "step-00000004").string()).empty());
}

TEST_F(ReaderTest, WhatIsNotThereIsRefused) {
  CheckpointReader reader(write(1));
  std::vector<std::byte> bytes(16);
  for (const auto& [key, begin, end] : std::vector<std::tuple<std::string, std::int64_t, std::int64_t>>{
           {"v/weight", 0, 4}, {"w/weight", 12, 16}, {"w/weight", -1, 3}, {"w/weight", 4, 0}, {"w/weight", 0, 3}}) {
    EXPECT_EQ(code_of([&] { reader.read(key, begin, end, bytes); }), ErrorCode::kUsage) << key << " " << begin;
  }
}

TEST_F(ReaderTest, AWriterThatDoesNotCommitLeavesNothing) {
  {
    CheckpointWriter writer(folder_.string(), manifest_of_step(2));
    std::vector<std::byte> data(60);
    writer.write(data);
    EXPECT_EQ(code_of([&] { (void)writer.commit({}); }), ErrorCode::kUsage);
    data.resize(1000);
    EXPECT_EQ(code_of([&] { writer.write(data); }), ErrorCode::kUsage);
  }
  EXPECT_TRUE(fs::is_empty(folder_));
  (void)write(2);
  EXPECT_EQ(code_of([&] { (void)write(2); }), ErrorCode::kUsage);
}

TEST_F(ReaderTest, DamageNamesBytesAndStates) {
  const std::string path = write(3);
  const fs::path file = fs::path(path) / rank_file_name(0);
  const auto size = static_cast<std::uint64_t>(fs::file_size(file));
  {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(-1, std::ios::end);
    stream.put('x');
  }
  std::vector<Damage> damage = find_damage(path);
  ASSERT_FALSE(damage.empty());
  EXPECT_EQ(damage.front().file, "rank-00000.safetensors");
  EXPECT_EQ(damage.front().end, size);
  fs::resize_file(file, size - 1);
  damage = find_damage(path);
  ASSERT_FALSE(damage.empty());
  EXPECT_THAT(damage.front().what, testing::HasSubstr("is torn"));
  fs::remove(file);
  EXPECT_FALSE(find_damage(path).empty());
}

TEST_F(ReaderTest, PruningKeepsTheNewestAndMultiples) {
  for (const std::int64_t step : {1, 2, 3, 4}) (void)write(step);
  const auto path = [this](std::int64_t step) { return (folder_ / checkpoint_name(step)).string(); };
  const Retention retention{.keep_last = 1, .keep_every = 2};
  EXPECT_THAT(prune_checkpoints(folder_.string(), retention, true), testing::ElementsAre(path(3), path(1)));
  EXPECT_TRUE(fs::exists(path(3)));
  EXPECT_THAT(prune_checkpoints(folder_.string(), retention), testing::ElementsAre(path(3), path(1)));
  EXPECT_FALSE(fs::exists(path(3)));
  EXPECT_TRUE(fs::exists(path(2)));
}

TEST(Coverage, EveryElementIsCounted) {
  EXPECT_EQ(detail::coverage_of(10, {part(10, 0, 4), part(10, 4, 10)}), Coverage{});
  EXPECT_EQ(detail::coverage_of(10, {part(10, 6, 10), part(10, 0, 4)}), (Coverage{.missing = 2, .first_missing = 4}));
  EXPECT_EQ(detail::coverage_of(10, {part(10, 0, 6), part(10, 4, 10)}), (Coverage{.twice = 2, .first_twice = 4}));
  EXPECT_EQ(detail::coverage_of(10, {part(10, 0, 10), part(10, 2, 3)}), (Coverage{.twice = 1, .first_twice = 2}));
  EXPECT_EQ(detail::coverage_of(10, {}), (Coverage{.missing = 10}));
  EXPECT_EQ(detail::coverage_of(0, {}), Coverage{});
  // Two halves of a matrix by columns.
  const BoxRange left{.logical = {2, 4}, .offset = {0, 0}, .shape = {2, 2}, .begin = 0, .end = 4};
  BoxRange right = left;
  right.offset = {0, 2};
  const std::vector<Source> both{{.entry = {.range = left}}, {.entry = {.range = right}}};
  EXPECT_EQ(detail::coverage_of(8, both), Coverage{});
  EXPECT_EQ(detail::coverage_of(8, {both.front()}), (Coverage{.missing = 4, .first_missing = 2}));
}

}  // namespace
}  // namespace zeroth
