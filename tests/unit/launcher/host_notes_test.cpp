#include "launcher/host_notes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace zeroth::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class HostNotesTest : public ::testing::Test {
 protected:
  void add(const std::string& host, const std::string& text, int at_ms = 0) {
    notes.add(host, text, start + Milliseconds{at_ms});
  }
  std::vector<std::string> taken(int at_ms) { return notes.take(start + Milliseconds{at_ms}); }

  HostNotes notes;
  HostNotes::TimePoint start = SteadyClock::now();
};

TEST_F(HostNotesTest, WhatSeveralHostsSayIsSaidOnce) {
  add("a", "few cores");
  add("b", "few cores", 100);
  add("a", "no core dumps", 120);
  EXPECT_THAT(taken(299), IsEmpty());
  EXPECT_EQ(notes.next(), start + Milliseconds{300});
  EXPECT_THAT(taken(300), ElementsAre("hosts a, b: few cores"));
  EXPECT_THAT(taken(419), IsEmpty());
  EXPECT_THAT(taken(420), ElementsAre("host a: no core dumps"));
  EXPECT_EQ(notes.next(), std::nullopt);
}

TEST_F(HostNotesTest, ManyHostsAreCounted) {
  for (const char* host : {"a", "b", "c", "d", "e"}) add(host, "five");
  EXPECT_THAT(notes.take(HostNotes::TimePoint::max()), ElementsAre("hosts a, b, c, d, e: five"));
  for (int host = 0; host < 125; ++host) add("n" + std::to_string(host), "many");
  EXPECT_THAT(notes.take(HostNotes::TimePoint::max()), ElementsAre("hosts n0, n1, n2, n3 and 121 more: many"));
}

TEST_F(HostNotesTest, TheNotesOfAHostStayInOrder) {
  add("a", "first");
  add("b", "second");
  add("b", "first");  // not that of a: b has said another thing before
  add("a", "first");  // again
  EXPECT_THAT(notes.take(HostNotes::TimePoint::max()),
              ElementsAre("host a: first", "host b: second", "hosts b, a: first"));
}

TEST_F(HostNotesTest, AFloodDoesNotPileUp) {
  for (int note = 0; note < 300; ++note) add("a", std::to_string(note));
  EXPECT_THAT(taken(0), SizeIs(44));
}

}  // namespace
}  // namespace zeroth::launcher
