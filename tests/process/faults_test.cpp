// Each fault of fault_cases.h on one rank of four, over shared memory and over messages between processes: every other
// rank ends in less than 15 s, 2 s where it dies, with the right error, which names the rank, the call and the unit or
// parameter; or the job goes on where that is right.
#include "process/fault_cases.h"
#include "process/fault_page.h"
#include "support/attempts.h"
#include "support/fork_ranks.h"
#include "support/socket_transport.h"

#include <zeroth/base/failpoint.h>

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iterator>
#include <optional>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

constexpr Milliseconds kHangs{40'000};

/// What the ranks write to stderr.
class Outputs {
 public:
  Outputs() {
    for (int& file : files_) file = ::memfd_create("output", MFD_CLOEXEC);
  }
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;
  ~Outputs() {
    for (const int file : files_) ::close(file);
  }
  void take(int rank) const { ::dup2(files_[static_cast<std::size_t>(rank)], STDERR_FILENO); }
  [[nodiscard]] std::string text(int rank) const {
    std::string text(1 << 16, '\0');
    const ssize_t got = ::pread(files_[static_cast<std::size_t>(rank)], text.data(), text.size(), 0);
    text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return text;
  }

 private:
  std::array<int, kFaultRanks> files_{};
};

struct Outcome {
  ForkReport report{};
  std::array<std::optional<double>, kFaultRanks> seconds{};
  std::array<std::string, kFaultRanks> output{};
  bool struck = false;
};

bool is_over(pid_t pid) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == pid;
}

Outcome run(const FaultCase& fault, Over over) {
  WatchedJob job;
  job.world = kFaultRanks;
  job.options.timeout = Milliseconds{60'000};
  job.options.frozen_after = Milliseconds{2'000};
  Times times;
  if (fault.arrange) fault.arrange(job, times);
  if (!job.happen) times.strike();  // counted from the start
  Outcome outcome;
  {
    const Outputs outputs;
    std::optional<SocketMesh> mesh;
    if (over == Over::kMessages) mesh.emplace(kFaultRanks);
    const std::string name = unique_job();
    ForkRanksOptions options{.deadline = kHangs};
    options.meanwhile = [&](const std::vector<pid_t>& pids, Milliseconds) {
      if (mesh) mesh->close_all();
      if (!fault.hangs) return false;
      for (int rank = 0; rank < kFaultRanks; ++rank) {
        if (rank != fault.guilty && !is_over(pids[static_cast<std::size_t>(rank)])) return true;
      }
      ::kill(pids[static_cast<std::size_t>(fault.guilty)], SIGKILL);
      return false;
    };
    outcome.report = fork_ranks(
        kFaultRanks,
        [&](int rank) {
          const rlimit none{};
          ::setrlimit(RLIMIT_CORE, &none);
          outputs.take(rank);
          if (rank == fault.guilty) {
            arm_failpoints(parse_failpoints(fault.failpoints), rank);
            while (fault.absent) ::pause();
          }
          try {
            run_watched_rank(job, mesh ? World::from_transport(mesh->transport(rank), "the test")
                                       : shared_memory_world(name, rank, kFaultRanks));
          } catch (...) {
            times.end(rank);
            throw;
          }
          times.end(rank);
        },
        options);
    for (int rank = 0; rank < kFaultRanks; ++rank) {
      outcome.seconds[static_cast<std::size_t>(rank)] = times.seconds(rank);
      outcome.output[static_cast<std::size_t>(rank)] = outputs.text(rank);
    }
  }
  outcome.struck = times.has_struck();
  return outcome;
}

bool holds(const std::string& text, const std::string& pattern) {
  return std::regex_search(text, std::regex(pattern));
}

void expect_told(const RankFailure* failure, const FaultCase& fault, const Told& told, const std::string& all) {
  if (failure == nullptr) {
    ADD_FAILURE() << "a rank ended well\n" << all;
    return;
  }
  EXPECT_TRUE(failure->code == told.code || (told.or_aborted && failure->code == ErrorCode::kAborted)) << all;
  EXPECT_TRUE(holds(failure->text, "\\brank " + std::to_string(fault.guilty) + "\\b")) << all;
  for (const std::string& word : told.words) {
    EXPECT_TRUE(holds(failure->text, word)) << "rank " << failure->rank << " does not say \"" << word << "\"\n" << all;
  }
}

/// The guilty rank, which comes to no wait, goes with the line of the others.
void expect_ends_itself(const Outcome& outcome, const FaultCase& fault, const Told& told, const std::string& all) {
  const auto guilty = static_cast<std::size_t>(fault.guilty);
  const int status = outcome.report.ends[guilty].wait_status;
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == exit_code(told.code)) << status << all;
  const std::string& said = outcome.output[guilty];
  EXPECT_TRUE(holds(said, "ZEROTH ERROR \\[" + std::string(slug(told.code)) + "\\] ")) << said << all;
  for (const std::string& word : told.words)
    EXPECT_TRUE(holds(said, word)) << "it does not say \"" << word << "\"\n" << said;
}

std::string text_of(Over over) {
  return over == Over::kMemory ? "shared memory" : "messages";
}

/// All faults, over what they exist.
std::vector<std::tuple<FaultCase, Over>> all_faults() {
  std::vector<std::tuple<FaultCase, Over>> all;
  for (const FaultCase& fault : fault_cases()) {
    for (const Over over : {Over::kMemory, Over::kMessages}) {
      if (!fault.only || fault.only == over) all.emplace_back(fault, over);
    }
  }
  return all;
}

/// Every row of this run; the page is written at its end where ZEROTH_WRITE_FAULTS names a file.
class PageWriter final : public ::testing::Environment {
 public:
  static PageWriter& instance() {
    static auto* const writer =
        static_cast<PageWriter*>(::testing::AddGlobalTestEnvironment(new PageWriter));  // which GoogleTest deletes
    return *writer;
  }
  void add(FaultRow row) { rows_.push_back(std::move(row)); }
  void TearDown() override {
    const char* const path = std::getenv("ZEROTH_WRITE_FAULTS");
    if (path == nullptr) return;
    if (rows_.size() != all_faults().size() || ::testing::UnitTest::GetInstance()->Failed()) {
      std::fprintf(stderr, "not all faults were explained: %s is not written\n", path);
      return;
    }
    std::ofstream(path) << fault_page(rows_);
  }

 private:
  std::vector<FaultRow> rows_{};
};
PageWriter& writer = PageWriter::instance();

/// What the page has of a run.
FaultRow row_of(const FaultCase& fault, Over over, const Outcome& outcome) {
  FaultRow row{.fault = fault.what, .over = text_of(over), .said = "goes on", .seconds = "-"};
  const int speaker = fault.guilty == 0 ? 1 : 0;
  if (const RankFailure* failure = outcome.report.of(speaker)) {
    row.said = "`" + without_accidents(failure->text) + "`";
    double last = 0;
    for (int rank = 0; rank < kFaultRanks; ++rank) {
      if (rank != fault.guilty) last = std::max(last, outcome.seconds[static_cast<std::size_t>(rank)].value_or(0));
    }
    std::ostringstream seconds;
    seconds << std::fixed << std::setprecision(1) << last;
    row.seconds = seconds.str();
  } else if (!fault.warning.empty()) {
    std::smatch line;
    if (std::regex_search(outcome.output[0], line, std::regex(fault.warning + ".*")))
      row.said += ": `" + without_accidents(line.str()) + "`";
  }
  return row;
}

bool is_in_time(const FaultCase& fault, const Outcome& outcome) {
  for (int rank = 0; rank < kFaultRanks; ++rank) {
    const std::optional<double>& seconds = outcome.seconds[static_cast<std::size_t>(rank)];
    if (rank != fault.guilty && seconds.value_or(fault.within_s) >= fault.within_s) return false;
  }
  return true;
}

class Faults : public ::testing::TestWithParam<std::tuple<FaultCase, Over>> {};

TEST_P(Faults, AreExplained) {
  const auto& [fault, over] = GetParam();
  const std::optional<Told>& told = fault.told(over);
  // A machine that stood still, as virtual ones may, says nothing about the time. Who is always late fails.
  const Outcome outcome = attempted([&, &fault = fault, over = over] { return run(fault, over); },
                                    [&fault = fault](const Outcome& one) { return is_in_time(fault, one); });
  const std::string all = outcome.report.text() + outcome.output[0];
  if (std::getenv("ZEROTH_SHOW_FAULTS") != nullptr) std::fputs(all.c_str(), stdout);
  EXPECT_TRUE(outcome.struck) << all;
  for (int rank = 0; rank < kFaultRanks; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    const RankFailure* failure = outcome.report.of(rank);
    EXPECT_FALSE(outcome.report.ends[index].killed_at_deadline) << all;
    if (rank == fault.guilty) {
      if (fault.deaf) expect_ends_itself(outcome, fault, *told, all);
      continue;
    }
    EXPECT_LT(outcome.seconds[index].value_or(fault.within_s), fault.within_s) << all;
    if (told) {
      expect_told(failure, fault, *told, all);
    } else {
      EXPECT_EQ(failure, nullptr) << all;
    }
  }
  EXPECT_TRUE(told || holds(outcome.output[0], fault.warning)) << all;
  writer.add(row_of(fault, over, outcome));
}

INSTANTIATE_TEST_SUITE_P(All, Faults, ::testing::ValuesIn(all_faults()), [](const auto& param_info) {
  return std::get<0>(param_info.param).name +
         (std::get<1>(param_info.param) == Over::kMemory ? "OverMemory" : "OverMessages");
});

TEST(AfterAVerdict, OnlyARankThatHasNotHeardOfItIsEnded) {
  const std::string name = unique_job();
  const Outputs outputs;
  CommOptions options;
  options.timeout = Milliseconds{20'000};
  options.end_stuck_after = Milliseconds{300};
  const auto goes_on = [] { std::this_thread::sleep_for(Milliseconds{2'500}); };
  const ForkReport report = fork_ranks(kFaultRanks, [&](int rank) {
    outputs.take(rank);
    const World world = shared_memory_world(name, rank, kFaultRanks);
    std::shared_ptr<CommBackend> group = world.connect(options, std::make_shared<TrafficTable>());
    Communicator(group).barrier();
    if (rank == 0) world.abort(Error(ErrorCode::kUsage, "the validation set is empty"));  // its own error
    if (rank == 1) {
      try {
        Communicator(group).barrier();
      } catch (const Error&) {  // it has heard, and has something left to do
      }
    }
    if (rank == 2) group.reset();  // it needs nobody any more
    goes_on();                     // rank 3 does not know
  });
  for (int rank = 0; rank < kFaultRanks; ++rank) {
    const int status = report.ends[static_cast<std::size_t>(rank)].wait_status;
    EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, rank == 3 ? 76 : 0)
        << rank << report.text() << outputs.text(rank);
  }
  EXPECT_TRUE(holds(
      outputs.text(3),
      R"(ZEROTH ERROR \[ABORTED\] rank 0 stopped the job: \[USAGE\] the validation set is empty; rank 3/4 has not come)"))
      << outputs.text(3);
}

/// This process's connections of the control plane.
std::vector<int> control_connections() {
  std::vector<int> found;
  for (int fd = 3; fd < 1'000; ++fd) {
    sockaddr_in peer{};
    socklen_t length = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0 && peer.sin_family == AF_INET)
      found.push_back(fd);
  }
  return found;
}

/// As a cable that is cut: not one packet comes any more.
void cut_cable() {
  sock_filter nothing{.code = BPF_RET | BPF_K, .jt = 0, .jf = 0, .k = 0};
  const sock_fprog program{.len = 1, .filter = &nothing};
  for (const int fd : control_connections()) {
    if (::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) != 0)
      throw std::runtime_error("no filter on a socket");
  }
}

void close_connections() {
  for (const int fd : control_connections()) (void)::shutdown(fd, SHUT_RDWR);
}

/// Rank `victim` of three is cut off from the others while it sleeps; they leave in order. What it ends with, and what
/// it has written.
struct CutOff {
  int code = -1;
  std::string text{};
  std::string report{};
};
CutOff cut_off(int victim, const std::function<void()>& cut, Milliseconds sleep) {
  constexpr int kRanks = 3;
  const std::string name = unique_job();
  const Outputs outputs;
  CommOptions options;
  options.timeout = Milliseconds{20'000};
  options.frozen_after = Milliseconds{200};  // and two seconds more between hosts
  options.end_stuck_after = Milliseconds{300};
  const ForkReport report = fork_ranks(kRanks, [&](int rank) {
    outputs.take(rank);
    const World world = shared_memory_world(name, rank, kRanks);
    const std::shared_ptr<CommBackend> group = world.connect(options, std::make_shared<TrafficTable>());
    if (rank == victim) cut();
    Communicator(group).barrier();  // over shared memory
    if (rank == victim) std::this_thread::sleep_for(sleep);
  });
  const int status = report.ends[static_cast<std::size_t>(victim)].wait_status;
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, outputs.text(victim), report.text()};
}

TEST(WhoIsCutOff, EndsByItselfWhileItSleeps) {
  for (const int victim : {0, 1, 2}) {
    const std::string other = victim == 0 ? "rank [12] .pid" : "rank 0 ";
    const CutOff silent = cut_off(victim, cut_cable, kHangs);
    EXPECT_EQ(silent.code, 76) << victim << silent.report << silent.text;
    EXPECT_TRUE(holds(silent.text, R"(ZEROTH ERROR \[PEER_LOST\] )" + other +
                                       ".*has given no sign of life for 2.* rank " + std::to_string(victim) +
                                       "/3 has not come"))
        << silent.text;
    const CutOff closed = cut_off(victim, close_connections, kHangs);
    EXPECT_EQ(closed.code, 76) << victim << closed.report << closed.text;
    EXPECT_TRUE(holds(closed.text, R"(ZEROTH ERROR \[PEER_LOST\] )" + other +
                                       ".*exited with code 0 before the others were done.* rank " +
                                       std::to_string(victim) + "/3 has not come"))
        << closed.text;
  }
}

TEST(WhoIsCutOff, IsNobodyWhomTheOthersHaveLeftInOrder) {
  for (const int last : {0, 1}) {
    const CutOff end = cut_off(last, [] {}, Milliseconds{4'000});
    EXPECT_EQ(end.code, 0) << last << end.report << end.text;
  }
}

TEST(FaultsPage, HoldsEveryFaultWithWhatTheRanksMustSay) {
  std::ifstream file(ZEROTH_FAULTS_PAGE);
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  const std::vector<FaultRow> rows = rows_of_page(page);
  const auto faults = all_faults();
  ASSERT_EQ(rows.size(), faults.size()) << "ZEROTH_WRITE_FAULTS=docs/faults.md faults_test writes it anew";
  EXPECT_GE(fault_cases().size(), 20U);
  EXPECT_EQ(fault_page(rows), page);
  for (std::size_t index = 0; index < rows.size(); ++index) {
    const auto& [fault, over] = faults[index];
    SCOPED_TRACE(fault.what);
    const FaultRow& row = rows[index];
    EXPECT_EQ(row.fault, fault.what);
    EXPECT_EQ(row.over, text_of(over));
    const std::optional<Told>& told = fault.told(over);
    if (!told) {
      EXPECT_TRUE(holds(row.said, "^goes on" + (fault.warning.empty() ? "$" : ": `" + fault.warning))) << row.said;
      continue;
    }
    EXPECT_TRUE(row.said.starts_with("`[" + std::string(slug(told->code)) + "] ") ||
                (told->or_aborted && row.said.starts_with("`[ABORTED] ")))
        << row.said;
    for (const std::string& word : told->words)
      EXPECT_TRUE(holds(row.said, word)) << row.said << "\ndoes not say\n" << word;
    EXPECT_LT(std::stod(row.seconds), fault.within_s);
  }
}

}  // namespace
}  // namespace zeroth::test
