#include "bench/io_measure.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <chrono>
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
  const std::size_t bytes = std::min<std::size_t>(kLargestMemory, each * files_.size());
  memory_ = Arena::create(ArenaKind::kPrivate, bytes, "bench.io");
  std::fill_n(memory_.data(), bytes, std::byte{0x5a});
  const auto queue = open_io_queue(options_.folders.front(), {.engine = IoEngineKind::kThreads, .depth = kFirstDepth});
  queue->submit(pass(IoOp::kWrite, std::min(kFirstBlock, each), kFirstDepth)).wait();
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

/// Requests for all blocks, one file after the other in turn. Request i has the memory of place i % depth: with `depth`
/// in flight, mostly no two share it, and what the bytes are does not matter here.
std::vector<IoRequest> IoMeasure::pass(IoOp op, std::uint64_t block_bytes, int depth) const {
  const std::uint64_t blocks = files_.front()->bytes() / block_bytes;
  const std::uint64_t places =
      std::min<std::uint64_t>(static_cast<std::uint64_t>(depth), memory_.capacity() / block_bytes);
  ZR_CHECK(blocks > 0 && places > 0, ErrorCode::kUsage, "a block is larger than the files",
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

double IoMeasure::speed(IoQueue& queue, IoOp op, std::uint64_t block_bytes, int depth) const {
  const std::vector<IoRequest> requests = pass(op, block_bytes, depth);
  const double bytes = static_cast<double>(requests.size()) * static_cast<double>(block_bytes);
  std::vector<double> speeds;
  double spent = 0;
  while (spent < options_.seconds) {
    const auto begin = SteadyClock::now();
    queue.submit(requests).wait();
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
