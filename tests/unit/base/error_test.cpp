#include "error_codes.h"

#include <zeroth/base/error.h>
#include <zeroth/base/error_place.h>

#include <gtest/gtest.h>

#include <cerrno>
#include <new>
#include <set>
#include <stdexcept>
#include <string>

namespace zeroth {
namespace {

using test::kCodes;

TEST(ErrorCode, SlugsAndExitCodesAreStable) {
  for (const auto& facts : kCodes) {
    EXPECT_EQ(slug(facts.code), facts.slug);
    EXPECT_EQ(exit_code(facts.code), facts.exit_code) << facts.slug;
  }
}

TEST(ErrorCode, EveryCodeIsInTheTable) {
  // kInternal is the last one; a new code must come before it and into the table.
  EXPECT_EQ(kCodes.size(), static_cast<std::size_t>(ErrorCode::kInternal) + 1);
  std::set<ErrorCode> codes;
  std::set<std::string_view> slugs;
  for (const auto& facts : kCodes) {
    codes.insert(facts.code);
    slugs.insert(facts.slug);
  }
  EXPECT_EQ(codes.size(), kCodes.size());
  EXPECT_EQ(slugs.size(), kCodes.size());
}

TEST(ErrorCode, ExitCodesTellFailureFromSignalAndShell) {
  for (const auto& facts : kCodes) {
    if (facts.code == ErrorCode::kUser) continue;  // 1: what Python and the shell say of a program's own failure
    EXPECT_GE(exit_code(facts.code), 64);
    EXPECT_LE(exit_code(facts.code), 78);
  }
}

TEST(ErrorText, NamesEveryFieldInOneOrder) {
  const Error error(ErrorCode::kMismatch, "sizes differ",
                    {.where = "comm.shm all_gather#841",
                     .who = "rank 3/8",
                     .which = "block.2",
                     .expected = "4 KiB",
                     .got = "8 KiB",
                     .hint = "call alike"});
  EXPECT_STREQ(error.what(),
               "[MISMATCH] sizes differ; where: comm.shm all_gather#841; who: rank 3/8; which: block.2; "
               "expected: 4 KiB; got: 8 KiB; hint: call alike");
}

TEST(ErrorText, LeavesEmptyFieldsOut) {
  EXPECT_STREQ(Error(ErrorCode::kIo, "gone").what(), "[IO] gone");
  EXPECT_STREQ(Error(ErrorCode::kIo, "gone", {.got = "x"}).what(), "[IO] gone; got: x");
  EXPECT_STREQ(Error(ErrorCode::kIo, "").what(), "[IO] ");
}

TEST(Error, KeepsItsPartsAndCopies) {
  const Error error(ErrorCode::kModel, "no", {.which = "w"});
  const Error copy = error;  // NOLINT(performance-unnecessary-copy-initialization): exceptions are copied
  EXPECT_EQ(copy.code(), ErrorCode::kModel);
  EXPECT_EQ(copy.message(), "no");
  EXPECT_EQ(copy.context().which, "w");
  EXPECT_STREQ(copy.what(), error.what());
}

TEST(ErrorOf, AnErrorStaysMemoryIsNamedAndAllElseIsTheUsers) {
  EXPECT_STREQ(error_of(Error(ErrorCode::kModel, "no loss", {.who = "rank 2/4"})).what(),
               "[MODEL] no loss; who: rank 2/4");
  EXPECT_STREQ(error_of(std::bad_alloc()).what(), "[OUT_OF_MEMORY] an allocation failed; got: std::bad_alloc");
  EXPECT_STREQ(error_of(std::runtime_error("no such token: 50257")).what(), "[USER] no such token: 50257");
  EXPECT_STREQ(error_of(std::logic_error("expected a float\nException raised from check at x.cpp:12")).what(),
               "[USER] expected a float");
  EXPECT_STREQ(error_of(std::runtime_error("")).what(), "[USER] ");
}

TEST(PlaceOf, ReadsRankStepAndCall) {
  const auto place = [](std::string who, std::string where, std::string expected) {
    return place_of({.where = std::move(where), .who = std::move(who), .expected = std::move(expected)});
  };
  EXPECT_EQ(place("rank 3/8, step 120 (forward)", "comm.shm group=world", "all_gather#841 float32, 96 elements"),
            (ErrorPlace{3, 120, "all_gather#841"}));
  EXPECT_EQ(place("rank 3/8, after step 119", "comm.shm all_reduce#12 group=world", "a slot of rank 2"),
            (ErrorPlace{3, 119, "all_reduce#12"}));
  EXPECT_EQ(place("rank 3/8", "world#0", "# nothing, x#y"), (ErrorPlace{3, std::nullopt, "world#0"}));
  EXPECT_EQ(place("", "", ""), ErrorPlace{});
  EXPECT_EQ(place("rank 99999999999/8, step x", "", ""), ErrorPlace{}) << "no number that fits";
}

TEST(Check, ThrowsOnlyWhenFalseAndEvaluatesOnce) {
  int evaluated = 0;
  EXPECT_NO_THROW(ZR_CHECK(++evaluated == 1, ErrorCode::kUsage, "never"));
  EXPECT_EQ(evaluated, 1);
  try {
    ZR_CHECK(++evaluated == 1, ErrorCode::kUsage, "now", ErrorContext{.who = "rank 1/2"});
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_EQ(error.context().who, "rank 1/2");
  }
  EXPECT_EQ(evaluated, 2);
}

TEST(Check, IsOneStatement) {
  bool reached = false;
  if (reached)
    ZR_CHECK(false, ErrorCode::kUsage, "dangling");
  else
    reached = true;
  EXPECT_TRUE(reached);
}

TEST(Assert, NamesExpressionFileAndNote) {
  try {
    ZR_ASSERT(1 + 1 == 3, "arithmetic broke");
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    const std::string text = error.what();
    EXPECT_NE(text.find("1 + 1 == 3"), std::string::npos) << text;
    EXPECT_NE(text.find("error_test.cpp"), std::string::npos) << text;
    EXPECT_NE(text.find("arithmetic broke"), std::string::npos) << text;
  }
}

TEST(ErrnoText, NamesNumberAndMeaning) {
  EXPECT_NE(errno_text(ENOENT).find("No such file"), std::string::npos);
  EXPECT_NE(errno_text(ENOENT).find(std::to_string(ENOENT)), std::string::npos);
  EXPECT_FALSE(errno_text(-7).empty());
}

}  // namespace
}  // namespace zeroth
