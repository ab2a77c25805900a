#include <zeroth/base/notices.h>

#include <utility>

namespace zeroth {

bool NoticeClock::due() {
  const auto now = SteadyClock::now();
  if (now < next_) return false;
  next_ = now + times_.every;
  return true;
}

std::string NoticeClock::waited() const {
  const auto waited = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - begin_);
  if (waited < Milliseconds{1'000}) return std::to_string(waited.count()) + " ms";
  return std::to_string(std::chrono::round<std::chrono::seconds>(waited).count()) + " s";
}

NoticeThread::NoticeThread(NoticeTimes times, std::function<void(const std::string&)> say)
    : thread_([this, times, say = std::move(say)] {
        NoticeClock clock(times);
        Milliseconds pause = times.first;
        std::unique_lock lock(mutex_);
        while (!changed_.wait_for(lock, pause, [this] { return over_; })) {
          say(clock.waited());
          pause = times.every;
        }
      }) {}

NoticeThread::~NoticeThread() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

}  // namespace zeroth
