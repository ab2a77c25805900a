// CheckpointWriter and CheckpointReader: logical tensors of one process into files and back, and what is found wrong.
#include "checkpoint/element_reader.h"
#include "checkpoint/files.h"
#include "checkpoint/rank_file.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/checkpoint/folder.h>
#include <zeroth/checkpoint/reader.h>
#include <zeroth/checkpoint/writer.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
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

/// Damages a checkpoint in one of the ways in which disks and copies do.
void damage(const fs::path& checkpoint, unsigned way) {
  const fs::path manifest = checkpoint / kManifestFile;
  const fs::path file = checkpoint / rank_file_name(0);
  switch (way % 7) {
    case 0:
      fs::resize_file(manifest, fs::file_size(manifest) / 2);
      break;
    case 1:
      fs::remove(manifest);
      break;
    case 2:
      fs::remove(file);
      break;
    case 3:
      fs::resize_file(file, fs::file_size(file) - 1);
      break;
    case 4:
      fs::remove_all(checkpoint);
      fs::create_directory(checkpoint);
      break;
    case 5:
      fs::remove(file);
      fs::create_directory(file);
      break;
    default: {  // its end, with the number of the commit and the digest, stays
      std::fstream stream(manifest, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekp(static_cast<std::streamoff>(fs::file_size(manifest) / 3));
      stream.put('\x01');
    }
  }
}

TEST_F(ReaderTest, PruningADamagedFolderKeepsTheLastWholeOnesAndAllThatAreTorn) {
  constexpr int kSteps = 5;
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    fs::remove_all(folder_);
    std::mt19937 random(seed);
    std::vector<std::string> whole;  // the last commit first
    std::vector<std::string> torn;
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      const std::string path = write(step);
      const bool is_damaged = random() % 2 == 0 || (seed < 7 && step == kSteps);
      if (is_damaged) damage(path, seed < 7 && step == kSteps ? seed : static_cast<unsigned>(random()));
      EXPECT_EQ(why_torn(path).empty(), !is_damaged) << why_torn(path);
      (is_damaged ? torn : whole).insert((is_damaged ? torn : whole).begin(), path);
    }
    const std::size_t keep = 1 + random() % 3;
    const auto removed = prune_checkpoints(folder_.string(), {.keep_last = static_cast<int>(keep)});
    EXPECT_EQ(removed.size(), whole.size() - std::min(keep, whole.size()));
    for (std::size_t index = 0; index < whole.size(); ++index) EXPECT_EQ(fs::exists(whole[index]), index < keep);
    for (const std::string& path : torn) EXPECT_TRUE(fs::exists(path)) << path;
  }
}

TEST_F(ReaderTest, WhatAKilledJobLeftOfTheHintGoesWithTheNextSave) {
  fs::create_directories(folder_);
  const fs::path left = folder_ / "LATEST.tmp-0123456789abcdef";
  std::ofstream(left) << "step-00000001";
  (void)write(2);
  EXPECT_FALSE(fs::exists(left));
  EXPECT_TRUE(fs::exists(folder_ / "LATEST"));
}

TEST_F(ReaderTest, TheNewestIsTheLastCommitAlsoOfASmallerStep) {
  for (const std::int64_t step : {4, 6, 3}) (void)write(step);
  const auto names = [](const fs::path& folder) {
    std::vector<std::string> all;
    for (const CheckpointEntry& entry : list_checkpoints(folder.string()))
      all.push_back(fs::path(entry.path).filename().string());
    return all;
  };
  const std::vector<std::string> expected{checkpoint_name(3), checkpoint_name(6), checkpoint_name(4)};
  EXPECT_EQ(names(folder_), expected);
  const fs::path copy = folder_.string() + "-copy";  // made in the order of steps, with other times
  fs::create_directories(copy);
  for (const std::int64_t step : {3, 4, 6})
    fs::copy(folder_ / checkpoint_name(step), copy / checkpoint_name(step), fs::copy_options::recursive);
  EXPECT_EQ(names(copy), expected);
  fs::remove_all(copy);
  // What is torn has the place of its step, and is none of the newest that stay.
  fs::create_directory(folder_ / checkpoint_name(9));
  std::ofstream(folder_ / checkpoint_name(9) / kManifestFile) << "{";
  EXPECT_EQ(names(folder_).front(), checkpoint_name(9));
  EXPECT_THAT(prune_checkpoints(folder_.string(), {.keep_last = 1}), testing::SizeIs(2));
  EXPECT_EQ(names(folder_), (std::vector<std::string>{checkpoint_name(9), checkpoint_name(3)}));
}

TEST_F(ReaderTest, ASaveNeverRemovesWhatItWrote) {
  for (const std::int64_t step : {4, 6}) (void)write(step);
  CheckpointWriter writer(folder_.string(), manifest_of_step(3));
  writer.write(std::vector<std::byte>(15 * 4 + 15 * 8 + 8));
  const std::string path = writer.commit({.keep_last = 1});
  EXPECT_EQ(list_checkpoints(folder_.string()).size(), 1U);
  EXPECT_EQ(read_manifest(path).commit, 3);
}

TEST_F(ReaderTest, ManifestsWithoutANumberComeAfterThoseThatHaveOne) {
  Manifest manifest = manifest_of_step(1);
  manifest.user_of_rank = {""};
  manifest.files = {{.name = "none"}};
  for (const std::int64_t commit : {0, 1, 12, 345}) {
    manifest.commit = commit;
    const std::string text = to_text(manifest);
    EXPECT_EQ(commit_in(std::string_view(text).substr(text.size() - kManifestTail)), commit);
    EXPECT_EQ(manifest_of(text, "here").commit, commit);
    EXPECT_EQ(commit_in(std::string_view(text).substr(0, text.size() - 1)), -1);
  }
  (void)write(2);
  manifest.commit = 0;
  manifest.step = 7;
  fs::create_directory(folder_ / checkpoint_name(7));
  std::ofstream(folder_ / checkpoint_name(7) / kManifestFile) << to_text(manifest);
  EXPECT_EQ(list_checkpoints(folder_.string()).front().step, 2);
}

/// A save of one file, as the rank that commits makes it; returns the run of what is there then.
std::string save_again(const std::string& folder, Existing existing, const std::string& content, const char* user,
                       const char* of_rank, const char* run) {
  PendingCheckpoint pending(folder, 5, run, 0, existing);
  detail::NewFile file((fs::path(pending.path()) / rank_file_name(0)).string(), content.size());
  file.write(std::as_bytes(std::span(content)));
  Manifest manifest{.version = "1", .run = run, .step = 5, .plan = "none", .user = user, .user_of_rank = {of_rank}};
  manifest.files = {file.finish()};
  return pending.commit(std::move(manifest), {.keep_last = 1});
}

TEST_F(ReaderTest, TheSameStepAgain) {
  const std::string folder = folder_.string();
  EXPECT_EQ(save_again(folder, Existing::kSame, "abc", "1", "x", "one"), "one");
  EXPECT_EQ(save_again(folder, Existing::kSame, "abc", "1", "x", "two"), "one") << "the same state stays";
  EXPECT_EQ(save_again(folder, Existing::kSame, "abc", "1", "y", "three"), "three") << "other random generators";
  for (const char* user : {"1", "2"}) {
    const char* content = *user == '1' ? "abd" : "abc";
    EXPECT_EQ(code_of([&] { (void)save_again(folder, Existing::kSame, content, user, "y", "four"); }),
              ErrorCode::kUsage);
    EXPECT_EQ(code_of([&] { (void)save_again(folder, Existing::kRefuse, content, user, "y", "four"); }),
              ErrorCode::kUsage);
    EXPECT_EQ(read_manifest((folder_ / checkpoint_name(5)).string()).run, "three");
  }
  EXPECT_EQ(save_again(folder, Existing::kReplace, "abd", "2", "y", "five"), "five");
  EXPECT_EQ(fs::file_size(folder_ / checkpoint_name(5) / rank_file_name(0)), 3U);
  EXPECT_EQ(read_manifest((folder_ / checkpoint_name(5)).string()).user, "2");
  // One that others refer to keeps its place, and its name for them.
  mark_as_base((folder_ / checkpoint_name(5)).string());
  Manifest later = manifest_of_step(6);
  later.base = {.name = checkpoint_name(5), .run = "five"};
  CheckpointWriter writer(folder, later);
  writer.write(std::vector<std::byte>(15 * 4 + 15 * 8 + 8));
  (void)writer.commit({});
  EXPECT_EQ(code_of([&] { (void)save_again(folder, Existing::kReplace, "x", "2", "y", "six"); }), ErrorCode::kUsage);
  EXPECT_EQ(save_again(folder, Existing::kSame, "abd", "2", "z", "seven"), "five");
  EXPECT_EQ(list_checkpoints(folder).front().step, 5) << "the last commit";
  EXPECT_EQ(list_checkpoints(folder).size(), 1U);
  int names = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(folder_)) ++names;
  EXPECT_EQ(names, 2) << "one checkpoint, and LATEST";
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

/// A checkpoint of one state "w/weight" whose elements have their row-major number as value, in files of several
/// ranges. An empty `order` is row major.
std::string write_in_order(const std::string& folder, const std::vector<std::int64_t>& shape,
                           const std::vector<int>& order, const std::vector<std::int64_t>& cuts) {
  const std::string path = folder + "/step-00000001";
  fs::create_directories(path);
  const std::int64_t elements = BoxRange::of_whole(shape, 0, 0).logical_elements();
  // Values as they lie in memory.
  std::vector<float> memory;
  std::vector<std::int64_t> index(shape.size(), 0);
  std::vector<int> dims = order;
  if (dims.empty()) {
    dims.resize(shape.size());
    std::iota(dims.begin(), dims.end(), 0);
  }
  for (std::int64_t at = 0; at < elements; ++at) {
    std::int64_t rest = at;
    for (std::size_t place = dims.size(); place-- > 0;) {
      const auto dim = static_cast<std::size_t>(dims[place]);
      index[dim] = rest % shape[dim];
      rest /= shape[dim];
    }
    std::int64_t number = 0;
    for (std::size_t dim = 0; dim < shape.size(); ++dim) number = number * shape[dim] + index[dim];
    memory.push_back(static_cast<float>(number));
  }
  Manifest manifest{.format = order.empty() ? kCheckpointFormat : kOrderedFormat,
                    .run = "r",
                    .step = 1,
                    .world = static_cast<int>(cuts.size()) - 1,
                    .groups = {"{}"}};
  manifest.params.push_back(
      {.name = "w", .shape = shape, .dtype = "F32", .states = {{.name = "weight", .dtype = "F32", .shape = shape}}});
  for (std::size_t rank = 0; rank + 1 < cuts.size(); ++rank) {
    std::vector<detail::RankEntry> entries{
        {.key = "w/weight", .dtype = "F32", .range = BoxRange::of_whole(shape, cuts[rank], cuts[rank + 1])}};
    entries.front().range.order = order;
    std::string text = detail::make_header(entries);
    text.append(reinterpret_cast<const char*>(memory.data() + cuts[rank]),
                static_cast<std::size_t>(cuts[rank + 1] - cuts[rank]) * sizeof(float));
    std::ofstream(path + "/" + rank_file_name(static_cast<int>(rank)), std::ios::binary) << text;
    CheckpointFile file{.name = rank_file_name(static_cast<int>(rank)), .bytes = text.size()};
    for (std::size_t at = 0; at < text.size(); at += detail::kChunkBytes)
      file.chunks.push_back(digest64(std::string_view(text).substr(at, detail::kChunkBytes)));
    manifest.files.push_back(std::move(file));
    manifest.user_of_rank.emplace_back();
  }
  std::ofstream(path + "/" + kManifestFile, std::ios::binary) << to_text(manifest);
  return path;
}

TEST_F(ReaderTest, AStateInAnotherOrderOfMemoryIsReadRowMajor) {
  std::mt19937 random(7);
  const auto below = [&random](std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(0, most - 1)(random);
  };
  for (int seed = 0; seed < 60; ++seed) {
    std::vector<std::int64_t> shape;
    for (std::int64_t dims = 2 + below(3); dims > 0; --dims) shape.push_back(1 + below(5));
    std::vector<int> order(shape.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, random);
    const std::int64_t elements = BoxRange::of_whole(shape, 0, 0).logical_elements();
    std::vector<std::int64_t> cuts{0, below(elements + 1), elements};
    std::ranges::sort(cuts);
    const std::string folder = (folder_ / std::to_string(seed)).string();
    const std::string path = write_in_order(folder, shape, order, cuts);
    EXPECT_TRUE(find_damage(path).empty()) << seed;
    CheckpointReader reader(path);
    std::vector<float> expected(static_cast<std::size_t>(elements));
    std::iota(expected.begin(), expected.end(), 0.0F);
    std::vector<float> values(expected.size(), -1.0F);
    // In two pieces, as tools read.
    const std::int64_t half = elements / 2;
    const std::span<std::byte> into = std::as_writable_bytes(std::span(values));
    reader.read("w/weight", half, elements, into.subspan(static_cast<std::size_t>(half) * sizeof(float)));
    reader.read("w/weight", 0, half, into.first(static_cast<std::size_t>(half) * sizeof(float)));
    EXPECT_EQ(values, expected) << seed;
    // A range of a rank whose memory has one more order.
    std::vector<int> other = order;
    std::ranges::shuffle(other, random);
    BoxRange has = BoxRange::of_whole(shape, cuts[1] / 2, elements - cuts[1] / 3);
    has.order = other;
    std::vector<detail::Source> sources;
    std::vector<detail::KnownFile> files;
    const Manifest manifest = read_manifest(path);
    for (const CheckpointFile& file : manifest.files) {
      files.emplace_back(path, file);
      for (detail::RankEntry& entry : detail::read_header(files.back()))
        sources.push_back({.file = files.size() - 1, .entry = std::move(entry)});
    }
    std::vector<float> own(static_cast<std::size_t>(has.size()), -1.0F);
    ASSERT_TRUE(detail::read_elements(has, sizeof(float), sources, files, std::as_writable_bytes(std::span(own))));
    const std::string twin = write_in_order(folder + "-twin", shape, other, {0, has.begin, has.end, elements});
    std::ifstream stream(twin + "/" + rank_file_name(1), std::ios::binary);
    std::string text((std::istreambuf_iterator<char>(stream)), {});
    std::vector<float> there(own.size());
    std::memcpy(there.data(), text.data() + text.size() - there.size() * sizeof(float), there.size() * sizeof(float));
    EXPECT_EQ(own, there) << seed;
    // Elements that are in no file are missed in any order.
    if (cuts[1] == elements) continue;
    sources.pop_back();
    EXPECT_FALSE(detail::read_elements(BoxRange::of_whole(shape, 0, elements), sizeof(float), sources, files, into));
  }
}

TEST_F(ReaderTest, OrdersThatCannotBeAreRefused) {
  const std::string path = write_in_order(folder_.string(), {2, 3}, {1, 0}, {0, 6});
  const fs::path file = fs::path(path) / rank_file_name(0);
  std::ifstream stream(file, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(stream)), {});
  for (const std::string order : {"[1,1]", "[0,2]", "[-1,0]", "[1,0,2]", "[1.5,0]", "[1]", "1"}) {
    std::string other = text;
    const std::size_t at = other.find("order");
    ASSERT_NE(at, std::string::npos);
    const std::size_t list = other.find("[1,0]", at);
    other.replace(list, 5, order);
    // The header's length follows.
    std::uint64_t length = 0;
    std::memcpy(&length, other.data(), sizeof length);
    length += order.size();
    length -= 5;
    std::memcpy(other.data(), &length, sizeof length);
    std::ofstream(file, std::ios::binary) << other;
    CheckpointFile about{.name = rank_file_name(0), .bytes = other.size(), .chunks = {digest64(other)}};
    detail::KnownFile known(path, about);
    EXPECT_EQ(code_of([&] { (void)detail::read_header(known); }), ErrorCode::kCheckpoint) << order;
  }
}

}  // namespace
}  // namespace zeroth
