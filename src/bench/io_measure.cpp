#include "bench/io_measure.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

namespace zeroth::bench {
namespace {

constexpr std::uint64_t kFirstBlock = std::uint64_t{1} << 20U;
constexpr int kFirstDepth = 8;
constexpr std::size_t kLargestMemory = std::size_t{1} << 30U;

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

}  // namespace

IoMeasure::IoMeasure(IoMeasureOptions options) : options_(std::move(options)) {
  const std::uint64_t each = options_.file_bytes / options_.folders.size();
  for (const std::string& folder : options_.folders)
    files_.push_back(ScratchFile::create(folder, each, {.access = options_.access}));
  const std::size_t bytes = std::min<std::size_t>(kLargestMemory, 2 * each * files_.size());
  memory_ = Arena::create(ArenaKind::kPrivate, bytes, "bench.io");
  std::fill_n(memory_.data(), bytes, std::byte{0x5a});
  const auto queue = open_io_queue(options_.folders.front(), {.engine = IoEngineKind::kThreads, .depth = kFirstDepth});
  const std::uint64_t block = std::min(kFirstBlock, each);
  const std::size_t batch = batch_of(block, kFirstDepth);
  pass(*queue, requests(IoOp::kWrite, block, batch), batch);
}

std::string IoMeasure::reason() const {
  for (const auto& file : files_) {
    if (!file->reason().empty()) return file->folder() + ": " + file->reason();
  }
  return "";
}

FileAccess IoMeasure::access() const {
  const bool direct =
      std::ranges::all_of(files_, [](const auto& file) { return file->access() == FileAccess::kDirect; });
  return direct ? FileAccess::kDirect : FileAccess::kBuffered;
}

/// Requests for all blocks, one file after the other in turn. Request i has the memory of place i % (2 batch).
std::vector<IoRequest> IoMeasure::requests(IoOp op, std::uint64_t block_bytes, std::size_t batch) const {
  const std::uint64_t blocks = files_.front()->bytes() / block_bytes;
  const std::uint64_t places = 2 * batch;
  ZR_CHECK(blocks > 0 && batch > 0, ErrorCode::kUsage, "a block is larger than the files",
           {.where = "zeroth-bench io",
            .expected = std::to_string(files_.front()->bytes()) + " bytes at most",
            .got = std::to_string(block_bytes)});
  std::vector<IoRequest> requests;
  for (std::uint64_t block = 0; block < blocks; ++block) {
    for (const auto& file : files_) {
      std::byte* const place = memory_.data() + requests.size() % places * block_bytes;
      requests.push_back({.op = op, .file = file, .offset = block * block_bytes, .memory = {place, block_bytes}});
    }
  }
  return requests;
}

/// As many as may be in flight; two batches have memory of their own.
std::size_t IoMeasure::batch_of(std::uint64_t block_bytes, int depth) const {
  return std::min(static_cast<std::size_t>(depth), memory_.capacity() / block_bytes / 2);
}

/// A batch waits in the queue while the one before it ends, so `depth` transfers stay in flight and none shares memory
/// with another one.
void IoMeasure::pass(IoQueue& queue, std::span<const IoRequest> requests, std::size_t batch) {
  std::optional<Work> before;
  while (!requests.empty()) {
    const std::size_t count = std::min(batch, requests.size());
    Work work = queue.submit(requests.first(count));
    requests = requests.subspan(count);
    if (before) before->wait();
    before = std::move(work);
  }
  if (before) before->wait();
}

double IoMeasure::speed(IoQueue& queue, IoOp op, std::uint64_t block_bytes, int depth) const {
  const std::size_t batch = batch_of(block_bytes, depth);
  const std::vector<IoRequest> all = requests(op, block_bytes, batch);
  const double bytes = static_cast<double>(all.size()) * static_cast<double>(block_bytes);
  std::vector<double> speeds;
  double spent = 0;
  while (spent < options_.seconds) {
    const auto begin = SteadyClock::now();
    pass(queue, all, batch);
    const double seconds = std::chrono::duration<double>(SteadyClock::now() - begin).count();
    speeds.push_back(bytes / seconds);
    spent += seconds;
  }
  return median_of(std::move(speeds));
}

IoTiming IoMeasure::row(IoEngineKind engine, std::uint64_t block_bytes, int depth) const {
  const auto queue =
      open_io_queue(options_.folders.front(), {.engine = engine, .depth = depth, .one_thread = options_.one_thread});
  IoTiming timing{.engine = std::string(queue->name()), .block_bytes = block_bytes, .depth = depth};
  timing.read_bytes_per_s = speed(*queue, IoOp::kRead, block_bytes, depth);
  timing.write_bytes_per_s = speed(*queue, IoOp::kWrite, block_bytes, depth);
  return timing;
}

}  // namespace zeroth::bench
