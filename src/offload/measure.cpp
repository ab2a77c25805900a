#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>
#include <zeroth/device/memory.h>
#include <zeroth/io/striped_file.h>
#include <zeroth/offload/measure.h>
#include <zeroth/offload/stores.h>

#include <algorithm>
#include <chrono>
#include <vector>

namespace zeroth {
namespace {

constexpr std::size_t kLargest = std::size_t{4} << 20U;
constexpr int kMostAtOnce = 4;

/// Two halves of a file, and memory for them: one half is read while the other is written.
class Trial {
 public:
  Trial(const BlockTimesOptions& options, std::size_t block_bytes, IoQueue& queue)
      : bytes_(block_bytes),
        at_once_(static_cast<std::size_t>(std::clamp(options.slots, 1, kMostAtOnce))),
        seconds_(options.seconds),
        queue_(queue),
        file_(StripedFile::create(options.folders, 2 * at_once_ * bytes_,
                                  {.stripe_bytes = options.stripe_bytes,
                                   .first_folder = options.first_folder,
                                   .file = {.access = options.access}})),
        memory_(Arena::create(ArenaKind::kPrivate, 2 * at_once_ * bytes_ + kIoAlignment, "offload.measure")),
        halves_(memory_.reserve(2 * at_once_ * bytes_, kIoAlignment)) {
    std::ranges::fill(halves_, std::byte{0x5a});
    queue_.submit(requests(IoOp::kWrite, 0)).wait();  // nothing below is the first write to its place
    queue_.submit(requests(IoOp::kWrite, 1)).wait();
  }

  /// Seconds a block takes in the fastest round: reads of one half, writes of the other, or both at once.
  [[nodiscard]] double time(bool reads, bool writes) {
    std::vector<IoRequest> all;
    if (reads) all = requests(IoOp::kRead, 0);
    if (writes) {
      const std::vector<IoRequest> more = requests(IoOp::kWrite, 1);
      all.insert(all.end(), more.begin(), more.end());
    }
    double best = 0.0;
    const auto begin = SteadyClock::now();
    for (bool first = true; first || std::chrono::duration<double>(SteadyClock::now() - begin).count() < seconds_;
         first = false) {
      const auto start = SteadyClock::now();
      queue_.submit(all).wait();
      const double round = std::chrono::duration<double>(SteadyClock::now() - start).count();
      best = first ? round : std::min(best, round);
    }
    return best / static_cast<double>(at_once_);
  }

 private:
  [[nodiscard]] std::vector<IoRequest> requests(IoOp op, std::size_t half) const {
    const std::size_t length = at_once_ * bytes_;
    return file_.requests(op, half * length, halves_.subspan(half * length, length), "measured blocks");
  }

  std::size_t bytes_;
  std::size_t at_once_;
  double seconds_;
  IoQueue& queue_;
  StripedFile file_;
  Arena memory_;
  std::span<std::byte> halves_;
};

}  // namespace

BlockTimes measure_block_times(const BlockTimesOptions& options, IoQueue& queue) {
  ZR_CHECK(options.block_bytes > 0, ErrorCode::kUsage, "a block to be measured is empty", {.where = "offload.measure"});
  const std::size_t bytes = align_up(std::min(options.block_bytes, kLargest), kIoAlignment);
  const double scale = static_cast<double>(options.block_bytes) / static_cast<double>(bytes);
  Trial trial(options, bytes, queue);
  const double read = trial.time(true, false);
  const double write = trial.time(false, true);
  // What one costs the other: none on two links, and on a shared one the sum of both.
  const double beside = std::max(1.0, trial.time(true, true) / std::max(read, write));
  return {.read_s = read * beside * scale, .write_s = write * beside * scale};
}

}  // namespace zeroth
