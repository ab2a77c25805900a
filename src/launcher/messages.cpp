#include "launcher/messages.h"

#include "launcher/frames.h"

#include <algorithm>
#include <climits>
#include <csignal>

namespace zeroth::launcher {
namespace {

constexpr std::size_t kMaxText = std::size_t{16} << 10;
constexpr std::size_t kMaxValue = std::size_t{4} << 20;  // the kernel takes 128 KiB a string
constexpr std::size_t kMaxStrings = std::size_t{1} << 16;

Stream stream_of(int number) {
  return number == 0 ? Stream::kOut : Stream::kErr;
}

[[noreturn]] void refuse_task(const std::string& message, const std::string& got) {
  throw Error(ErrorCode::kLaunch, message, {.where = "zeroth-run between hosts", .got = got});
}

}  // namespace

std::string printable(std::string text) {
  std::ranges::replace_if(text, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, ' ');
  return text;
}

bool valid_variable_name(std::string_view name) {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  return !name.empty() && letter(name.front()) &&
         std::ranges::all_of(name, [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
}

std::string encode(const Hello& hello) {
  return PayloadWriter()
      .text(hello.version)
      .text(hello.host)
      .number(hello.free_port)
      .number(hello.num_ranks)
      .number(hello.node)
      .number(hello.num_nodes)
      .text(hello.ssh_connection)
      .take();
}

Hello decode_hello(std::string_view payload) {
  PayloadReader reader(payload);
  Hello hello;
  hello.version = printable(reader.text(kMaxName));
  hello.host = printable(reader.text(kMaxName));
  hello.free_port = reader.small(0, 65'535);
  hello.num_ranks = reader.small(0, kMaxJobRanks);
  hello.node = reader.small(-1, kMaxJobRanks - 1);
  hello.num_nodes = reader.small(0, kMaxJobRanks);
  hello.ssh_connection = printable(reader.text(kMaxName));
  reader.finish();
  return hello;
}

std::string encode(const HostTask& task) {
  std::vector<std::string> names;
  std::vector<std::string> values;
  for (const auto& [name, value] : task.extra) {
    names.push_back(name);
    values.push_back(value);
  }
  return PayloadWriter()
      .number(task.job.num_ranks)
      .number(task.job.num_nodes)
      .text(task.job.job_id)
      .text(task.job.master_address)
      .number(task.job.master_port)
      .number(task.job.restart)
      .number(task.job.max_restarts)
      .number(task.node)
      .number(task.first_rank)
      .number(task.num_ranks)
      .number(static_cast<int>(task.bind))
      .number(task.lost_after_ms)
      .text(task.directory)
      .texts(task.command)
      .texts(task.environment)
      .texts(names)
      .texts(values)
      .take();
}

HostTask decode_task(std::string_view payload) {
  PayloadReader reader(payload);
  HostTask task;
  task.job.num_ranks = reader.small(1, kMaxJobRanks);
  task.job.num_nodes = reader.small(1, kMaxJobRanks);
  task.job.job_id = printable(reader.text(kMaxName));
  task.job.master_address = printable(reader.text(kMaxName));
  task.job.master_port = reader.small(0, 65'535);
  task.job.restart = reader.small(0, INT_MAX);
  task.job.max_restarts = reader.small(0, INT_MAX);
  task.node = reader.small(0, task.job.num_nodes - 1);
  task.first_rank = reader.small(0, task.job.num_ranks - 1);
  task.num_ranks = reader.small(1, task.job.num_ranks - task.first_rank);
  task.bind = static_cast<BindCores>(reader.small(0, 2));
  task.lost_after_ms = reader.small(1, INT_MAX);
  task.directory = reader.text(kMaxText);
  task.command = reader.texts(kMaxStrings, kMaxValue);
  task.environment = reader.texts(kMaxStrings, kMaxValue);
  const auto names = reader.texts(kMaxStrings, kMaxText);
  const auto values = reader.texts(kMaxStrings, kMaxValue);
  reader.finish();
  if (task.directory.find('\0') != std::string::npos)
    refuse_task("a NUL byte in the directory", printable(task.directory));
  if (names.size() != values.size()) refuse_task("variables without values", std::to_string(names.size()));
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (!valid_variable_name(names[i])) refuse_task("not a name of a variable", printable(names[i].substr(0, 40)));
    task.extra.emplace_back(names[i], values[i]);
  }
  return task;
}

std::string encode(const Started& started) {
  PayloadWriter writer;
  writer.number(static_cast<std::int64_t>(started.pids.size()));
  for (const int pid : started.pids) writer.number(pid);
  return writer.texts(started.notes).take();
}

Started decode_started(std::string_view payload) {
  PayloadReader reader(payload);
  Started started;
  const int count = reader.small(0, kMaxJobRanks);
  for (int i = 0; i < count; ++i) started.pids.push_back(reader.small(1, INT_MAX));
  for (std::string& note : reader.texts(16, kMaxText)) started.notes.push_back(printable(std::move(note)));
  reader.finish();
  return started;
}

std::string encode(const RankEnd& end) {
  return PayloadWriter()
      .number(end.rank)
      .number(end.pid)
      .number(end.status.exit_code)
      .number(end.status.signal)
      .number(end.status.core_dumped ? 1 : 0)
      .take();
}

RankEnd decode_rank_end(std::string_view payload) {
  PayloadReader reader(payload);
  RankEnd end;
  end.rank = reader.small(0, kMaxJobRanks - 1);
  end.pid = reader.small(1, INT_MAX);
  end.status.exit_code = reader.small(0, 255);
  end.status.signal = reader.small(0, SIGRTMAX);
  end.status.core_dumped = reader.small(0, 1) == 1;
  reader.finish();
  return end;
}

std::string encode(const std::vector<EndedRank>& ranks) {
  PayloadWriter writer;
  writer.number(static_cast<std::int64_t>(ranks.size()));
  for (const EndedRank& rank : ranks) writer.number(rank.rank).number(rank.pid).number(rank.exit_code).text(rank.host);
  return writer.take();
}

std::vector<EndedRank> decode_ended_ranks(std::string_view payload) {
  PayloadReader reader(payload);
  std::vector<EndedRank> ranks;
  const int count = reader.small(0, kMaxJobRanks);
  for (int i = 0; i < count; ++i) {
    EndedRank rank;
    rank.rank = reader.small(0, kMaxJobRanks - 1);
    rank.pid = reader.small(1, INT_MAX);
    rank.exit_code = reader.small(0, 255);
    rank.host = printable(reader.text(kMaxName));
    ranks.push_back(std::move(rank));
  }
  reader.finish();
  return ranks;
}

std::string encode(const Output& output) {
  return PayloadWriter().number(output.rank).number(static_cast<int>(output.stream)).take().append(output.bytes);
}

Output decode_output(std::string_view payload) {
  PayloadReader reader(payload);
  Output output{.rank = reader.small(0, kMaxJobRanks - 1), .stream = stream_of(reader.small(0, 1))};
  output.bytes = reader.rest();
  return output;
}

std::string encode(const SignalOrder& order) {
  return PayloadWriter().number(order.number).number(order.groups ? 1 : 0).take();
}

SignalOrder decode_signal(std::string_view payload) {
  PayloadReader reader(payload);
  SignalOrder order{.number = reader.small(1, SIGRTMAX), .groups = reader.small(0, 1) == 1};
  reader.finish();
  return order;
}

std::string encode(const JobEnd& end) {
  return PayloadWriter().number(end.exit_code).number(end.restart ? 1 : 0).text(end.text.substr(0, kMaxText)).take();
}

JobEnd decode_job_end(std::string_view payload) {
  PayloadReader reader(payload);
  JobEnd end{.exit_code = reader.small(0, 255), .restart = reader.small(0, 1) == 1};
  end.text = printable(reader.text(kMaxText));
  reader.finish();
  return end;
}

std::string encode(const Error& error) {
  const ErrorContext& context = error.context();
  PayloadWriter writer;
  writer.text(slug(error.code()));
  for (const std::string& part :
       {error.message(), context.where, context.who, context.which, context.expected, context.got, context.hint}) {
    writer.text(std::string_view(part).substr(0, kMaxText));
  }
  return writer.take();
}

Error decode_error(std::string_view payload) {
  PayloadReader reader(payload);
  const auto code = code_of_slug(reader.text(kMaxName));
  const auto part = [&reader] { return printable(reader.text(kMaxText)); };
  const std::string message = part();
  ErrorContext context;
  for (std::string* field :
       {&context.where, &context.who, &context.which, &context.expected, &context.got, &context.hint}) {
    *field = part();
  }
  reader.finish();
  return Error(code.value_or(ErrorCode::kLaunch), message, std::move(context));
}

}  // namespace zeroth::launcher
