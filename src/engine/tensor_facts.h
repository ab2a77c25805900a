// TensorFacts: what an update needs to know of whole parameters (TensorFact), whose elements are on several ranks: in
// shards, in boxes of a larger tensor, in copies of which one counts.
//
// Each rank adds the numbers of its blocks, combine() makes those of all ranks of them: sums by integers
// (kernels/norm/norm.h), so no split and no order changes a bit. A tensor has a number that all ranks agree on, by its
// name in the whole model.
#pragma once

#include <kernels/norm/norm.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/optim/optimizer.h>

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

class TensorFacts {
 public:
  /// Collective over the job, blocks. `own`: names of this rank's tensors. `is_split`: others have elements of one.
  TensorFacts(Communicator job, std::span<const std::string> own, bool is_split);

  /// Number of one of this rank's tensors.
  [[nodiscard]] int number(const std::string& name) const;
  /// Every rank adds all blocks that it updates, which are all there are; else those that it alone counts.
  [[nodiscard]] bool is_local() const { return !is_split_; }

  /// Forgets the last update's; these are the next one's. The same on all ranks.
  void begin(std::vector<TensorFact> facts);
  [[nodiscard]] const std::vector<TensorFact>& facts() const { return facts_; }
  /// Numbers of blocks of a tensor. By any thread.
  void add(int tensor, std::size_t fact, std::span<const double> blocks);
  /// Collective where tensors are split, blocks: one all_reduce, and one more for what is greatest.
  void combine();
  /// After combine().
  [[nodiscard]] std::vector<double> of(int tensor) const;

 private:
  [[nodiscard]] std::size_t at(int tensor, std::size_t fact) const {
    return static_cast<std::size_t>(tensor) * facts_.size() + fact;
  }

  Communicator job_;
  std::vector<std::string> names_;  ///< of all ranks' tensors, in order
  bool is_split_ = false;
  std::vector<TensorFact> facts_;
  std::vector<kernels::NormAccumulator> sums_;  ///< one a tensor and fact; empty for those that are no sums
  std::vector<double> greatest_;                ///< the same; 0 for sums
  std::mutex adding_;
};

}  // namespace zeroth
