#include "offload/transfers.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>

#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <exception>

namespace zeroth::offload {
namespace {

constexpr Milliseconds kLongestEnd{60'000};

/// Adds the time of its life.
class Counted {
 public:
  Counted(std::uint64_t& ns, TransferClock& clock, const std::string& what)
      : ns_(ns), clock_(clock), what_(what), begin_(clock.now()) {}
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  ~Counted() {
    const auto end = clock_.now();
    clock_.waited(begin_, end, what_);
    ns_ += static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin_).count());
  }

 private:
  std::uint64_t& ns_;
  TransferClock& clock_;
  const std::string& what_;
  SteadyClock::time_point begin_;
};

}  // namespace

void wait_for(const Work& transfer, std::uint64_t& wait_ns, TransferClock& clock, const std::string& what) {
  const Counted counted(wait_ns, clock, what);
  transfer.wait();
}

bool has_ended(const Work& transfer) {
  return transfer.event().ready();
}

void wait_at_end(const Work& transfer) noexcept {
  const Deadline deadline(kLongestEnd);
  while (!has_ended(transfer) && !deadline.passed()) {
    try {
      transfer.wait();
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kUsage) return;  // a forked child: the transfer is the parent's
    } catch (const std::exception&) {                 // the watch's; each look takes its slice of a wait
    }
  }
}

std::uint64_t bytes_on_disk(const ScratchFile& file, const char* where) {
  struct stat status{};
  ZR_CHECK(::fstat(file.descriptor(), &status) == 0, ErrorCode::kIo, "a file cannot be looked at",
           {.where = where, .which = file.folder(), .got = errno_text(errno)});
  return static_cast<std::uint64_t>(status.st_blocks) * 512;
}

}  // namespace zeroth::offload
