// A job over several hosts: places, bytes, ends and losses. Hosts are processes here (hosts.h); hosts_test.py
// has network namespaces.
#include "process/launcher/hosts.h"

#include "support/attempts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class SeveralHosts : public ::testing::Test {
 protected:
  /// Lines of the output, sorted.
  static std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    std::ranges::sort(lines);
    return lines;
  }

  FakeHosts hosts;
};

TEST_F(SeveralHosts, EachRankFindsItsPlace) {
  Job job(hosts.arguments({"--hosts", "h1:2,h2:1"}, {"/bin/sh", "-c",
                                                     "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE "
                                                     "$NODE_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR $PWD"}),
          hosts.setup());
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::string here = std::filesystem::current_path().string();
  EXPECT_THAT(lines_of(result.out),
              ElementsAre("[0] 0/3 0/2 0/2 192.0.2.8 " + here, "[1] 1/3 1/2 0/2 192.0.2.8 " + here,
                          "[2] 2/3 0/1 1/2 192.0.2.8 " + here))
      << "the end of the connection that sshd tells";
  EXPECT_EQ(result.err, "");
}

TEST_F(SeveralHosts, EachHostTakesItsOwnPythonForAScript) {
  const std::string python = hosts.scratch.file("venv/bin/python", "#!/bin/sh\necho $RANK \"$@\"\n", 0755);
  const std::string script = hosts.scratch.file("train.py", "");
  JobSetup setup = hosts.setup();
  setup.environment.emplace_back("VIRTUAL_ENV", hosts.scratch.path("venv"));
  std::vector<std::string> arguments =
      hosts.arguments({"--hosts", "h1:2,h2:2", "--nproc_per_node", "1"}, {script, "x"});
  arguments.erase(arguments.begin());  // not -q
  Job job(arguments, setup);
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(lines_of(result.out), ElementsAre("[0] 0 -u " + script + " x", "[1] 1 -u " + script + " x"));
  EXPECT_THAT(result.err, HasSubstr(": " + script + " is run by " + python + " -u (VIRTUAL_ENV)\n"));
  EXPECT_THAT(result.err, AnyOf(HasSubstr("hosts h1, h2: " + script), HasSubstr("hosts h2, h1: " + script)));
}

TEST_F(SeveralHosts, ADryRunReachesNoHost) {
  const std::string file = hosts.scratch.file("hosts", "h1 slots=2\nh2 slots=1\n");
  Job job({"--hostfile", file, "--dry-run", "train.py"}, hosts.setup());
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("2 hosts, 3 ranks (hostfile " + file + "); zeroth-run starts them by "));
  EXPECT_THAT(result.out, HasSubstr("ranks 0-1 on h1: train.py\nrank 2 on h2: train.py\nPython, on each host: "));
  EXPECT_EQ(result.err, "");
  EXPECT_FALSE(std::filesystem::exists(hosts.scratch.path("calls")));
}

TEST_F(SeveralHosts, TheJobHasOneNameAndOnePort) {
  JobSetup setup = hosts.setup();
  setup.environment.emplace_back("OWN", "kept");
  setup.merge = true;
  const auto run = [&] {
    Job job(hosts.probe({"--hosts", "h1,h2,localhost"}, {"env", "ZEROTH_JOB_ID", "MASTER_PORT", "OWN"}), setup);
    JobResult done = job.wait();
    EXPECT_EQ(done.exit_code, 0) << done.err;
    return done;
  };
  const JobResult result = attempted(run, [](const JobResult& one) {  // ranks that start far apart are not waited for
    return one.out.find("[ranks 0-2] OWN=kept\n") != std::string::npos;
  });
  EXPECT_EQ(std::ranges::count(result.out, '\n'), 3) << result.out;
  EXPECT_THAT(result.out, HasSubstr("[ranks 0-2] OWN=kept\n"));
}

TEST_F(SeveralHosts, TheAddressOfThisHostIsTheOneThatOthersSee) {
  Job job(hosts.probe({"--hosts", "localhost,h2"}, {"env", "MASTER_ADDR"}), hosts.setup());
  EXPECT_THAT(job.wait().out, HasSubstr("[1] MASTER_ADDR=192.0.2.7\n"));
  Job alone(hosts.probe({"--hosts", "localhost:2,127.0.0.1"}, {"env", "MASTER_ADDR"}), hosts.setup());
  EXPECT_THAT(alone.wait().out, HasSubstr("[2] MASTER_ADDR=127.0.0.1\n"));
  Job chosen(hosts.probe({"--hosts", "h1,h2", "--env", "MASTER_ADDR=there"}, {"env", "MASTER_ADDR"}), hosts.setup());
  EXPECT_THAT(chosen.wait().out, HasSubstr("[1] MASTER_ADDR=there\n"));
}

TEST_F(SeveralHosts, VariablesOfALoginStayWhereTheyAre) {
  JobSetup setup = hosts.setup();
  setup.environment.emplace_back("SSH_AUTH_SOCK", "of-the-head");
  setup.environment.emplace_back("HOSTNAME", "of-the-head");
  setup.environment.emplace_back("CUDA_VISIBLE_DEVICES", "2,3");
  std::vector<std::string> arguments =
      hosts.probe({"--hosts", "h1"}, {"env", "SSH_AUTH_SOCK", "HOSTNAME", "CUDA_VISIBLE_DEVICES"});
  arguments.erase(arguments.begin());  // not -q
  Job job(arguments, setup);
  const JobResult result = job.wait();
  EXPECT_THAT(lines_of(result.out),
              ElementsAre("[0] CUDA_VISIBLE_DEVICES=2,3", "[0] HOSTNAME=name-of-h1", "[0] SSH_AUTH_SOCK unset"));
  EXPECT_THAT(result.err,
              ::testing::ContainsRegex("zeroth-run: not carried to the hosts: .*HOSTNAME,.* SSH_AUTH_SOCK"));
}

TEST_F(SeveralHosts, OnlyFixedWordsAreOnACommandLine) {
  const std::string canary = hosts.scratch.path("canary");
  const std::string evil =
      "; touch " + canary + " $(touch " + canary + ") `touch " + canary + "` & | > < ' \" \\ \n * ~ # { } !";
  JobSetup setup = hosts.setup();
  setup.environment.emplace_back("EVIL", evil);
  Job job(hosts.probe({"--hosts", "h1", "--no-prefix", "--env", "ALSO=" + evil}, {"args", evil, "", "-x"}), setup);
  const JobResult result = job.wait();
  EXPECT_EQ(result.out, "<" + evil + ">\n<>\n<-x>\n");
  EXPECT_FALSE(std::filesystem::exists(canary));
  EXPECT_EQ(hosts.scratch.read("calls"),
            std::string("-o BatchMode=yes -o ConnectTimeout=10 -- h1 ") + ZEROTH_RUN_PATH + " --agent\n");
}

TEST_F(SeveralHosts, AnyBytesArriveAsTheyAre) {
  std::mt19937 random(20'26);
  std::uniform_int_distribution<int> byte(1, 255);
  std::vector<std::string> words;
  std::string expected;
  for (int i = 0; i < 200; ++i) {
    std::string word(static_cast<std::size_t>(i), ' ');
    for (char& c : word) c = static_cast<char>(byte(random));
    words.push_back(word);
    expected += "<" + word + ">\n";
  }
  JobSetup setup = hosts.setup();
  setup.environment.emplace_back("BYTES", words.back());
  std::vector<std::string> arguments{"args"};
  arguments.insert(arguments.end(), words.begin(), words.end());
  Job job(hosts.probe({"--hosts", "h1", "--no-prefix"}, arguments), setup);
  EXPECT_EQ(job.wait().out, expected);
  Job variable(hosts.probe({"--hosts", "h1", "--no-prefix"}, {"env", "BYTES"}), setup);
  EXPECT_EQ(variable.wait().out, "BYTES=" + words.back() + "\n");
}

TEST_F(SeveralHosts, TheFirstCauseIsNamedWithItsHost) {
  Job job(hosts.probe({"--hosts", "h1:2,h2:2"}, {"wait", "error=ZEROTH ERROR [CONFIG] no such key", "exit=78"}),
          hosts.setup());
  const auto pids = job.wait_for("READY", 4);
  ::kill(pids.at(3), SIGUSR1);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 78);
  EXPECT_EQ(result.err.substr(result.err.find("zeroth-run")),
            "zeroth-run: rank 3 (pid " + std::to_string(pids.at(3)) +
                " on h2) exited with code 78: ZEROTH ERROR [CONFIG] no such key; the other 3 ranks were ended.\n");
}

TEST_F(SeveralHosts, RanksOfOtherHostsHearWhoHasEndedWell) {
  const std::string waits = "while ! grep -q '^1 ' $ZEROTH_ENDED_RANKS; do sleep 0.02; done; cat $ZEROTH_ENDED_RANKS";
  Job job(hosts.arguments({"-q", "--hosts", "h1,h2"}, {"/bin/sh", "-c", "[ $RANK = 1 ] && exit 0; " + waits}),
          hosts.setup());
  const JobResult result = job.wait(kPatience);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, ::testing::ContainsRegex("1 [0-9]+ 0 h2\n"));
}

TEST_F(SeveralHosts, AnAgentThatDiesIsAHostThatIsLost) {
  Job job(hosts.probe({"--hosts", "h1:2,h2:2"}, {"wait", "ignore", "child"}), hosts.setup());
  auto pids = job.wait_for("READY", 4);
  const pid_t agent = parent_of(pids.at(2));
  for (const auto& [rank, pid] : job.wait_for("CHILD", 4)) pids.emplace(100 + rank, pid);
  ::kill(agent, SIGKILL);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 76);
  EXPECT_THAT(result.err,
              HasSubstr("zeroth-run: host h2 (ranks 2-3): [PEER_LOST] the connection to the host has ended; got: "));
  EXPECT_THAT(result.err, HasSubstr("ssh exited with code 137: Killed; 2 other ranks were ended.\n"));
  EXPECT_TRUE(all_gone_within(pids, kEndDeadline));
}

TEST_F(SeveralHosts, RanksEndWithTheConnectionToTheirHost) {
  Job job(hosts.probe({"--hosts", "h1,child:2"}, {"wait", "ignore"}), hosts.setup());
  const auto pids = job.wait_for("READY", 3);
  ::kill(parent_of(parent_of(pids.at(1))), SIGKILL);  // the session; its agent lives
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 76);
  EXPECT_THAT(result.err, HasSubstr("host child (ranks 1-2): [PEER_LOST]"));
  EXPECT_TRUE(all_gone_within(pids, kEndDeadline));
}

TEST_F(SeveralHosts, AConnectionHasASessionOfItsOwnAndItsEndASignal) {
  Job job(hosts.probe({"--hosts", "child:1,localhost:1"}, {"wait"}), hosts.setup());
  const auto pids = job.wait_for("READY", 2);
  const pid_t ssh = parent_of(parent_of(parent_of(pids.at(0))));  // above its shell and the agent
  for (const pid_t connection : {ssh, parent_of(pids.at(1))}) {
    EXPECT_EQ(parent_of(connection), job.pid());
    EXPECT_EQ(::getsid(connection), connection);
  }
  ::kill(ssh, SIGTERM);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 76);
  EXPECT_THAT(result.err, ContainsRegex("host child \\(rank 0\\): \\[PEER_LOST\\] the connection to the host has "
                                        "ended; got: [^;]*ssh was killed by signal 15 \\(SIGTERM\\)"));
}

TEST_F(SeveralHosts, RanksEndWithTheHead) {
  Job job(hosts.probe({"--hosts", "h1:2,child:2,localhost"}, {"wait", "ignore", "child"}), hosts.setup());
  auto pids = job.wait_for("READY", 5);
  for (const auto& [rank, pid] : job.wait_for("CHILD", 5)) pids.emplace(100 + rank, pid);
  job.signal(SIGKILL);
  EXPECT_TRUE(all_gone_within(pids, kEndDeadline));
  EXPECT_EQ(job.wait(kEndDeadline).signal, SIGKILL);
}

TEST_F(SeveralHosts, AHostThatIsSilentIsLost) {
  Job job(hosts.probe({"--hosts", "h1,h2", "--lost-after", "1.5"}, {"wait"}), hosts.setup());
  const auto pids = job.wait_for("READY", 2);
  ::kill(parent_of(pids.at(1)), SIGSTOP);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 76);
  EXPECT_THAT(result.err, HasSubstr("host h2 (rank 1): [PEER_LOST] no word from the host for 1.5 s"));
  EXPECT_TRUE(all_gone_within(pids, kEndDeadline));
}

TEST_F(SeveralHosts, ASilentHostIsTheCauseOfWhatOthersSayAboutIt) {
  constexpr std::string_view kSilent = "zeroth-run: host h2 (rank 1): [PEER_LOST] no word";
  const auto run = [&] {
    Job job(hosts.probe({"--hosts", "h1,h2", "--lost-after", "6"},
                        {"wait", "error=ZEROTH ERROR [TIMEOUT] no answer", "exit=76"}),
            hosts.setup());
    const auto pids = job.wait_for("READY", 2);
    ::kill(parent_of(pids.at(1)), SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(4500));
    ::kill(pids.at(0), SIGUSR1);
    JobResult done = job.wait();
    EXPECT_EQ(done.exit_code, 76);
    return done;
  };
  const JobResult result = attempted(run, [&](const JobResult& one) {  // a head that stood still does not count that
    return one.err.find(kSilent) != std::string::npos;
  });
  EXPECT_THAT(result.err, HasSubstr(kSilent));
}

TEST_F(SeveralHosts, RanksEndWhenTheHeadIsSilent) {
  Job job(hosts.probe({"--hosts", "h1"}, {"wait"}), hosts.setup());
  const auto pids = job.wait_for("READY", 1);
  ::kill(job.pid(), SIGSTOP);  // nobody has told the agent
  EXPECT_FALSE(all_gone_within(pids, std::chrono::seconds(4)));
  EXPECT_TRUE(all_gone_within(pids, std::chrono::seconds(15)));
  ::kill(job.pid(), SIGCONT);
  EXPECT_EQ(job.wait().exit_code, 76);
}

TEST_F(SeveralHosts, CtrlZStopsAllHostsAndIsNoSilence) {
  Job job(hosts.probe({"--hosts", "h1,h2", "--lost-after", "2"}, {"wait"}), hosts.setup());
  const auto pids = job.wait_for("READY", 2);
  job.signal(SIGTSTP);
  std::this_thread::sleep_for(std::chrono::seconds(4));
  job.signal(SIGCONT);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  for (const auto& [rank, pid] : pids) {
    EXPECT_TRUE(is_alive(pid));
    ::kill(pid, SIGUSR1);
  }
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST_F(SeveralHosts, SignalsReachEveryRank) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Job job(hosts.probe({"--hosts", "h1,h2"}, {"wait", "catch"}), hosts.setup());
    job.wait_for("READY", 2);
    job.signal(signal);
    const JobResult result = job.wait(kEndDeadline);
    EXPECT_EQ(result.exit_code, 128 + signal);
    EXPECT_THAT(result.out, HasSubstr("[1] CAUGHT 1 " + std::to_string(signal)));
  }
}

TEST_F(SeveralHosts, RanksThatIgnoreItAreKilled) {
  Job job(hosts.probe({"--hosts", "h1:2,h2", "--grace", "0.3"}, {"wait", "ignore", "child"}), hosts.setup());
  job.wait_for("READY", 3);
  job.signal(SIGINT);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 130);
}

TEST_F(SeveralHosts, EveryHostThatCannotTakePartIsNamed) {
  Job job(hosts.probe({"--hosts", "h1,refused,other,liar,garbage", "--connect-timeout", "20"}, {"wait"}),
          hosts.setup());
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 69);
  EXPECT_THAT(result.err, HasSubstr("[LAUNCH] 4 of 5 hosts cannot take part: host refused: "));
  EXPECT_THAT(result.err,
              HasSubstr("ssh exited with code 255: ssh: connect to host refused port 22: Connection refused | "));
  EXPECT_THAT(result.err,
              HasSubstr("host other: [LAUNCH] another version of zeroth-run is on that host; expected: 0."));
  EXPECT_THAT(result.err, HasSubstr("got: other"));
  EXPECT_THAT(result.err, HasSubstr("host liar: [LAUNCH] a message is too long"));
  EXPECT_THAT(result.err, HasSubstr("host garbage: [LAUNCH] what came is not from zeroth-run"));
}

TEST_F(SeveralHosts, ALateHostIsNamedWithItsTime) {
  Job job(hosts.probe({"--hosts", "h1,silent", "--connect-timeout", "6"}, {"wait"}), hosts.setup());
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 69);
  EXPECT_THAT(result.err, HasSubstr("zeroth-run: waiting for host silent for 5 s (1 of 2 are here)\n"));
  EXPECT_THAT(result.err, HasSubstr("[LAUNCH] 1 of 2 hosts cannot take part: host silent: no answer for 6 s"));
  EXPECT_LT(result.lasted, std::chrono::seconds(9));
}

TEST_F(SeveralHosts, TheJobsTimeCountsWhileAHostIsAwaited) {
  Job job(hosts.probe({"--hosts", "h1,silent", "--timeout", "1.5"}, {"wait"}), hosts.setup());
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 76);
  EXPECT_THAT(result.err, HasSubstr("[TIMEOUT] the job took longer than 1.5 s; nothing was started; where: --timeout; "
                                    "got: waited for host silent for "));
}

TEST_F(SeveralHosts, TheFirstLineSaysWhatIsStarted) {
  const std::string file = hosts.scratch.file("list", "h1 slots=2\nh2 slots=2\n");
  for (const auto& [options, line] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--hostfile", file}, "2 hosts x 2 ranks = 4 (hostfile " + file + ")"},
           {{"--hostfile", file, "-n", "3"}, "2 hosts, 3 ranks (hostfile " + file + ")"},
           {{"--hosts", "h1"}, "1 host x 1 rank = 1 (--hosts)"}}) {
    std::vector<std::string> arguments = hosts.probe(options, {"args"});
    arguments.erase(arguments.begin());  // not -q
    Job job(arguments, hosts.setup());
    EXPECT_THAT(job.wait().err, ::testing::StartsWith("zeroth-run: " + line + "\n"));
  }
}

TEST_F(SeveralHosts, CtrlCWhileWaitingForAHostIsHeard) {
  Job job(hosts.probe({"--hosts", "h1,silent"}, {"wait"}), hosts.setup());
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  job.signal(SIGINT);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_THAT(result.err, HasSubstr("stopped by signal 2; nothing was started."));
}

TEST_F(SeveralHosts, AGreetingIsNoObstacle) {
  Job job(hosts.probe({"--hosts", "banner"}, {"args", "x"}), hosts.setup());
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "[0] <x>\n");
}

TEST_F(SeveralHosts, AHostThatTalksWithoutEndIsCutShort) {
  Job job(hosts.probe({"--hosts", "chatty"}, {"args", "x"}), hosts.setup());
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "[0] <x>\n");
  EXPECT_THAT(result.err, HasSubstr("zeroth-run: host chatty: 1\n"));
  EXPECT_THAT(result.err, HasSubstr("host chatty: (what else it says is left out)\n"));
  EXPECT_LE(std::ranges::count(result.err, '\n'), 201);
}

TEST_F(SeveralHosts, AProgramOrDirectoryThatIsNotThereIsTheHostsFault) {
  Job job(hosts.arguments({"--hosts", "h1,h2"}, {"no-such-program"}), hosts.setup());
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 64);
  EXPECT_THAT(result.err,
              ::testing::ContainsRegex("host h[12] \\(rank [01]\\): \\[USAGE\\] cannot start no-such-program"));
}

TEST_F(SeveralHosts, AMissingZerothRunIsNamed) {
  Job job({"-q", "--remote-program", "/no/zeroth-run", "--hosts", "h1", "true"}, hosts.setup());
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 69);
  EXPECT_THAT(result.err, HasSubstr("ssh exited with code 127: sh: 1: /no/zeroth-run: not found"));
}

TEST_F(SeveralHosts, AFloodNobodyReadsStopsTheOutputAndNotTheSupervision) {
  JobSetup setup = hosts.setup();
  setup.read_output = false;
  Job job(hosts.probe({"--hosts", "h1,h2"}, {"wait", "now=1", "signal=9", "flood"}), setup);
  // Rank 1 dies at once: it is noticed although rank 0's output goes nowhere.
  std::this_thread::sleep_for(std::chrono::seconds(2));
  job.start_reading();
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_LT(result.out.size(), std::size_t{8} << 20);
}

TEST_F(SeveralHosts, LogsOfAllRanksAreWrittenHere) {
  Job job(hosts.probe({"--hosts", "h1,h2", "--log-dir", hosts.scratch.path("logs")}, {"lines", "3"}), hosts.setup());
  EXPECT_EQ(job.wait().exit_code, 0);
  EXPECT_EQ(hosts.scratch.read("logs/rank1.stdout.log"), "1 out 0\n1 out 1\n1 out 2\n");
  EXPECT_EQ(hosts.scratch.read("logs/rank0.stderr.log"), "0 err 0\n0 err 1\n0 err 2\n");
}

TEST_F(SeveralHosts, AHostfileAndAFilterChooseTheRanks) {
  const std::string file = hosts.scratch.file("hosts", "# two\nh1 slots=4\nh2 slots=2\n");
  Job all(hosts.probe({"--hostfile", file}, {"env", "RANK"}), hosts.setup());
  EXPECT_EQ(lines_of(all.wait().out).size(), 6U);
  Job some(hosts.probe({"--hostfile", file, "--include", "h2@h1:1,3"}, {"env", "CUDA_VISIBLE_DEVICES"}), hosts.setup());
  EXPECT_THAT(lines_of(some.wait().out),
              ElementsAre("[0] CUDA_VISIBLE_DEVICES=1,3", "[1] CUDA_VISIBLE_DEVICES=1,3",
                          "[2] CUDA_VISIBLE_DEVICES unset", "[3] CUDA_VISIBLE_DEVICES unset"));
  Job first(hosts.probe({"--hostfile", file, "--exclude", "h1", "-n", "1"}, {"env", "RANK"}), hosts.setup());
  EXPECT_EQ(first.wait().out, "[0] RANK=0\n");
}

TEST_F(SeveralHosts, AThousandRanksOnAHundredAndTwentyFiveHosts) {
  std::string text;
  for (int host = 0; host < 125; ++host) text += "h" + std::to_string(host) + " slots=8\n";
  const std::string file = hosts.scratch.file("hosts", text);
  const auto start = [&](const std::string& script) {
    std::vector<std::string> arguments = hosts.arguments({"--hostfile", file}, {"sh", "-c", script});
    arguments.erase(arguments.begin());  // not -q
    return arguments;
  };
  Job all(start("echo here"), hosts.setup());
  const JobResult result = all.wait(std::chrono::seconds{60});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(lines_of(result.out).size(), 1'000U);
  EXPECT_THAT(result.err, HasSubstr("zeroth-run: 125 hosts x 8 ranks = 1000"));
  EXPECT_THAT(
      result.err,
      ::testing::ContainsRegex(
          "zeroth-run: hosts h[0-9]+, h[0-9]+, h[0-9]+, h[0-9]+ and [0-9]+ more: OMP_NUM_THREADS=1 in every rank"));
  EXPECT_LT(lines_of(result.err).size(), 60U) << "what hosts say alike is said once";

  Job one_fails(start("if [ $RANK = 567 ]; then sleep 2; exit 3; fi; exec sleep 100"), hosts.setup());
  const JobResult failed = one_fails.wait(std::chrono::seconds{60});
  EXPECT_EQ(failed.exit_code, 3);
  EXPECT_THAT(failed.err,
              ::testing::ContainsRegex(
                  "zeroth-run: rank 567 \\(pid [0-9]+ on h70\\) exited with code 3; the other 999 ranks were ended"));
}

}  // namespace
}  // namespace zeroth::test
