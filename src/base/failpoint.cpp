#include "base/failpoint_lines.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/text.h>

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

namespace zeroth {

namespace detail {
constinit std::atomic<bool> failpoints_armed{false};
}  // namespace detail

namespace {

struct ErrnoName {
  std::string_view name;
  int value;
};
constexpr auto kErrnos = std::to_array<ErrnoName>({
    {"EACCES", EACCES},         {"EAGAIN", EAGAIN},
    {"EBADF", EBADF},           {"ECONNREFUSED", ECONNREFUSED},
    {"ECONNRESET", ECONNRESET}, {"EDQUOT", EDQUOT},
    {"EFBIG", EFBIG},           {"EINTR", EINTR},
    {"EINVAL", EINVAL},         {"EIO", EIO},
    {"EMFILE", EMFILE},         {"ENFILE", ENFILE},
    {"ENOBUFS", ENOBUFS},       {"ENOENT", ENOENT},
    {"ENOMEM", ENOMEM},         {"ENOSPC", ENOSPC},
    {"ENOSYS", ENOSYS},         {"EOPNOTSUPP", EOPNOTSUPP},
    {"EPERM", EPERM},           {"EPIPE", EPIPE},
    {"EROFS", EROFS},           {"ESTALE", ESTALE},
    {"ETIMEDOUT", ETIMEDOUT},   {"EXDEV", EXDEV},
});

constexpr int kLongestSleepMs = 3'600'000;

std::string name_of_member(const FailpointRow& row, std::string_view member) {
  const std::size_t star = row.name.find('*');
  if (star == std::string_view::npos) return std::string(row.name);
  return std::string(row.name.substr(0, star)) + std::string(member) + std::string(row.name.substr(star + 1));
}

const std::vector<Failpoint>& all_failpoints() {
  static const std::vector<Failpoint> all = failpoints();
  return all;
}

const Failpoint* find_failpoint(std::string_view name) {
  for (const Failpoint& site : all_failpoints()) {
    if (site.name == name) return &site;
  }
  return nullptr;
}

/// "" also for what is longer than any name: nobody has misspelt that.
std::string nearest_site(std::string_view name) {
  constexpr std::size_t kLongest = 40;
  if (name.size() > kLongest) return "";
  std::vector<std::string> names;
  for (const Failpoint& known : all_failpoints()) names.push_back(known.name);
  return nearest_name(name, names);
}

/// Bytes of a variable in a message: printable, and not too many.
std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text.substr(0, 60)) result += c >= ' ' && c < 0x7f ? c : '?';
  return result + (text.size() > 60 ? "...\"" : "\"");
}

/// Walks over a spec; every refusal knows its column.
class SpecReader {
 public:
  explicit SpecReader(std::string_view spec) : spec_(spec) {}

  std::vector<FailpointRule> rules() {
    std::vector<FailpointRule> rules;
    if (spec_.empty()) return rules;
    do {
      rules.push_back(rule());
    } while (take(';'));
    return rules;
  }

 private:
  FailpointRule rule() {
    FailpointRule rule;
    const std::size_t begin = at_;
    const std::string_view name = word();
    const Failpoint* const site = find_failpoint(name);
    if (site == nullptr) {
      const std::string nearest = nearest_site(name);
      refuse(begin, "no such failpoint", "the name of a site", name,
             nearest.empty() ? "zeroth-run --list-failpoints prints all of them" : "did you mean " + nearest + "?");
    }
    rule.site = site->name;
    bool has_seed = false;
    if (take('@')) {
      do {
        has_seed = condition(rule) || has_seed;
      } while (take(','));
    }
    if (has_seed && !rule.probability)
      refuse(begin, "a seed, and nothing that it is the seed of", "p=X beside seed=N", name);
    if (rule.hit != 0 && rule.probability)
      refuse(begin, "two conditions that exclude each other", "hit=N or p=X", name);
    if (!take(':')) refuse(at_, "no action", "\":\" and an action after the site and its conditions", rest());
    action(rule, *site);
    if (at_ < spec_.size() && spec_[at_] != ';')
      refuse(at_, "more than an action", "\";\" and another rule, or the end", rest());
    return rule;
  }

  /// Whether it was the seed.
  bool condition(FailpointRule& rule) {
    const std::size_t begin = at_;
    const std::string_view name = word();
    if (!take('=')) refuse(begin, "not a condition", "rank=N, hit=N, p=X or seed=N", name);
    if (name == "rank" && !rule.rank) {
      rule.rank = static_cast<int>(number(0, 1'000'000));
    } else if (name == "hit" && rule.hit == 0) {
      rule.hit = number(1, ~std::uint64_t{0});
    } else if (name == "seed") {
      rule.seed = number(0, ~std::uint64_t{0});
      return true;
    } else if (name == "p" && !rule.probability) {
      const std::size_t value_begin = at_;
      const std::string_view text = word();
      double value = 0;
      const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
      if (problem != std::errc() || end != text.data() + text.size() || !(value > 0 && value <= 1)) {
        refuse(value_begin, "not a probability", "a number above 0, at most 1", text);
      }
      rule.probability = value;
    } else {
      refuse(begin, "an unknown condition, or one that is there twice", "rank=N, hit=N, p=X or seed=N", name);
    }
    return false;
  }

  void action(FailpointRule& rule, const Failpoint& site) {
    const std::size_t begin = at_;
    const std::string_view name = word();
    if (name == "kill" || name == "stop" || name == "throw") {
      rule.action = name == "kill"   ? FailpointAction::kKill
                    : name == "stop" ? FailpointAction::kStop
                                     : FailpointAction::kThrow;
      if (name == "throw" && site.kind == FailpointKind::kNoThrow) {
        refuse(begin, site.name + " cannot throw: it lies in a function that is noexcept",
               "kill, stop, exit=N or sleep=MS", name);
      }
      return;
    }
    const bool known = name == "exit" || name == "sleep" || name == "errno";
    if (!known || !take('=')) refuse(begin, "not an action", "kill, stop, throw, exit=N, sleep=MS or errno=NAME", name);
    if (name == "exit") {
      rule.action = FailpointAction::kExit;
      rule.argument = static_cast<int>(number(0, 255));
    } else if (name == "sleep") {
      rule.action = FailpointAction::kSleep;
      rule.argument = static_cast<int>(number(0, kLongestSleepMs));
    } else {
      if (site.kind != FailpointKind::kSystemCall)
        refuse(begin, site.name + " is at no system call", "another action", name);
      rule.action = FailpointAction::kErrno;
      rule.argument = errno_value();
    }
  }

  int errno_value() {
    const std::size_t begin = at_;
    const std::string_view name = word();
    std::vector<std::string> names;
    for (const ErrnoName& known : kErrnos) {
      if (known.name == name) return known.value;
      names.emplace_back(known.name);
    }
    const std::string nearest = nearest_name(name.substr(0, 20), names);
    refuse(begin, "an unknown errno", "one of " + join(names, ", "), name,
           nearest.empty() ? "" : "did you mean " + nearest + "?");
  }

  std::uint64_t number(std::uint64_t least, std::uint64_t most) {
    const std::size_t begin = at_;
    const std::string_view text = word();
    std::uint64_t value = 0;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (problem != std::errc() || end != text.data() + text.size() || value < least || value > most) {
      refuse(begin, "not a usable number", fmt::format("{} to {}", least, most), text);
    }
    return value;
  }

  bool take(char expected) {
    if (at_ >= spec_.size() || spec_[at_] != expected) return false;
    ++at_;
    return true;
  }
  /// Up to the next character that means something.
  std::string_view word() {
    const std::size_t begin = at_;
    at_ = std::min(spec_.find_first_of("@,=:;", at_), spec_.size());
    return spec_.substr(begin, at_ - begin);
  }
  [[nodiscard]] std::string_view rest() const { return spec_.substr(at_); }

  [[noreturn]] static void refuse(std::size_t at, const std::string& what, const std::string& expected,
                                  std::string_view got, const std::string& hint = "") {
    throw Error(ErrorCode::kEnvironment, what,
                {.where = "failpoints",
                 .which = fmt::format("{}, column {}", kFailpointVariable, at + 1),
                 .expected = expected,
                 .got = got.empty() ? "nothing" : quoted(got),
                 .hint = hint});
  }

  std::string_view spec_;
  std::size_t at_ = 0;
};

std::string text_of_rule(const FailpointRule& rule) {
  std::vector<std::string> conditions;
  if (rule.rank) conditions.push_back(fmt::format("rank={}", *rule.rank));
  if (rule.hit != 0) conditions.push_back(fmt::format("hit={}", rule.hit));
  if (rule.probability) conditions.push_back(fmt::format("p={}", *rule.probability));
  if (rule.seed != 0) conditions.push_back(fmt::format("seed={}", rule.seed));
  const auto action = [&]() -> std::string {
    switch (rule.action) {
      case FailpointAction::kKill:
        return "kill";
      case FailpointAction::kStop:
        return "stop";
      case FailpointAction::kThrow:
        return "throw";
      case FailpointAction::kExit:
        return fmt::format("exit={}", rule.argument);
      case FailpointAction::kSleep:
        return fmt::format("sleep={}", rule.argument);
      case FailpointAction::kErrno:
        for (const ErrnoName& known : kErrnos) {
          if (known.value == rule.argument) return "errno=" + std::string(known.name);
        }
    }
    return "";
  };
  return rule.site + (conditions.empty() ? "" : "@" + join(conditions, ",")) + ":" + action();
}

/// 64 well mixed bits (the finaliser of SplitMix64).
std::uint64_t mixed(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15U;
  value = (value ^ (value >> 30U)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27U)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31U);
}

/// What is asked for, and how often each site has been passed. One a process, for a process is what fails.
class Armed {
 public:
  void set(std::vector<FailpointRule> rules, int rank) {
    const std::lock_guard lock(mutex_);
    rules_ = std::move(rules);
    passed_.assign(rules_.size(), 0);
    rank_ = rank;
  }

  struct Actions {
    std::vector<FailpointRule> due{};
    int rank = 0;
  };
  /// Counts a pass of `site`, and says what is due.
  Actions pass(std::string_view site) {
    const std::lock_guard lock(mutex_);
    Actions actions{.due = {}, .rank = rank_};
    for (std::size_t index = 0; index < rules_.size(); ++index) {
      const FailpointRule& rule = rules_[index];
      if (rule.site != site || (rule.rank && *rule.rank != rank_)) continue;
      const std::uint64_t passed = ++passed_[index];
      if (rule.hit != 0 && rule.hit != passed) continue;
      if (rule.probability) {
        const std::uint64_t drawn = mixed(mixed(rule.seed ^ mixed(static_cast<std::uint64_t>(rank_))) ^ passed);
        if (static_cast<double>(drawn >> 11U) * 0x1p-53 >= *rule.probability) continue;
      }
      actions.due.push_back(rule);
    }
    return actions;
  }

 private:
  std::mutex mutex_;
  std::vector<FailpointRule> rules_;
  std::vector<std::uint64_t> passed_;
  int rank_ = 0;
};

Armed& armed() {
  static Armed the_only;
  return the_only;
}

/// The launcher's word; what makes no sense is refused elsewhere, and matches no rank here.
int rank_of_environment() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}) {
    const char* const value = std::getenv(name);
    if (value == nullptr) continue;
    const std::string_view text(value);
    int rank = -1;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), rank);
    return problem == std::errc() && end == text.data() + text.size() ? rank : -1;
  }
  return 0;
}

}  // namespace

std::vector<Failpoint> failpoints() {
  std::vector<Failpoint> all;
  for (std::size_t index = 0; index < detail::kFailpoints.size(); ++index) {
    const FailpointRow& row = detail::kFailpoints[index];
    for (std::size_t member = 0; member < row.size(); ++member) {
      all.push_back({.name = name_of_member(row, row.members.empty() ? "" : row.members[member]),
                     .file = row.file,
                     .line = detail::line_of_failpoint(index),
                     .what = row.what,
                     .kind = row.kind});
    }
  }
  return all;
}

std::vector<FailpointRule> parse_failpoints(std::string_view spec) {
  return SpecReader(spec).rules();
}

std::string to_text(std::span<const FailpointRule> rules) {
  std::vector<std::string> texts;
  for (const FailpointRule& rule : rules) texts.push_back(text_of_rule(rule));
  return join(texts, ";");
}

void arm_failpoints(std::vector<FailpointRule> rules, int rank) {
  const bool any = !rules.empty();
  armed().set(std::move(rules), rank);
  detail::failpoints_armed.store(any);
}

void disarm_failpoints() noexcept {
  detail::failpoints_armed.store(false);
}

void arm_failpoints_of_environment() {
  // Not std::call_once: where its function throws, the thread sanitizer's pthread_once never comes back from the next
  // call.
  static std::mutex mutex;
  static bool done = false;
  const std::lock_guard lock(mutex);
  if (done) return;
  const char* const spec = std::getenv(kFailpointVariable);
  if (spec != nullptr && *spec != '\0') arm_failpoints(parse_failpoints(spec), rank_of_environment());
  done = true;
}

namespace detail {

bool pass_failpoint(std::size_t row, std::string_view member, int line) {
  const std::string site = name_of_member(kFailpoints[row], member);
  int failing = 0;
  const Armed::Actions actions = armed().pass(site);
  for (const FailpointRule& rule : actions.due) {
    switch (rule.action) {
      case FailpointAction::kKill:
        ::kill(::getpid(), SIGKILL);
        break;
      case FailpointAction::kStop:
        ::kill(::getpid(), SIGSTOP);
        break;
      case FailpointAction::kExit:
        ::_exit(rule.argument);
      case FailpointAction::kSleep:
        std::this_thread::sleep_for(std::chrono::milliseconds(rule.argument));
        break;
      case FailpointAction::kErrno:
        failing = rule.argument;
        break;
      case FailpointAction::kThrow:
        throw Error(ErrorCode::kInternal, "planted failure at " + site,
                    {.where = fmt::format("{}:{}", kFailpoints[row].file, line),
                     .who = fmt::format("rank {}", actions.rank),
                     .hint = fmt::format("{} asked for it", kFailpointVariable)});
    }
  }
  if (failing != 0) errno = failing;
  return failing != 0;
}

}  // namespace detail
}  // namespace zeroth
