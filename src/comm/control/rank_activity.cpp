#include <zeroth/comm/rank_activity.h>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <thread>
#include <utility>

namespace zeroth {
namespace {

constexpr std::array<std::string_view, kNumPhases> kPhases{
    "has not begun to train", "is in the forward", "is in the backward",        "has ended the backward",
    "is in step()",           "is between steps",  "is in a call of all ranks", "is in a forward without gradients"};

pid_t this_thread() {
  return static_cast<pid_t>(::syscall(SYS_gettid));
}

constexpr std::uint64_t pack(Phase phase, int model, int unit) {
  return static_cast<std::uint64_t>(phase) << 56U | (static_cast<std::uint64_t>(model + 1) & 0xff'ffffU) << 32U |
         (static_cast<std::uint64_t>(unit + 1) & 0xffff'ffffU);
}

}  // namespace

int RankActivity::add_model(std::vector<std::string> units) {
  const std::lock_guard lock(mutex_);
  models_.push_back(std::move(units));
  return static_cast<int>(models_.size()) - 1;
}

std::shared_ptr<std::atomic<std::uint64_t>> RankActivity::calls_begun(const std::string& group) {
  const std::lock_guard lock(mutex_);
  auto count = std::make_shared<std::atomic<std::uint64_t>>(0);
  calls_begun_[group] = count;
  return count;
}

void RankActivity::enter(Phase phase, int model, int unit) noexcept {
  phase_.store(pack(phase, model, unit), std::memory_order_relaxed);
}

void RankActivity::enter_action(ActionWord action, Phase phase) noexcept {
  failed_.store(false, std::memory_order_relaxed);
  action_.store(action, std::memory_order_relaxed);
  enter(phase);
  const std::lock_guard lock(shown_mutex_);
  for (ShownAction* const place : shown_) {
    place->steps.store(steps_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    place->action.store(action, std::memory_order_release);
  }
}

std::string RankActivity::failed_action() const {
  const auto [action, steps] = running_action();
  return failed_.load(std::memory_order_relaxed) ? action_text(action, steps) : "";
}

std::string RankActivity::action_text(ActionWord action, std::int64_t steps) const {
  ActionText (*const reader)(ActionWord) = reader_.load();
  if (action == 0 || reader == nullptr) return "";
  const ActionText text = reader(action);
  return text.trains ? fmt::format("action {} of step {} ({})", text.name, steps + 1, text.about)
                     : fmt::format("action {} of an evaluation after step {} ({})", text.name, steps, text.about);
}

void RankActivity::show_at(ShownAction& place) {
  const std::lock_guard lock(shown_mutex_);
  shown_.push_back(&place);
}

void RankActivity::hide_at(const ShownAction& place) noexcept {
  const std::lock_guard lock(shown_mutex_);
  std::erase(shown_, &place);
}

void RankActivity::set_locator(Locator locator) {
  const std::lock_guard lock(mutex_);
  locator_ = locator ? std::make_shared<const Locator>(std::move(locator)) : nullptr;
}

void RankActivity::at(const char* file, int line, const char* function) noexcept {
  const std::lock_guard lock(mutex_);
  here_ = {file, line, function};
}

void RankActivity::set_waker(std::function<void()> waker) {
  const std::lock_guard lock(mutex_);
  waker_ = waker ? std::make_shared<const std::function<void()>>(std::move(waker)) : nullptr;
}

void RankActivity::set_teller(std::function<void(const Error& error)> teller) {
  const std::lock_guard lock(teller_mutex_);
  teller_ = std::move(teller);
}

void RankActivity::tell(const Error& error) const {
  const std::lock_guard lock(teller_mutex_);
  if (teller_) teller_(error);
}

void RankActivity::tell_and_await(const Error& error, Milliseconds patience) const {
  {
    const std::lock_guard lock(teller_mutex_);
    if (!teller_) return;
    teller_(ErrorOfJob(error));
  }
  await_verdict(patience);
}

RankStatus RankActivity::status(bool with_place) {
  RankStatus status;
  const std::uint64_t phase = phase_.load(std::memory_order_relaxed);
  status.phase = static_cast<Phase>(phase >> 56U);
  status.step = steps_.load(std::memory_order_relaxed);
  status.action = action_text(action_.load(std::memory_order_relaxed), status.step);
  if (!status.action.empty() && failed_.load(std::memory_order_relaxed)) status.action += ", which has failed";
  status.last_call = recorder_.last_call();
  std::shared_ptr<const Locator> locator;
  Line here;
  pid_t thread = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto model = static_cast<std::size_t>(phase >> 32U & 0xff'ffffU);
    const auto unit = static_cast<std::size_t>(phase & 0xffff'ffffU);
    if (model > 0 && model <= models_.size() && unit > 0 && unit <= models_[model - 1].size())
      status.unit = models_[model - 1][unit - 1];
    status.one_thread = threads_.size() <= 1;
    std::erase_if(calls_begun_, [&](const auto& entry) {
      const auto count = entry.second.lock();
      if (count) status.calls_begun.emplace(entry.first, count->load());
      return !count;
    });
    if (!waits_.empty()) status.wait = waits_.begin()->second;
    locator = locator_;
    here = here_;
    thread = last_thread_ != 0 ? last_thread_ : ::getpid();
  }
  if (with_place && locator) {
    status.place = (*locator)(thread);
  } else if (with_place) {
    status.place = place_text(here);
  }
  return status;
}

/// "train.cpp:57 in load_batch": as of Python, without the folders.
std::string RankActivity::place_text(const Line& here) {
  if (here.line == 0) return "";
  std::string_view file = here.file;
  file.remove_prefix(file.rfind('/') + 1);
  return fmt::format("{}:{} in {}", file, here.line, here.function);
}

RankStatus RankActivity::goodbye() {
  RankStatus last = status(false);
  const std::lock_guard lock(mutex_);
  last.place = place_text(here_);
  if (entered() == end_at_ && last.step == end_after_) last.end = end_;
  return last;
}

void RankActivity::ends_by(std::string how) {
  const std::lock_guard lock(mutex_);
  end_ = std::move(how);
  end_at_ = entered();
  end_after_ = steps_.load(std::memory_order_relaxed);
}

void RankActivity::judge(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (verdict_) return;
  verdict_ = error;
  judged_.store(true, std::memory_order_release);
}

void RankActivity::throw_verdict() const {
  hear();
  const std::lock_guard lock(mutex_);
  ErrorContext context = verdict_->context();
  if (context.who.empty())
    context.who = fmt::format("rank {}/{}{}", rank_, size_, step_text());  // else whom it is about, or who saw it
  throw JobVerdict(verdict_->code(), verdict_->message(), std::move(context));
}

std::string RankActivity::step_text() const {
  const auto phase = static_cast<Phase>(phase_.load(std::memory_order_relaxed) >> 56U);
  const auto [action, steps] = running_action();
  if (ActionText(*const reader)(ActionWord) = reader_.load(); action != 0 && reader != nullptr) {
    const ActionText text = reader(action);
    return text.trains ? fmt::format(", step {} ({})", steps + 1, text.name)
                       : fmt::format(", after step {} ({})", steps, text.name);
  }
  switch (phase) {
    case Phase::kForward:
      return fmt::format(", step {} (forward)", steps + 1);
    case Phase::kBackward:
    case Phase::kAfterBackward:
      return fmt::format(", step {} (backward)", steps + 1);
    case Phase::kStep:
      return fmt::format(", step {} (step())", steps + 1);
    default:
      return steps > 0 ? fmt::format(", after step {}", steps) : "";
  }
}

Error RankActivity::dated(const Error& error) const {
  ErrorContext context = error.context();
  const std::string own = fmt::format("rank {}/{}", rank_, size_);
  if (!context.who.empty() && context.who != own) return error;
  context.who = own + step_text();
  return Error(error.code(), error.message(), std::move(context));
}

void RankActivity::write_record(const std::string& path, const Error& error, const RankStatus& last) const {
  const ErrorContext& context = error.context();
  const WaitReport& waited = last.wait.report;
  FlightRecorder::Facts facts{{"code", std::string(slug(error.code()))},
                              {"message", error.message()},
                              {"where", context.where},
                              {"who", context.who.empty() ? fmt::format("rank {}/{}", rank_, size_) : context.who},
                              {"which", context.which},
                              {"expected", context.expected},
                              {"got", context.got},
                              {"hint", context.hint},
                              {"steps", std::to_string(last.step)},
                              {"rank_was", describe_phase(last)},
                              {"waited_for", waited.call},
                              {"group", waited.group},
                              {"time", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))}};
  std::erase_if(facts, [](const auto& fact) { return fact.second.empty(); });
  recorder_.write(path, rank_, size_, facts);
}

std::uint64_t RankActivity::look(std::uint64_t id, WaitReport report, bool expired, int lost) {
  std::shared_ptr<const std::function<void()>> waker;
  {
    const std::lock_guard lock(mutex_);
    const bool first = id == 0;
    if (first) {
      id = ++next_wait_;
      last_thread_ = this_thread();
      threads_.insert(last_thread_);
    }
    WaitStatus& wait = waits_[id];
    wait.id = id;
    ++wait.looks;
    wait.report = std::move(report);
    if (first || (expired && !wait.expired) || (lost >= 0 && wait.lost < 0)) waker = waker_;
    wait.expired = wait.expired || expired;
    wait.lost = std::max(wait.lost, lost);
  }
  if (waker) (*waker)();
  return id;
}

void RankActivity::end_wait(std::uint64_t id) noexcept {
  const std::lock_guard lock(mutex_);
  waits_.erase(id);
}

void RankActivity::await_verdict(Milliseconds patience) const {
  {
    const std::lock_guard lock(mutex_);
    if (!waker_ && !verdict_) return;  // nobody would say anything
  }
  const Deadline deadline(patience);
  while (true) {
    check();
    if (deadline.passed()) return;
    std::this_thread::sleep_for(std::min(deadline.remaining(), Milliseconds{10}));
  }
}

std::string describe(const RankStatus& status) {
  if (status.wait.id != 0) {
    return fmt::format("waits for {}{}", status.wait.report.call, status.place.empty() ? "" : " at " + status.place);
  }
  return describe_phase(status) + (status.place.empty() ? "" : ", at " + status.place);
}

std::string describe_phase(const RankStatus& status) {
  if (!status.action.empty()) return "is in " + status.action + (status.unit.empty() ? "" : ", in unit " + status.unit);
  const auto phase = static_cast<std::size_t>(status.phase);
  std::string text(kPhases[phase < kPhases.size() ? phase : 0]);
  if (!status.unit.empty()) text += " of unit " + status.unit;
  if (status.phase == Phase::kBetweenSteps || status.phase == Phase::kEvaluation || status.phase == Phase::kSyncPoint) {
    text += fmt::format(", after step {}", status.step);
  } else if (status.phase != Phase::kStarting) {
    text += fmt::format(" of step {}", status.step + 1);
  }
  return text;
}

}  // namespace zeroth
