// One rank of torch_process_parity_test: runs the whole grid of its world, or with the argument "rows" the rows of it,
// one configuration after another, and compares each with its own reference by bits. zeroth-run starts it.
#include "parity/torch_parity_list.h"

#include <zeroth/base/text.h>
#include <zeroth/engine/world.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::test {
namespace {

/// What all ranks must hold alike: losses and norms themselves, parameters as digests. One line, so that the
/// test can compare what ranks say.
std::string shared_bits(const TorchOutcome& outcome) {
  std::string text;
  for (std::size_t step = 0; step < outcome.losses.size(); ++step) {
    text += "loss of step " + std::to_string(step) + " " + hex_float(outcome.losses[step]) + "; norm of step " +
            std::to_string(step) + " " + hex_float(outcome.norms[step]) + "; ";
  }
  for (const auto& [name, value] : outcome.values) {
    const std::string_view bytes(reinterpret_cast<const char*>(value.bytes.data()), value.bytes.size());
    text += "parameter " + name + " " + std::to_string(digest64(bytes)) + "; ";
  }
  return text;
}

class Rank {
 public:
  explicit Rank(World world) : world_(std::move(world)) {}

  /// True if everything was equal.
  bool run(const std::vector<ParityGroup>& groups) {
    const std::string backend = world_.size() == 1 ? "self" : "shm";
    if (world_.backend_name() != backend) report("the job", "backend " + world_.backend_name() + ", not " + backend);
    for (std::size_t index = 0; index < groups.size(); ++index) {
      const TorchTraining& reference = groups[index].reference;
      const TorchOutcome expected = train(reference);
      std::cout << "REFERENCE " << reference.text() << "; " << shared_bits(expected) << std::endl;
      for (const double norm : expected.norms) {
        if (!std::isfinite(norm) || norm <= 0) report(reference.text(), "norm " + hex_float(norm));
      }
      for (const TorchTraining& variant : groups[index].variants) compare(variant.text(), expected, train(variant));
      // Ranks take turns, so that all references are compared once.
      if (static_cast<int>(index) % world_.size() == world_.rank()) {
        compare(reference.text() + " against ranks that are threads", threads(reference), expected);
      }
    }
    std::cout << "COMPARED " << compared_ << std::endl;
    return good_;
  }

 private:
  TorchOutcome train(const TorchTraining& training) {
    return reported(training.text(), [&] { return train_torch_as_rank(training, world_); });
  }
  TorchOutcome threads(const TorchTraining& training) {
    TorchOutcome outcome = reported(training.text() + " on threads", [&] { return train_torch(training); });
    outcome.buffers = {outcome.buffers[static_cast<std::size_t>(world_.rank())]};
    return outcome;
  }
  TorchOutcome reported(const std::string& what, const std::function<TorchOutcome()>& body) {
    try {
      return body();
    } catch (const std::exception& error) {
      report(what, error.what());
      throw;
    }
  }
  void compare(const std::string& configuration, const TorchOutcome& expected, const TorchOutcome& got) {
    ++compared_;
    const std::string different = difference(expected, got);
    if (!different.empty()) report(configuration, different);
  }
  /// On one line.
  void report(const std::string& configuration, std::string what) {
    good_ = false;
    std::ranges::replace(what, '\n', ' ');
    std::cout << "DIFFERENT world " << world_.size() << " rank " << world_.rank() << " " << configuration << ": "
              << what << std::endl;
  }

  World world_;
  int compared_ = 0;
  bool good_ = true;
};

}  // namespace
}  // namespace zeroth::test

int main(int argc, char** argv) {
  using namespace zeroth::test;
  const zeroth::World world = zeroth::World::from_environment();
  const bool rows = argc > 1 && std::string_view(argv[1]) == "rows";
  try {
    return Rank(world).run(rows ? parity_rows({world.size()}) : parity_grid(world.size())) ? 0 : 1;
  } catch (const std::exception& error) {
    world.abort(zeroth::Error(zeroth::ErrorCode::kAborted, error.what()));
    return 1;
  }
}
