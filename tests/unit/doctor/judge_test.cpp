// What is found wrong in a report that is made up.
#include "doctor/judge.h"

#include "doctor/table.h"

#include <zeroth/base/text.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::doctor {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr double kGigabyte = 1e9;

/// Hosts a, b, ... of so many ranks, with nothing wrong.
Report healthy(int num_hosts, int ranks_per_host) {
  Report report{.num_ranks = num_hosts * ranks_per_host};
  for (int host = 0; host < num_hosts; ++host) {
    report.hosts.push_back({.host = host,
                            .name = std::string(1, static_cast<char>('a' + host)),
                            .address = "10.0.0." + std::to_string(host + 1)});
    report.disks.push_back({.host = host,
                            .folder = "/scratch",
                            .free = std::uint64_t{1} << 40U,
                            .write_bytes_per_s = kGigabyte,
                            .read_bytes_per_s = kGigabyte});
    report.clocks.push_back({.host = host, .ahead_ms = 0.1 * host, .uncertainty_ms = 0.05});
    for (int local = 0; local < ranks_per_host; ++local) {
      report.ranks.push_back({.rank = host * ranks_per_host + local,
                              .host = host,
                              .host_name = report.hosts.back().name,
                              .zeroth = "0.1.0",
                              .kernel = "6.1",
                              .glibc = "2.36",
                              .processors = 8,
                              .cores = 8,
                              .numa_nodes = 1,
                              .memory = std::uint64_t{1} << 36U,
                              .memory_available = std::uint64_t{1} << 35U,
                              .shm_bytes = std::uint64_t{1} << 34U,
                              .memlock = -1,
                              .open_files = 4096});
    }
  }
  return report;
}

Link far_link(int a, int b, double there, double back, double latency_us = 20) {
  return {.a = a,
          .b = b,
          .transport = "tcp",
          .far = true,
          .latency_us = latency_us,
          .there_bytes_per_s = there,
          .back_bytes_per_s = back};
}

std::vector<std::string> lines_of(Report report, const Thresholds& thresholds = {}) {
  judge(report, thresholds);
  std::vector<std::string> lines;
  for (const Finding& finding : report.findings) lines.push_back((finding.note ? "note " : "") + finding.line());
  return lines;
}

TEST(Judge, FindsNothingWhereNothingIsWrong) {
  Report report = healthy(3, 2);
  report.links = {far_link(0, 2, kGigabyte, 0.9 * kGigabyte), far_link(0, 4, 1.1 * kGigabyte, kGigabyte),
                  far_link(2, 4, 0.8 * kGigabyte, kGigabyte)};
  EXPECT_THAT(lines_of(report), IsEmpty());
  EXPECT_TRUE(report.well());
  EXPECT_THAT(table_of(report, {}), HasSubstr("all well\n"));
}

TEST(Judge, NamesTheSlowLinkWithItsFigureAndWhatIsUsual) {
  Report report = healthy(3, 2);
  report.links = {far_link(0, 2, kGigabyte, kGigabyte), far_link(0, 4, kGigabyte, 5e6),
                  far_link(2, 4, kGigabyte, kGigabyte)};
  EXPECT_THAT(odd_links(report, {}), ElementsAre(1));
  EXPECT_THAT(
      lines_of(report),
      ElementsAre(AllOf(HasSubstr("[ENVIRONMENT] a link is slow; where: link over tcp; who: rank 0 (a) and rank 4 (c)"),
                        HasSubstr("expected: 1.00 GB/s as usual here"),
                        HasSubstr("got: 5.00 MB/s from rank 4 to rank 0, 1.00 GB/s back"))));
}

TEST(Judge, NamesTheHostWhoseLinksAreAllSlow) {
  // Two of three links are slow: the middle of all would be slow, too.
  Report report = healthy(3, 1);
  report.links = {far_link(0, 1, 5e6, 5e6), far_link(0, 2, kGigabyte, kGigabyte), far_link(1, 2, 5e6, 5e6)};
  const std::vector<std::string> lines = lines_of(report);
  EXPECT_THAT(odd_links(report, {}), ElementsAre(0, 2));
  EXPECT_THAT(lines, Contains(AllOf(HasSubstr("all links of one host are slow"), HasSubstr("who: b"))));
  EXPECT_EQ(lines.size(), 3U);
}

TEST(Judge, OfTwoHostsOneDirectionCanBeSlow) {
  Report report = healthy(2, 1);
  report.links = {far_link(0, 1, kGigabyte, 0.1 * kGigabyte)};
  EXPECT_THAT(lines_of(report), ElementsAre(HasSubstr("got: 100 MB/s from rank 1 to rank 0, 1.00 GB/s back")));
}

TEST(Judge, InsideAHostTheBetterDirectionCounts) {
  Report report = healthy(1, 3);
  const auto near = [](int a, int b, double there, double back) {
    return Link{
        .a = a, .b = b, .transport = "shm", .latency_us = 1, .there_bytes_per_s = there, .back_bytes_per_s = back};
  };
  report.links = {near(0, 1, kGigabyte, 4 * kGigabyte), near(0, 2, 4 * kGigabyte, 4 * kGigabyte),
                  near(1, 2, kGigabyte, kGigabyte)};
  EXPECT_THAT(odd_links(report, {}), ElementsAre(2));
}

TEST(Judge, ALongWayIsNamedAndAFewMicrosecondsAreNot) {
  Report report = healthy(3, 1);
  report.links = {far_link(0, 1, kGigabyte, kGigabyte, 20), far_link(0, 2, kGigabyte, kGigabyte, 90),
                  far_link(1, 2, kGigabyte, kGigabyte, 5000)};
  EXPECT_THAT(odd_links(report, {}), ElementsAre(2));
  EXPECT_THAT(lines_of(report), ElementsAre(AllOf(HasSubstr("a link takes long"), HasSubstr("got: 5.00 ms"))));
}

TEST(Judge, LinksOfDifferentKindsAreNotCompared) {
  Report report = healthy(2, 2);
  report.links = {{.a = 0,
                   .b = 1,
                   .transport = "shm",
                   .latency_us = 1,
                   .there_bytes_per_s = 10 * kGigabyte,
                   .back_bytes_per_s = 10 * kGigabyte},
                  {.a = 2,
                   .b = 3,
                   .transport = "shm",
                   .latency_us = 1,
                   .there_bytes_per_s = 9 * kGigabyte,
                   .back_bytes_per_s = 9 * kGigabyte},
                  far_link(0, 2, 0.1 * kGigabyte, 0.1 * kGigabyte)};
  EXPECT_THAT(lines_of(report), IsEmpty());
}

TEST(Judge, OddOnesOutAreTheFewer) {
  EXPECT_THAT(odd_ones_out({"1", "1", "2", "1"}), ElementsAre(2));
  EXPECT_THAT(odd_ones_out({"2", "1", "1"}), ElementsAre(0));
  EXPECT_THAT(odd_ones_out({"1", "2"}), ElementsAre(1));
  EXPECT_THAT(odd_ones_out({"1", "1"}), IsEmpty());
  EXPECT_THAT(odd_ones_out({}), IsEmpty());
}

struct Trouble {
  const char* why;
  std::function<void(Report&)> make;
  std::vector<std::string> words;
};

TEST(Judge, EveryTroubleIsOneLineThatSaysWhereAndWhatToDo) {
  const std::vector<Trouble> troubles{
      {"version",
       [](Report& r) { r.ranks[2].zeroth = r.ranks[3].zeroth = "0.0.9"; },
       {"[MISMATCH] another Zeroth than elsewhere; where: b; who: ranks 2, 3; expected: 0.1.0 as on most ranks; got: "
        "0.0.9; hint: install"}},
      {"mpi",
       [](Report& r) { r.ranks[5].mpi = "Open MPI v3"; },
       {"[MISMATCH] another MPI than elsewhere; where: c; who: rank 5; expected: none, as on most ranks"}},
      {"kernel",
       [](Report& r) { r.ranks[0].kernel = r.ranks[1].kernel = "5.4"; },
       {"note [MISMATCH] another kernel than elsewhere; where: a; who: ranks 0, 1"}},
      {"memfd",
       [](Report& r) { r.ranks[4].memfd = "Operation not permitted"; },
       {"[RESOURCE] memfd_create is refused; where: c; who: rank 4", "seccomp"}},
      {"pidfd",
       [](Report& r) { r.ranks[0].pidfd = "Operation not permitted"; },
       {"[RESOURCE] pidfd_open is refused; where: a"}},
      {"files",
       [](Report& r) { r.ranks[2].open_files = 256; },
       {"[RESOURCE] few open files are allowed; where: b", "got: 256", "ulimit -n"}},
      {"shm",
       [](Report& r) { r.ranks[2].shm_bytes = 64 << 20; },
       {"note [RESOURCE] /dev/shm is small; where: b", "got: 64.0 MiB"}},
      {"memlock",
       [](Report& r) {
         for (RankFacts& f : r.ranks) f.devices = {"H100"};
         r.ranks[2].memlock = 65536;
       },
       {"note [RESOURCE] locked memory is limited; where: b", "64.0 KiB"}},
      {"full disk",
       [](Report& r) { r.disks[1].error = "cannot write: No space left on device"; },
       {"[IO] a file cannot be written and read back; where: b; which: /scratch", "No space left"}},
      {"nearly full",
       [](Report& r) { r.disks[2].free = 1 << 20; },
       {"[IO] a disk is nearly full; where: c", "got: 1.00 MiB"}},
      {"clock",
       [](Report& r) { r.clocks[1].ahead_ms = 7000; },
       {"[ENVIRONMENT] a clock is wrong; where: b", "got: 7000 ms ahead"}},
      // All others are ahead of rank 0's: it is the odd one.
      {"clock of rank 0",
       [](Report& r) { r.clocks[1].ahead_ms = r.clocks[2].ahead_ms = 7000; },
       {"[ENVIRONMENT] a clock is wrong; where: a", "got: 7000 ms behind"}},
      {"loopback",
       [](Report& r) { r.ranks[2].name_leads_to = "127.0.1.1"; },
       {"[LAUNCH] a host's own name leads to loopback; where: b; which: b", "got: 127.0.1.1", "/etc/hosts"}},
      {"loopback that does not matter",
       [](Report& r) {
         r.ranks[2].name_leads_to = "127.0.1.1";
         r.ranks[2].interface_chosen = true;
       },
       {"note [LAUNCH] a host's own name"}},
      {"silence",
       [](Report& r) {
         r.lost = {{.rank = 3, .host = 1, .expected = "to come", .got = "nothing for 20 s"},
                   {.rank = 2, .host = 1, .expected = "to come", .got = "nothing for 20 s"}};
       },
       {"[LAUNCH] ranks do not answer; where: b; who: ranks 2-3; expected: to come; got: nothing for 20 s"}},
      {"a link that is not there",
       [](Report& r) { r.links = {{.a = 0, .b = 2, .transport = "tcp", .far = true, .error = "10.0.0.2:4: refused"}}; },
       {"[LAUNCH] two ranks do not reach each other; where: link over tcp; who: rank 0 (a) and rank 2 (b); got: "
        "10.0.0.2:4: refused"}},
  };
  for (const Trouble& trouble : troubles) {
    Report report = healthy(3, 2);
    trouble.make(report);
    const std::vector<std::string> lines = lines_of(report);
    ASSERT_EQ(lines.size(), 1U) << trouble.why << ": " << join(lines, "\n");
    for (const std::string& word : trouble.words) EXPECT_THAT(lines.front(), HasSubstr(word)) << trouble.why;
  }
}

TEST(Judge, OfTwoVersionsTheFirstIsExpected) {
  Report report = healthy(2, 1);
  report.ranks[1].zeroth = "0.0.9";
  EXPECT_THAT(lines_of(report),
              ElementsAre(HasSubstr("where: b; who: rank 1; expected: 0.1.0 as on rank 0; got: 0.0.9")));
}

TEST(Judge, NotesAreNoReasonToFail) {
  Report report = healthy(2, 1);
  report.ranks[1].kernel = "5.4";
  judge(report, {});
  EXPECT_EQ(report.findings.size(), 1U);
  EXPECT_TRUE(report.well());
}

TEST(Table, HasOneLineForEachThingWhateverHostsSay) {
  Report report = healthy(2, 1);
  report.ranks[1].mpi = "an MPI\nwith\x1b[31m lines";
  report.links = {far_link(0, 1, kGigabyte, 0.01 * kGigabyte)};
  judge(report, {});
  const std::string table = table_of(report, {});
  EXPECT_THAT(table, HasSubstr("host b at 10.0.0.2 (rank 1)\n"));
  EXPECT_THAT(table, HasSubstr("  MPI           an MPI with [31m lines\n"));
  EXPECT_THAT(table, HasSubstr("  0-1       tcp   between       20.0 us     1.00 GB/s     10.0 MB/s  <- slow\n"));
  EXPECT_THAT(table, HasSubstr("found: [MISMATCH] another MPI than elsewhere"));
  EXPECT_THAT(table, HasSubstr("2 findings\n"));
  EXPECT_THAT(table, Not(HasSubstr("\x1b")));
}

}  // namespace
}  // namespace zeroth::doctor
