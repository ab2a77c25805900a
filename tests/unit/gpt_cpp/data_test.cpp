#include "data.h"

#include "temp_folder.h"

#include <zeroth/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using zeroth::Error;
using zeroth::ErrorCode;

constexpr std::size_t kSeq = 8;

std::vector<std::string> names_of(const Corpus& corpus) {
  std::vector<std::string> names;
  for (const CorpusFile& file : corpus.files) {
    names.push_back(file.name);
  }
  return names;
}

std::string text_of(const Corpus& corpus) {
  return {corpus.bytes.begin(), corpus.bytes.end()};
}

// What load_corpus throws, or kInternal with "nothing thrown".
std::pair<ErrorCode, std::string> error_of(const CorpusOptions& options, std::size_t seq) {
  try {
    static_cast<void>(load_corpus(options, seq));
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {ErrorCode::kInternal, "nothing thrown"};
}

TEST(Corpus, JoinsFilesInByteOrderOfTheirNames) {
  const test::TempFolder folder;
  folder.write("b.txt", std::string(40, 'b'));
  folder.write("B.txt", std::string(41, 'B'));
  folder.write("a/z.txt", std::string(42, 'z'));
  folder.write("a.txt", std::string(43, 'a'));
  folder.write("empty.txt", "");

  const Corpus corpus = load_corpus({.folder = folder.path()}, kSeq);

  EXPECT_THAT(names_of(corpus), ElementsAre("B.txt", "a.txt", "a/z.txt", "b.txt"));
  EXPECT_EQ(text_of(corpus), std::string(41, 'B') + std::string(43, 'a') + std::string(42, 'z') + std::string(40, 'b'));
  EXPECT_EQ(corpus.files[2].bytes, 42U);
}

TEST(Corpus, HoldsOutTheLastTenthButAtLeastFourWindows) {
  const test::TempFolder folder;
  folder.write("t.txt", std::string(1003, 'x'));

  const Corpus large = load_corpus({.folder = folder.path()}, kSeq);
  EXPECT_EQ(large.held_out().size(), 100U);
  EXPECT_EQ(large.train().size(), 903U);
  EXPECT_EQ(large.held_out().data(), large.bytes.data() + 903);

  const Corpus tight = load_corpus({.folder = folder.path()}, 99);
  EXPECT_EQ(tight.held_out().size(), 400U);
  EXPECT_EQ(tight.train().size(), 603U);
}

TEST(Corpus, TakesSuffixesAndLeavesOutNamesAndBinaries) {
  const test::TempFolder folder;
  folder.write("keep.py", std::string(100, 'k'));
  folder.write("also.pyi", std::string(100, 'p'));
  folder.write("no.txt", std::string(100, 'n'));
  folder.write("deep/test/out.py", std::string(100, 'o'));
  folder.write("out.py", std::string(100, 'o'));
  folder.write("binary.py", std::string(50, 'x') + std::string(1, '\0') + std::string(50, 'x'));
  std::filesystem::create_symlink(folder.path() / "nowhere", folder.path() / "broken.py");

  const Corpus corpus =
      load_corpus({.folder = folder.path(), .suffixes = {".py", ".pyi"}, .exclude = {"test", "out.py"}}, kSeq);

  EXPECT_THAT(names_of(corpus), ElementsAre("also.pyi", "keep.py"));
  EXPECT_EQ(corpus.num_binary, 1U);
  EXPECT_THAT(describe(corpus), HasSubstr("2 files, 200 B of text"));
}

TEST(Corpus, DigestSeesNamesOrderAndContent) {
  const auto digest = [](const std::vector<std::pair<std::string, std::string>>& files) {
    const test::TempFolder folder;
    for (const auto& [name, content] : files) {
      folder.write(name, content);
    }
    return load_corpus({.folder = folder.path()}, kSeq).digest;
  };
  const std::string x(60, 'x');
  const std::string y(60, 'y');
  const std::set<std::uint64_t> digests = {digest({{"a", x}, {"b", y}}), digest({{"a", y}, {"b", x}}),
                                           digest({{"a", x}, {"c", y}}), digest({{"a", x + y}}),
                                           digest({{"a", x}, {"b", y + "z"}})};
  EXPECT_EQ(digests.size(), 5U);
  EXPECT_EQ(digest({{"a", x}, {"b", y}}), digest({{"b", y}, {"a", x}}));
}

TEST(Corpus, RefusesWhatCannotBeTrainedOn) {
  const test::TempFolder folder;
  const auto file = folder.write("some.txt", std::string(53, 'x'));
  const test::TempFolder empty;

  auto [code, text] = error_of({.folder = folder.path() / "missing"}, kSeq);
  EXPECT_EQ(code, ErrorCode::kIo);
  EXPECT_THAT(text, HasSubstr("does not exist"));
  EXPECT_THAT(text, HasSubstr((folder.path() / "missing").string()));

  std::tie(code, text) = error_of({.folder = file}, kSeq);
  EXPECT_EQ(code, ErrorCode::kIo);
  EXPECT_THAT(text, HasSubstr("not a folder"));

  std::tie(code, text) = error_of({.folder = empty.path()}, kSeq);
  EXPECT_EQ(code, ErrorCode::kUsage);
  EXPECT_THAT(text, HasSubstr("nothing to train on"));

  std::tie(code, text) = error_of({.folder = folder.path(), .suffixes = {".py"}}, kSeq);
  EXPECT_EQ(code, ErrorCode::kUsage);
  EXPECT_THAT(text, HasSubstr("ends in .py"));

  // Six windows of nine bytes are needed: two to train on, four held out.
  std::tie(code, text) = error_of({.folder = folder.path()}, kSeq);
  EXPECT_EQ(code, ErrorCode::kUsage);
  EXPECT_THAT(text, HasSubstr("at least 54 bytes"));
  EXPECT_THAT(text, HasSubstr("53 bytes"));
  folder.write("more.txt", "x");
  EXPECT_EQ(load_corpus({.folder = folder.path()}, kSeq).train().size(), 18U);
}

TEST(Corpus, NamesAFileThatCannotBeRead) {
  const test::TempFolder folder;
  folder.write("fine.txt", std::string(100, 'x'));
  // A regular file that refuses to be read, by root too; permissions would not hold root back.
  std::filesystem::create_symlink("/proc/self/mem", folder.path() / "refuses.txt");
  const auto [code, text] = error_of({.folder = folder.path()}, kSeq);
  EXPECT_EQ(code, ErrorCode::kIo);
  EXPECT_THAT(text, HasSubstr("refuses.txt"));
}

TEST(TrainWindows, AreAFunctionOfSeedStepMicroStepAndRank) {
  const BatchKey key{.seed = 5, .step = 7, .micro_step = 1, .rank = 2};
  const auto windows = [](const BatchKey& k) { return train_windows(1'000'003, kSeq, 4, k); };
  EXPECT_EQ(windows(key), windows(key));
  std::set<std::vector<std::size_t>> seen = {windows(key)};
  for (const BatchKey& other :
       {BatchKey{6, 7, 1, 2}, {5, 8, 1, 2}, {5, 7, 0, 2}, {5, 7, 1, 3}, {5, 1, 7, 2}, {7, 5, 1, 2}}) {
    EXPECT_TRUE(seen.insert(windows(other)).second) << "seed " << other.seed << " step " << other.step;
  }
}

TEST(TrainWindows, AlwaysFitTheText) {
  EXPECT_TRUE(rc::check("every window of seq + 1 bytes lies inside the text", [] {
    const auto seq = *rc::gen::inRange<std::size_t>(1, 40);
    const auto text_bytes = seq + 1 + *rc::gen::inRange<std::size_t>(0, 100);
    const BatchKey key{*rc::gen::arbitrary<std::uint64_t>(), *rc::gen::arbitrary<std::int64_t>(), 0, 3};
    for (const std::size_t start : train_windows(text_bytes, seq, 17, key)) {
      RC_ASSERT(start + seq + 1 <= text_bytes);
    }
  }));
}

TEST(TrainWindows, ReachEveryStartEvenly) {
  constexpr std::size_t kStarts = 11;
  std::map<std::size_t, int> counts;
  for (const std::size_t start : train_windows(kSeq + kStarts, kSeq, 11'000, {.seed = 3})) {
    ++counts[start];
  }
  EXPECT_EQ(counts.size(), kStarts);
  for (const auto& [start, count] : counts) {
    EXPECT_NEAR(count, 1000, 160) << "start " << start;  // five standard deviations
  }
}

TEST(HeldOutWindows, AreDisjointSpreadAndInside) {
  EXPECT_TRUE(rc::check("windows are disjoint, in order and inside the text", [] {
    const auto seq = *rc::gen::inRange<std::size_t>(1, 20);
    const auto text_bytes = *rc::gen::inRange<std::size_t>(0, 500);
    const auto count = *rc::gen::inRange<std::size_t>(1, 60);
    const auto starts = held_out_windows(text_bytes, seq, count);
    RC_ASSERT(starts.size() == std::min(count, text_bytes / (seq + 1)));
    for (std::size_t i = 0; i < starts.size(); ++i) {
      RC_ASSERT(starts[i] + seq + 1 <= text_bytes);
      RC_ASSERT(
          (i == 0 || starts[i] >= starts[i - 1] + seq + 1));  // rapidcheck takes || apart and evaluates both sides
    }
  }));
  EXPECT_THAT(held_out_windows(90, 8, 5), ElementsAre(0, 18, 36, 54, 72));
}

TEST(BigramEntropy, AgreesWithHandComputedCases) {
  const auto entropy = [](std::string_view text) {
    return bigram_entropy(std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size()));
  };
  EXPECT_EQ(entropy(""), 0.0);
  EXPECT_EQ(entropy("a"), 0.0);
  EXPECT_EQ(entropy("abababab"), 0.0);  // the byte before says all
  // Pairs aa, ab, ba, aa: after a (three times) a twice and b once, after b always a.
  EXPECT_NEAR(entropy("aabaa"), (2 * std::log(3.0 / 2) + std::log(3.0)) / 4, 1e-15);
}

TEST(BigramEntropy, OfIndependentBytesIsTheirEntropy) {
  std::vector<std::uint8_t> text(200'000);
  for (std::size_t i = 0; i < text.size(); ++i) {
    text[i] = static_cast<std::uint8_t>((i * 2654435761U >> 7U) * 40503U >> 3U & 3U);
  }
  std::map<int, double> counts;
  for (const std::uint8_t byte : text) {
    counts[byte] += 1.0;
  }
  double entropy = 0.0;
  for (const auto& [byte, count] : counts) {
    entropy -= count / 200'000 * std::log(count / 200'000);
  }
  EXPECT_LE(bigram_entropy(text), entropy + 1e-4);  // knowing more never adds uncertainty
}

}  // namespace
}  // namespace gpt
