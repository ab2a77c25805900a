#include "base/own_thread.h"

#include <pthread.h>

#include <csignal>
#include <string>
#include <system_error>
#include <utility>

namespace zeroth::detail {

std::thread start_own_thread(std::function<void()> body, std::string_view purpose, ErrorContext context) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  std::string problem;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    problem = error.what();
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ZR_CHECK(thread.joinable(), ErrorCode::kResource, "no thread for " + std::string(purpose) + ": " + problem,
           std::move(context));
  return thread;
}

}  // namespace zeroth::detail
