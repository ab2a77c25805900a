// Blocks of states in files, in the optimizer's pattern: each block is read ahead, changed and written behind, in
// order. Checksums are on, as in training; the change is one pass over the block.
//
// Run: store_bench FOLDER [--bytes N] [--block N] [--slots N] [--depth N] [--engine NAME] [--seconds S]
// Prints one line: {"update_bytes_per_s": ..., "bytes_read": ..., "bytes_written": ..., "blocks": ...}, of the median
// pass; bytes of a pass are those read and those written.
#include "support/statistics.h"

#include <zeroth/base/deadline.h>
#include <zeroth/device/memory.h>
#include <zeroth/offload/stores.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

namespace {

using namespace zeroth;  // NOLINT(google-build-using-namespace)

struct Options {
  std::string folder{};
  std::uint64_t bytes = std::uint64_t{256} << 20U;
  std::size_t block = std::size_t{3} << 20U;  // 262,144 elements of master and two moments
  int slots = 4;
  int depth = 32;
  std::string engine = "auto";
  double seconds = 2;
};

void update(StateStore& store, int block) {
  StateLease lease = store.acquire(block, Access::kUpdate);
  for (std::byte& byte : lease.bytes()) byte ^= std::byte{1};
}

void pass(StateStore& store, int ahead) {
  const int blocks = store.num_blocks();
  int asked = 0;
  for (int block = 0; block < blocks; ++block) {
    for (asked = std::max(asked, block + 1); asked < std::min(blocks, block + 1 + ahead); ++asked) {
      if (!store.prefetch(asked)) break;
    }
    update(store, block);
  }
  store.flush();
}

void run(const Options& options) {
  const std::vector<std::size_t> sizes(options.bytes / options.block, options.block);
  const FileStoreOptions files{.folders = {options.folder}, .slots = options.slots};
  Arena memory = Arena::create(ArenaKind::kPrivate, file_store_memory(sizes, files), "bench.store");
  const auto engine = io_engine_of(options.engine);
  if (!engine || sizes.empty()) throw std::invalid_argument("--engine or --block");
  const std::shared_ptr<IoQueue> queue =
      open_io_queue(options.folder, {.engine = *engine, .depth = options.depth, .one_thread = true});
  const auto store = make_file_store({.bytes = sizes}, files, queue, {memory.data(), memory.capacity()});
  pass(*store, options.slots - 2);  // the first reads nothing
  std::vector<double> seconds;
  const StoreCounters before = store->counters();
  for (double spent = 0; spent < options.seconds; spent += seconds.back()) {
    const auto begin = SteadyClock::now();
    pass(*store, options.slots - 2);
    seconds.push_back(std::chrono::duration<double>(SteadyClock::now() - begin).count());
  }
  const StoreCounters after = store->counters();
  const auto passes = static_cast<double>(seconds.size());
  const double read = static_cast<double>(after.read_bytes - before.read_bytes) / passes;
  const double written = static_cast<double>(after.write_bytes - before.write_bytes) / passes;
  std::printf(
      R"({"update_bytes_per_s": %.0f, "bytes_read": %.0f, "bytes_written": %.0f, "blocks": %zu, "engine": "%s"})"
      "\n",
      (read + written) / benchmarks::median(seconds), read, written, sizes.size(), std::string(queue->name()).c_str());
}

}  // namespace

int main(int count, char** arguments) {
  Options options;
  CLI::App app("Blocks of states in files, in the optimizer's pattern.");
  app.add_option("folder", options.folder)->required();
  app.add_option("--bytes", options.bytes);
  app.add_option("--block", options.block);
  app.add_option("--slots", options.slots);
  app.add_option("--depth", options.depth);
  app.add_option("--engine", options.engine);
  app.add_option("--seconds", options.seconds);
  CLI11_PARSE(app, count, arguments);
  try {
    run(options);
  } catch (const std::exception& error) {
    (void)std::fprintf(stderr, "store_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
