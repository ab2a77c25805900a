#include "support/crowd.h"

#include <zeroth/base/error.h>

#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

constexpr std::size_t kSlotBytes = 4'096;
constexpr Milliseconds kLook{100};  // as transports do

}  // namespace

/// What all ranks see. What they look at often lies close together.
struct Crowd::Shared {
  explicit Shared(int num_ranks) : size(num_ranks) {}
  static std::size_t bytes(int size) {
    return sizeof(Shared) + static_cast<std::size_t>(size) * (kNotes * sizeof(double) + kPlaces + kSlotBytes);
  }

  double& note(int rank, int which) { return reinterpret_cast<double*>(this + 1)[which * size + rank]; }
  std::atomic<bool>& arrived(int place, int rank) {
    return reinterpret_cast<std::atomic<bool>*>(&note(0, kNotes))[place * size + rank];
  }
  std::byte* slot(int rank) {
    return reinterpret_cast<std::byte*>(&arrived(kPlaces, 0)) + static_cast<std::size_t>(rank) * kSlotBytes;
  }

  int size;
  alignas(64) pthread_barrier_t barrier{};
};

class Crowd::Group final : public CommBackend {
 public:
  Group(Shared& shared, int rank, int size) : shared_(shared), rank_(rank), size_(size) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] const std::string& group_name() const override { return name_; }
  [[nodiscard]] std::string_view kind() const override { return "crowd"; }
  [[nodiscard]] Capabilities capabilities() const override { return {.separate_processes = true}; }
  [[nodiscard]] std::span<const int> node_sizes() const override { return {&size_, 1}; }
  [[nodiscard]] std::size_t memory_bytes() const override { return 0; }

  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    for (const Collective& call : collectives) run(call);
    return {stream.record(), {}};
  }
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> /*points*/,
                                                     const Stream& /*stream*/) override {
    throw not_here();
  }
  [[nodiscard]] std::unique_ptr<CommBackend> split(int /*color*/, int /*key*/, std::string_view /*name*/) override {
    throw not_here();
  }
  [[nodiscard]] PeerWindow attach(const Arena& /*arena*/, std::string_view /*name*/) override { throw not_here(); }
  void wait_until(const std::function<bool()>& /*predicate*/, const WaitContext& /*context*/) override {
    throw not_here();
  }
  void notify() override {}
  [[nodiscard]] int add_progress(std::weak_ptr<Progress> /*progress*/) override { return rank_; }
  void check_peers(const WaitContext& /*context*/) override {}
  void abort(const Error& /*error*/) noexcept override {}
  void count_one_sided(CollectiveKind /*kind*/, int /*peer*/, std::uint64_t /*bytes*/) override {}
  void set_observer(std::shared_ptr<TrafficObserver> /*observer*/) override {}
  void set_tag_names(TagNames /*names*/) override {}

 private:
  static std::logic_error not_here() { return std::logic_error("a crowd has no such call"); }

  void run(const Collective& call) {
    const bool gathers = call.kind == CollectiveKind::kAllGather;
    if (!gathers && call.kind != CollectiveKind::kBroadcast) throw not_here();
    const std::size_t bytes = static_cast<std::size_t>(call.counts.front()) * size_of(call.in_dtype);
    if (bytes > kSlotBytes) throw not_here();
    if (gathers || rank_ == call.root) std::memcpy(shared_.slot(rank_), call.send, bytes);
    ::pthread_barrier_wait(&shared_.barrier);
    for (int rank = 0; gathers && rank < size_; ++rank)
      std::memcpy(call.recv + static_cast<std::size_t>(rank) * bytes, shared_.slot(rank), bytes);
    if (!gathers && rank_ != call.root) std::memcpy(call.recv, shared_.slot(call.root), bytes);
    ::pthread_barrier_wait(&shared_.barrier);
  }

  Shared& shared_;
  int rank_;
  int size_;
  std::string name_ = "world";
};

Crowd::Crowd(int size) : size_(size) {
  void* mapped = ::mmap(nullptr, Shared::bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::runtime_error("mmap failed");
  shared_ = new (mapped) Shared(size);  // the rest is zero: nobody has arrived
  pthread_barrierattr_t attributes;
  ::pthread_barrierattr_init(&attributes);
  ::pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  ::pthread_barrier_init(&shared_->barrier, &attributes, static_cast<unsigned>(size));
  ::pthread_barrierattr_destroy(&attributes);
}

Crowd::~Crowd() {
  ::munmap(shared_, Shared::bytes(size_));
}

std::unique_ptr<CommBackend> Crowd::group(int rank) {
  return std::make_unique<Group>(*shared_, rank, size_);
}

double& Crowd::note(int rank, int which) {
  return shared_->note(rank, which);
}

bool Crowd::all_at(int place, int absent) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != absent && !shared_->arrived(place, rank)) return false;
  }
  return true;
}

void Crowd::meet(int rank, RankActivity& activity, int place, Milliseconds timeout) {
  shared_->arrived(place, rank) = true;
  const Deadline deadline(timeout);
  WatchedWait wait(&activity);
  std::vector<int> missing;
  const auto find_missing = [&] {
    missing.clear();
    for (int other = 0; other < size_; ++other) {
      if (!shared_->arrived(place, other)) missing.push_back(other);
    }
    return !missing.empty();
  };
  const auto begun = SteadyClock::now();
  const auto report = [&] {
    return WaitReport{.group = "world",
                      .call = "place " + std::to_string(place),
                      .ranks = missing,
                      .direct = true,
                      .waited = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - begun),
                      .timeout = timeout};
  };
  while (find_missing()) {
    std::this_thread::sleep_for(kLook);
    if (!deadline.passed()) {
      wait.look(report);
      continue;
    }
    wait.expire(report);
    throw Error(ErrorCode::kTimeout, "nobody explains why the others do not come", {.where = "test.crowd"});
  }
}

}  // namespace zeroth::test
