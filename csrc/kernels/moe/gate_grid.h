// gate.h on a grid, see common/grid.h: a thread does a token, lane by lane in the orders of the CPU variants, in memory
// of its own in a workspace; then a thread for each expert adds over the tokens. The additions are exact, so their
// order does not matter.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/moe/gate_math.h>

#include <cstddef>
#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Threads that do tokens: their memory is bounded, and each goes on with a further token.
inline constexpr std::int64_t kGateThreads = 16384;
/// Numbers of a thread: logits, scores, keys or gradients of scores, groups.
inline constexpr std::int64_t kGateArrays = 4;

constexpr std::int64_t gate_threads(std::int64_t tokens) {
  return tokens < kGateThreads ? tokens : kGateThreads;
}
constexpr std::size_t gate_number_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
}
/// Of the rows of all threads, with a number of 8 bytes for each token (the term of the z-loss) before it.
constexpr std::size_t gate_workspace(const GateRule& rule, DType dtype, std::int64_t tokens) {
  return static_cast<std::size_t>(tokens) * sizeof(double) +
         static_cast<std::size_t>(gate_threads(tokens) * kGateArrays * room_of(rule.experts)) *
             gate_number_bytes(dtype);
}

/// The rows of thread `index`: arrays of room_of(E).
template <class T>
ZR_HOST_DEVICE ZR_INLINE T* gate_rows_of(void* workspace, std::int64_t tokens, std::int64_t index, std::int64_t room) {
  return reinterpret_cast<T*>(static_cast<double*>(workspace) + tokens) + index * kGateArrays * room;
}

/// Threads from kGateThreads on have nothing to do.
template <class In, class T>
struct GateGrid {
  GateArgs args;
  void* workspace;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    const GateRule& rule = args.rule;
    const std::int64_t experts = rule.experts;
    const std::int64_t room = room_of(experts);
    const std::int64_t count = thread.count < kGateThreads ? thread.count : kGateThreads;
    if (thread.index >= count || thread.index >= args.tokens) return;
    T* const arrays = gate_rows_of<T>(workspace, args.tokens, thread.index, room);
    GateRow<T> row{arrays, arrays + room};
    T* const keys = arrays + 2 * room;
    const T nan = canonical(Lane<T>{static_cast<T>(__builtin_nan(""))}).v;
    for (std::int64_t t = thread.index; t < args.tokens; t += count) {
      std::int32_t* const chosen = args.chosen + t * rule.k;
      T* const weights = static_cast<T*>(args.weights) + t * rule.k;
      load_row<Lane<T>>(row, static_cast<const In*>(args.logits) + t * experts, experts);
      if (row.known) {
        scores_of_row<Lane<T>>(row, rule, args.z_sum != nullptr);
        const T* from = rule.score == GateScore::kSoftmaxOfChosen ? row.logits : row.scores;
        if (args.bias != nullptr) {
          for (std::int64_t e = 0; e < experts; ++e) keys[e] = from[e] + static_cast<T>(args.bias[e]);
          from = keys;
        }
        GateBest<T> best;
        choose<Lane<T>>(from, rule, arrays + 3 * room, best);
        for (std::int64_t j = 0; j < rule.k; ++j) chosen[j] = best.expert[j];
        weights_of(row, rule, chosen, weights);
        const T scale = static_cast<T>(rule.scale);
        for (std::int64_t j = 0; j < rule.k; ++j) weights[j] = canonical(Lane<T>{weights[j] * scale}).v;
      } else {
        for (std::int64_t e = 0; e < experts; ++e) row.scores[e] = nan;
        for (std::int64_t j = 0; j < rule.k; ++j) {
          chosen[j] = static_cast<std::int32_t>(j);
          weights[j] = nan;
        }
      }
      for (std::int64_t e = 0; args.scores != nullptr && e < experts; ++e)
        static_cast<T*>(args.scores)[t * experts + e] = row.scores[e];
      if (args.z_sum != nullptr) {
        const double log_sum = row.known ? log_sum_of_row(row) : static_cast<double>(nan);
        static_cast<double*>(workspace)[t] = rounded_z(log_sum * log_sum);
      }
    }
  }
};

/// After GateGrid: a thread for each expert, and one for the z-loss.
template <class T>
struct GateSumsGrid {
  GateArgs args;
  const double* z_terms;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    const std::int64_t experts = args.rule.experts;
    for (std::int64_t e = thread.index; e <= experts; e += thread.count) {
      if (e == experts) {
        if (args.z_sum == nullptr) continue;
        double sum = *args.z_sum;
        for (std::int64_t t = 0; t < args.tokens; ++t) sum = sum + z_terms[t];
        *args.z_sum = canonical(Lane<double>{sum}).v;
        continue;
      }
      if (args.score_sums != nullptr) {
        Lane<double> sum{args.score_sums[e]};
        for (std::int64_t t = 0; t < args.tokens; ++t)
          sum = sum + rounded_score(Lane<double>::load(static_cast<const T*>(args.scores) + t * experts + e));
        canonical(sum).store(args.score_sums + e);
      }
      if (args.counts != nullptr) {
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < args.tokens * args.rule.k; ++i) count += args.chosen[i] == e ? 1 : 0;
        args.counts[e] += count;
      }
    }
  }
};

/// Threads from kGateThreads on have nothing to do.
template <class In, class T>
struct GateBackwardGrid {
  GateBackwardArgs args;
  void* workspace;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    const std::int64_t experts = args.rule.experts;
    const std::int64_t room = room_of(experts);
    const std::int64_t count = thread.count < kGateThreads ? thread.count : kGateThreads;
    if (thread.index >= count || thread.index >= args.tokens) return;
    T* const arrays = gate_rows_of<T>(workspace, args.tokens, thread.index, room);
    GateRow<T> row{arrays, arrays + room};
    const T nan = canonical(Lane<T>{static_cast<T>(__builtin_nan(""))}).v;
    for (std::int64_t t = thread.index; t < args.tokens; t += count) {
      const auto* const d_weights = static_cast<const T*>(args.d_weights);
      const auto* const d_given = static_cast<const T*>(args.d_scores);
      load_row<Lane<T>>(row, static_cast<const In*>(args.logits) + t * experts, experts);
      if (row.known) {
        backward_of_row<Lane<T>>(row, args, args.chosen + t * args.rule.k,
                                 d_weights == nullptr ? nullptr : d_weights + t * args.rule.k,
                                 d_given == nullptr ? nullptr : d_given + t * experts, arrays + 2 * room);
      }
      for (std::int64_t e = 0; e < experts; ++e) {
        canonical(Lane<T>{row.known ? row.scores[e] : nan}).store(static_cast<In*>(args.d_logits) + t * experts + e);
      }
    }
  }
};

/// Calls body(logit, number) with values of their types.
template <class Body>
void with_grid_logits(DType dtype, const Body& body) {
  if (dtype == DType::kFloat64) return body(double{}, double{});
  if (dtype == DType::kBFloat16) return body(BFloat16{}, float{});
  if (dtype == DType::kFloat16) return body(Float16{}, float{});
  body(float{}, float{});
}

/// Sums of scores need the scores. workspace: gate_workspace(), of 8-byte alignment.
template <class Launch>
bool gate_on_grid(const GateArgs& args, void* workspace, Launch& launch) {
  if (!is_gate_rule(args.rule) || !has_gate(args.dtype) || args.tokens < 0) return false;
  if (args.score_sums != nullptr && args.scores == nullptr) return false;
  if (args.tokens == 0) return true;
  with_grid_logits(args.dtype, [&](auto logit, auto number) {
    using T = decltype(number);
    launch(GateGrid<decltype(logit), T>{args, workspace}, gate_threads(args.tokens));
    if (args.counts != nullptr || args.score_sums != nullptr || args.z_sum != nullptr)
      launch(GateSumsGrid<T>{args, static_cast<const double*>(workspace)}, args.rule.experts + 1);
  });
  return true;
}

/// Experts are not looked at.
template <class Launch>
bool gate_backward_on_grid(const GateBackwardArgs& args, void* workspace, Launch& launch) {
  if (!is_gate_rule(args.rule) || !has_gate(args.dtype) || args.tokens < 0) return false;
  if (args.tokens == 0) return true;
  with_grid_logits(args.dtype, [&](auto logit, auto number) {
    launch(GateBackwardGrid<decltype(logit), decltype(number)>{args, workspace}, gate_threads(args.tokens));
  });
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
