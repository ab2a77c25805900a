// ExpertRanks: the ranks that share the experts of one layer, and how tokens and experts meet on them.
//
// One layout serves all ways: rank r owns slice r of the experts. So the options may change between two forwards, and
// no byte moves for it. They change where rows are computed and when messages go, and no number beyond rounding:
//
//   meet       rows travel to their experts (expert parallelism), or copies of experts to their rows (fully sharded
//              experts), or copies only where they even out the work; see zeroth/parallel/expert_placement.h
//   pieces     own experts in so many runs: rows of the next run are under way while one is computed. An expert's
//              product is whole, so the bits do not depend on it
//   two hops   rows go to the rank of their place in the own node first, then to the node: of n nodes with m ranks,
//              m - 1 + n - 1 messages a rank instead of n m - 1, and no other bytes between nodes
//
// Ref: Hwang et al., "Tutel: Adaptive Mixture-of-Experts at Scale", 2023 (one layout for all ways, adaptive pieces, 2DH
// all-to-all). Nie et al., "Hecate", 2025 (sparse materialization).
#pragma once

#include <zeroth/comm/mesh.h>
#include <zeroth/engine/config.h>
#include <zeroth/engine/param_axes.h>
#include <zeroth/libtorch/rank_group.h>
#include <zeroth/parallel/expert_placement.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

struct ExpertOptions {
  MeetAt meet = MeetAt::kExperts;
  /// Most experts of other ranks that a rank holds during a layer, until its backward. From 0.
  std::int64_t copies = 1;
  /// From 1; at most 64. 0: of 1, 2 and 4 the one with the least time of the slowest rank, measured three times each.
  int pieces = 1;
  bool two_hops = false;
  bool operator==(const ExpertOptions&) const = default;
};

/// Cheap to copy; copies share all. Each layer has its own, of_another_layer(), so that times are those of the layer.
class ExpertRanks {
 public:
  /// `axes`: of the mesh, along which the ranks differ. `alike`: ranks of the group that have the same tokens, as those
  /// of tp: each sends its slice of them, and they give each other the results. With two_hops collective over the
  /// group. Throws kUsage for options out of range, and for two hops on nodes that have other numbers of ranks.
  ExpertRanks(RankGroup group, ExpertOptions options = {},  // NOLINT: a group is one
              std::vector<std::string> axes = {std::string(kExpertAxis)}, std::optional<RankGroup> alike = {});
  /// Of the axes in `config.over` that have several ranks. None if there are no such axes. Collective over the world of
  /// the mesh. Throws as the constructor.
  [[nodiscard]] static std::optional<ExpertRanks> of_mesh(Mesh& mesh, const ExpertsConfig& config,
                                                          const RankGroup::Rethrow& rethrow = nullptr);

  [[nodiscard]] const RankGroup& group() const;
  [[nodiscard]] const ExpertOptions& options() const;
  [[nodiscard]] const std::vector<std::string>& axes() const;
  [[nodiscard]] const std::optional<RankGroup>& alike() const;
  /// From the next forward on. All ranks of the group make the call with the same options, else the next forward is
  /// kMismatch on all. Collective where it turns two_hops on. Throws as the constructor.
  void set_options(ExpertOptions options) const;
  /// The same ranks and options, with times of its own. Makes no call.
  [[nodiscard]] ExpertRanks of_another_layer() const;
  /// Pieces of the last forward.
  [[nodiscard]] int pieces() const;

  struct State;  // src/libtorch/experts/
  [[nodiscard]] State& state() const { return *state_; }

 private:
  explicit ExpertRanks(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace zeroth::libtorch
