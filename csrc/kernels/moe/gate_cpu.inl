// Memory access of gate.h; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/moe/gate_math.h>
#include <kernels/moe/gate_variants.h>

namespace zeroth::kernels {
namespace {

/// Calls body(logits, T{}) with the type of the logits, and that of the weights.
template <class Body>
ZR_INLINE void with_gate_type(DType dtype, const void* logits, const Body& body) {
  if (dtype == DType::kFloat64) return body(static_cast<const double*>(logits), 0.0);
  if (dtype == DType::kBFloat16) return body(static_cast<const BFloat16*>(logits), 0.0F);
  if (dtype == DType::kFloat16) return body(static_cast<const Float16*>(logits), 0.0F);
  body(static_cast<const float*>(logits), 0.0F);
}

template <template <class> class V, class In, class T>
void gate_rows(const GateArgs& args, const In* logits, T /*type*/) {
  const GateRule& rule = args.rule;
  const std::int64_t experts = rule.experts;
  const T nan = canonical(Lane<T>{static_cast<T>(__builtin_nan(""))}).v;
  const T scale = static_cast<T>(rule.scale);
  auto* const weights = static_cast<T*>(args.weights);
  auto* const scores = static_cast<T*>(args.scores);
  alignas(64) T row_logits[kMostExperts];
  alignas(64) T row_scores[kMostExperts];
  GateRow<T> row{row_logits, row_scores};
  T keys[kMostExperts];
  T of_group[kMostExperts];
  T bias[kMostExperts];
  if (args.bias != nullptr) {
    for (std::int64_t e = 0; e < experts; ++e) bias[e] = static_cast<T>(args.bias[e]);
  }
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    load_row<V<T>>(row, logits + t * experts, experts);
    std::int32_t* const chosen = args.chosen + t * rule.k;
    T* const of_token = weights + t * rule.k;
    if (row.known) {
      scores_of_row<V<T>>(row, rule, args.z_sum != nullptr);
      const T* from = rule.score == GateScore::kSoftmaxOfChosen ? row.logits : row.scores;
      if (args.bias != nullptr) {
        for_each_vector<V, T>(0, experts, [&](auto width, std::int64_t e) {
          using W = typename decltype(width)::Vector;
          (W::load(from + e) + W::load(bias + e)).store(keys + e);
        });
        from = keys;
      }
      GateBest<T> best;
      choose<V<T>>(from, rule, of_group, best);
      for (std::int64_t j = 0; j < rule.k; ++j) chosen[j] = best.expert[j];
      weights_of(row, rule, chosen, of_token);
      for (std::int64_t j = 0; j < rule.k; ++j) of_token[j] = canonical(Lane<T>{of_token[j] * scale}).v;
    } else {
      for (std::int64_t e = 0; e < experts; ++e) row.scores[e] = nan;
      for (std::int64_t j = 0; j < rule.k; ++j) {
        chosen[j] = static_cast<std::int32_t>(j);
        of_token[j] = nan;
      }
    }
    if (scores != nullptr) {
      __builtin_memcpy(scores + t * experts, row.scores, static_cast<std::size_t>(experts) * sizeof(T));
    }
    if (args.counts != nullptr) {
      for (std::int64_t j = 0; j < rule.k; ++j) ++args.counts[chosen[j]];
    }
    if (args.score_sums != nullptr) {
      for_each_vector<V, double>(0, experts, [&](auto width, std::int64_t e) {
        using W = typename decltype(width)::Vector;
        canonical(W::load(args.score_sums + e) + rounded_score(W::load(row.scores + e))).store(args.score_sums + e);
      });
    }
    if (args.z_sum != nullptr) {
      const double log_sum = row.known ? log_sum_of_row(row) : static_cast<double>(nan);
      *args.z_sum = canonical(Lane<double>{*args.z_sum + rounded_z(log_sum * log_sum)}).v;
    }
  }
}

template <template <class> class V>
void gate_any(const GateArgs& args) {
  with_gate_type(args.dtype, args.logits, [&](const auto* logits, auto type) { gate_rows<V>(args, logits, type); });
}

template <template <class> class V, class In, class T>
std::int64_t gate_backward_rows(const GateBackwardArgs& args, const In* logits, T /*type*/) {
  const std::int64_t experts = args.rule.experts;
  const std::int64_t k = args.rule.k;
  const T nan = canonical(Lane<T>{static_cast<T>(__builtin_nan(""))}).v;
  const auto* const d_weights = static_cast<const T*>(args.d_weights);
  const auto* const d_given = static_cast<const T*>(args.d_scores);
  auto* const d_logits = static_cast<In*>(args.d_logits);
  alignas(64) T row_logits[kMostExperts];
  alignas(64) T row_scores[kMostExperts];
  GateRow<T> row{row_logits, row_scores};
  T d_scores[kMostExperts];
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    const std::int32_t* const chosen = args.chosen + t * k;
    for (std::int64_t j = 0; j < k; ++j) {
      if (chosen[j] < 0 || chosen[j] >= experts) return t * k + j;
    }
    load_row<V<T>>(row, logits + t * experts, experts);
    if (row.known) {
      backward_of_row<V<T>>(row, args, chosen, d_weights == nullptr ? nullptr : d_weights + t * k,
                            d_given == nullptr ? nullptr : d_given + t * experts, d_scores);
    } else {
      for (std::int64_t e = 0; e < experts; ++e) row.scores[e] = nan;
    }
    for_each_vector<V, T>(0, experts, [&](auto width, std::int64_t e) {
      using W = typename decltype(width)::Vector;
      canonical(W::load(row.scores + e)).store(d_logits + t * experts + e);
    });
  }
  return -1;
}

template <template <class> class V>
std::int64_t gate_backward_any(const GateBackwardArgs& args) {
  std::int64_t wrong = -1;
  with_gate_type(args.dtype, args.logits,
                 [&](const auto* logits, auto type) { wrong = gate_backward_rows<V>(args, logits, type); });
  return wrong;
}

}  // namespace
}  // namespace zeroth::kernels
