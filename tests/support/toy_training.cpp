#include "support/toy_training.h"

#include <zeroth/base/text.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/comm/factory.h>

#include <exception>
#include <mutex>
#include <random>
#include <thread>

namespace zeroth::test {
namespace {

EngineSettings settings_of(const ToyTraining& training) {
  EngineSettings settings;
  settings.plan = training.plan;
  settings.micro_steps = training.micro_steps;
  settings.gradient_clipping = training.clipping;
  settings.optimizer = {.type = training.optimizer, .momentum = training.optimizer == "SGD"};
  settings.groups = {GroupHyper{.lr = 0.02, .weight_decay = 0.1, .momentum = 0.9},
                     GroupHyper{.lr = 0.05, .momentum = 0.9}};
  settings.threads = training.threads;
  settings.max_nonfinite_steps = training.max_nonfinite_steps;
  settings.memory_limit_bytes = training.memory_limit_bytes;
  return settings;
}

std::uint64_t bytes_of(const TrafficTable& table, CollectiveKind kind) {
  const TrafficRow row = table.row(kind);
  return row.bytes + row.one_sided_bytes;
}

struct Shared {
  std::mutex mutex;
  std::exception_ptr first;
  ToyOutcome outcome;
};

void run_thread(const ToyTraining& training, const ThreadGroups& groups, int rank, Shared& shared) {
  try {
    CommOptions options;
    options.timeout = training.timeout;
    const ToyOutcome own = train_toy_rank(training, groups.group(rank, options));
    const std::lock_guard lock(shared.mutex);
    ToyOutcome& all = shared.outcome;
    const auto index = static_cast<std::size_t>(rank);
    if (training.reports_memory) all.memory[index] = own.memory[0];
    all.planned_wire[index] = own.planned_wire[0];
    if (!own.results.empty()) {  // of a training with a step
      all.gather_bytes[index] = own.gather_bytes[0];
      all.reduce_bytes[index] = own.reduce_bytes[0];
      all.far_gather_bytes[index] = own.far_gather_bytes[0];
      all.far_reduce_bytes[index] = own.far_reduce_bytes[0];
    }
    if (all.values.empty()) {
      all.losses = own.losses;
      all.norms = own.norms;
      all.values = own.values;
      all.results = own.results;
    }
    ZR_CHECK(all.same_numbers(own), ErrorCode::kInternal, "ranks of one toy training differ from each other",
             {.who = "rank " + std::to_string(rank)});
  } catch (...) {
    const std::lock_guard lock(shared.mutex);
    if (!shared.first) shared.first = std::current_exception();
  }
}

}  // namespace

ToyOutcome train_toy_rank(const ToyTraining& training, std::unique_ptr<CommBackend> base) {
  const int rank = base->rank();
  auto table = std::make_shared<TrafficTable>();
  if (training.decorate) base = training.decorate(std::move(base), rank);
  const auto backend = std::make_shared<CountingBackend>(std::move(base), table);
  try {
    const std::uint64_t seed = training.chaos_seed * 131 + static_cast<std::uint64_t>(rank);
    const auto device = training.make_device ? training.make_device(rank) : make_cpu_device(training.mode, seed);
    ToyModel model(training.model, training.model_seed);
    model.set_poison(training.poison);
    model.set_chosen(training.chosen_gradients);
    if (training.make_memory) model.set_memory(training.make_memory());
    if (training.data_of) model.take_data_of(training.data_of(rank));
    model.set_left_out(training.left_out, training.zeros_for_left_out);
    ToyStructure structure = model.structure();
    EngineSettings settings = settings_of(training);
    if (training.tamper) training.tamper(rank, structure, settings);
    Engine engine(structure.params, structure.units, settings, *device, backend, model, training.logger);
    model.attach(engine);
    const ToyModel::Visitor visitor = training.visitor ? training.visitor(*backend) : ToyModel::Visitor();
    model.set_visitor(visitor);
    ToyOutcome own;
    std::vector<double> losses;
    if (training.at_start) training.at_start(engine, model);
    for (int step = training.first_step; step < training.steps; ++step) {
      table->reset();
      double loss = 0;
      StepResult result;
      const int first = step == training.first_step ? training.first_micro_step : 0;
      for (int micro = first; micro < training.micro_steps && !result.boundary; ++micro) {
        const int data = training.before_micro_step ? training.before_micro_step(engine, model, step, micro) : micro;
        for (int pass = 0; pass < training.passes; ++pass) {
          const auto skip = [&](int who, std::int64_t at, int block) {
            return training.skip && training.skip(who, at * training.passes + pass, block);
          };
          loss += model.forward_backward(step, data * training.passes + pass, skip);
          if (visitor) visitor(true, ToyTraining::kEndOfBackward);
        }
        result = engine.step();
        if (training.after_micro_step && !result.boundary) training.after_micro_step(engine, step, micro + 1);
      }
      own.gather_bytes = {bytes_of(*table, CollectiveKind::kAllGather)};
      // Those in codes are all_to_alls.
      own.reduce_bytes = {bytes_of(*table, CollectiveKind::kReduceScatter) +
                          bytes_of(*table, CollectiveKind::kAllToAll)};
      own.far_gather_bytes = {table->row(CollectiveKind::kAllGather).far_bytes};
      own.far_reduce_bytes = {table->row(CollectiveKind::kReduceScatter).far_bytes +
                              table->row(CollectiveKind::kAllToAll).far_bytes};
      if (training.after_step) training.after_step(engine, model, result);
      losses.push_back(loss);
      own.norms.push_back(hex_float(result.grad_norm));
      own.results.push_back(result);
    }
    // Not in the loop: ranks would meet there, and nothing could run ahead.
    for (const double loss : losses) own.losses.push_back(hex_float(engine.average(loss)));
    for (std::size_t param = 0; param < model.structure().params.size(); ++param) {
      own.values.push_back(model.value(static_cast<int>(param)));
    }
    if (training.reports_memory) own.memory = {engine.memory_report()};
    own.planned_wire = {engine.planned_wire()};
    engine.barrier();
    return own;
  } catch (const Error& error) {
    backend->abort(error);
    throw;
  } catch (const std::exception& caught) {
    backend->abort(Error(ErrorCode::kAborted, caught.what()));
    throw;
  }
}

ToyOutcome train_toy(const ToyTraining& training) {
  const auto world = static_cast<std::size_t>(training.world);
  Shared shared;
  if (training.reports_memory) shared.outcome.memory.resize(world);
  shared.outcome.planned_wire.resize(world);
  shared.outcome.gather_bytes.resize(world);
  shared.outcome.reduce_bytes.resize(world);
  shared.outcome.far_gather_bytes.resize(world);
  shared.outcome.far_reduce_bytes.resize(world);
  const ThreadGroups groups(training.world, training.transport, nodes_of_ranks(training.world, training.per_node));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < training.world; ++rank) {
    threads.emplace_back([&, rank] { run_thread(training, groups, rank, shared); });
  }
  for (std::thread& thread : threads) thread.join();
  if (shared.first) std::rethrow_exception(shared.first);
  return std::move(shared.outcome);
}

SkipRule random_paths(std::uint64_t seed) {
  return [seed](int rank, std::int64_t step, int block) {
    std::mt19937_64 random(seed ^ (static_cast<std::uint64_t>(step) << 24U | static_cast<std::uint64_t>(rank) << 12U |
                                   static_cast<std::uint64_t>(block)));
    return random() % 2 == 0;
  };
}

std::string difference(const ToyOutcome& expected, const ToyOutcome& got) {
  for (std::size_t step = 0; step < expected.losses.size(); ++step) {
    if (step >= got.losses.size() || expected.losses[step] != got.losses[step]) {
      return "loss of step " + std::to_string(step) + ": " + expected.losses[step] + " against " +
             (step < got.losses.size() ? got.losses[step] : "nothing");
    }
    if (expected.norms[step] != got.norms[step]) {
      return "norm of step " + std::to_string(step) + ": " + expected.norms[step] + " against " + got.norms[step];
    }
  }
  for (std::size_t param = 0; param < expected.values.size(); ++param) {
    if (expected.values[param] != got.values[param]) return "values of parameter " + std::to_string(param);
  }
  return "";
}

}  // namespace zeroth::test
