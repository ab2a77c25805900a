#include "support/watched_job.h"

#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace zeroth::test {
namespace {

EngineSettings settings_of(const WatchedJob& job) {
  EngineSettings settings;
  settings.plan = zero_plan(job.zero_stage, {"dp"});
  settings.optimizer = {.type = "AdamW"};
  settings.groups = {GroupHyper{.lr = job.lr, .weight_decay = 0.1}, GroupHyper{.lr = job.lr}};
  settings.max_nonfinite_steps = job.max_nonfinite_steps;
  settings.configuration = R"({"train_batch_size":12})";
  return settings;
}

TagNames names_of_sums() {
  return {.name = [](const MessageTag& tag) -> std::string {
            if (tag.label == kLossTag) return "the loss metrics";
            return tag.label == kCountsTag ? "the token counts" : "";
          },
          .hint = {}};
}

void train(const WatchedJob& job, const World& world) {
  const auto backend = world.connect(job.options, std::make_shared<TrafficTable>());
  const auto device = make_cpu_device();
  ToyOptions shape = job.model;
  EngineSettings settings = settings_of(job);
  if (job.tamper) job.tamper(world.rank(), shape, settings);
  ToyModel model(shape, 7);
  model.set_poison(job.poison);
  Engine engine(model.structure().params, model.structure().units, settings, *device, backend, model,
                Logger(world.rank(), world.size()));
  engine.set_activity(world.activity());
  model.attach(engine);
  Communicator own(world.connect(job.options, std::make_shared<TrafficTable>()));
  own.backend().set_tag_names(names_of_sums());

  RankHere here{.world = world,
                .engine = engine,
                .model = model,
                .own = own,
                .exports = engine.add_operation({.name = "an export"})};
  const auto happen = [&](Moment moment, int unit = -1) {
    if (job.happen) job.happen(here, moment, unit);
  };
  model.set_visitor([&](bool backward, int unit) { happen(backward ? Moment::kBackward : Moment::kForward, unit); });
  for (here.step = 0; here.step < job.steps; ++here.step) {
    here.turn = {};
    happen(Moment::kBegin);
    if (here.turn.leaves) return;
    if (here.turn.backward) (void)model.forward_backward(here.step, 0, job.skip);
    happen(Moment::kTrained);
    if (here.turn.step) (void)engine.step();
    happen(Moment::kStepped);
    if (here.turn.loss) sum_loss(own);
    if (here.turn.counts) sum_counts(own);
    happen(Moment::kSummed);
  }
  engine.barrier();
}

}  // namespace

void sum_loss(const Communicator& own, int count) {
  std::vector<float> values(static_cast<std::size_t>(count), 1.0F);
  own.all_reduce(std::span(values), MessageTag{.label = kLossTag});
}

void sum_counts(const Communicator& own, int count) {
  std::vector<float> values(static_cast<std::size_t>(count), 1.0F);
  own.all_reduce(std::span(values), MessageTag{.label = kCountsTag});
}

void run_watched_rank(const WatchedJob& job, const World& world) {
  try {
    train(job, world);
  } catch (const std::exception& cause) {
    world.abort(cause);
    throw;
  }
}

World shared_memory_world(const std::string& name, int rank, int size) {
  const std::map<std::string_view, std::string> variables{
      {"RANK", std::to_string(rank)}, {"WORLD_SIZE", std::to_string(size)}, {"ZEROTH_JOB_ID", name}};
  return World::from_variables([&](std::string_view variable) -> std::optional<std::string> {
    const auto found = variables.find(variable);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

}  // namespace zeroth::test
