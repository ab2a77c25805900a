#include "base/unique_fd.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>
#include <zeroth/comm/flight_recorder.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace zeroth {
namespace {

constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

/// [Note: Versions] Word 0 of a slot is 2 ticket + 1 while it is written and 2 ticket + 2 afterwards. Stores of the
/// other words are releases, so that the odd version is seen before any of them; loads are acquires, so that the second
/// look at the version is the last.
enum Word : std::size_t { kVersion, kSequence, kBegun, kEnded, kElements, kGroupUnit, kLabelKind, kNames };

constexpr std::uint64_t written(std::uint64_t ticket) {
  return 2 * ticket + 2;
}

std::uint64_t pair_of(std::uint32_t high, std::uint32_t low) {
  return std::uint64_t{high} << 32U | low;
}

std::string_view call_text(const CallRecord& record) {
  return record.wait ? "wait" : name_of(record.kind);
}

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// An errno, or 0. Nothing is left of a file that could not be written whole.
int write_anew(const std::string& path, std::string_view text) {
  struct stat there{};
  if (::lstat(path.c_str(), &there) == 0 && S_ISREG(there.st_mode)) ::unlink(path.c_str());
  const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) return errno;
  while (!text.empty()) {
    const ssize_t put = ::write(file.get(), text.data(), text.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      const int trouble = errno;
      ::unlink(path.c_str());
      return trouble;
    }
    text.remove_prefix(static_cast<std::size_t>(put));
  }
  return 0;
}

}  // namespace

std::int32_t FlightRecorder::group(std::string_view name) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(groups_, name);
  if (found != groups_.end()) return static_cast<std::int32_t>(found - groups_.begin());
  groups_.emplace_back(name);
  return static_cast<std::int32_t>(groups_.size()) - 1;
}

std::int32_t FlightRecorder::name(std::string_view name) {
  constexpr std::size_t kMost = 1'024;
  const std::lock_guard lock(mutex_);
  if (const auto found = name_numbers_.find(name); found != name_numbers_.end()) return found->second;
  const auto number = static_cast<std::int32_t>(names_.size());
  if (names_.size() == kMost) return number - 1;
  names_.emplace_back(names_.size() + 1 == kMost ? "..." : name);
  name_numbers_.emplace(names_.back(), number);
  return number;
}

std::uint64_t FlightRecorder::begin(const CallRecord& call) noexcept {
  const std::uint64_t ticket = next_.fetch_add(1);
  auto& words = slots_[ticket % kRecords].words;
  words[kVersion].store(2 * ticket + 1, std::memory_order_relaxed);
  words[kSequence].store(call.sequence, kRelease);
  words[kBegun].store(static_cast<std::uint64_t>(now_ns()), kRelease);
  words[kEnded].store(0, kRelease);
  words[kElements].store(static_cast<std::uint64_t>(call.elements), kRelease);
  words[kGroupUnit].store(pair_of(static_cast<std::uint32_t>(call.group), static_cast<std::uint32_t>(call.unit)),
                          kRelease);
  const auto kind = static_cast<std::uint32_t>(call.kind) | static_cast<std::uint32_t>(call.dtype) << 8U |
                    static_cast<std::uint32_t>(call.wait) << 16U;
  words[kLabelKind].store(pair_of(call.label, kind), kRelease);
  words[kNames].store(pair_of(static_cast<std::uint32_t>(call.about), static_cast<std::uint32_t>(call.name)), kRelease);
  words[kVersion].store(written(ticket), kRelease);
  return ticket;
}

void FlightRecorder::end(std::uint64_t ticket) noexcept {
  auto& words = slots_[ticket % kRecords].words;
  if (words[kVersion].load(kAcquire) != written(ticket)) return;
  words[kVersion].store(2 * ticket + 1, std::memory_order_relaxed);
  words[kEnded].store(static_cast<std::uint64_t>(now_ns()), kRelease);
  words[kVersion].store(written(ticket), kRelease);
}

bool FlightRecorder::read(std::uint64_t ticket, CallRecord& record) const {
  const auto& words = slots_[ticket % kRecords].words;
  if (words[kVersion].load(kAcquire) != written(ticket)) return false;
  const std::uint64_t group_unit = words[kGroupUnit].load(kAcquire);
  const std::uint64_t label_kind = words[kLabelKind].load(kAcquire);
  const std::uint64_t names = words[kNames].load(kAcquire);
  record.name = static_cast<std::int32_t>(names & 0xffff'ffffU);
  record.about = static_cast<std::int32_t>(names >> 32U);
  record.sequence = words[kSequence].load(kAcquire);
  record.begun_ns = static_cast<std::int64_t>(words[kBegun].load(kAcquire));
  record.ended_ns = static_cast<std::int64_t>(words[kEnded].load(kAcquire));
  record.elements = static_cast<std::int64_t>(words[kElements].load(kAcquire));
  record.group = static_cast<std::int32_t>(group_unit >> 32U);
  record.unit = static_cast<std::int32_t>(group_unit & 0xffff'ffffU);
  record.label = static_cast<std::uint32_t>(label_kind >> 32U);
  record.kind = static_cast<CollectiveKind>(label_kind & 0xffU);
  record.dtype = static_cast<DType>(label_kind >> 8U & 0xffU);
  record.wait = (label_kind >> 16U & 1U) != 0;
  return words[kVersion].load(std::memory_order_relaxed) == written(ticket);
}

std::vector<CallRecord> FlightRecorder::records() const {
  const std::uint64_t end = next_.load();
  std::vector<CallRecord> all;
  for (std::uint64_t ticket = end > kRecords ? end - kRecords : 0; ticket < end; ++ticket) {
    CallRecord record;
    if (read(ticket, record)) all.push_back(record);
  }
  return all;
}

std::vector<std::string> FlightRecorder::groups() const {
  const std::lock_guard lock(mutex_);
  return groups_;
}

std::vector<std::string> FlightRecorder::names() const {
  const std::lock_guard lock(mutex_);
  return names_;
}

std::string FlightRecorder::last_call() const {
  const std::uint64_t end = next_.load();
  CallRecord record;
  if (end == 0 || !read(end - 1, record)) return "";
  const std::vector<std::string> all_groups = groups();
  const std::vector<std::string> all_names = names();
  const auto index = static_cast<std::size_t>(record.group);
  const std::int64_t since = record.ended_ns == 0 ? record.begun_ns : record.ended_ns;
  return fmt::format("{}#{}{}{} of {}, {} {:.1f} s ago", call_text(record), record.sequence,
                     record.name < 0 ? "" : " \"" + all_names.at(static_cast<std::size_t>(record.name)) + "\"",
                     record.about < 0 ? "" : " (" + all_names.at(static_cast<std::size_t>(record.about)) + ")",
                     index < all_groups.size() ? all_groups[index] : "?", record.ended_ns == 0 ? "begun" : "ended",
                     static_cast<double>(std::max<std::int64_t>(0, now_ns() - since)) * 1e-9);
}

void FlightRecorder::write(const std::string& path, int rank, int size, const Facts& facts) const {
  std::string text;
  const auto put = [&text](const nlohmann::json& line) {
    text += line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + '\n';
  };
  const std::vector<CallRecord> all = records();  // before the names: which grow meanwhile
  const std::vector<std::string> groups_now = groups();
  const std::vector<std::string> names_now = names();
  nlohmann::json head{{"rank", rank},        {"size", size},       {"pid", ::getpid()},
                      {"host", host_name()}, {"now_ns", now_ns()}, {"names", names_now}};
  if (!facts.empty()) head["failure"] = facts;
  put(head);
  for (const CallRecord& record : all) {
    const auto index = static_cast<std::size_t>(record.group);
    nlohmann::json line{{"group", index < groups_now.size() ? groups_now[index] : "?"},
                        {"sequence", record.sequence},
                        {"call", call_text(record)},
                        {"dtype", name_of(record.dtype)},
                        {"elements", record.elements},
                        {"bytes", record.elements * static_cast<std::int64_t>(size_of(record.dtype))},
                        {"unit", record.unit},
                        {"label", record.label},
                        {"begun_ns", record.begun_ns},
                        {"ended_ns", record.ended_ns}};
    if (record.name >= 0) line["name"] = names_now.at(static_cast<std::size_t>(record.name));
    if (record.about >= 0) line["about"] = record.about;
    put(line);
  }
  if (const int trouble = write_anew(path, text); trouble != 0) {
    throw Error(ErrorCode::kIo, "the trace could not be written: " + errno_text(trouble),
                {.where = "comm.trace", .who = fmt::format("rank {}/{}", rank, size), .which = path});
  }
}

}  // namespace zeroth
