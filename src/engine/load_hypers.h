// Which hyper-parameters the groups of an engine get from a checkpoint, whose groups may be numbered in another way.
#pragma once

#include <zeroth/optim/optimizer.h>

#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// A parameter that trains is in group `here` of this engine, and was in group `there` of the checkpoint.
struct GroupPair {
  int here = 0;
  int there = 0;
  std::string param{};
  bool operator==(const GroupPair&) const = default;
};

/// For ranks to tell each other; and what all ranks have said, each pair of groups once.
[[nodiscard]] std::string text_of(const std::vector<GroupPair>& pairs);
[[nodiscard]] std::vector<GroupPair> pairs_in(const std::vector<std::string>& texts);

/// One a group here: the number of the one there whose hyper-parameters it gets, -1 where none of its parameters had
/// any. `there`: of the checkpoint, by its groups. Unless `strict` the first pair decides. Throws kCheckpoint where one
/// group here was several there, with other hyper-parameters; and where several groups here, which have different ones,
/// were one there.
[[nodiscard]] std::vector<int> groups_there(const std::vector<GroupPair>& pairs, std::span<const GroupHyper> here,
                                            std::span<const GroupHyper> there, bool strict, const std::string& path);

/// `here`, with those of the groups that were chosen.
[[nodiscard]] std::vector<GroupHyper> chosen_hypers(std::span<const GroupHyper> here, std::span<const GroupHyper> there,
                                                    const std::vector<int>& chosen);

/// "group 1: lr 0.001 -> 0.0005, weight_decay 0 -> 0.1; group 2: ..."; "" if nothing differs.
[[nodiscard]] std::string changes_of(std::span<const GroupHyper> before, std::span<const GroupHyper> after);

}  // namespace zeroth
