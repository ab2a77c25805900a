#include "program/checks.h"

#include <algorithm>
#include <cstddef>

namespace zeroth {

std::optional<Refutation> refute_forwards(const StepProgram& program) {
  for (int chunk = 0; chunk < program.chunks(); ++chunk) {
    std::vector<int> done;
    for (const Action& action : program.actions[static_cast<std::size_t>(rank_of(program, chunk))]) {
      if (action.kind == ActionKind::kForward && action.chunk == chunk) done.push_back(action.micro_batch);
    }
    std::ranges::sort(done);
    done.erase(std::unique(done.begin(), done.end()), done.end());
    if (static_cast<int>(done.size()) == program.micro_batches) continue;
    int missing = 0;
    while (missing < static_cast<int>(done.size()) && done[static_cast<std::size_t>(missing)] == missing) ++missing;
    return Refutation{
        .what = "a chunk never computes a micro-batch",
        .places = {place_of(program, rank_of(program, chunk), -1)},
        .expected = to_text(Action{.kind = ActionKind::kForward, .chunk = chunk, .micro_batch = missing})};
  }
  return std::nullopt;
}

namespace {

/// Looks at one (chunk, micro-batch) at a time.
class OrderCheck {
 public:
  OrderCheck(const StepProgram& program, const ActionIndex& index) : program_(program), index_(index) {}

  std::optional<Refutation> of(int chunk, int micro_batch, bool forwards_only) {
    chunk_ = chunk;
    micro_batch_ = micro_batch;
    found_ = std::nullopt;
    const int forward = at(ActionKind::kForward);
    needs_input(forward, ActionKind::kForward, ActionKind::kRecvForward, chunk - 1);
    if (forwards_only) {
      for (const ActionKind kind : {ActionKind::kBackward, ActionKind::kBackwardInput, ActionKind::kBackwardWeight})
        if (at(kind) >= 0) refute("a program of forwards alone has a backward", at(kind), -2, "no " + name(kind));
      return found_;
    }
    const int whole = at(ActionKind::kBackward);
    const int input = at(ActionKind::kBackwardInput);
    const int weight = at(ActionKind::kBackwardWeight);
    if (whole >= 0 && input >= 0) refute("a chunk computes a gradient twice", whole, input, "B, or I and W");
    if (whole >= 0 && weight >= 0) refute("a chunk computes a gradient twice", whole, weight, "B, or I and W");
    const int gradient = index_.gradient(chunk, micro_batch);
    if (gradient < 0) refute("a forward has no backward", forward, -1, name(ActionKind::kBackward));
    if (input >= 0 && weight < 0) refute("an I has no W", input, -1, name(ActionKind::kBackwardWeight));
    comes_first(forward, gradient, "a backward comes before its forward");
    if (weight >= 0) comes_first(input, weight, "a W comes before its I");
    needs_input(gradient, ActionKind::kBackward, ActionKind::kRecvBackward, chunk + 1);
    recomputes(forward, gradient);
    offloads(forward, gradient);
    return found_;
  }

 private:
  [[nodiscard]] int at(ActionKind kind) const { return index_.position(kind, chunk_, micro_batch_); }
  [[nodiscard]] std::string name(ActionKind kind) const {
    return to_text(Action{.kind = kind, .chunk = chunk_, .micro_batch = micro_batch_});
  }
  /// Two actions of the chunk's rank; -1 is the end of the list, -2 none.
  void refute(const std::string& what, int first, int second, const std::string& expected) {
    if (found_) return;
    const int rank = rank_of(program_, chunk_);
    found_ = Refutation{.what = what, .places = {place_of(program_, rank, first)}, .expected = expected};
    if (second != -2) found_->places.push_back(place_of(program_, rank, second));
  }
  void comes_first(int first, int second, const char* what) {
    if (first >= 0 && second >= 0 && first > second) refute(what, second, first, "the other order");
  }
  /// The result of chunk `other` must be there before `use`: computed on this rank, or received.
  void needs_input(int use, ActionKind kind, ActionKind receive, int other) {
    if (found_ || use < 0 || other < 0 || other >= program_.chunks()) return;
    const int rank = rank_of(program_, chunk_);
    if (rank_of(program_, other) != rank) {
      const int received = at(receive);
      if (received >= 0) return comes_first(received, use, "a computation comes before the receive of what it needs");
      refute("a computation needs what is never received", use, -2, name(receive) + " before it");
      const int other_rank = rank_of(program_, other);
      found_->places.push_back(place_of(program_, other_rank, computed(kind, other)));
      return;
    }
    const int before = computed(kind, other);
    if (before >= 0) return comes_first(before, use, "a computation comes before what it needs");
  }
  [[nodiscard]] int computed(ActionKind kind, int chunk) const {
    return kind == ActionKind::kForward ? index_.position(kind, chunk, micro_batch_)
                                        : index_.gradient(chunk, micro_batch_);
  }
  void recomputes(int forward, int gradient) {
    const int again = at(ActionKind::kRecompute);
    if (again < 0) return;
    comes_first(forward, again, "a RECOMPUTE comes before its forward");
    comes_first(again, gradient, "a RECOMPUTE comes after its backward");
  }
  void offloads(int forward, int gradient) {
    const int flush = at(ActionKind::kFlush);
    const int fetch = at(ActionKind::kFetch);
    const int first_use = at(ActionKind::kRecompute) >= 0 ? at(ActionKind::kRecompute) : gradient;
    if (flush < 0 && fetch >= 0) refute("a FETCH has no FLUSH", fetch, -1, name(ActionKind::kFlush) + " before it");
    if (flush >= 0 && fetch < 0) refute("a FLUSH has no FETCH", flush, first_use, name(ActionKind::kFetch));
    comes_first(forward, flush, "activations are moved away before they are there");
    comes_first(flush, fetch, "activations are fetched before they are moved away");
    comes_first(fetch, first_use, "activations are used before they are fetched");
  }

  const StepProgram& program_;
  const ActionIndex& index_;
  int chunk_ = 0;
  int micro_batch_ = 0;
  std::optional<Refutation> found_{};
};

}  // namespace

std::optional<Refutation> refute_order(const StepProgram& program, const ActionIndex& index, bool forwards_only) {
  if (!index.twice().empty())
    return Refutation{.what = "an action stands there twice", .places = index.twice(), .expected = "once"};
  OrderCheck check(program, index);
  for (int micro_batch = 0; micro_batch < program.micro_batches; ++micro_batch) {
    for (int chunk = 0; chunk < program.chunks(); ++chunk) {
      if (auto refutation = check.of(chunk, micro_batch, forwards_only)) return refutation;
    }
  }
  return std::nullopt;
}

}  // namespace zeroth
