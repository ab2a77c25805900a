#include "launcher/line_splitter.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {
namespace {

std::string split_in_chunks(std::string_view text, std::size_t chunk, const LineStyle& style) {
  LineSplitter splitter(style);
  std::string out;
  for (std::size_t at = 0; at < text.size(); at += chunk) splitter.feed(text.substr(at, chunk), out);
  splitter.finish(out);
  return out;
}

TEST(LineSplitter, PrefixesEveryLineAndEndsTheLast) {
  struct Row {
    std::string in;
    std::string out;
  };
  const std::vector<Row> rows{
      {"", ""},
      {"a", "> a\n"},
      {"a\n", "> a\n"},
      {"\n", "> \n"},
      {"\n\n", "> \n> \n"},
      {"a\nb", "> a\n> b\n"},
      {"a\r\nb\r\n", "> a\r\n> b\r\n"},
      {"\r10%\r20%\rdone\n", "> \r> 10%\r> 20%\r> done\n"},
      {"a\r", "> a\r"},
      {"a\r\r\n", "> a\r> \r\n"},
      {std::string("a\0b\n", 4), std::string("> a\0b\n", 6)},
  };
  for (const Row& row : rows) {
    for (const std::size_t chunk : {1UL, 2UL, 3UL, 100UL}) {
      EXPECT_EQ(split_in_chunks(row.in, chunk, {.prefix = "> "}), row.out) << chunk;
    }
  }
}

TEST(LineSplitter, SplitsOnlyLinesThatAreTooLong) {
  for (const std::size_t length : {kMaxLineBytes - 1, kMaxLineBytes}) {
    const std::string line(length, 'x');
    for (const char* end : {"\n", "\r\n", "\r"}) {
      EXPECT_EQ(split_in_chunks(line + end, 40000, {.prefix = "> "}), "> " + line + end);
    }
  }
  const std::string full(kMaxLineBytes, 'x');
  EXPECT_EQ(split_in_chunks(full + full + "x\n", 40000, {.prefix = "> "}), "> " + full + "\n> " + full + "\n> x\n");
}

TEST(LineSplitter, ChunksOfTheInputDoNotShow) {
  EXPECT_TRUE(rc::check([](const std::vector<std::uint8_t>& raw) {
    const std::string alphabet("ab\n\r\0\xff", 6);
    std::string text;
    for (const std::uint8_t value : raw) text.push_back(alphabet[value % alphabet.size()]);
    const std::string whole = split_in_chunks(text, text.size() + 1, {.prefix = ">"});
    for (const std::size_t chunk : {1UL, 2UL, 3UL, 7UL}) {
      RC_ASSERT(split_in_chunks(text, chunk, {.prefix = ">"}) == whole);
      RC_ASSERT(split_in_chunks(text, chunk, {.pass_through = true}) == text);
    }
    // Nothing but prefixes and at most one last LF is added.
    std::string bare = whole;
    std::erase(bare, '>');
    RC_ASSERT(bare == text || bare == text + "\n");
  }));
}

TEST(LineSplitter, RemembersTheLastErrorLine) {
  for (const bool pass_through : {false, true}) {
    LineSplitter splitter({.pass_through = pass_through});
    std::string out;
    splitter.feed("ZEROTH ERROR [IO] old\nnoise\n[zeroth 1/2] error: ZEROTH ERR", out);
    EXPECT_EQ(splitter.last_error_line(), "ZEROTH ERROR [IO] old");
    splitter.feed("OR [CONFIG] \x1b[31mnew\tkey\r\nnoise", out);
    EXPECT_EQ(splitter.last_error_line(), "ZEROTH ERROR [CONFIG] ?[31mnew?key");
    splitter.feed("\nZEROTH ERROR [USAGE] without end", out);
    splitter.finish(out);
    EXPECT_EQ(splitter.last_error_line(), "ZEROTH ERROR [USAGE] without end");
    splitter.feed("ZEROTH ERROR [IO] " + std::string(5000, 'x') + "\n", out);
    EXPECT_EQ(splitter.last_error_line().size(), 1000U);
    splitter.feed("zeroth.Error: [IO] of Python\n", out);
    EXPECT_EQ(splitter.last_error_line(), "zeroth.Error: [IO] of Python");
    splitter.feed("[9] RuntimeError: [PEER_LOST] through torch\nValueError: [1, 2] is not ours\n", out);
    EXPECT_EQ(splitter.last_error_line(), "RuntimeError: [PEER_LOST] through torch");
  }
}

}  // namespace
}  // namespace zeroth::launcher
