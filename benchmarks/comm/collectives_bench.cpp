// Collectives of the shm transport against the memory of the machine.
//
// N ranks are forked. Each size and call is timed in rounds that alternate with a plain copy of the same
// shared pages by all ranks at once; the copy's traffic (bytes read + bytes written, all ranks, per second)
// is the roof. The time that a call would need at that traffic, with every byte moved once, is
//   gather in place  2 (n-1) S       reduce_scatter  (n+1) S       all_reduce  (n+1) S + 2 (n-1) S
// for S = 64 MiB, say, of full output (gather) or input (reductions) a rank. A row's time is that of the
// slowest rank.
//
//   collectives_bench --ranks 2 --rounds 30 --json out.json
#include "support/cpu_time.h"
#include "support/record.h"

#include <kernels/copy/copy.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/factory.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace zeroth::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

struct Settings {
  int ranks = 2;
  int rounds = 30;
  std::vector<std::size_t> sizes{std::size_t{4} << 10U, std::size_t{256} << 10U, std::size_t{4} << 20U,
                                 std::size_t{64} << 20U};
  std::size_t staging_bytes = CommOptions{}.staging_bytes;
  std::string json{};
  std::string job{};
};

struct Sample {
  double us = 0;       ///< wall time of the slowest rank, one call
  double roof_us = 0;  ///< the call's traffic at the roof of the same round; 0 where there is no roof
  double cpu_us = 0;   ///< processor time of all ranks, one call
};

CommOptions options_of(const Settings& settings) {
  CommOptions options;
  options.staging_bytes = settings.staging_bytes;
  return options;
}

/// One rank of the benchmark.
class Rank {
 public:
  Rank(const Settings& settings, int rank)
      : settings_(settings),
        backend_(make_backend("shm", {.rank = rank,
                                      .size = settings.ranks,
                                      .job = settings.job,
                                      .hub = nullptr,
                                      .options = options_of(settings)})),
        comm_(backend_),
        largest_(*std::max_element(settings.sizes.begin(), settings.sizes.end())),
        arena_(Arena::create(ArenaKind::kShared, kPageBytes + 2 * largest_, "bench")),
        plain_(Arena::create(ArenaKind::kPrivate, 2 * largest_, "plain")),
        window_(backend_->attach(arena_, "bench")) {
    std::memset(arena_.data() + kPageBytes, 1, 2 * largest_);
    std::memset(plain_.data(), 1, 2 * largest_);
  }

  /// Samples by row name; only rank 0's are complete.
  std::map<std::string, std::vector<Sample>> run() {
    for (int round = 0; round < settings_.rounds + 1; ++round) {
      for (const std::size_t size : settings_.sizes) run_size(size, round > 0);
    }
    return std::move(samples_);
  }

 private:
  float* shared_send() { return reinterpret_cast<float*>(arena_.data() + kPageBytes); }
  float* shared_recv() { return reinterpret_cast<float*>(arena_.data() + kPageBytes + largest_); }
  float* plain_send() { return reinterpret_cast<float*>(plain_.data()); }
  float* plain_recv() { return reinterpret_cast<float*>(plain_.data() + largest_); }

  void run_size(std::size_t bytes, bool keep) {
    const auto n = static_cast<std::size_t>(comm_.size());
    const std::size_t count = bytes / sizeof(float);
    const std::size_t part = count / n;
    const double size = static_cast<double>(bytes);
    const bool roofed = bytes >= (std::size_t{1} << 20U);
    const int batch = bytes <= (std::size_t{64} << 10U) ? 200 : bytes <= (std::size_t{1} << 20U) ? 20 : 1;
    const double bytes_a_us = roofed ? roof(bytes) : 0;
    const auto name = [&](std::string_view call, std::string_view how) {
      return fmt::format("{} {} {}", format_bytes(bytes), call, how);
    };
    const auto measure = [&](const std::string& row, double traffic, const std::function<void()>& call) {
      call();
      Sample sample = time(batch, call);
      if (roofed) sample.roof_us = traffic / bytes_a_us;
      if (keep) samples_[row].push_back(sample);
    };
    const double others = static_cast<double>(n - 1);
    const double gather_traffic = 2 * others * size;
    const double scatter_traffic = (others + 2) * size;
    for (const bool attached : {true, false}) {
      float* const send = attached ? shared_send() : plain_send();
      float* const recv = attached ? shared_recv() : plain_recv();
      const std::string_view how = attached ? "attached" : "staged";
      const auto rank = static_cast<std::size_t>(comm_.rank());
      measure(name("all_gather", how), gather_traffic,
              [&] { comm_.all_gather(std::span<const float>(recv + rank * part, part), std::span(recv, part * n)); });
      measure(name("reduce_scatter", how), scatter_traffic,
              [&] { comm_.reduce_scatter(std::span<const float>(send, part * n), std::span(recv, part)); });
      measure(name("all_reduce", how), scatter_traffic + gather_traffic,
              [&] { comm_.all_reduce(std::span<const float>(send, count), std::span(recv, count)); });
    }
    measure(name("gather", "pulled"), gather_traffic, [&] { pull(part * sizeof(float)); });
    measure("barrier", 0, [&] { comm_.barrier(); });
  }

  /// What zero does: announce, wait for the others' epoch, copy their parts; no meeting.
  void pull(std::size_t part_bytes) {
    flag(comm_.rank()).store(++epoch_);
    backend_->notify();
    for (int step = 1; step < comm_.size(); ++step) {
      const int peer = (comm_.rank() + step) % comm_.size();
      const std::atomic_ref<std::uint64_t> epoch = flag(peer);
      if (epoch.load() < epoch_) {
        backend_->wait_until([&] { return epoch.load() >= epoch_; }, {.what = "an epoch", .ranks = {peer}});
      }
      const std::size_t first = static_cast<std::size_t>(peer) * part_bytes;
      kernels::copy_stream(reinterpret_cast<std::byte*>(shared_recv()) + first,
                           window_.ranks[static_cast<std::size_t>(peer)].data() + kPageBytes + first,
                           static_cast<std::int64_t>(part_bytes), isa_);
    }
  }

  /// Bytes a microsecond that all ranks together read and write when each copies the part that it would
  /// gather; the faster of an ordinary and a streaming copy.
  double roof(std::size_t bytes) {
    const auto n = static_cast<std::size_t>(comm_.size());
    const std::size_t own = bytes / n * (n - 1);
    double best = 1e300;
    for (const bool streaming : {true, false, true, false}) {
      const Sample sample = time(2, [&] {
        if (streaming) {
          kernels::copy_stream(shared_recv(), shared_send(), static_cast<std::int64_t>(own), isa_);
        } else {
          std::memcpy(shared_recv(), shared_send(), own);
        }
      });
      best = std::min(best, sample.us);
    }
    return 2 * static_cast<double>(own * n) / best;
  }

  static double cpu_us() { return 1e6 * cpu_seconds(); }

  Sample time(int batch, const std::function<void()>& call) {
    comm_.barrier();
    const double cpu_before = cpu_us();
    const auto begin = Clock::now();
    for (int index = 0; index < batch; ++index) call();
    const double wall = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    const std::array<double, 2> own{wall / batch, (cpu_us() - cpu_before) / batch};
    std::vector<double> all(own.size() * static_cast<std::size_t>(comm_.size()));
    comm_.all_gather(std::span<const double>(own), std::span(all));
    Sample sample;
    for (std::size_t index = 0; index < all.size(); index += 2) {
      sample.us = std::max(sample.us, all[index]);
      sample.cpu_us += all[index + 1];
    }
    return sample;
  }

  [[nodiscard]] std::atomic_ref<std::uint64_t> flag(int rank) const {
    return std::atomic_ref<std::uint64_t>(
        *reinterpret_cast<std::uint64_t*>(window_.ranks[static_cast<std::size_t>(rank)].data()));
  }

  const Settings& settings_;
  std::shared_ptr<CommBackend> backend_;
  Communicator comm_;
  std::size_t largest_;
  Arena arena_;
  Arena plain_;
  PeerWindow window_;
  kernels::Isa isa_ = kernels::best_isa();
  std::uint64_t epoch_ = 0;
  std::map<std::string, std::vector<Sample>> samples_;
};

double least(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}

void add_rows(Record& record, const Settings& settings, const std::map<std::string, std::vector<Sample>>& samples) {
  for (const auto& [name, list] : samples) {
    std::vector<double> wall;
    std::vector<double> cpu;
    std::vector<double> ratio;
    for (const Sample& sample : list) {
      wall.push_back(sample.us);
      cpu.push_back(sample.cpu_us);
      if (sample.roof_us > 0) ratio.push_back(sample.us / sample.roof_us);
    }
    const std::string row = fmt::format("n={} {}", settings.ranks, name);
    record.add({.name = row, .unit = "us", .summary = summarise(wall), .better = Better::kLower});
    record.add({.name = row + ", least", .unit = "us", .summary = summarise({least(wall)}), .better = Better::kLower});
    record.add({.name = row + ", cpu of all ranks", .unit = "us", .summary = summarise(cpu), .better = Better::kLower});
    if (ratio.empty()) continue;
    // The bar is for data in place, with a core for each rank; staging moves every byte twice.
    const bool has_bar = name.find("staged") == std::string::npos && settings.ranks == 2;
    record.add({.name = row + " / roof",
                .unit = "x",
                .summary = summarise(ratio),
                .better = Better::kLower,
                .bar = has_bar ? std::optional<double>(1.6) : std::nullopt});
    record.add(
        {.name = row + " / roof, least", .unit = "x", .summary = summarise({least(ratio)}), .better = Better::kLower});
  }
}

int run(const Settings& settings, Record& record) {
  std::vector<pid_t> children;
  for (int rank = 1; rank < settings.ranks; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      try {
        [[maybe_unused]] const auto samples = Rank(settings, rank).run();
      } catch (const std::exception& error) {
        std::cerr << error.what() << "\n";
        ::_exit(1);
      }
      ::_exit(0);
    }
    children.push_back(pid);
  }
  const auto samples = Rank(settings, 0).run();
  int failed = 0;
  for (const pid_t pid : children) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (status != 0) ++failed;
  }
  if (failed > 0) return 1;
  record.set_own_cpu_seconds(cpu_seconds() + cpu_seconds(RUSAGE_CHILDREN));
  record.setting("ranks", settings.ranks);
  record.setting("rounds", settings.rounds);
  record.setting("staging_bytes", settings.staging_bytes);
  record.setting("isa", std::string(kernels::name_of(kernels::best_isa())));
  record.note(
      "attached: buffers in an attached arena, read in place; staged: private buffers; pulled: one-sided, "
      "without a meeting");
  record.note("roof: traffic of a plain copy of the same shared pages by all ranks at once, in the same round");
  add_rows(record, settings, samples);
  std::cout << record.table();
  record.write(settings.json);
  return 0;
}

}  // namespace
}  // namespace zeroth::benchmarks

int main(int argc, char** argv) {
  zeroth::benchmarks::Settings settings;
  CLI::App app("Collectives of the shm transport against the memory of the machine");
  app.add_option("--ranks", settings.ranks, "processes")->capture_default_str();
  app.add_option("--rounds", settings.rounds, "samples of each row")->capture_default_str();
  app.add_option("--sizes", settings.sizes, "bytes");
  app.add_option("--staging", settings.staging_bytes, "staging bytes of each rank")->capture_default_str();
  app.add_option("--json", settings.json, "file for the rows");
  CLI11_PARSE(app, argc, argv);
  settings.job = "bench-" + std::to_string(::getpid());
  zeroth::benchmarks::Record record("comm/collectives", argc, argv);
  return zeroth::benchmarks::run(settings, record);
}
