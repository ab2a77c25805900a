#include <zeroth/base/text.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace zeroth {
namespace {

TEST(FormatBytes, TableOfSizes) {
  const std::map<std::uint64_t, std::string> table{
      {0, "0 B"},
      {1, "1 B"},
      {1023, "1023 B"},
      {1024, "1.00 KiB"},
      {1536, "1.50 KiB"},
      {10229, "9.99 KiB"},
      {10236, "10.0 KiB"},  // 9.996: not "10.00"
      {12595, "12.3 KiB"},
      {1048575, "1.00 MiB"},  // not "1024.0 KiB"
      {1048576, "1.00 MiB"},
      {107163419, "102.2 MiB"},
      {std::uint64_t{3} << 29U, "1.50 GiB"},
      {std::uint64_t{5} << 40U, "5.00 TiB"},
      {std::numeric_limits<std::uint64_t>::max(), "16777216.0 TiB"},
  };
  for (const auto& [bytes, text] : table) EXPECT_EQ(format_bytes(bytes), text) << bytes;
}

RC_GTEST_PROP(FormatBytesProperty, TextIsWithinOnePercentAndShort, ()) {
  const auto shift = *rc::gen::inRange(0, 50);
  const auto bytes = *rc::gen::arbitrary<std::uint64_t>() >> (14U + static_cast<unsigned>(shift));
  const std::string text = format_bytes(bytes);
  char* unit = nullptr;
  double value = std::strtod(text.c_str(), &unit);
  RC_ASSERT(value < 1024.0);
  const std::map<std::string, int> powers{{" B", 0}, {" KiB", 10}, {" MiB", 20}, {" GiB", 30}, {" TiB", 40}};
  value = std::ldexp(value, powers.at(unit));
  RC_ASSERT(std::fabs(value - static_cast<double>(bytes)) <= 0.01 * static_cast<double>(bytes));
}

RC_GTEST_PROP(HexFloatProperty, ReadsBackTheSameBits, ()) {
  const auto bits = *rc::gen::arbitrary<std::uint64_t>();
  const auto value = std::bit_cast<double>(bits);
  RC_PRE(!std::isnan(value));
  RC_ASSERT(std::bit_cast<std::uint64_t>(std::strtod(hex_float(value).c_str(), nullptr)) == bits);
}

TEST(HexFloat, KnownValues) {
  EXPECT_EQ(hex_float(3.0), "0x1.8p+1");
  EXPECT_EQ(hex_float(-0.0), "-0x0p+0");
  EXPECT_EQ(hex_float(std::numeric_limits<double>::infinity()), "inf");
  EXPECT_NE(hex_float(std::nan("")).find("nan"), std::string::npos);
}

TEST(NearestName, FindsMisspellings) {
  const std::vector<std::string> names{"stage", "reshard", "ring_slots", "reduction_policy", "AdamW", "SGD"};
  EXPECT_EQ(nearest_name("stge", names), "stage");
  EXPECT_EQ(nearest_name("satge", names),
            "");  // a transposition is two edits, more than a third of five letters
  EXPECT_EQ(nearest_name("ring_slot", names), "ring_slots");
  EXPECT_EQ(nearest_name("reductoin_polcy", names), "reduction_policy");
  EXPECT_EQ(nearest_name("AdamW", names), "AdamW");
  EXPECT_EQ(nearest_name("SDG", names), "");
  EXPECT_EQ(nearest_name("SG", names), "SGD");
  EXPECT_EQ(nearest_name("completely different", names), "");
  EXPECT_EQ(nearest_name("x", std::vector<std::string>{}), "");
}

TEST(NearestName, PrefersTheNearestThenTheFirst) {
  EXPECT_EQ(nearest_name("abcdef", std::vector<std::string>{"abcdxy", "abcdex"}), "abcdex");
  EXPECT_EQ(nearest_name("abcdef", std::vector<std::string>{"abcdeY", "abcdeX"}), "abcdeY");
}

TEST(RanksText, RunsAreShort) {
  EXPECT_EQ(ranks_text({3}), "rank 3");
  EXPECT_EQ(ranks_text({3, 1}), "ranks 1, 3");
  EXPECT_EQ(ranks_text({2, 1}), "ranks 1, 2");
  EXPECT_EQ(ranks_text({0, 1, 2, 3, 7, 9, 10, 11}), "ranks 0-3, 7, 9-11");
  std::vector<int> every_other;
  for (int rank = 0; rank < 32; rank += 2) every_other.push_back(rank);
  EXPECT_EQ(ranks_text(every_other), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30");
  for (int rank = 32; rank < 1'000; rank += 2) every_other.push_back(rank);
  EXPECT_EQ(ranks_text(every_other), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 484 more");
}

RC_GTEST_PROP(NearestNameProperty, OneEditOfALongNameIsAlwaysFound, ()) {
  auto name = *rc::gen::container<std::string>(12, rc::gen::inRange('a', 'z'));
  const std::string original = name;
  const auto at = *rc::gen::inRange<std::size_t>(0, name.size());
  switch (*rc::gen::inRange(0, 3)) {
    case 0:
      name.erase(at, 1);
      break;
    case 1:
      name.insert(at, "_");
      break;
    default:
      name[at] = '#';
  }
  RC_ASSERT(nearest_name(name, std::vector<std::string>{"0000", original, "111111111111"}) == original);
}

TEST(Join, PutsSeparatorsBetween) {
  EXPECT_EQ(join(std::vector<std::string>{}, ", "), "");
  EXPECT_EQ(join(std::vector<std::string>{"a"}, ", "), "a");
  EXPECT_EQ(join(std::vector<std::string>{"a", "b", "c"}, ", "), "a, b, c");
  EXPECT_EQ(join(std::vector<std::string>{"", "", "x"}, "-"), "--x");
}

TEST(Few, NamesTenAndCountsTheRest) {
  std::vector<std::string> parts(10, "x");
  EXPECT_EQ(few(parts), "x, x, x, x, x, x, x, x, x, x");
  parts.resize(13, "y");
  EXPECT_EQ(few(parts), "x, x, x, x, x, x, x, x, x, x and 3 more");
}

TEST(UnwrappedName, HasNoComponentOfTorchCompile) {
  EXPECT_EQ(unwrapped_name("_orig_mod.0.weight"), "0.weight");
  EXPECT_EQ(unwrapped_name("0._orig_mod.1._orig_mod.weight"), "0.1.weight");
  EXPECT_EQ(unwrapped_name("0._orig_mod"), "0");
  for (const char* name : {"0.weight", "_orig_mod", "my_orig_mod.weight", "_orig_models.weight", ""})
    EXPECT_EQ(unwrapped_name(name), name);
}

TEST(ShortestText, IsDecimalAndTellsNeighboursApart) {
  EXPECT_EQ(shortest_text(0.1), "0.1");
  EXPECT_EQ(shortest_text(1e-4), "1e-04");
  EXPECT_EQ(shortest_text(0.0), "0");
}

TEST(Digest64, IsXxh3WithSeed) {
  EXPECT_EQ(digest64(""), 0x2d06800538d394c2U);  // published value of XXH3_64bits of nothing
  EXPECT_EQ(digest64("zeroth"), digest64(std::string("zeroth")));
  EXPECT_NE(digest64("zeroth"), digest64("zeroth", 1));
  EXPECT_NE(digest64("zeroth"), digest64("Zeroth"));
  EXPECT_NE(digest64(std::string_view("a\0b", 3)), digest64(std::string_view("a\0c", 3)));
}

TEST(Digest64, SeesEveryBitOfEveryLength) {
  for (const std::size_t length : {1U, 3U, 8U, 17U, 64U, 129U, 241U, 1025U}) {
    std::string text(length, 'x');
    std::set<std::uint64_t> seen{digest64(text)};
    for (std::size_t at = 0; at < length; ++at) {
      text[at] ^= 1;
      EXPECT_TRUE(seen.insert(digest64(text)).second) << length << " at " << at;
      text[at] ^= 1;
    }
  }
}

}  // namespace
}  // namespace zeroth
