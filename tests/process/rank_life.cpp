#include "process/rank_life.h"

#include "support/toy_training.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/store.h>
#include <zeroth/engine/safetensors.h>

#include <array>
#include <exception>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

constexpr std::size_t kSmall = 10;
constexpr std::size_t kLarge = 40'000;                        // more than lies beside a description
constexpr std::size_t kTensorBytes = std::size_t{65} << 20U;  // more than the writer leaves to the end

/// A sum that peers read where it lies.
void sum_in_place(const Communicator& comm) {
  const Arena arena = Arena::create(comm.backend().capabilities().window_kind, kLarge * sizeof(float), "life");
  const PeerWindow window = comm.backend().attach(arena, "life");
  comm.all_reduce(std::span(reinterpret_cast<float*>(arena.data()), kLarge));
  comm.barrier();  // nobody reads what goes now
}

/// A rank that does not come is missed by the clock alone: nobody knows who a client is.
void meet_at_store(const std::string& name, int rank, int world, Milliseconds patience) {
  const auto key = [](int of) { return "rank " + std::to_string(of); };
  std::shared_ptr<Store> store = rank == 0 ? serve_store(name) : connect_store(name, patience);
  store->set(key(rank), "here");
  for (int other = 0; other < world; ++other) {
    if (store->get(key(other), patience) != "here") throw std::runtime_error("the store has another value");
  }
  if (rank == 0) {
    std::vector<std::string> gone;
    for (int other = 1; other < world; ++other) gone.push_back("gone " + std::to_string(other));
    store->wait(gone, patience);
  } else {
    store->set("gone " + std::to_string(rank), "");
  }
}

void write_file(const std::filesystem::path& path) {
  SafetensorsWriter writer(
      path, {{.name = "w", .dtype = "U8", .shape = {static_cast<std::int64_t>(kTensorBytes)}, .bytes = kTensorBytes}},
      {});
  const std::vector<std::byte> piece(kTensorBytes / 5);
  for (int part = 0; part < 5; ++part) writer.write(piece);
  writer.flush();
  writer.commit();
}

void live_until_training(const RankLife& life, CommBackend& backend, const Communicator& comm) {
  call_everything(comm, kSmall);
  call_everything(comm, kLarge);
  if (backend.capabilities().one_sided) sum_in_place(comm);
  const std::shared_ptr<CommBackend> part = backend.split(0, backend.rank(), "part");
  Communicator(part).barrier();
  if (!life.store.empty()) meet_at_store(life.store, backend.rank(), backend.size(), life.store_patience);
  if (!life.exports.empty()) write_file(life.exports);
  comm.barrier();
}

}  // namespace

void call_everything(const Communicator& comm, std::size_t part) {
  const auto world = static_cast<std::size_t>(comm.size());
  const bool first = comm.rank() == 0;
  const std::vector<float> own(part, 1.0F);
  const std::vector<float> all(part * world, 1.0F);
  std::vector<float> taken(part);
  std::vector<float> whole(part * world);
  std::vector<float> at_first(first ? part * world : 0);
  comm.barrier();
  comm.all_gather(std::span<const float>(own), std::span(whole));
  comm.reduce_scatter(std::span<const float>(all), std::span(taken));
  comm.all_reduce(std::span(whole));
  comm.broadcast(std::span(taken), 0);
  comm.gather(std::span<const float>(own), std::span(at_first), 0);
  comm.scatter(std::span<const float>(at_first), std::span(taken), 0);
  comm.all_to_all(std::span<const float>(all), std::span(whole));
  const int next = (comm.rank() + 1) % comm.size();
  const int before = (comm.rank() + comm.size() - 1) % comm.size();
  const std::array<Collective, 2> ring{comm.send_call(std::span<const float>(own), next),
                                       comm.recv_call(std::span(taken), before)};
  comm.batch(ring);
}

std::uintmax_t exported_bytes() {
  const std::string header = R"({"w":{"data_offsets":[0,)" + std::to_string(kTensorBytes) +
                             R"(],"dtype":"U8","shape":[)" + std::to_string(kTensorBytes) + "]}}";
  return sizeof(std::uint64_t) + (header.size() + 7) / 8 * 8 + kTensorBytes;
}

void live(const RankLife& life) {
  std::unique_ptr<CommBackend> backend = life.group();
  try {
    const std::shared_ptr<CommBackend> borrowed(backend.get(), [](CommBackend*) {});
    live_until_training(life, *backend, Communicator(borrowed));
  } catch (const Error& error) {
    backend->abort(error);
    throw;
  } catch (const std::exception& error) {
    backend->abort(Error(ErrorCode::kAborted, error.what()));
    throw;
  }
  ToyTraining training;
  training.model = {.width = 16, .blocks = 2};
  training.world = backend->size();
  training.plan = zero_plan(3, {"dp"});
  training.plan.gradient_degree = life.gradient_degree;
  training.steps = 2;  // of sums, and of messages
  training.optimizer = "OneBitAdam";
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) { settings.optimizer.freeze_step = 1; };
  (void)train_toy_rank(training, std::move(backend));
}

}  // namespace zeroth::test
