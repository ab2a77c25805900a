#include <zeroth/base/notices.h>

#include <gtest/gtest.h>

#include <future>
#include <string>
#include <thread>

namespace zeroth {
namespace {

TEST(Notices, AreDueAfterTheFirstTimeAndThenNowAndThen) {
  NoticeClock never({.first = Milliseconds{60'000}});
  EXPECT_FALSE(never.due());
  NoticeClock clock({.first = Milliseconds{0}, .every = Milliseconds{60'000}});
  EXPECT_TRUE(clock.due());
  EXPECT_FALSE(clock.due());
  EXPECT_EQ(NoticeTimes{}.first, Milliseconds{5'000});
  EXPECT_EQ(NoticeTimes{}.every, Milliseconds{30'000});
}

TEST(Notices, AThreadSaysThemUntilTheWaitIsOver) {
  int said = 0;
  std::promise<void> twice;
  {
    const NoticeThread notices({.first = Milliseconds{1}, .every = Milliseconds{1}}, [&](const std::string& waited) {
      EXPECT_NE(waited.find(" ms"), std::string::npos) << waited;
      if (++said == 2) twice.set_value();
    });
    twice.get_future().wait();
  }
  const int at_the_end = said;
  EXPECT_GE(at_the_end, 2);
  {
    const NoticeThread notices({.first = Milliseconds{60'000}}, [&](const std::string&) { ++said; });
  }
  EXPECT_EQ(said, at_the_end) << "a short wait says nothing, and its end does not wait";
}

}  // namespace
}  // namespace zeroth
