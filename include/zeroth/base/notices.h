// What a wait says while it lasts: first after a few seconds, then now and then.
#pragma once

#include <zeroth/base/deadline.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace zeroth {

/// After the begin of a wait, and after each notice.
struct NoticeTimes {
  Milliseconds first{5'000};
  Milliseconds every{30'000};
};

/// For a wait that looks around by itself.
class NoticeClock {
 public:
  explicit NoticeClock(NoticeTimes times) : times_(times), begin_(SteadyClock::now()), next_(begin_ + times.first) {}

  /// Whether a notice is due; then the next one is due later.
  [[nodiscard]] bool due();
  /// "5 s", "250 ms" since the begin.
  [[nodiscard]] std::string waited() const;

 private:
  NoticeTimes times_;
  SteadyClock::time_point begin_;
  SteadyClock::time_point next_;
};

/// For a wait inside of another library: a thread of its own says it, until the destructor, which waits for it.
class NoticeThread {
 public:
  /// `say` gets NoticeClock::waited(), must not throw, and is called by that thread.
  NoticeThread(NoticeTimes times, std::function<void(const std::string& waited)> say);
  NoticeThread(const NoticeThread&) = delete;
  NoticeThread& operator=(const NoticeThread&) = delete;
  ~NoticeThread();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace zeroth
