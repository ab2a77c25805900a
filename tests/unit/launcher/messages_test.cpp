// What the head and its agents say to each other: nothing that comes is believed, and nothing is allocated
// for a length that lies.
#include "launcher/messages.h"

#include "launcher/frames.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <functional>
#include <string>
#include <vector>

namespace zeroth::launcher {
namespace {

using ::testing::HasSubstr;

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(slug(error.code()), "LAUNCH");
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

std::string stream_of(const std::vector<Frame>& frames) {
  std::string bytes = preface();
  for (const Frame& frame : frames) bytes += encode_frame(frame.type, frame.payload);
  return bytes;
}

TEST(Frames, ArriveWholeHoweverTheyAreCut) {
  EXPECT_TRUE(rc::check([](const std::vector<std::string>& payloads, const std::string& noise) {
    const std::string banner = noise.substr(0, noise.find('Z'));
    std::vector<Frame> sent;
    for (const std::string& payload : payloads) sent.push_back({FrameType::kOutput, payload});
    const std::string bytes = banner + stream_of(sent);
    FrameParser parser(1000);
    std::vector<std::string> got;
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t count = *rc::gen::inRange<std::size_t>(1, 20);
      parser.feed(bytes.substr(at, count));
      at += count;
      while (const auto frame = parser.next()) got.push_back(frame->payload);
    }
    RC_ASSERT(got == payloads);
    RC_ASSERT(parser.banner() == banner);
  }));
}

TEST(Frames, RefuseWhatIsNoStreamOfOurs) {
  const auto parse = [](const std::string& bytes, std::size_t banner = 0) {
    return refusal([&] {
      FrameParser parser(banner);
      parser.feed(bytes);
      while (parser.next()) {
      }
    });
  };
  EXPECT_THAT(parse("GET / HTTP/1.1\r\n"), HasSubstr("not from zeroth-run"));
  EXPECT_THAT(parse("ZERG"), HasSubstr("not from zeroth-run"));
  EXPECT_THAT(parse(std::string(100, '\0'), 50), HasSubstr("not from zeroth-run"));
  EXPECT_THAT(parse(preface(2)), HasSubstr("another version of zeroth-run"));
  EXPECT_THAT(parse(preface() + std::string("\0\0\0\0\0", 5)), HasSubstr("a message of no known kind"));
  EXPECT_THAT(parse(preface() + std::string("\0\0\0\0\x11", 5)), HasSubstr("a message of no known kind"));
  EXPECT_THAT(parse(preface() + std::string("\1\0\2\0\5", 5)), HasSubstr("a message is too long"));
  EXPECT_THAT(parse(preface() + std::string("\xff\xff\xff\xff\2", 5)),
              HasSubstr("at most 8388608 bytes; got: 4294967295"));
}

TEST(Frames, AStrangerMayNotSendATask) {
  EXPECT_THAT(refusal([] {
                FrameParser parser(0, 1024);
                parser.feed(preface() + std::string("\1\4\0\0\2", 5));
                (void)parser.next();
              }),
              HasSubstr("at most 1024 bytes; got: 1025"));
}

TEST(Frames, AWholeOneIsNeededAndAPartIsWaitedFor) {
  FrameParser parser(0);
  parser.feed("ZEROTH");
  EXPECT_FALSE(parser.next());
  parser.feed("AG");
  EXPECT_FALSE(parser.next());
}

HostTask some_task() {
  return {.job = {.num_ranks = 8,
                  .num_nodes = 2,
                  .job_id = "ab",
                  .master_address = "h1",
                  .master_port = 4711,
                  .restart = 1,
                  .max_restarts = 3},
          .node = 1,
          .first_rank = 4,
          .num_ranks = 4,
          .command = {"program", "", "a b", "\n'\"\\$`"},
          .environment = {"A=b", "C=", "odd"},
          .extra = {{"X", "\xff\n"}},
          .directory = "/some where",
          .bind = BindCores::kOn};
}

TEST(Messages, AreReadBack) {
  const Hello hello{.version = "1.2.3",
                    .host = "h",
                    .free_port = 65535,
                    .num_ranks = 4,
                    .node = 1,
                    .num_nodes = 2,
                    .ssh_connection = "::1 50000 ::2 22"};
  EXPECT_EQ(decode_hello(encode(hello)), hello);
  EXPECT_EQ(decode_task(encode(some_task())), some_task());
  const Started started = decode_started(encode(Started{.pids = {1, 2}, .notes = {"n"}}));
  EXPECT_THAT(started.pids, ::testing::ElementsAre(1, 2));
  EXPECT_THAT(started.notes, ::testing::ElementsAre("n"));
  const RankEnd end =
      decode_rank_end(encode(RankEnd{.rank = 3, .pid = 7, .status = {.signal = 9, .core_dumped = true}}));
  EXPECT_EQ(end.rank, 3);
  EXPECT_EQ(end.status.signal, 9);
  EXPECT_TRUE(end.status.core_dumped);
  const std::vector<EndedRank> ended{{.rank = 3, .pid = 7, .exit_code = 75, .host = "h1"}, {.rank = 4, .pid = 8}};
  EXPECT_EQ(decode_ended_ranks(encode(ended)), ended);
  const std::string payload = encode(Output{.rank = 2, .stream = Stream::kErr, .bytes = std::string_view("a\0b", 3)});
  EXPECT_EQ(decode_output(payload).bytes, std::string_view("a\0b", 3));
  EXPECT_EQ(decode_output(payload).stream, Stream::kErr);
  const JobEnd job = decode_job_end(encode(JobEnd{.exit_code = 7, .restart = true, .text = "why"}));
  EXPECT_EQ(job.exit_code, 7);
  EXPECT_TRUE(job.restart);
  EXPECT_EQ(job.text, "why");
  const Error error(ErrorCode::kUsage, "no", {.where = "w", .expected = "e", .hint = "h"});
  const Error read = decode_error(encode(error));
  EXPECT_STREQ(read.what(), error.what());
  EXPECT_EQ(read.code(), ErrorCode::kUsage);
}

TEST(Messages, ATaskOfAnyBytesIsReadBack) {
  EXPECT_TRUE(rc::check([](std::vector<std::string> words, const std::string& value) {
    HostTask task = some_task();
    for (std::string& word : words) std::erase(word, '\0');
    task.command = words;
    std::string text = value;
    std::erase(text, '\0');
    task.extra = {{"NAME", text}};
    RC_ASSERT(decode_task(encode(task)) == task);
  }));
}

TEST(Messages, RefuseEveryBrokenField) {
  const auto broken = [](const std::function<void(HostTask&)>& change) {
    HostTask task = some_task();
    change(task);
    return refusal([&] { (void)decode_task(encode(task)); });
  };
  EXPECT_THAT(broken([](HostTask& task) { task.job.num_ranks = 4097; }), HasSubstr("1 to 4096"));
  EXPECT_THAT(broken([](HostTask& task) { task.job.num_ranks = 0; }), HasSubstr("1 to 4096"));
  EXPECT_THAT(broken([](HostTask& task) { task.first_rank = 8; }), HasSubstr("0 to 7"));
  EXPECT_THAT(broken([](HostTask& task) { task.node = task.job.num_nodes; }), HasSubstr("0 to 1"));
  EXPECT_THAT(broken([](HostTask& task) { task.directory += std::string("\0/", 2); }),
              HasSubstr("a NUL byte in the directory"));
  EXPECT_THAT(broken([](HostTask& task) { task.num_ranks = 5; }), HasSubstr("1 to 4"));
  EXPECT_THAT(broken([](HostTask& task) { task.job.master_port = 65536; }), HasSubstr("0 to 65535"));
  EXPECT_THAT(broken([](HostTask& task) { task.command.emplace_back("a\0b", 3); }), HasSubstr("a NUL byte"));
  EXPECT_THAT(broken([](HostTask& task) { task.extra.emplace_back("1x", ""); }), HasSubstr("not a name of a variable"));
  EXPECT_THAT(broken([](HostTask& task) { task.extra.emplace_back("LD_PRELOAD=x\nY", ""); }), HasSubstr("not a name"));
  EXPECT_THAT(refusal([] { (void)decode_job_end(encode(JobEnd{.exit_code = 256})); }), HasSubstr("0 to 255"));
  EXPECT_THAT(refusal([] { (void)decode_signal(encode(SignalOrder{.number = 0})); }), HasSubstr("1 to 64"));
  EXPECT_THAT(refusal([] { (void)decode_rank_end(encode(RankEnd{.rank = -1, .pid = 1})); }), HasSubstr("0 to 4095"));
  EXPECT_THAT(refusal([] { (void)decode_hello(encode(Hello{.node = 4096})); }), HasSubstr("-1 to 4095"));
  EXPECT_THAT(refusal([] { (void)decode_hello(encode(Hello{.version = std::string(300, 'v')})); }),
              HasSubstr("at most 256 bytes"));
}

TEST(Messages, EveryCutAndEveryFlippedByteIsRefusedOrRead) {
  const std::string task = encode(some_task());
  for (std::size_t length = 0; length < task.size(); ++length) {
    refusal([&] { (void)decode_task(std::string_view(task).substr(0, length)); });
  }
  EXPECT_THAT(refusal([&] { (void)decode_task(task + "x"); }), HasSubstr("1 more bytes"));
  for (std::size_t at = 0; at < task.size(); ++at) {
    for (const char value : {'\0', '\x7f', '\xff'}) {
      std::string changed = task;
      changed[at] = value;
      try {
        (void)decode_task(changed);
      } catch (const Error&) {
      }
    }
  }
}

TEST(Messages, TextFromElsewhereStaysOneLine) {
  EXPECT_EQ(decode_hello(encode(Hello{.host = "a\nb\x1b[2J"})).host, "a b [2J");
  EXPECT_THAT(decode_error(encode(Error(ErrorCode::kUsage, "a\nb"))).what(), HasSubstr("a b"));
}

}  // namespace
}  // namespace zeroth::launcher
