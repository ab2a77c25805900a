// Collectives of Zeroth beside those of Open MPI and of torch's gloo: the same ranks, the same buffers, the same run,
// one after the other in rounds of another order each. Loaded by comm_peers.py, which makes torch's group; mpirun
// starts the ranks.
//
// A row's time is that of the slowest rank. The roof is the time that the call's bytes would take at the traffic of a
// plain copy from the one of its buffers to the other by all ranks at once in the same round: for a whole of S bytes on
// each of n ranks 2 n S in an all_gather and an all_to_all, (n+1) S in a reduce_scatter, (n+1) S + 2 (n-1) S in an
// all_reduce. "bare" is what such a call cannot do without where memory is shared, and nothing else: ranks wait for
// each other, copy or sum where the others' data lies, and wait again. No ranks are compared, no deadline is looked at,
// and nobody sleeps.
#include "support/cpu_time.h"
#include "support/record.h"

#include <kernels/common/dispatch.h>
#include <kernels/copy/copy.h>
#include <kernels/reduce/reduce.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/factory.h>

#include <ATen/ops/from_blob.h>
#include <mpi.h>
#include <sched.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace zeroth::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

enum class Op { kAllReduce, kAllGather, kReduceScatter, kAllToAll };
constexpr Op kOps[] = {Op::kAllReduce, Op::kAllGather, Op::kReduceScatter, Op::kAllToAll};

std::string name_of(Op op) {
  switch (op) {
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kAllGather:
      return "all_gather";
    case Op::kReduceScatter:
      return "reduce_scatter";
    case Op::kAllToAll:
      return "all_to_all";
  }
  return "";
}

/// One call: `bytes` is the size of the whole, of which each rank has, gives or gets a part.
struct Call {
  Op op = Op::kAllReduce;
  DType dtype = DType::kFloat32;
  std::byte* send = nullptr;
  std::byte* recv = nullptr;
  std::size_t bytes = 0;

  [[nodiscard]] std::int64_t elements() const { return static_cast<std::int64_t>(bytes / size_of(dtype)); }
};

class Contestant {
 public:
  /// `memory`: where its buffers are; of two of the largest size.
  Contestant(std::string name, int ranks, const Arena& memory)
      : name_(std::move(name)), ranks_(ranks), memory_(memory.data()) {}
  Contestant(const Contestant&) = delete;
  Contestant& operator=(const Contestant&) = delete;
  virtual ~Contestant() = default;
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::byte* memory() const { return memory_; }
  /// Whether it can make this call at all.
  [[nodiscard]] virtual bool can(const Call& /*call*/) { return true; }
  virtual void make(const Call& call) = 0;

 protected:
  [[nodiscard]] std::int64_t ranks() const { return ranks_; }

 private:
  std::string name_;
  int ranks_;
  std::byte* memory_;
};

class Ours final : public Contestant {
 public:
  Ours(std::string name, std::shared_ptr<CommBackend> backend, const Arena& memory)
      : Contestant(std::move(name), backend->size(), memory), backend_(std::move(backend)), comm_(backend_) {}
  void make(const Call& call) override {
    Collective own{.in_dtype = call.dtype, .out_dtype = call.dtype, .send = call.send, .recv = call.recv};
    const std::vector<std::int64_t> parts(static_cast<std::size_t>(ranks()), call.elements() / ranks());
    switch (call.op) {
      case Op::kAllReduce:
        own.kind = CollectiveKind::kAllReduce;
        own.counts = {call.elements()};
        break;
      case Op::kAllGather:
        own.kind = CollectiveKind::kAllGather;
        own.counts = parts;
        break;
      case Op::kReduceScatter:
        own.kind = CollectiveKind::kReduceScatter;
        own.counts = parts;
        break;
      case Op::kAllToAll:
        own.kind = CollectiveKind::kAllToAll;
        own.counts = own.recv_counts = parts;
        break;
    }
    comm_.batch({&own, 1});
  }

 private:
  std::shared_ptr<CommBackend> backend_;
  Communicator comm_;
};

/// Between buffers in attached arenas.
class Bare final : public Contestant {
 public:
  /// `here`: this rank's arena, whose last bytes count the ranks that have come.
  Bare(PeerWindow window, const Arena& here, int rank)
      : Contestant("bare", static_cast<int>(window.ranks.size()), here),
        window_(std::move(window)),
        here_(here.data()),
        rank_(rank),
        come_(*reinterpret_cast<std::uint64_t*>(window_.ranks.front().data() + window_.ranks.front().size() -
                                                sizeof(std::uint64_t))) {}

  void make(const Call& call) override {
    const std::size_t part = call.bytes / static_cast<std::size_t>(ranks());
    const auto own = static_cast<std::size_t>(rank_);
    meet();
    switch (call.op) {
      case Op::kAllGather:
        for_each_rank([&](std::size_t peer) { copy(call.recv + peer * part, at(peer, call.send), part); });
        break;
      case Op::kAllToAll:
        for_each_rank([&](std::size_t peer) { copy(call.recv + peer * part, at(peer, call.send) + own * part, part); });
        break;
      case Op::kReduceScatter:
        sum(call, call.recv, part);
        break;
      case Op::kAllReduce:
        sum(call, call.recv + own * part, part);
        meet();
        for_each_rank([&](std::size_t peer) {
          if (peer != own) copy(call.recv + peer * part, at(peer, call.recv) + peer * part, part);
        });
        break;
    }
    meet();
  }

 private:
  void meet() {
    const auto size = static_cast<std::uint64_t>(ranks());
    const std::uint64_t all = (come_.fetch_add(1) / size + 1) * size;
    for (int looks = 1; come_.load() < all; ++looks) {
      if (looks % 64 == 0) ::sched_yield();
    }
  }
  /// Every rank begins with itself.
  template <class Body>
  void for_each_rank(const Body& body) {
    const auto size = static_cast<std::size_t>(ranks());
    for (std::size_t index = 0; index < size; ++index) body((static_cast<std::size_t>(rank_) + index) % size);
  }
  [[nodiscard]] std::byte* at(std::size_t peer, const std::byte* own) const {
    return window_.ranks[peer].data() + (own - here_);
  }
  static void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    kernels::copy_stream(to, from, static_cast<std::int64_t>(bytes), kernels::best_isa());
  }
  void sum(const Call& call, std::byte* to, std::size_t part) {
    std::vector<const void*> sources;
    for (std::size_t peer = 0; peer < window_.ranks.size(); ++peer)
      sources.push_back(at(peer, call.send) + static_cast<std::size_t>(rank_) * part);
    kernels::sum_sources({.dst = to,
                          .dst_dtype = call.dtype,
                          .sources = sources.data(),
                          .num_sources = static_cast<int>(sources.size()),
                          .src_dtype = call.dtype,
                          .read_soon = call.op == Op::kAllReduce,
                          .n = static_cast<std::int64_t>(part / size_of(call.dtype))},
                         kernels::best_isa());
  }

  PeerWindow window_;
  std::byte* here_;
  int rank_;
  std::atomic_ref<std::uint64_t> come_;
};

void check_mpi(int code) {
  if (code != MPI_SUCCESS) throw std::runtime_error("MPI failed");
}

class OpenMpi final : public Contestant {
 public:
  OpenMpi(int ranks, const Arena& memory) : Contestant("Open MPI", ranks, memory) {}
  /// It has no bf16, which moves as any 2 bytes, but is not summed.
  bool can(const Call& call) override {
    return call.dtype == DType::kFloat32 || call.op == Op::kAllGather || call.op == Op::kAllToAll;
  }
  void make(const Call& call) override {
    const MPI_Datatype type = call.dtype == DType::kFloat32 ? MPI_FLOAT : MPI_SHORT;
    const int whole = static_cast<int>(call.elements());
    const int part = static_cast<int>(call.elements() / ranks());
    switch (call.op) {
      case Op::kAllReduce:
        return check_mpi(MPI_Allreduce(call.send, call.recv, whole, type, MPI_SUM, MPI_COMM_WORLD));
      case Op::kAllGather:
        return check_mpi(MPI_Allgather(call.send, part, type, call.recv, part, type, MPI_COMM_WORLD));
      case Op::kReduceScatter:
        return check_mpi(MPI_Reduce_scatter_block(call.send, call.recv, part, type, MPI_SUM, MPI_COMM_WORLD));
      case Op::kAllToAll:
        return check_mpi(MPI_Alltoall(call.send, part, type, call.recv, part, type, MPI_COMM_WORLD));
    }
  }
};

class Gloo final : public Contestant {
 public:
  Gloo(const std::string& group, int ranks, const Arena& memory)
      : Contestant("gloo", ranks, memory), group_(c10d::resolve_process_group(group)) {}
  void make(const Call& call) override {
    const std::int64_t part = call.elements() / ranks();
    at::Tensor send = tensor(call, call.send, call.op == Op::kAllGather ? part : call.elements());
    at::Tensor recv = tensor(call, call.recv, call.op == Op::kReduceScatter ? part : call.elements());
    switch (call.op) {
      case Op::kAllReduce: {  // in place: it has no other form
        std::vector<at::Tensor> tensors{recv};
        group_->allreduce(tensors)->wait();
        return;
      }
      case Op::kAllGather: {
        group_->_allgather_base(recv, send)->wait();
        return;
      }
      case Op::kReduceScatter: {
        group_->_reduce_scatter_base(recv, send)->wait();
        return;
      }
      case Op::kAllToAll: {
        std::vector<std::int64_t> even;
        group_->alltoall_base(recv, send, even, even)->wait();
        return;
      }
    }
  }

 private:
  static at::Tensor tensor(const Call& call, std::byte* data, std::int64_t elements) {
    return at::from_blob(data, {elements},
                         at::TensorOptions().dtype(call.dtype == DType::kFloat32 ? at::kFloat : at::kBFloat16));
  }
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

double cpu_us() {
  return 1e6 * cpu_seconds();
}

struct Sample {
  double us = 0;
  double cpu_us = 0;  ///< of all ranks
};

/// Time of one of `batch` calls.
Sample measure(int batch, const std::function<void()>& call) {
  check_mpi(MPI_Barrier(MPI_COMM_WORLD));
  const double cpu_before = cpu_us();
  const auto begin = Clock::now();
  for (int index = 0; index < batch; ++index) call();
  const double own[] = {std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / batch,
                        (cpu_us() - cpu_before) / batch};
  Sample sample;
  check_mpi(MPI_Allreduce(&own[0], &sample.us, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD));
  check_mpi(MPI_Allreduce(&own[1], &sample.cpu_us, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD));
  return sample;
}

struct Samples {
  std::map<std::string, std::vector<Sample>> of{};  ///< contestants
  std::vector<double> roof_us{};
};

/// Bytes a microsecond that all ranks together read and write when each copies `bytes`.
double roof(std::byte* to, const std::byte* from, std::size_t bytes, int ranks) {
  double best = 1e300;
  for (const bool streaming : {true, false, true, false}) {
    best = std::min(best, measure(2, [&] {
                            if (streaming) {
                              kernels::copy_stream(to, from, static_cast<std::int64_t>(bytes), kernels::best_isa());
                            } else {
                              std::memcpy(to, from, bytes);
                            }
                          }).us);
  }
  return 2 * static_cast<double>(bytes) * ranks / best;
}

double traffic_of(const Call& call, int ranks) {
  const auto size = static_cast<double>(call.bytes);
  const double others = 2.0 * (ranks - 1) * size;
  const double scatter = (ranks + 1.0) * size;
  if (call.op == Op::kAllReduce) return others + scatter;
  return call.op == Op::kReduceScatter ? scatter : 2.0 * ranks * size;  // from one buffer to another: the own part, too
}

void add_rows(Record& record, const std::string& name, const Samples& samples) {
  const auto times = [&](const std::string& who) {
    std::vector<double> values;
    for (const Sample& sample : samples.of.at(who)) values.push_back(sample.us);
    return values;
  };
  for (const auto& [who, list] : samples.of) {
    std::vector<double> cpu;
    for (const Sample& sample : list) cpu.push_back(sample.cpu_us);
    record.add({.name = name + " " + who, .unit = "us", .summary = summarise(times(who)), .better = Better::kLower});
    record.add({.name = name + " " + who + ", cpu of all ranks",
                .unit = "us",
                .summary = summarise(cpu),
                .better = Better::kLower});
  }
  const std::vector<double> own = times("shm attached");
  const auto ratio = [&](const std::vector<double>& mine, const std::vector<double>& other, const std::string& text,
                         std::optional<double> bar) {
    std::vector<double> values;
    for (std::size_t round = 0; round < mine.size(); ++round) values.push_back(mine[round] / other[round]);
    record.add(
        {.name = name + " " + text, .unit = "x", .summary = summarise(values), .better = Better::kLower, .bar = bar});
  };
  for (const auto& [who, list] : samples.of) {
    if (who != "Open MPI" && who != "gloo") continue;
    ratio(own, times(who), "shm attached / " + who, 1.0);
    ratio(times("shm"), times(who), "shm / " + who, 1.0);
  }
  if (samples.of.contains("Open MPI")) ratio(times("mpi"), times("Open MPI"), "mpi / Open MPI", std::nullopt);
  ratio(own, times("bare"), "shm attached / bare", std::nullopt);
  if (samples.roof_us.empty()) return;
  ratio(own, samples.roof_us, "shm attached / roof", 1 / 0.6);
  ratio(times("bare"), samples.roof_us, "bare / roof", std::nullopt);
}

int run(const std::string& group, const std::string& command, const std::string& json, int rounds, int largest_log2) {
  int threads = 0;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &threads));
  int rank = 0;
  int ranks = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
  const char* const argv[] = {command.c_str()};
  Record record("comm/peers", 1, argv);
  {
    const std::size_t largest = std::size_t{1} << static_cast<unsigned>(largest_log2);
    const std::shared_ptr<CommBackend> shm =
        make_backend("shm", {.rank = rank, .size = ranks, .job = std::getenv("PMIX_NAMESPACE")});
    const Arena arena = Arena::create(ArenaKind::kShared, 2 * largest + kPageBytes, "bench");
    const Arena plain = Arena::create(ArenaKind::kPrivate, 2 * largest, "plain");
    const PeerWindow window = shm->attach(arena, "bench");
    for (const Arena* memory : {&arena, &plain}) std::memset(memory->data(), 0, memory->capacity());
    check_mpi(MPI_Barrier(MPI_COMM_WORLD));

    std::vector<std::unique_ptr<Contestant>> contestants;
    contestants.push_back(std::make_unique<Ours>("shm attached", shm, arena));
    contestants.push_back(std::make_unique<Ours>("shm", shm, plain));
    contestants.push_back(std::make_unique<Bare>(window, arena, rank));
    contestants.push_back(std::make_unique<Ours>("mpi", make_backend("mpi", {.rank = rank, .size = ranks}), plain));
    contestants.push_back(std::make_unique<OpenMpi>(ranks, plain));
    contestants.push_back(std::make_unique<Gloo>(group, ranks, plain));

    std::mt19937 order(1);
    for (const unsigned log2 : {12U, 16U, 20U, 22U, 24U, 26U, 28U}) {
      const std::size_t bytes = std::size_t{1} << log2;
      if (bytes > largest) break;
      // Several calls also where a few fill the caches, and as many before: the first ones after another contestant's
      // pay for what that one has left there.
      const int batch = bytes <= (std::size_t{64} << 10U)   ? 50
                        : bytes <= (std::size_t{1} << 20U)  ? 10
                        : bytes <= (std::size_t{16} << 20U) ? 4
                                                            : 1;
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        for (const Op op : kOps) {
          Samples samples;
          for (int round = 0; round <= rounds; ++round) {
            double bytes_a_us = 0;
            if (bytes >= (std::size_t{4} << 20U)) {
              bytes_a_us = roof(arena.data() + largest, arena.data(), bytes, ranks);
            }
            // In another order each time, the same on all ranks: who always came after one that uses other memory would
            // always find cold caches.
            std::shuffle(contestants.begin(), contestants.end(), order);
            for (const std::unique_ptr<Contestant>& each : contestants) {
              Contestant& contestant = *each;
              const Call call{.op = op,
                              .dtype = dtype,
                              .send = contestant.memory(),
                              .recv = contestant.memory() + largest,
                              .bytes = bytes};
              if (!contestant.can(call)) continue;
              for (int index = 0; index < batch; ++index) contestant.make(call);  // warm
              const Sample sample = measure(batch, [&] { contestant.make(call); });
              if (round > 0) samples.of[contestant.name()].push_back(sample);
            }
            if (round > 0 && bytes_a_us > 0)
              samples.roof_us.push_back(traffic_of({.op = op, .bytes = bytes}, ranks) / bytes_a_us);
          }
          const std::string name = "n=" + std::to_string(ranks) + " " + format_bytes(bytes) + " " + name_of(op) + " " +
                                   std::string(zeroth::name_of(dtype));
          if (rank == 0) add_rows(record, name, samples);
          if (rank == 0) std::fprintf(stderr, "%s\n", name.c_str());
        }
      }
    }
  }
  const double cpu = cpu_seconds();
  double all = 0;
  check_mpi(MPI_Allreduce(&cpu, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD));
  if (rank == 0) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(version, &length);
    version[std::strcspn(version, ",\n")] = '\0';
    record.version("mpi", version);
    record.version("torch", ZEROTH_TORCH_VERSION);
    record.set_own_cpu_seconds(all);
    record.setting("ranks", ranks);
    record.setting("rounds", rounds);
    record.note("shm attached: buffers in an attached arena, read in place; all others: the same private buffers");
    record.note("gloo sums in place, the others from one buffer to another; Open MPI has no bfloat16 sum");
    record.note("mpi: Zeroth's calls over MPI's messages, sums in rank order, every call compared between ranks");
    record.note("roof: traffic of a plain copy by all ranks at once, in the same round");
    std::fputs(record.table().c_str(), stdout);
    record.write(json);
  }
  check_mpi(MPI_Finalize());
  return 0;
}

}  // namespace
}  // namespace zeroth::benchmarks

extern "C" __attribute__((visibility("default"))) int zeroth_comm_peers(const char* group, const char* command,
                                                                        const char* json, int rounds,
                                                                        int largest_log2) {
  try {
    return zeroth::benchmarks::run(group, command, json, rounds, largest_log2);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "comm_peers: %s\n", error.what());
    return 1;
  }
}
