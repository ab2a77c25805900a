// One rank of a site that is a job of its own (zeroth-run --sites): trains the toy model with local updates, and says
// what each exchange was. sites_test.cpp starts it.
//
// site_probe STAGE METHOD LOST FAULT STEP FOLDER
//   FAULT   armed before step STEP in the first start of site 1, "-": none
//   FOLDER  "-": kSteps steps; else until site 1 is back, and two windows more, with checkpoints there
#include "support/local_jobs.h"
#include "support/toy_training.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/local_updates.h>
#include <zeroth/engine/site_line.h>
#include <zeroth/engine/world.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace zeroth;
using namespace zeroth::test;

constexpr int kManySteps = 100'000;

void train(const std::vector<std::string>& arguments) {
  const World job = World::from_environment();
  const World site = job.site(job.place()->sites);
  const char* const restarts = std::getenv("ZEROTH_RESTART_COUNT");
  const bool is_first = restarts == nullptr || std::string(restarts) == "0";
  const bool until_back = arguments[5] != "-";
  const int strike_at = std::stoi(arguments[4]);
  const auto table = std::make_shared<TrafficTable>();
  CommOptions options;
  options.timeout = Milliseconds{30'000};
  const std::shared_ptr<CommBackend> backend = site.connect(options, table);

  ToyTraining training = toy_of_sites(std::stoi(arguments[0]), site.size());
  LocalSettings settings = settings_of_sites(arguments[1]);
  settings.lost_sites = lost_sites_of(arguments[2]);
  training.steps = until_back ? kManySteps : kStepsOfSites;
  training.logger = Logger(site.rank(), site.size(), LogLevel::kWarning);
  training.data_of = [&](int rank) { return site.site_index() * site.size() + rank; };
  const auto strike = [&](std::int64_t step) {
    if (step == strike_at && arguments[3] != "-" && site.site_index() == 1 && is_first)
      arm_failpoints(parse_failpoints(arguments[3]), site.rank());
  };
  bool was_alone = false;
  std::string exchanges;
  training.at_start = [&](Engine& engine, ToyModel&) {
    const LocalUpdates& local = LocalUpdates::attach(engine, site.across_sites(table), settings);
    training.first_step = static_cast<int>(local.report().step);
    was_alone = local.report().joined;
    if (was_alone) std::cout << "joined at " << training.first_step << std::endl;
    if (until_back) (void)engine.load(arguments[5] + "/site" + std::to_string(site.site_index()), {.if_any = true});
    strike(training.first_step);
  };
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult& step) {
    const LocalReport report = dynamic_cast<const LocalUpdates*>(engine.follower())->report();
    exchanges += " " + std::to_string(step.step) + ":";
    for (const int one : report.present) exchanges += std::to_string(one);
    const bool all = report.present.size() == static_cast<std::size_t>(report.sites);
    if (was_alone && all && training.steps == kManySteps && step.step % settings.steps == 0)
      training.steps = static_cast<int>(step.step) + 2 * settings.steps;
    was_alone = was_alone || !all;
    if (step.step == training.steps) {
      const std::vector<std::string> kinds = engine.state_kinds();
      if (std::ranges::find(kinds, "outer_param") != kinds.end()) {
        std::string bytes;
        engine.read_states({.kind = "outer_param"}, [&](const StateTensor& tensor) {
          bytes.append(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size());
        });
        if (site.rank() == 0) std::cout << "outer " << digest64(bytes) << std::endl;
      }
    }
    if (until_back) {
      if (is_first && step.step == 4) (void)engine.save(arguments[5] + "/site" + std::to_string(site.site_index()));
      std::this_thread::sleep_for(Milliseconds{2});  // the site that comes back has to start meanwhile
    }
    strike(step.step);
  };
  const ToyOutcome got = train_toy_rank(training, backend->split(0, site.rank(), "toy"));
  std::cout << "values " << digest_of(got.values) << " present" << exchanges << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(std::vector<std::string>(argv + 1, argv + argc));
    return 0;
  } catch (const std::exception& error) {
    const char* const rank = std::getenv("RANK");
    std::cerr << "ZEROTH ERROR " << error.what() << " (rank " << (rank != nullptr ? rank : "") << ")" << std::endl;
    const auto* const own = dynamic_cast<const Error*>(&error);
    return own != nullptr ? exit_code(own->code()) : 1;
  }
}
