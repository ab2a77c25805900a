// Which engine a queue gets: the first that writes, reads and compares well.
#include "io/engine.h"
#include "io/memory.h"
#include "io/probe.h"
#include "io/request_queue.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/io/io_queue.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <random>
#include <utility>
#include <vector>

namespace zeroth {

std::string_view name_of(IoOp op) noexcept {
  return op == IoOp::kRead ? "read" : "write";
}

std::string_view name_of(IoEngineKind kind) noexcept {
  constexpr std::array<std::string_view, 4> kNames{"auto", "io_uring", "aio", "threads"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::optional<IoEngineKind> io_engine_of(std::string_view name) noexcept {
  for (const IoEngineKind kind :
       {IoEngineKind::kAuto, IoEngineKind::kIoUring, IoEngineKind::kAio, IoEngineKind::kThreads}) {
    if (name_of(kind) == name) return kind;
  }
  return std::nullopt;
}

namespace detail {

void probe_queue(IoQueue& queue, const std::shared_ptr<const ScratchFile>& file) {
  const std::size_t block = file->alignment();
  constexpr std::size_t kBlocks = 8;
  const AlignedMemory memory(2 * kBlocks * block, block);
  const std::span<std::byte> written = memory.bytes().first(kBlocks * block);
  const std::span<std::byte> read = memory.bytes().subspan(kBlocks * block);
  std::minstd_rand random(61);
  for (std::byte& byte : written) byte = static_cast<std::byte>(random());
  std::ranges::fill(read, std::byte{0});
  for (const IoOp op : {IoOp::kWrite, IoOp::kRead}) {
    std::vector<IoRequest> requests;
    for (std::size_t i = 0; i < kBlocks; ++i) {
      requests.push_back({.op = op,
                          .file = file,
                          .offset = i * block,
                          .memory = (op == IoOp::kWrite ? written : read).subspan(i * block, block),
                          .name = "the probe"});
    }
    queue.submit(requests).wait();
  }
  const auto [first, second] = std::ranges::mismatch(written, read);
  ZR_CHECK(first == written.end(), ErrorCode::kIo, "what was written does not read back",
           {.where = fmt::format("io.{} probe", queue.name()),
            .which = fmt::format("a {} file in {}", name_of(file->access()), file->folder()),
            .expected = fmt::format("byte {} is {:#04x}", first - written.begin(), static_cast<unsigned>(*first)),
            .got = fmt::format("{:#04x}", static_cast<unsigned>(*second))});
}

}  // namespace detail

namespace {

constexpr Milliseconds kProbeTimeout{10'000};

std::unique_ptr<detail::IoEngine> make_engine(IoEngineKind kind, const IoQueueOptions& options) {
  if (kind == IoEngineKind::kIoUring) return detail::make_io_uring_engine(options.depth, options.one_thread);
  if (kind == IoEngineKind::kAio) return detail::make_aio_engine(options.depth);
  return detail::make_thread_engine(options.depth, options.num_threads);
}

/// A queue of this engine that has passed the probe. The faults of tests begin after it.
std::unique_ptr<IoQueue> open_one(IoEngineKind kind, const IoQueueOptions& options, std::string reason,
                                  const std::shared_ptr<const ScratchFile>& file) {
  IoQueueOptions probing = options;
  probing.timeout = kProbeTimeout;
  detail::probe_queue(*detail::make_request_queue(make_engine(kind, options), probing, ""), file);
  std::unique_ptr<detail::IoEngine> engine = make_engine(kind, options);
  if (options.faults) engine = detail::make_faulty_engine(std::move(engine), options.faults);
  return detail::make_request_queue(std::move(engine), options, std::move(reason));
}

void check_options(const IoQueueOptions& options) {
  const auto check = [](bool good, const char* what, const char* expected, std::int64_t got) {
    ZR_CHECK(good, ErrorCode::kUsage, std::string("an option of a queue for files is out of range: ") + what,
             {.where = "io.open_io_queue", .expected = expected, .got = std::to_string(got)});
  };
  check(options.depth >= 1 && options.depth <= 4096, "depth", "1 to 4096", options.depth);
  check(options.num_threads >= 1 && options.num_threads <= 64, "num_threads", "1 to 64", options.num_threads);
  check(options.timeout.count() >= 1, "timeout", "at least 1 ms", options.timeout.count());
}

}  // namespace

std::unique_ptr<IoQueue> open_io_queue(const std::string& folder, const IoQueueOptions& options) {
  check_options(options);
  const auto file = ScratchFile::create(folder, std::uint64_t{1} << 20U);
  if (options.engine != IoEngineKind::kAuto) return open_one(options.engine, options, "", file);
  std::string reasons;
  const auto refuse = [&](IoEngineKind kind, const std::string& why) {
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", name_of(kind), why);
  };
  for (const IoEngineKind kind : {IoEngineKind::kIoUring, IoEngineKind::kAio, IoEngineKind::kThreads}) {
    if (kind == IoEngineKind::kAio && file->access() != FileAccess::kDirect) {
      refuse(kind, "would block in submit(), because files are buffered (" + file->reason() + ")");
      continue;
    }
    try {
      return open_one(kind, options, reasons, file);
    } catch (const Error& error) {
      refuse(kind, error.message());
    }
  }
  throw Error(ErrorCode::kIo, "no engine for files works",
              {.where = "io.open_io_queue", .which = folder, .got = reasons});
}

}  // namespace zeroth
