// StatePiece: a rank's part of one state of one parameter, by the names and elements of the logical tensor.
#pragma once

#include "zero/model_memory.h"

#include <zeroth/checkpoint/box_range.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zeroth {

/// All elements that a parameter has of its logical tensor.
[[nodiscard]] BoxRange whole_box(const ParamSpec& spec);

struct StatePiece {
  int param = 0;        ///< of the layout that it was made for
  std::string state{};  ///< "weight", or as the optimizer declares it; "<state>@<rank>" if every rank has its own
  DType dtype = DType::kFloat32;  ///< of the values: a float32 master, where there is one
  BoxRange has{};                 ///< what this rank keeps
  /// Elements [begin, end) of the box that this rank writes. Each element of a tensor is written by one rank; ranks
  /// write the same number of them, to one block.
  Range writes{};
  /// Of has.begin: values, or the 16-bit parameters of which the masters are kept in another place.
  StateBytes data{};
  Master master = Master::kNone;  ///< how float32 values are kept
  StateBytes master_data{};       ///< lower halves or whole masters of the elements `master_range`
  Range master_range{};           ///< elements of the box; contains `writes`
  bool scaled = false;            ///< values are what lies at `data` times `factor`, in their dtype
  double factor = 1.0;
  /// The label of its range in a file: "blocks.0.weight/exp_avg".
  [[nodiscard]] std::string key(const ParamSpec& spec) const { return spec.tensor_name() + "/" + state; }
};

/// The pieces of a shard group on one rank, in the order of its flats. `is_first`: no other group with the same
/// elements writes them. `job_rank`: for states of every rank's own. `with_held`: held gradients are states.
[[nodiscard]] std::vector<StatePiece> state_pieces(const ModelLayout& model, const ModelMemory& memory, bool is_first,
                                                   int job_rank, bool with_held);

/// A state that a parameter has on some rank.
struct StateOfParam {
  int param = 0;  ///< of the layout that it was made for
  std::string state{};
  DType dtype = DType::kFloat32;        ///< as StatePiece::dtype
  std::vector<std::int64_t> logical{};  ///< shape of the state's tensor
};

/// What state_pieces() of all ranks are of, also where this rank has no element. Without states of every rank's own.
[[nodiscard]] std::vector<StateOfParam> described_states(const ModelLayout& model, const ModelMemory& memory,
                                                         bool with_held);

/// What lies in the rows of which other ranks have some elements too: parameters, masters, states of the optimizer and
/// averages; by rows as they lie in memory, without masters joined to parameters. One for each row and parameter, on
/// all ranks of the group the same ones in the same order; `has` is empty where this rank has no element.
/// `after_messages`: owners' parts of StateShape::kReplica have come to all ranks.
[[nodiscard]] std::vector<StatePiece> replica_pieces(const ModelLayout& model, const ModelMemory& memory,
                                                     bool after_messages);

/// The parameters at rest, in the dtype of computation, as the state "param".
[[nodiscard]] std::vector<StatePiece> parameter_pieces(const ModelLayout& model, const ModelMemory& memory,
                                                       bool is_first);

/// This rank's reduced gradients as the state "grad", of flats that `has_sums`; the sums must be complete. `factor`:
/// what makes a mean of a sum, without the flat's grad_factor.
[[nodiscard]] std::vector<StatePiece> gradient_pieces(const ModelLayout& model, ModelMemory& memory, bool is_first,
                                                      const std::function<bool(int flat)>& has_sums, double factor);

}  // namespace zeroth
