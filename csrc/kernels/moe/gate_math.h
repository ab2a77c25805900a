// The arithmetic of gate.h: of one vector (or lane) of experts, and of one token's row.
//
// A row lies in arrays of room_of(E) numbers. From E to the next multiple of 16 its logits are -inf, so these
// have the score 0. On the CPU a row is done in vectors; the thread of a GPU does it lane by lane, with the same
// orders.
#pragma once

#include <kernels/moe/gate.h>
#include <kernels/moe/moe_lanes.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

constexpr std::int64_t kGateLanes = 16;

constexpr bool has_gate(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

constexpr bool is_gate_rule(const GateRule& rule) {
  return rule.experts >= 1 && rule.experts <= kMostExperts && rule.k >= 1 && rule.k <= kMostChosen &&
         rule.k <= rule.experts && rule.groups >= 1 && rule.groups <= rule.experts && rule.experts % rule.groups == 0 &&
         rule.kept_groups >= 1 && rule.kept_groups <= rule.groups &&
         rule.experts / rule.groups * rule.kept_groups >= rule.k && rule.scale - rule.scale == 0.0;
}

template <class T>
struct GateNumbers;
template <>
struct GateNumbers<float> {
  static constexpr float kShift = 0x1.8p23F;
  static constexpr float kLeast = -87.0F;
  static constexpr float kLogHigh = 0x1.62e4p-1F;  // few bits: its products with small integers are exact
  static constexpr float kLogLow = 0x1.7f7d1cp-20F;
  static constexpr int kDegree = 7;
};
template <>
struct GateNumbers<double> {
  static constexpr double kShift = 0x1.8p52;
  static constexpr double kLeast = -708.0;
  static constexpr double kLogHigh = 0x1.62e42fefap-1;
  static constexpr double kLogLow = 0x1.cf79abc9e3b39p-40;
  static constexpr int kDegree = 13;
};

/// exp(x) of x <= 0; 0 below kLeast. NaN is not looked at.
template <class V>
ZR_HOST_DEVICE ZR_INLINE V exp_of(V x) {
  using T = typename V::Value;
  using N = GateNumbers<T>;
  constexpr double kFactor[14] = {
      1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
      1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
  const V least = V::splat(N::kLeast);
  const V zero = V::splat(T{0});
  const V near = select_below(x, least, least, x);
  const V shifted = fused(near, V::splat(static_cast<T>(0x1.71547652b82fep+0)), V::splat(N::kShift));
  const V n = shifted - V::splat(N::kShift);
  const V r = fused(n, V::splat(-N::kLogLow), fused(n, V::splat(-N::kLogHigh), near));
  V sum = V::splat(static_cast<T>(kFactor[N::kDegree]));
  for (int i = N::kDegree - 1; i >= 0; --i) sum = fused(sum, r, V::splat(static_cast<T>(kFactor[i])));
  return select_below(x, least, zero, sum * power_of(shifted));
}

/// 1 / (1 + exp(-x)).
template <class V>
ZR_HOST_DEVICE ZR_INLINE V sigmoid_of(V x) {
  using T = typename V::Value;
  const V zero = V::splat(T{0});
  const V one = V::splat(T{1});
  const V e = exp_of(select_below(x, zero, x, zero - x));
  return select_below(x, zero, e, one) / (one + e);
}

/// log(x) of a normal x > 0, to some units in the last place. One for all variants.
ZR_HOST_DEVICE ZR_INLINE double log_of(double x) {
  const auto bits = __builtin_bit_cast(std::uint64_t, x);
  // The mantissa from sqrt(1/2) to sqrt(2).
  const std::uint64_t moved = bits - 0x3fe6a09e667f3bcdULL;
  const std::int64_t exponent = static_cast<std::int64_t>(moved) >> 52;
  const double m = __builtin_bit_cast(double, bits - (static_cast<std::uint64_t>(exponent) << 52U));
  const double s = (m - 1.0) / (m + 1.0);
  const double square = s * s;
  double sum = 1.0 / 23.0;
  for (int i = 21; i >= 1; i -= 2) sum = fused(Lane<double>{sum}, Lane<double>{square}, Lane<double>{1.0 / i}).v;
  const auto n = static_cast<double>(exponent);
  const double low = fused(Lane<double>{n}, Lane<double>{0x1.cf79abc9e3b39p-40}, Lane<double>{2.0 * s * sum}).v;
  return fused(Lane<double>{n}, Lane<double>{0x1.62e42fefap-1}, Lane<double>{low}).v;
}

/// The terms of sums over tokens, see gate.h.
template <class D>
ZR_HOST_DEVICE ZR_INLINE D rounded_score(D score) {
  const D shift = D::splat(0x1.8p22);
  return (score + shift) - shift;
}
/// A number of 0x1p36 or more is a multiple already, or so great that it does not matter.
ZR_HOST_DEVICE ZR_INLINE double rounded_z(double z) {
  constexpr double kShift = 0x1.8p36;
  return z < 0x1p35 ? (z + kShift) - kShift : z;
}

/// The 16 lanes of a sum over experts, in vectors.
template <class V>
struct GateSum {
  static constexpr std::int64_t kVectors = kGateLanes / V::kLanes;
  using T = typename V::Value;
  V sum[kVectors];

  ZR_HOST_DEVICE ZR_INLINE GateSum() {
    for (auto& one : sum) one = V::splat(T{0});
  }
  [[nodiscard]] ZR_HOST_DEVICE ZR_INLINE T folded() const {
    T lanes[kGateLanes];
    for (std::int64_t k = 0; k < kVectors; ++k) sum[k].store(lanes + k * V::kLanes);
    for (std::int64_t half = kGateLanes / 2; half > 0; half /= 2) {
      for (std::int64_t l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
    }
    return lanes[0];
  }
};

/// Calls body(k, e) for the vectors of a row: k is the vector among those of 16 lanes, e the first expert.
template <class V, class Body>
ZR_HOST_DEVICE ZR_INLINE void for_each_of_row(std::int64_t room, const Body& body) {
  for (std::int64_t e = 0; e < room; e += kGateLanes) {
    for (std::int64_t k = 0; k < GateSum<V>::kVectors; ++k) body(k, e + k * V::kLanes);
  }
}

/// A token's row, filled by its first steps.
template <class T>
struct GateRow {
  T* logits;      ///< [room_of(E)]
  T* scores;      ///< likewise
  T most = T{0};  ///< of the logits
  T sum = T{0};   ///< of exp(logit - most)
  bool known = true;
};

ZR_HOST_DEVICE constexpr std::int64_t room_of(std::int64_t experts) {
  return (experts + kGateLanes - 1) / kGateLanes * kGateLanes;
}

/// Logits, their greatest, and whether anything is known of the row.
template <class V, class T, class In>
ZR_HOST_DEVICE ZR_INLINE void load_row(GateRow<T>& row, const In* logits, std::int64_t experts) {
  const T infinity = static_cast<T>(__builtin_inf());
  const std::int64_t whole = experts / V::kLanes * V::kLanes;
  V most = V::splat(-infinity);
  V wrong = V::splat(T{0});  // 0, or NaN after a NaN
  for (std::int64_t e = 0; e < whole; e += V::kLanes) {
    const V x = V::load(logits + e);
    x.store(row.logits + e);
    most = select_below(most, x, x, most);
    wrong = wrong + (x - x) * V::splat(T{0});
  }
  T lanes[V::kLanes];
  most.store(lanes);
  row.most = lanes[0];
  for (const T one : lanes) row.most = row.most < one ? one : row.most;
  bool nan = false;
  for (std::int64_t e = whole; e < experts; ++e) {
    const T x = Lane<T>::load(logits + e).v;
    row.logits[e] = x;
    row.most = row.most < x ? x : row.most;
  }
  for (std::int64_t e = experts; e < room_of(experts); ++e) row.logits[e] = -infinity;
  // An infinite logit makes `wrong` NaN as well: only then the row is looked at one by one.
  wrong.store(lanes);
  for (const T one : lanes) nan = nan || one != one;
  const std::int64_t first = nan ? 0 : whole;
  nan = false;
  for (std::int64_t e = first; e < experts; ++e) nan = nan || row.logits[e] != row.logits[e];
  row.known = !nan && row.most - row.most == T{0};
}

/// exp(logit - most) into the scores, and their sum.
template <class V, class T>
ZR_HOST_DEVICE ZR_INLINE void exponents_of_row(GateRow<T>& row, std::int64_t room) {
  GateSum<V> sum;
  const V most = V::splat(row.most);
  for_each_of_row<V>(room, [&](std::int64_t k, std::int64_t e) {
    const V x = exp_of(V::load(row.logits + e) - most);
    x.store(row.scores + e);
    sum.sum[k] = sum.sum[k] + x;
  });
  row.sum = sum.folded();
}

/// log(sum_e exp(l_e)), in double.
template <class T>
ZR_HOST_DEVICE ZR_INLINE double log_sum_of_row(const GateRow<T>& row) {
  return static_cast<double>(row.most) + log_of(static_cast<double>(row.sum));
}

/// The scores of a known row. with_sum: its sum of exponents as well, for the z-loss.
template <class V, class T>
ZR_HOST_DEVICE ZR_INLINE void scores_of_row(GateRow<T>& row, const GateRule& rule, bool with_sum) {
  const std::int64_t room = room_of(rule.experts);
  if (rule.score != GateScore::kSigmoid) {
    exponents_of_row<V>(row, room);
    const V sum = V::splat(row.sum);
    for_each_of_row<V>(room,
                       [&](std::int64_t, std::int64_t e) { (V::load(row.scores + e) / sum).store(row.scores + e); });
    return;
  }
  if (with_sum) exponents_of_row<V>(row, room);
  for_each_of_row<V>(room,
                     [&](std::int64_t, std::int64_t e) { sigmoid_of(V::load(row.logits + e)).store(row.scores + e); });
}

/// The greatest keys so far, the greatest first.
template <class T>
struct GateBest {
  T key[kMostChosen];
  std::int32_t expert[kMostChosen];
  std::int64_t count = 0;

  ZR_HOST_DEVICE ZR_INLINE void take(T new_key, std::int64_t new_expert, std::int64_t k) {
    std::int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && new_key > key[at - 1]; --at) {
      key[at] = key[at - 1];
      expert[at] = expert[at - 1];
    }
    key[at] = new_key;
    expert[at] = static_cast<std::int32_t>(new_expert);
  }
};

/// The keys of [begin, end), in the order of experts. `keys` has whole vectors.
template <class V, class T>
ZR_HOST_DEVICE ZR_INLINE void take_best(const T* keys, std::int64_t begin, std::int64_t end, std::int64_t k,
                                        GateBest<T>& best) {
  std::int64_t e = begin;
  for (; e < end && best.count < k; ++e) best.take(keys[e], e, k);
  for (; e + V::kLanes <= end; e += V::kLanes) {
    unsigned found = above(V::load(keys + e), V::splat(best.key[k - 1]));
    if constexpr (V::kLanes == 1) {
      if (found != 0) best.take(keys[e], e, k);
    } else {
      for (; found != 0; found &= found - 1U) {
        const std::int64_t at = e + __builtin_ctz(found);
        if (keys[at] > best.key[k - 1]) best.take(keys[at], at, k);
      }
    }
  }
  for (; e < end; ++e) {
    if (keys[e] > best.key[k - 1]) best.take(keys[e], e, k);
  }
}

/// The choice of a known row. of_group: room for the scores of groups.
template <class V, class T>
ZR_HOST_DEVICE ZR_INLINE void choose(const T* keys, const GateRule& rule, T* of_group, GateBest<T>& best) {
  if (rule.kept_groups == rule.groups) {
    take_best<V>(keys, 0, rule.experts, rule.k, best);
    return;
  }
  const std::int64_t size = rule.experts / rule.groups;
  for (std::int64_t g = 0; g < rule.groups; ++g) {
    T first = keys[g * size];
    T second = T{0};
    bool has_second = false;
    for (std::int64_t e = g * size + 1; e < (g + 1) * size; ++e) {
      if (keys[e] > first) {
        second = first;
        first = keys[e];
      } else if (!has_second || keys[e] > second) {
        second = keys[e];
      }
      has_second = true;
    }
    of_group[g] = rule.group_score == GroupScore::kSumOfTwoGreatest && has_second ? first + second : first;
  }
  // A group is kept if fewer than kept_groups are before it.
  for (std::int64_t g = 0; g < rule.groups; ++g) {
    std::int64_t before = 0;
    for (std::int64_t other = 0; other < rule.groups; ++other) {
      before += of_group[other] > of_group[g] || (of_group[other] == of_group[g] && other < g) ? 1 : 0;
    }
    if (before < rule.kept_groups) take_best<V>(keys, g * size, (g + 1) * size, rule.k, best);
  }
}

/// The weights of the chosen experts before the scale.
template <class T>
ZR_HOST_DEVICE ZR_INLINE void weights_of(const GateRow<T>& row, const GateRule& rule, const std::int32_t* chosen,
                                         T* weights) {
  T sum = T{0};
  if (rule.score == GateScore::kSoftmaxOfChosen) {
    T most = row.logits[chosen[0]];
    for (std::int64_t j = 1; j < rule.k; ++j) most = most < row.logits[chosen[j]] ? row.logits[chosen[j]] : most;
    for (std::int64_t j = 0; j < rule.k; ++j) {
      weights[j] = exp_of(Lane<T>{row.logits[chosen[j]] - most}).v;
      sum = sum + weights[j];
    }
    for (std::int64_t j = 0; j < rule.k; ++j) weights[j] = weights[j] / sum;
    return;
  }
  for (std::int64_t j = 0; j < rule.k; ++j) {
    weights[j] = row.scores[chosen[j]];
    sum = sum + weights[j];
  }
  if (!rule.renormalize) return;
  sum = sum + static_cast<T>(0x1p-66);
  for (std::int64_t j = 0; j < rule.k; ++j) weights[j] = weights[j] / sum;
}

/// The gradient of the logits of a known row into row.scores. d_weights, d_given: of the token, or null; d_scores:
/// room.
template <class V, class T>
ZR_HOST_DEVICE ZR_INLINE void backward_of_row(GateRow<T>& row, const GateBackwardArgs& args, const std::int32_t* chosen,
                                              const T* d_weights, const T* d_given, T* d_scores) {
  const GateRule& rule = args.rule;
  const std::int64_t room = room_of(rule.experts);
  const bool with_z = args.d_z_sum != 0.0;
  scores_of_row<V>(row, rule, with_z);
  for (std::int64_t e = 0; e < room; ++e) d_scores[e] = T{0};
  if (args.d_score_sums != nullptr) {
    for (std::int64_t e = 0; e < rule.experts; ++e) d_scores[e] = static_cast<T>(args.d_score_sums[e]);
  }
  if (d_given != nullptr) {
    for (std::int64_t e = 0; e < rule.experts; ++e) d_scores[e] = d_scores[e] + d_given[e];
  }
  // By the weights: d s_j = scale (g_j - sum_i g_i w_i) / sum of scores, or scale g_j.
  T d_direct[kMostChosen];
  const bool of_chosen = rule.score == GateScore::kSoftmaxOfChosen;
  if (d_weights != nullptr) {
    const T scale = static_cast<T>(rule.scale);
    T weights[kMostChosen];
    weights_of(row, rule, chosen, weights);
    T dot = T{0};
    T sum = T{0};
    for (std::int64_t j = 0; j < rule.k; ++j) {
      dot = fused(Lane<T>{d_weights[j]}, Lane<T>{weights[j]}, Lane<T>{dot}).v;
      sum = sum + row.scores[chosen[j]];
    }
    sum = sum + static_cast<T>(0x1p-66);
    for (std::int64_t j = 0; j < rule.k; ++j) {
      if (of_chosen) {
        d_direct[j] = scale * (weights[j] * (d_weights[j] - dot));
      } else if (rule.renormalize) {
        d_scores[chosen[j]] = d_scores[chosen[j]] + scale * ((d_weights[j] - dot) / sum);
      } else {
        d_scores[chosen[j]] = d_scores[chosen[j]] + scale * d_weights[j];
      }
    }
  }
  const double log_sum = with_z ? log_sum_of_row(row) : 0.0;
  const V z = V::splat(static_cast<T>(2.0 * args.d_z_sum * log_sum));
  if (rule.score == GateScore::kSigmoid) {
    const V one = V::splat(T{1});
    const V most = V::splat(row.most);
    const V exponents = V::splat(row.sum);
    for_each_of_row<V>(room, [&](std::int64_t, std::int64_t e) {
      const V s = V::load(row.scores + e);
      V d = V::load(d_scores + e) * (s * (one - s));
      if (with_z) d = fused(z, exp_of(V::load(row.logits + e) - most) / exponents, d);
      d.store(row.scores + e);
    });
  } else {
    // Softmax: d l = s (d s - sum_i s_i d s_i); the z-loss adds z s.
    GateSum<V> dots;
    for_each_of_row<V>(room, [&](std::int64_t k, std::int64_t e) {
      dots.sum[k] = fused(V::load(row.scores + e), V::load(d_scores + e), dots.sum[k]);
    });
    const V less = z - V::splat(dots.folded());
    for_each_of_row<V>(room, [&](std::int64_t, std::int64_t e) {
      (V::load(row.scores + e) * (V::load(d_scores + e) + less)).store(row.scores + e);
    });
  }
  if (of_chosen && d_weights != nullptr) {
    for (std::int64_t j = 0; j < rule.k; ++j) row.scores[chosen[j]] = row.scores[chosen[j]] + d_direct[j];
  }
}

}  // namespace
}  // namespace zeroth::kernels
