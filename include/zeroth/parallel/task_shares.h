// Tasks of unlike size on ranks that train one model: a heavy task has several ranks, light ones share one.
#pragma once

#include <span>
#include <vector>

namespace zeroth {

/// Part `part` of `parts` equal parts of a task's data.
struct TaskPart {
  int task = 0;
  int part = 0;
  int parts = 1;
  friend bool operator==(const TaskPart&, const TaskPart&) = default;
};

/// The parts of each rank. loads: what each task costs a step, above 0. A task is whole on one rank, beside other whole
/// ones, or it has `parts` ranks for itself. Parts of a task are on consecutive ranks, and a rank's tasks are in order.
/// A rank may have none.
///
/// The largest load of a rank is at most 4/3 of the least that any such plan has: for every bound l/k of a task in k
/// parts, tasks above the bound are split, and the others go, the largest first, to the rank with the least (Graham,
/// "Bounds on Multiprocessing Timing Anomalies", 1969); the best of these plans is taken. The least bound that a plan
/// keeps is among them, and no plan keeps it with fewer parts. O(tasks^2 ranks log tasks) and more; no call is made,
/// and the same loads give the same plan.
///
/// Throws kUsage for no tasks, less than 1 rank, or a load that is not above 0 and finite.
///
/// Ref: Shen et al., "SE-MoE: A Scalable and Efficient Mixture-of-Experts Distributed Training and Inference System",
/// 2022, section 3.1 (elastic training of several tasks).
[[nodiscard]] std::vector<std::vector<TaskPart>> share_tasks(std::span<const double> loads, int ranks);

}  // namespace zeroth
