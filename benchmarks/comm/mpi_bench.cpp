// What Zeroth adds to MPI: its calls over MPI's own algorithms (Reduction::kTransport) beside the same calls made of
// MPI by hand, blocking and non-blocking, and beside its sums in rank order. The same ranks and buffers, one after the
// other, in rounds that begin with another one each.
//
// A row's time is that of the slowest rank. Blocking calls have no deadline and hear of nothing; the non-blocking ones
// of the same library are other code, and slower where messages are small. The bar is for the faster of the two, at
// sizes from 4 KiB to 256 MiB.
//
//   mpirun -n 2 --bind-to core --mca btl self,vader build/release/benchmarks/mpi_bench --rounds 15 --json mpi.json
#include "support/cpu_time.h"
#include "support/record.h"

#include <zeroth/base/text.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/factory.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace zeroth::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

struct Settings {
  int rounds = 15;
  std::vector<std::size_t> sizes{std::size_t{4} << 10U,  std::size_t{32} << 10U, std::size_t{256} << 10U,
                                 std::size_t{2} << 20U,  std::size_t{16} << 20U, std::size_t{64} << 20U,
                                 std::size_t{256} << 20U};
  std::string json{};
};

enum class Op { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kBroadcast };
constexpr Op kOps[] = {Op::kAllReduce, Op::kAllGather, Op::kReduceScatter, Op::kAllToAll, Op::kBroadcast};

const char* name_of(Op op) {
  static constexpr const char* kNames[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"};
  return kNames[static_cast<int>(op)];
}

void check(int code) {
  if (code != MPI_SUCCESS) throw std::runtime_error("MPI failed");
}

/// float32; `count` is that of the whole, of which each rank has, gives or gets an equal part.
struct Call {
  Op op = Op::kAllReduce;
  float* send = nullptr;
  float* recv = nullptr;
  std::int64_t count = 0;
  int ranks = 1;
  [[nodiscard]] int whole() const { return static_cast<int>(count); }
  [[nodiscard]] int part() const { return static_cast<int>(count / ranks); }
};

using Contestant = std::function<void(const Call&)>;

Contestant ours(const std::shared_ptr<CommBackend>& backend) {
  return [comm = Communicator(backend)](const Call& call) {
    const auto whole = static_cast<std::size_t>(call.whole());
    const auto part = static_cast<std::size_t>(call.part());
    switch (call.op) {
      case Op::kAllReduce:
        return comm.all_reduce(std::span<const float>(call.send, whole), std::span(call.recv, whole));
      case Op::kAllGather:
        return comm.all_gather(std::span<const float>(call.send, part),
                               std::span(call.recv, part * static_cast<std::size_t>(call.ranks)));
      case Op::kReduceScatter:
        return comm.reduce_scatter(std::span<const float>(call.send, part * static_cast<std::size_t>(call.ranks)),
                                   std::span(call.recv, part));
      case Op::kAllToAll: {
        const std::size_t all = part * static_cast<std::size_t>(call.ranks);
        return comm.all_to_all(std::span<const float>(call.send, all), std::span(call.recv, all));
      }
      case Op::kBroadcast:
        return comm.broadcast(std::span(call.recv, whole), 0);
    }
  };
}

/// Parts of an all_to_all are each rank's own matter in Zeroth: so MPI's comparable call is the one with counts.
struct Parts {
  std::vector<int> counts;
  std::vector<int> offsets;
  explicit Parts(const Call& call) : counts(static_cast<std::size_t>(call.ranks), call.part()) {
    for (int rank = 0; rank < call.ranks; ++rank) offsets.push_back(rank * call.part());
  }
};

void blocking(const Call& call) {
  switch (call.op) {
    case Op::kAllReduce:
      return check(MPI_Allreduce(call.send, call.recv, call.whole(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD));
    case Op::kAllGather:
      return check(MPI_Allgather(call.send, call.part(), MPI_FLOAT, call.recv, call.part(), MPI_FLOAT, MPI_COMM_WORLD));
    case Op::kReduceScatter:
      return check(MPI_Reduce_scatter_block(call.send, call.recv, call.part(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD));
    case Op::kAllToAll: {
      const Parts parts(call);
      return check(MPI_Alltoallv(call.send, parts.counts.data(), parts.offsets.data(), MPI_FLOAT, call.recv,
                                 parts.counts.data(), parts.offsets.data(), MPI_FLOAT, MPI_COMM_WORLD));
    }
    case Op::kBroadcast:
      return check(MPI_Bcast(call.recv, call.whole(), MPI_FLOAT, 0, MPI_COMM_WORLD));
  }
}

void non_blocking(const Call& call) {
  MPI_Request request = MPI_REQUEST_NULL;
  const Parts parts(call);
  switch (call.op) {
    case Op::kAllReduce:
      check(MPI_Iallreduce(call.send, call.recv, call.whole(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request));
      break;
    case Op::kAllGather:
      check(MPI_Iallgather(call.send, call.part(), MPI_FLOAT, call.recv, call.part(), MPI_FLOAT, MPI_COMM_WORLD,
                           &request));
      break;
    case Op::kReduceScatter:
      check(MPI_Ireduce_scatter_block(call.send, call.recv, call.part(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request));
      break;
    case Op::kAllToAll:
      check(MPI_Ialltoallv(call.send, parts.counts.data(), parts.offsets.data(), MPI_FLOAT, call.recv,
                           parts.counts.data(), parts.offsets.data(), MPI_FLOAT, MPI_COMM_WORLD, &request));
      break;
    case Op::kBroadcast:
      check(MPI_Ibcast(call.recv, call.whole(), MPI_FLOAT, 0, MPI_COMM_WORLD, &request));
      break;
  }
  check(MPI_Wait(&request, MPI_STATUS_IGNORE));
}

/// Microseconds of one of `batch` calls, of the slowest rank.
double measure(int batch, const std::function<void()>& call) {
  check(MPI_Barrier(MPI_COMM_WORLD));
  const auto begin = Clock::now();
  for (int index = 0; index < batch; ++index) call();
  const double own = std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / batch;
  double slowest = 0;
  check(MPI_Allreduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD));
  return slowest;
}

constexpr const char* kOurs = "transport";
constexpr const char* kBlocking = "MPI blocking";
constexpr const char* kNonBlocking = "MPI non-blocking";

double least(const std::vector<double>& list) {
  return *std::ranges::min_element(list);
}

void add_rows(Record& record, const std::string& name, const std::map<std::string, std::vector<double>>& times) {
  for (const auto& [who, list] : times) {
    record.add({.name = name + " " + who, .unit = "us", .summary = summarise(list), .better = Better::kLower});
    record.add({.name = name + " " + who + ", least",
                .unit = "us",
                .summary = summarise({least(list)}),
                .better = Better::kLower});
  }
  const std::vector<double>& own = times.at(kOurs);
  const std::vector<double>& one = times.at(kBlocking);
  const std::vector<double>& other = times.at(kNonBlocking);
  std::vector<double> ratio;
  std::vector<double> more;
  std::vector<double> to_non_blocking;
  for (std::size_t round = 0; round < own.size(); ++round) {
    const double faster = std::min(one[round], other[round]);
    ratio.push_back(own[round] / faster);
    more.push_back(own[round] - faster);
    to_non_blocking.push_back(own[round] / other[round]);
  }
  record.add({.name = name + " / the faster of MPI's",
              .unit = "x",
              .summary = summarise(ratio),
              .better = Better::kLower,
              .bar = 1.05});
  record.add(
      {.name = name + " - the faster of MPI's", .unit = "us", .summary = summarise(more), .better = Better::kLower});
  record.add({.name = name + " / MPI non-blocking",
              .unit = "x",
              .summary = summarise(to_non_blocking),
              .better = Better::kLower});
  record.add({.name = name + " / the faster of MPI's, least of each",
              .unit = "x",
              .summary = summarise({least(own) / std::min(least(one), least(other))}),
              .better = Better::kLower});
}

int run(const Settings& settings, Record& record) {
  int rank = 0;
  int ranks = 0;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
  check(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
  {
    const std::size_t largest = *std::ranges::max_element(settings.sizes);
    std::vector<float> send(largest / sizeof(float), 1.0F);
    std::vector<float> recv(largest / sizeof(float), 0.0F);
    CommOptions own_sums;
    own_sums.reduction = Reduction::kTransport;
    const std::vector<std::pair<std::string, Contestant>> contestants{
        {kOurs,
         ours(make_backend("mpi", {.rank = rank, .size = ranks, .job = {}, .hub = nullptr, .options = own_sums}))},
        {kBlocking, blocking},
        {kNonBlocking, non_blocking},
        {"rank order", ours(make_backend("mpi", {.rank = rank, .size = ranks}))}};
    for (const std::size_t bytes : settings.sizes) {
      const int batch = bytes <= (std::size_t{64} << 10U) ? 100 : bytes <= (std::size_t{2} << 20U) ? 10 : 1;
      for (const Op op : kOps) {
        const Call call{.op = op,
                        .send = send.data(),
                        .recv = recv.data(),
                        .count = static_cast<std::int64_t>(bytes / sizeof(float)),
                        .ranks = ranks};
        std::map<std::string, std::vector<double>> times;
        for (int round = 0; round <= settings.rounds; ++round) {
          for (std::size_t index = 0; index < contestants.size(); ++index) {
            const auto& [who, make] = contestants[(index + static_cast<std::size_t>(round)) % contestants.size()];
            make(call);
            const double time = measure(batch, [&] { make(call); });
            if (round > 0) times[who].push_back(time);
          }
        }
        if (rank == 0) add_rows(record, fmt::format("n={} {} {}", ranks, format_bytes(bytes), name_of(op)), times);
      }
    }
  }
  const double own_cpu = cpu_seconds();
  double cpu = 0;
  check(MPI_Allreduce(&own_cpu, &cpu, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD));
  if (rank != 0) return 0;
  char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(version, &length);
  version[std::strcspn(version, ",\n")] = '\0';
  record.version("mpi", version);
  record.set_own_cpu_seconds(cpu);
  record.setting("ranks", ranks);
  record.setting("rounds", settings.rounds);
  record.note(
      "transport: Zeroth with Reduction::kTransport; rank order: its default, every call compared between ranks");
  record.note("the faster of MPI's: of each round, blocking or non-blocking");
  std::cout << record.table();
  record.write(settings.json);
  return 0;
}

}  // namespace
}  // namespace zeroth::benchmarks

int main(int argc, char** argv) {
  zeroth::benchmarks::Settings settings;
  CLI::App app("What Zeroth adds to MPI; mpirun starts the ranks");
  app.add_option("--rounds", settings.rounds, "samples of each row")->capture_default_str();
  app.add_option("--sizes", settings.sizes, "bytes");
  app.add_option("--json", settings.json, "file for the rows, written by rank 0");
  CLI11_PARSE(app, argc, argv);
  int threads = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &threads);
  zeroth::benchmarks::Record record("comm/mpi", argc, argv, "mpirun");
  int code = 1;
  try {
    code = zeroth::benchmarks::run(settings, record);
  } catch (const std::exception& error) {
    std::cerr << "mpi_bench: " << error.what() << "\n";
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return code;
}
