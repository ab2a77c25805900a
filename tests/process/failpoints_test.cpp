// Strikes at every failpoint there is, on a rank of a small life: the others end in time with the right code, nothing
// is left behind, and no site is without a run that reaches it. The long tier takes every rank and every action that
// ends a rank's work.
#include "process/rank_life.h"
#include "support/fork_ranks.h"
#include "support/process_groups.h"
#include "support/watched_job.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/comm/factory.h>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

namespace fs = std::filesystem;

/// All others have ended by then. They need milliseconds, but the machine may be busy.
constexpr Milliseconds kBound{10'000};
constexpr Milliseconds kHangs{20'000};
constexpr const char* kOld = "what was there before";

struct World {
  std::string kind;
  int size = 0;
  int per_node = 0;
  int gradient_degree = 0;
};

/// Where a site is on the way of a rank.
World world_of(std::string_view site) {
  if (site == "one_sided.combine") return {.kind = "shm", .size = 4, .gradient_degree = 2};
  if (site == "matched.combine") return {.kind = "sockets", .size = 4, .gradient_degree = 2};
  for (const std::string_view begin : {"messages.", "abort.messages", "matched."}) {
    if (site.starts_with(begin)) return {.kind = "sockets", .size = 3};
  }
  if (site.starts_with("control.")) return {.kind = "watched", .size = 3};
  if (site.starts_with("mixed.")) return {.kind = "shm|sockets", .size = 3};
  if (site.starts_with("levels.")) return {.kind = "shm+sockets", .size = 4, .per_node = 2};
  return {.kind = "shm", .size = 3};
}

/// Who fails here is missed by nobody but the clock: others may not have met it; or they come when rank 0 has given the
/// meeting up, and find nobody.
bool is_before_meeting(std::string_view site) {
  return site.starts_with("rendezvous.") || site.starts_with("system.") || site.starts_with("unix_socket.");
}

/// An exception there is not that of the rank: it ends a connection to a server, whose clients see that.
bool is_swallowed(std::string_view site) {
  return site == "store.answer";
}

/// Whether the rank comes by: rank 0 alone is the meeting point and serves the store, and the others come to it.
bool comes_by(const std::string& site, int rank) {
  static const std::set<std::string> of_rank_0{"rendezvous.listen", "rendezvous.admit", "rendezvous.answer",
                                               "memory.collect",    "memory.spread",    "store.answer",
                                               "control.welcome",   "control.verdict"};
  static const std::set<std::string> of_others{"rendezvous.connect", "rendezvous.hello",    "rendezvous.welcome",
                                               "memory.offer",       "unix_socket.connect", "store.ask",
                                               "control.connect",    "control.hello"};
  return rank == 0 ? !of_others.contains(site) : !of_rank_0.contains(site);
}

/// Another failure must come first, and where.
std::string first_failure(std::string_view site, int victim, int size) {
  if (site == "control.verdict" && victim != 0) return "";
  if (site == "abort.hear" || site == "control.verdict" || site == "control.judged")
    return "engine.vote@rank=" + std::to_string(victim == 0 ? size - 1 : 0) + ":throw;";
  if (site == "shm.staged.round") return "system.process_vm_readv:errno=EPERM;";  // else data is read where it lies
  if (site.starts_with("abort.") || site == "control.tell")
    return "engine.vote@rank=" + std::to_string(victim) + ":throw;";
  return "";
}

/// Folder for files that are meant to stay, beside the one in which nothing may.
class ExportFolder {
 public:
  ExportFolder() {
    std::string pattern = (fs::temp_directory_path() / "zeroth-exports-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp " + pattern);
    path_ = pattern;
  }
  ExportFolder(const ExportFolder&) = delete;
  ExportFolder& operator=(const ExportFolder&) = delete;
  ~ExportFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }

  [[nodiscard]] fs::path file_of(int rank) const { return path_ / ("rank" + std::to_string(rank)); }
  void fill(int rank) const { std::ofstream(file_of(rank)) << kOld; }
  [[nodiscard]] bool is_old(int rank) const {
    std::ifstream file(file_of(rank));
    char text[64] = {};
    file.read(text, sizeof text);
    return std::string_view(text, static_cast<std::size_t>(file.gcount())) == kOld;
  }
  [[nodiscard]] bool is_new(int rank) const { return fs::file_size(file_of(rank)) == exported_bytes(); }
  [[nodiscard]] int temporaries() const {
    return static_cast<int>(std::count_if(fs::directory_iterator(path_), {}, [](const auto& entry) {
      return entry.path().filename().string().find(".tmp-") != std::string::npos;
    }));
  }

 private:
  fs::path path_;
};

struct Outcome {
  ForkReport report{};
  bool struck = false;  ///< the rank came by the site
};

/// Ranks of a world with a control plane train with `spec`.
ForkReport run_watched(const World& world, const std::string& spec, const CommOptions& options) {
  const std::string name = unique_job();
  const auto last_until_a_beat = [&](RankHere& here, Moment moment, int /*unit*/) {
    if (spec.starts_with("control.beat") && moment == Moment::kBegin && here.step == 0)
      std::this_thread::sleep_for(Milliseconds{700});
  };
  return fork_ranks(world.size,
                    [&](int rank) {
                      arm_failpoints(parse_failpoints(spec), rank);
                      run_watched_rank(
                          {.world = world.size, .steps = 2, .options = options, .happen = last_until_a_beat},
                          shared_memory_world(name, rank, world.size));
                    },
                    {.deadline = kHangs});
}

/// Ranks live with `spec`; `exports`: where one of them writes a file, if it does.
ForkReport run_lives(const World& world, const std::string& spec, Milliseconds timeout, const ExportFolder* exports,
                     int exporter) {
  const bool breaks_store = spec.starts_with("store.");
  CommOptions options;
  options.timeout = timeout;
  for (int rank = 0; world.per_node > 0 && rank < world.size; ++rank) options.nodes.push_back(rank / world.per_node);
  if (world.kind == "watched") return run_watched(world, spec, options);
  ProcessGroups groups(world.kind, world.size, options);
  const std::string store = world.kind == "shm" ? unique_job() : "";
  return fork_ranks(world.size,
                    [&](int rank) {
                      arm_failpoints(parse_failpoints(spec), rank);
                      live({.group = [&] { return groups.group(rank); },
                            .store = store,
                            .store_patience = Milliseconds{breaks_store ? 1'500 : 20'000},
                            .exports = exports != nullptr && rank == exporter ? exports->file_of(rank) : fs::path(),
                            .gradient_degree = world.gradient_degree});
                    },
                    {.deadline = kHangs, .meanwhile = groups.parted({})});
}

bool was_killed(const ProcessEnd& end) {
  return WIFSIGNALED(end.wait_status) && WTERMSIG(end.wait_status) == SIGKILL;
}

/// Ranks live with `rule`; `victim` is the one that writes a file, if one does.
Outcome strike(const std::string& rule, int victim, const ExportFolder* exports, bool ends) {
  const std::string site = rule.substr(0, rule.find_first_of("@:"));
  const World world = world_of(site);
  Outcome run;
  const Milliseconds timeout{ends && is_before_meeting(site) ? 400 : 30'000};
  run.report = run_lives(world, first_failure(site, victim, world.size) + rule, timeout, exports, victim);
  return run;
}

/// Rank `victim` comes by `site` and is struck with `action`.
Outcome strike(const std::string& site, const std::string& action, int victim, const ExportFolder* exports) {
  Outcome run = strike(site + "@rank=" + std::to_string(victim) + ":" + action, victim, exports, true);
  const ProcessEnd& end = run.report.ends[static_cast<std::size_t>(victim)];
  const RankFailure* const failure = run.report.of(victim);
  if (action == "kill") run.struck = was_killed(end) && !end.killed_at_deadline;
  if (action == "exit=3") run.struck = WIFEXITED(end.wait_status) && WEXITSTATUS(end.wait_status) == 3;
  if (action == "throw") {
    run.struck = failure != nullptr && failure->text.find("planted failure at " + site) != std::string::npos;
    if (is_swallowed(site)) run.struck = failure != nullptr;
  }
  return run;
}

/// Everybody has ended by itself and in time; who was not struck knows why.
void expect_orderly(const Outcome& run, const std::string& site, const std::string& action, int victim) {
  const ForkReport& report = run.report;
  for (const ProcessEnd& end : report.ends) {
    EXPECT_FALSE(end.killed_at_deadline) << report.text();
    EXPECT_LT(end.after, kBound) << report.text();
    const RankFailure* failure = report.of(end.rank);
    const bool failed_first = (site == "abort.hear" || site == "control.verdict" || site == "control.judged") &&
                              failure != nullptr &&
                              failure->text.find("planted failure at engine.vote") != std::string::npos &&
                              failure->code == ErrorCode::kInternal;
    if (failed_first || (end.rank == victim && !(action == "throw" && is_swallowed(site)))) continue;
    if (failure == nullptr) {
      // It had done its part: the last thing that a rank does is to leave, and the word that it is leaving may be lost.
      EXPECT_EQ(site, "shm.depart") << "rank " << end.rank << " ended well\n" << report.text();
      continue;
    }
    ASSERT_TRUE(failure->code.has_value()) << report.text();
    EXPECT_EQ(exit_code(*failure->code), 76) << report.text();
  }
}

class Failpoints : public ::testing::Test {
 protected:
  static std::vector<std::string> actions_of(FailpointKind kind) {
    return {"kill", kind == FailpointKind::kNoThrow ? "exit=3" : "throw"};
  }
  static void expect_strike(const std::string& site, const std::string& action, int victim) {
    SCOPED_TRACE(site + ": " + action + " on rank " + std::to_string(victim));
    const bool exports = site.starts_with("export.");
    const ExportFolder folder;
    if (exports) folder.fill(victim);
    const Outcome run = strike(site, action, victim, exports ? &folder : nullptr);
    EXPECT_EQ(run.struck, comes_by(site, victim)) << run.report.text();
    if (run.struck) {
      expect_orderly(run, site, action, victim);
    } else {
      EXPECT_TRUE(run.report.ok()) << run.report.text();  // it does not come by, and is none the worse for it
    }
    if (exports) expect_whole_file(folder, site, action, victim);
  }
  /// On every rank, with every action.
  static void expect_strikes(const std::string& site, FailpointKind kind) {
    for (const std::string& action : actions_of(kind)) {
      for (int victim = 0; victim < world_of(site).size; ++victim) expect_strike(site, action, victim);
    }
  }
  /// On one rank that comes by, with one action: by turns, so that a few sites see all of them.
  static void expect_a_strike(const std::string& site, FailpointKind kind, int turn) {
    int victim = turn % world_of(site).size;
    if (!comes_by(site, victim)) victim = victim == 0 ? 1 : 0;
    expect_strike(site, actions_of(kind)[static_cast<std::size_t>(turn) % 2], victim);
  }

  /// The file is the old one or the new one; what goes through an exception takes the temporary file along.
  static void expect_whole_file(const ExportFolder& folder, const std::string& site, const std::string& action,
                                int rank) {
    EXPECT_EQ(folder.temporaries(), action == "kill" && site != "export.open" && site != "export.folder" ? 1 : 0);
    EXPECT_TRUE(site == "export.folder" ? folder.is_new(rank) : folder.is_old(rank));
  }
};

/// Other tests strike at these: mpi_failpoints_test.cpp under mpirun, tests/python/c10d_test.py over groups of torch,
/// launcher/nodes_test.py and doctor_test.py, sites_test.cpp, conformance/pending_faults_test.cpp.
bool is_elsewhere(std::string_view site) {
  return site.starts_with("mpi.") || site == "abort.mpi" || site.starts_with("nccl.") || site == "abort.nccl" ||
         site.starts_with("c10d.") || site.starts_with("launcher.") || site.starts_with("doctor.") ||
         site.starts_with("checkpoint.") || site.starts_with("io.") || site.starts_with("sites.") || site == "shm.look";
}

TEST_F(Failpoints, ALifeWithoutAFaultIsWhole) {
  for (const char* site : {"engine.vote", "messages.send", "levels.step"}) {
    const ExportFolder folder;
    const World world = world_of(site);
    const ForkReport report = run_lives(world, "", Milliseconds{30'000}, &folder, 1);
    EXPECT_TRUE(report.ok()) << report.text();
    EXPECT_TRUE(folder.is_new(1));
    EXPECT_EQ(folder.temporaries(), 0);
  }
}

TEST_F(Failpoints, WhoDiesBeforeItCanSayItsRankIsMentioned) {
  const Outcome run = strike("rendezvous.hello", "kill", 2, nullptr);
  ASSERT_TRUE(run.struck);
  ASSERT_NE(run.report.of(0), nullptr);
  const std::string text = run.report.of(0)->text;
  EXPECT_NE(text.find("missing rank 2; pid " + std::to_string(run.report.ends[2].pid) + " connected and left"),
            std::string::npos)
      << text;
}

TEST_F(Failpoints, WhoDiesAmongMessagesInThePlaceOfGradientsIsNamed) {
  for (const char* site : {"engine.messages", "signs.send", "signs.sum"}) {
    const Outcome run = strike(site, "kill", 1, nullptr);
    ASSERT_TRUE(run.struck) << site;
    for (const int other : {0, 2}) {
      ASSERT_NE(run.report.of(other), nullptr) << site;
      EXPECT_EQ(run.report.of(other)->code, ErrorCode::kPeerLost) << run.report.text();
      EXPECT_NE(run.report.of(other)->text.find("rank 1"), std::string::npos) << run.report.text();
      EXPECT_LT(run.report.ends[static_cast<std::size_t>(other)].after, kBound);
    }
  }
}

struct BrokenCall {
  const char* site;
  const char* error;
  std::optional<ErrorCode> code{};  ///< of the rank whose call fails; none: it makes the call again, and nobody sees it
};

TEST_F(Failpoints, AFailedSystemCallIsMadeAgainOrNamed) {
  constexpr int kVictim = 2;
  for (const BrokenCall& broken : {BrokenCall{"unix_socket.connect", "EINTR", {}},
                                   {"unix_socket.connect", "ECONNREFUSED", {}},
                                   {"unix_socket.connect", "EACCES", ErrorCode::kResource},
                                   {"unix_socket.send", "EINTR", {}},
                                   {"unix_socket.send", "EAGAIN", {}},
                                   {"unix_socket.send", "EPIPE", ErrorCode::kPeerLost},
                                   {"unix_socket.send", "ENOBUFS", ErrorCode::kResource},
                                   {"unix_socket.receive", "EINTR", {}},
                                   {"unix_socket.receive", "EAGAIN", {}},
                                   {"unix_socket.receive", "ECONNRESET", ErrorCode::kPeerLost},
                                   {"unix_socket.receive", "EMFILE", ErrorCode::kResource},
                                   {"system.memfd_create", "ENOSYS", ErrorCode::kResource},
                                   {"system.pidfd_open", "EPERM", ErrorCode::kResource},
                                   {"system.process_vm_readv", "EINTR", {}},
                                   {"system.process_vm_readv", "EPERM", {}},  // data goes through staging areas then
                                   {"export.open", "EACCES", ErrorCode::kIo},
                                   {"export.write", "EINTR", {}},
                                   {"export.write", "ENOSPC", ErrorCode::kIo},
                                   {"export.flush", "EIO", ErrorCode::kIo},
                                   {"export.sync", "EIO", ErrorCode::kIo},
                                   {"export.close", "EDQUOT", ErrorCode::kIo},
                                   {"export.rename", "EXDEV", ErrorCode::kIo},
                                   {"export.folder", "EIO", ErrorCode::kIo}}) {
    SCOPED_TRACE(std::string(broken.site) + " " + broken.error);
    const std::string site = broken.site;
    const bool exports = site.starts_with("export.");
    const ExportFolder folder;
    if (exports) folder.fill(kVictim);
    const Outcome run = strike(site + "@hit=1,rank=2:errno=" + broken.error, kVictim, exports ? &folder : nullptr,
                               broken.code.has_value());
    if (!broken.code) {
      EXPECT_TRUE(run.report.ok()) << run.report.text();
      continue;
    }
    for (const ProcessEnd& end : run.report.ends) {
      const RankFailure* failure = run.report.of(end.rank);
      ASSERT_TRUE(failure != nullptr && failure->code.has_value()) << run.report.text();
      EXPECT_LT(end.after, kBound);
      // What the kernel refuses to one rank is said by all.
      const bool fits = failure->code == broken.code || (end.rank != kVictim && exit_code(*failure->code) == 76);
      EXPECT_TRUE(fits) << failure->text;
    }
    if (!exports) continue;
    EXPECT_NE(run.report.of(kVictim)->text.find("(errno "), std::string::npos) << run.report.text();
    EXPECT_EQ(folder.temporaries(), 0);
    EXPECT_TRUE(site == "export.folder" ? folder.is_new(kVictim) : folder.is_old(kVictim));
  }
}

TEST_F(Failpoints, ASleepOfARankIsNoFailure) {
  for (const char* spec : {"rendezvous.listen:sleep=100", "shm.*.mid:sleep=20", "engine.publish@rank=1:sleep=100"}) {
    for (const Failpoint& site : failpoints()) {
      const std::string rule(spec);
      const std::size_t colon = rule.find_first_of("@:");
      const std::string name = rule.substr(0, colon);
      const bool star = name == "shm.*.mid" && site.name.starts_with("shm.") && site.name.ends_with(".mid");
      if (site.name != name && !star) continue;
      const Outcome run = strike(site.name + rule.substr(colon), 1, nullptr, false);
      EXPECT_TRUE(run.report.ok()) << site.name << "\n" << run.report.text();
    }
  }
}

/// One case a group of sites, so that each stays short.
class Sites : public Failpoints, public ::testing::WithParamInterface<const char*> {
 protected:
  static std::vector<Failpoint> sites();
};
class Sweep : public Sites {};

std::string group_of(std::string_view site) {
  return std::string(site.substr(0, site.find('.')));
}

std::vector<Failpoint> Sites::sites() {
  std::vector<Failpoint> all = failpoints();
  std::erase_if(all,
                [](const Failpoint& site) { return group_of(site.name) != GetParam() || is_elsewhere(site.name); });
  return all;
}

TEST_P(Sites, EachIsReachedAndEveryRankEnds) {
  ASSERT_FALSE(sites().empty());
  int turn = 0;
  for (const Failpoint& site : sites()) expect_a_strike(site.name, site.kind, turn++);
}

TEST_P(Sweep, EveryRankComesByOrIsNoneTheWorseWithEveryAction) {
  ASSERT_FALSE(sites().empty());
  for (const Failpoint& site : sites()) expect_strikes(site.name, site.kind);
}

constexpr const char* kGroups[] = {"rendezvous", "memory", "system",  "unix_socket", "shm",   "messages",
                                   "levels",     "mixed",  "control", "store",       "abort", "one_sided",
                                   "matched",    "signs",  "engine",  "export"};
INSTANTIATE_TEST_SUITE_P(Groups, Sites, ::testing::ValuesIn(kGroups),
                         [](const auto& of) { return std::string(of.param); });
INSTANTIATE_TEST_SUITE_P(Long, Sweep, ::testing::ValuesIn(kGroups),
                         [](const auto& of) { return std::string(of.param); });

TEST_F(Failpoints, TheGroupsAreAllThereAre) {
  const std::set<std::string> groups(std::begin(kGroups), std::end(kGroups));
  for (const Failpoint& site : failpoints())
    EXPECT_TRUE(is_elsewhere(site.name) || groups.contains(group_of(site.name))) << site.name;
}

}  // namespace
}  // namespace zeroth::test
