// The stores of one rank without an engine around them, for tests on ranks that are threads.
#pragma once

#include "support/thread_ranks.h"
#include "zero/gradient_store.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/zero/parameter_store.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {

using Backend = std::shared_ptr<CommBackend>;

/// Unit 0 is outside the repeated class and has flats of three dtypes; units 1 to 3 are blocks of different
/// sizes.
inline ModelLayout make_model(const Degrees& degrees) {
  std::vector<ParamSpec> params{{.name = "embed", .shape = {37, 61}},
                                {.name = "scale", .shape = {}, .dtype = DType::kFloat64},
                                {.name = "head", .shape = {1500}, .dtype = DType::kBFloat16},
                                {.name = "frozen", .shape = {5000}, .trainable = false}};
  std::vector<UnitSpec> units{{.name = "root", .params = {0, 1, 2, 3}}};
  for (int block = 0; block < 3; ++block) {
    const std::string name = "blocks." + std::to_string(block);
    const int first = static_cast<int>(params.size());
    params.push_back({.name = name + ".weight", .shape = {70 + block, 71}});
    params.push_back({.name = name + ".bias", .shape = {70 + block}});
    units.push_back({.name = name, .params = {first, first + 1}, .repeated = true});
  }
  return make_model_layout(std::move(params), std::move(units), degrees);
}
inline ModelLayout make_model(int world) {
  return make_model(Degrees{.world = world});
}
inline constexpr int kBlock0 = 1;
inline constexpr int kBlock1 = 2;
inline constexpr int kBlock2 = 3;

inline ShardingPlan make_plan(int ring_slots = 2) {
  ShardingPlan plan = zero_plan(3, {"dp"});
  plan.ring_slots = ring_slots;
  return plan;
}

/// The value that byte `index` of a flat must have in version `epoch`.
inline std::byte byte_of(int flat, std::size_t index, std::uint64_t epoch) {
  const std::uint64_t place = index + 1 + static_cast<std::uint64_t>(flat) * 1'000'003 + epoch * 10'000'019;
  const std::uint64_t mixed = place * 0x9e3779b97f4a7c15U;
  return static_cast<std::byte>(mixed >> 40U);
}

inline std::vector<std::byte> whole_flat(const ModelLayout& model, int flat, std::uint64_t epoch) {
  std::vector<std::byte> bytes(model.flat(flat).bytes());
  for (std::size_t index = 0; index < bytes.size(); ++index) bytes[index] = byte_of(flat, index, epoch);
  return bytes;
}

/// Where the store has bound each flat.
class Bound final : public ParameterBinder {
 public:
  void bind(int flat, std::byte* data) override {
    data_[flat] = data;
    ++binds;
  }
  [[nodiscard]] std::byte* at(int flat) const {
    const auto found = data_.find(flat);
    return found == data_.end() ? nullptr : found->second;
  }
  int binds = 0;

 private:
  std::map<int, std::byte*> data_;
};

/// What one rank of an engine has, without the engine.
struct Stores {
  explicit Stores(Backend group, ShardingPlan chosen = make_plan())
      : Stores(group, chosen, make_model(chosen.degrees(group->size()))) {}
  Stores(Backend group, ShardingPlan chosen, ModelLayout layout, int micro_steps = 1, const StateFiles& files = {})
      : backend(std::move(group)),
        plan(std::move(chosen)),
        model(std::move(layout)),
        memory(model, plan, element_states(2), micro_steps, *device, *kernels, *backend, files),
        parameters(model, plan, memory, *backend, *device, device->make_stream("gather"), *kernels, bound, counters),
        gradients(model, plan, micro_steps, memory, *backend, device->make_stream("reduce"), *kernels, *kernels,
                  device->ledger()) {}

  /// Gives what this rank updates the values of the next version, and waits until all ranks have.
  void publish_next() {
    update();
    parameters.publish();
    barrier();
  }
  void update() {
    const std::uint64_t next = parameters.epoch() + 1;
    for (int flat = 0; flat < static_cast<int>(model.flats.size()); ++flat) {
      const Range rest = memory.rest_range(flat, memory.rank());
      // What is frozen travels once, to where it rests.
      const Range updated = model.flat(flat).trainable ? memory.update_range(flat) : rest;
      const std::size_t element = size_of(model.flat(flat).dtype);
      std::vector<std::byte> bytes(static_cast<std::size_t>(updated.size()) * element);
      for (std::size_t index = 0; index < bytes.size(); ++index) {
        bytes[index] = byte_of(flat, static_cast<std::size_t>(updated.begin) * element + index, next);
      }
      memory.parameters_at_rest(flat).after(updated.begin - rest.begin, model.flat(flat).dtype).write(bytes);
    }
  }
  void barrier() const { Communicator(backend).barrier(); }

  /// Throws if a unit is not bound to exactly the current version.
  void require_values(int unit) const {
    for (const int flat : model.unit_flats[static_cast<std::size_t>(unit)]) {
      const std::vector<std::byte> expected = whole_flat(model, flat, parameters.epoch());
      require(bound.at(flat) != nullptr, "flat " + std::to_string(flat) + " is not bound");
      require(std::memcmp(bound.at(flat), expected.data(), expected.size()) == 0,
              "flat " + std::to_string(flat) + " of unit " + std::to_string(unit) + " has wrong bytes");
    }
  }
  void require_unbound(int unit) const {
    for (const int flat : model.unit_flats[static_cast<std::size_t>(unit)]) {
      require(bound.at(flat) == nullptr, "flat " + std::to_string(flat) + " is still bound");
    }
  }
  [[nodiscard]] std::uint64_t unit_bytes(int unit) const {
    std::uint64_t bytes = 0;
    for (const int flat : model.unit_flats[static_cast<std::size_t>(unit)]) bytes += model.flat(flat).bytes();
    return bytes;
  }
  [[nodiscard]] std::uint64_t live(MemoryState state) const { return device->ledger().live()[state]; }

  Backend backend;
  ShardingPlan plan;
  ModelLayout model;
  std::unique_ptr<Device> device = make_cpu_device();
  ThreadPool pool{1};
  std::unique_ptr<Kernels> kernels = make_host_kernels(*device, pool, kernels::best_isa());
  Bound bound;
  ParameterStore::Counters counters;
  ModelMemory memory;
  ParameterStore parameters;
  GradientStore gradients;
};

inline void require_equal(std::uint64_t expected, std::uint64_t got, const std::string& what) {
  require(expected == got, what + ": expected " + std::to_string(expected) + ", got " + std::to_string(got));
}

}  // namespace zeroth::test
