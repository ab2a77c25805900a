// One rank of torch_process_parity_test: runs the whole list of its world, one configuration after another,
// and compares each with its own reference by bits. zeroth-run starts it.
#include "parity/torch_parity_list.h"

#include <zeroth/base/text.h>
#include <zeroth/engine/world.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <string>

namespace zeroth::testing {
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
  bool run_list() {
    const std::string backend = world_.size() == 1 ? "self" : "shm";
    if (world_.backend_name() != backend) report("the job", "backend " + world_.backend_name() + ", not " + backend);
    const std::vector<TorchTraining> references = parity_references(world_.size());
    for (std::size_t index = 0; index < references.size(); ++index) {
      const TorchOutcome expected = train(references[index]);
      std::cout << "REFERENCE " << references[index].text() << "; " << shared_bits(expected) << std::endl;
      for (const double norm : expected.norms) {
        if (!std::isfinite(norm) || norm <= 0) report(references[index].text(), "norm " + hex_float(norm));
      }
      for (const TorchTraining& variant : parity_variants(references[index])) {
        compare(variant.text(), expected, train(variant));
      }
      // Ranks take turns, so that all references are compared once.
      if (static_cast<int>(index) % world_.size() == world_.rank()) {
        compare(references[index].text() + " against ranks that are threads", threads(references[index]), expected);
      }
    }
    expect_comparison_to_see_one_bit(references.front());
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
  void expect_comparison_to_see_one_bit(TorchTraining training) {
    const TorchOutcome expected = train(training);
    training.lr = std::nextafter(static_cast<float>(training.lr), 1.0F);
    if (difference(expected, train(training)).empty()) report(training.text(), "another learning rate is not seen");
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
}  // namespace zeroth::testing

int main() {
  const zeroth::World world = zeroth::World::from_environment();
  try {
    return zeroth::testing::Rank(world).run_list() ? 0 : 1;
  } catch (const std::exception& error) {
    world.abort(zeroth::Error(zeroth::ErrorCode::kAborted, error.what()));
    return 1;
  }
}
