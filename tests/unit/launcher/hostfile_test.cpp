// Hostfiles, lists of hosts and filters: what is read, and what is refused at which line and column.
#include "hosts/hostfile.h"

#include <zeroth/base/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace zeroth::launcher {
namespace {

using ::testing::HasSubstr;

/// What the call throws; fails the test if it throws nothing.
std::string refusal(ErrorCode code, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(slug(error.code()), slug(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

struct BadText {
  std::string text;
  std::string place;  ///< "line:column"
  std::vector<std::string> said;
};

TEST(Hostfile, RefusesWithLineAndColumn) {
  const std::string name254(254, 'a');
  const std::vector<BadText> table{
      {"", "1:1", {"no host in the hostfile"}},
      {"\n\n", "1:1", {"no host"}},
      {"# only a comment\n", "1:1", {"no host"}},
      {"a", "1:2", {"number of slots is missing", "add slots="}},
      {"a\n", "1:2", {"slots is missing"}},
      {"a slots=2\nb\n", "2:2", {"slots is missing"}},
      {"a:2\n", "1:1", {"not a host", "'a:2'"}},
      {"a 2\n", "1:3", {"slots is missing", "'2'"}},
      {"a slot=2\n", "1:3", {"slots is missing", "'slot=2'"}},
      {"a SLOTS=2\n", "1:3", {"slots is missing"}},
      {"a slots 2\n", "1:3", {"slots is missing"}},
      {"a slots =2\n", "1:3", {"slots is missing"}},
      {"a slots=\n", "1:9", {"1 to 1024", "''"}},
      {"a slots= 2\n", "1:9", {"1 to 1024", "''"}},
      {"a slots=0\n", "1:9", {"1 to 1024", "'0'"}},
      {"a slots=-1\n", "1:9", {"1 to 1024", "'-1'"}},
      {"a slots=+1\n", "1:9", {"'+1'"}},
      {"a slots=01\n", "1:9", {"'01'"}},
      {"a slots=1025\n", "1:9", {"1 to 1024", "'1025'"}},
      {"a slots=1000000000\n", "1:9", {"1 to 1024"}},
      {"a slots=99999999999999999999\n", "1:9", {"1 to 1024"}},
      {"a slots=2x\n", "1:9", {"'2x'"}},
      {"a slots=2.5\n", "1:9", {"'2.5'"}},
      {"a slots=0x10\n", "1:9", {"'0x10'"}},
      {"a slots=two\n", "1:9", {"'two'"}},
      {"a slots=2 max_slots=4\n", "1:11", {"more on the line", "'max_slots=4'"}},
      {"a slots=2 b slots=2\n", "1:11", {"more on the line"}},
      {"a slots=2,\n", "1:9", {"'2,'"}},
      {"slots=2 a\n", "1:1", {"not a host", "the host comes first"}},
      {"a slots=2\r\nb slots=2\r\n", "1:10", {"a carriage return", "Windows", "\\x0d"}},
      {"a slots=2\rb slots=2\n", "1:10", {"a carriage return"}},
      {std::string("a slots=2\n\0", 11), "2:1", {"a NUL byte"}},
      {std::string("a\0b slots=2\n", 12), "1:2", {"a NUL byte"}},
      {std::string("a slots=2 # \0\n", 14), "1:13", {"a NUL byte"}},
      {"\xef\xbb\xbf"
       "a slots=2\n",
       "1:1",
       {"byte-order mark"}},
      {"a slots=2\na slots=2\n", "2:1", {"a host twice", "the first is at line 1"}},
      {"a slots=2\n\n  A slots=2\n", "3:3", {"a host twice"}},
      {"::1 slots=1\n[0::1] slots=1\n", "2:1", {"a host twice"}},
      {"-oProxyCommand=x slots=2\n", "1:1", {"not a host", "never begins with '-'"}},
      {"--help slots=2\n", "1:1", {"never begins with '-'"}},
      {"root@a slots=2\n", "1:1", {"not a host", "ssh's configuration"}},
      {"a;reboot slots=2\n", "1:1", {"not a host"}},
      {"$(reboot) slots=2\n", "1:1", {"not a host"}},
      {"`reboot` slots=2\n", "1:1", {"not a host"}},
      {"a/b slots=2\n", "1:1", {"not a host"}},
      {"a..b slots=2\n", "1:1", {"not a host"}},
      {"a. slots=2\n", "1:1", {"not a host"}},
      {".a slots=2\n", "1:1", {"not a host"}},
      {"_a slots=2\n", "1:1", {"not a host"}},
      {"h\xc3\xb6st slots=2\n", "1:1", {"not a host", "'h\\xc3\\xb6st'"}},
      {name254 + " slots=2\n", "1:1", {"not a host", "'..."}},
      {"fd00::g slots=2\n", "1:1", {"not a host"}},
      {"fd00:::1 slots=2\n", "1:1", {"not a host"}},
      {"[fd00::1 slots=2\n", "1:1", {"not an IPv6 address in brackets"}},
      {"[fd00::1]:22 slots=2\n", "1:10", {"slots is missing"}},
      {"[] slots=2\n", "1:1", {"not an IPv6 address"}},
      {"[a] slots=2\n", "1:1", {"not an IPv6 address"}},
      {"fe80::1%eth0 slots=2\n", "1:1", {"a zone"}},
      {"\v\f slots=2\n", "1:1", {"not a host"}},
      {"{\"hosts\": []}\n", "1:1", {"not a host"}},
  };
  EXPECT_GE(table.size(), 60U);
  for (const BadText& bad : table) {
    SCOPED_TRACE(::testing::PrintToString(bad.text));
    const std::string said = refusal(ErrorCode::kConfig, [&] { (void)parse_hostfile(bad.text, "hosts"); });
    EXPECT_THAT(said, HasSubstr("where: hosts:" + bad.place + ";"));
    for (const std::string& part : bad.said) EXPECT_THAT(said, HasSubstr(part));
  }
}

TEST(Hostfile, ReadsWhatTheGrammarAllows) {
  const auto hosts = parse_hostfile(
      "# cluster\n"
      "\n"
      "worker-1 slots=4\n"
      "\t Worker_2.example.org \t slots=1024 \t# the large one\n"
      "10.0.0.7 slots=1#x\n"
      "fd00:0:0::0007 slots=2\n"
      "[fd00::8] slots=2\n"
      "last slots=16",  // no line end: the last line all the same
      "hosts");
  const std::vector<HostEntry> expected{
      {"worker-1", 4}, {"Worker_2.example.org", 1024}, {"10.0.0.7", 1}, {"fd00::7", 2}, {"fd00::8", 2}, {"last", 16}};
  EXPECT_EQ(hosts, expected);
}

TEST(Hostfile, HasLimits) {
  std::string text;
  for (std::size_t i = 0; i < kMaxHosts; ++i) text += fmt::format("h{} slots=1\n", i);
  EXPECT_EQ(parse_hostfile(text, "hosts").size(), kMaxHosts);
  EXPECT_THAT(refusal(ErrorCode::kConfig, [&] { (void)parse_hostfile(text + "more slots=1\n", "hosts"); }),
              HasSubstr("too many hosts; where: hosts:65537:1; expected: at most 65536"));
  const std::string large(kMaxHostfileBytes + 1, '\n');
  EXPECT_THAT(refusal(ErrorCode::kConfig, [&] { (void)parse_hostfile(large, "hosts"); }), HasSubstr("too large"));
}

TEST(Hostfile, WhatIsReadBackIsTheSame) {
  const auto host = rc::gen::map(
      rc::gen::pair(rc::gen::nonEmpty(rc::gen::container<std::string>(rc::gen::elementOf(std::string("abz019-_")))),
                    rc::gen::inRange(1, kMaxSlots + 1)),
      [](const std::pair<std::string, int>& pair) { return HostEntry{"h" + pair.first, pair.second}; });
  EXPECT_TRUE(rc::check([&] {
    auto hosts = *rc::gen::nonEmpty(rc::gen::container<std::vector<HostEntry>>(host));
    std::set<std::string> seen;
    std::erase_if(hosts, [&](const HostEntry& entry) { return !seen.insert(entry.name).second; });
    RC_ASSERT(parse_hostfile(format_hostfile(hosts), "hosts") == hosts);
  }));
}

TEST(Hostfile, AnyBytesAreReadOrRefused) {
  const auto bytes = rc::gen::container<std::string>(
      rc::gen::oneOf(rc::gen::arbitrary<char>(), rc::gen::elementOf(std::string("a[]:=#\n \tslots1-"))));
  EXPECT_TRUE(rc::check([&] {
    const std::string text = *bytes;
    for (const auto& parse : {std::function<void()>([&] { (void)parse_hostfile(text, "hosts"); }),
                              std::function<void()>([&] { (void)parse_host_list(text); }),
                              std::function<void()>([&] { (void)select_hosts({{"a", 4}}, text, ""); })}) {
      try {
        parse();
      } catch (const Error& error) {
        for (const char* c = error.what(); *c != '\0'; ++c) RC_ASSERT(*c >= 0x20 && *c < 0x7f);
      }
    }
  }));
}

class FilesOfHosts : public ::testing::Test {
 protected:
  FilesOfHosts() {
    std::string pattern = (std::filesystem::temp_directory_path() / "zeroth-hostfile-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~FilesOfHosts() override { std::filesystem::remove_all(folder_); }
  [[nodiscard]] std::string path(const std::string& name) const { return folder_ + "/" + name; }

  std::string folder_;
};

TEST_F(FilesOfHosts, AreReadWhole) {
  const std::string text = format_hostfile(std::vector<HostEntry>(10'000, {"some-host", 8}));
  std::ofstream(path("hosts")) << text;
  EXPECT_EQ(read_hostfile(path("hosts")), text);
}

TEST_F(FilesOfHosts, ThatCannotBeReadAreNamed) {
  ::mkfifo(path("fifo").c_str(), 0666);
  std::ofstream(path("large"));
  std::filesystem::resize_file(path("large"), std::uintmax_t{1} << 30);
  std::ofstream(path("secret")) << "a slots=2\n";
  ::chmod(path("secret").c_str(), 0);
  const auto said = [&](ErrorCode code, const std::string& file) {
    return refusal(code, [&] { (void)read_hostfile(file); });
  };
  EXPECT_THAT(said(ErrorCode::kIo, path("none")),
              HasSubstr("No such file or directory (errno 2); where: --hostfile; which: " + path("none")));
  EXPECT_THAT(said(ErrorCode::kIo, path("large/x")), HasSubstr("Not a directory"));
  EXPECT_THAT(said(ErrorCode::kConfig, folder_), HasSubstr("not a regular file"));
  EXPECT_THAT(said(ErrorCode::kConfig, path("fifo")), HasSubstr("not a regular file"));
  EXPECT_THAT(said(ErrorCode::kConfig, "/dev/zero"), HasSubstr("not a regular file"));
  EXPECT_THAT(said(ErrorCode::kConfig, path("large")), HasSubstr("larger than 16777216 bytes"));
  const uid_t user = ::geteuid();
  if (user == 0) {
    ::chmod(folder_.c_str(), 0755);
    ASSERT_EQ(::seteuid(65534), 0);  // root may read everything
  }
  EXPECT_THAT(said(ErrorCode::kIo, path("secret")), HasSubstr("Permission denied"));
  ASSERT_EQ(::seteuid(user), 0);
}

TEST(HostList, IsReadFromTheCommandLine) {
  const std::vector<HostEntry> expected{{"a", 2}, {"b", 1}, {"fd00::1", 4}};
  EXPECT_EQ(parse_host_list("a:2,b,[fd00::1]:4"), expected);
}

TEST(HostList, RefusesWithColumn) {
  const std::vector<BadText> table{
      {"", "1:1", {"not a host"}},
      {",a", "1:1", {"not a host"}},
      {"a,", "1:3", {"not a host"}},
      {"a,,b", "1:3", {"not a host"}},
      {"a:", "1:3", {"1 to 1024"}},
      {"a:0", "1:3", {"1 to 1024", "'0'"}},
      {"a:2:3", "1:3", {"'2:3'"}},
      {"a:2,a:3", "1:5", {"a host twice", "column 1"}},
      {"a b", "1:1", {"not a host"}},
      {"a:2 ", "1:3", {"'2 '"}},
      {"fd00::1", "1:6", {"1 to 1024"}},
      {"-x:2", "1:1", {"never begins with '-'"}},
      {"[fd00::1]x", "1:10", {"not a list"}},
      {"a:1,me@b:2", "1:5", {"ssh's configuration"}},
  };
  for (const BadText& bad : table) {
    SCOPED_TRACE(bad.text);
    const std::string said = refusal(ErrorCode::kUsage, [&] { (void)parse_host_list(bad.text); });
    EXPECT_THAT(said, HasSubstr("where: --hosts:" + bad.place + ";"));
    for (const std::string& part : bad.said) EXPECT_THAT(said, HasSubstr(part));
  }
}

const std::vector<HostEntry> kThree{{"worker-0", 4}, {"worker-1", 4}, {"fd00::1", 2}};

TEST(HostFilter, WithoutOneEverySlotIsUsed) {
  const std::vector<HostSelection> expected{
      {"worker-0", {0, 1, 2, 3}}, {"worker-1", {0, 1, 2, 3}}, {"fd00::1", {0, 1}}};
  EXPECT_EQ(select_hosts(kThree, "", ""), expected);
}

TEST(HostFilter, IncludesHostsAndSlots) {
  const std::vector<HostSelection> expected{{"worker-0", {0, 1, 2, 3}}, {"worker-1", {0, 2}, true}};
  EXPECT_EQ(select_hosts(kThree, "worker-1:2,0@worker-0", ""), expected);
  const std::vector<HostSelection> address{{"fd00::1", {1}, true}};
  EXPECT_EQ(select_hosts(kThree, "[fd00::1]:1", ""), address);
}

TEST(HostFilter, ExcludesHostsAndSlots) {
  const std::vector<HostSelection> expected{{"worker-0", {1, 2, 3}, true}, {"fd00::1", {0, 1}}};
  EXPECT_EQ(select_hosts(kThree, "", "WORKER-1@worker-0:0"), expected);
  const std::vector<HostSelection> rest{{"worker-0", {0, 1, 2, 3}}, {"worker-1", {0, 1, 2, 3}}};
  EXPECT_EQ(select_hosts(kThree, "", "[fd00::1]:0,1"), rest);
}

TEST(HostFilter, RefusesWithColumn) {
  const std::vector<BadText> table{
      {"worker-2", "1:1", {"not among the job's", "did you mean worker-0?"}},
      {"worker-0@", "1:10", {"not a host"}},
      {"@worker-0", "1:1", {"not a host"}},
      {"worker-0:", "1:10", {"0 to 3"}},
      {"worker-0:4", "1:10", {"0 to 3", "'4'"}},
      {"worker-0:-1", "1:10", {"0 to 3"}},
      {"worker-0:0-2", "1:10", {"'0-2'"}},
      {"worker-0:0,0", "1:12", {"a slot twice"}},
      {"worker-0:0,", "1:12", {"0 to 3", "''"}},
      {"worker-0@worker-0:1", "1:10", {"a host twice"}},
      {"worker-0,worker-1", "1:9", {"not a filter"}},
      {"fd00::1", "1:1", {"not among"}},
      {"worker-0:1 ", "1:10", {"'1 '"}},
  };
  for (const BadText& bad : table) {
    SCOPED_TRACE(bad.text);
    for (const bool include : {true, false}) {
      const std::string said = refusal(
          ErrorCode::kUsage, [&] { (void)select_hosts(kThree, include ? bad.text : "", include ? "" : bad.text); });
      EXPECT_THAT(said, HasSubstr((include ? "where: --include:" : "where: --exclude:") + bad.place + ";"));
      for (const std::string& part : bad.said) EXPECT_THAT(said, HasSubstr(part));
    }
  }
  EXPECT_THAT(refusal(ErrorCode::kUsage, [] { (void)select_hosts(kThree, "worker-0", "worker-1"); }),
              HasSubstr("together"));
  EXPECT_THAT(refusal(ErrorCode::kUsage, [] { (void)select_hosts({{"a", 2}}, "", "a:0,1"); }),
              HasSubstr("no host is left"));
}

}  // namespace
}  // namespace zeroth::launcher
