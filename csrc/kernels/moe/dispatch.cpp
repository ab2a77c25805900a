#include <kernels/common/fp_environment.h>
#include <kernels/moe/dispatch.h>
#include <kernels/moe/dispatch_math.h>
#include <kernels/moe/dispatch_variants.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <limits>
#include <string>

namespace zeroth::kernels {
namespace {

constexpr std::int64_t kMostDispatched = std::int64_t{1} << 20;  // experts

/// An entry of a full expert; `position` is j * tokens + t.
struct Contender {
  std::uint64_t key;
  std::int64_t position;

  friend bool operator<(const Contender& a, const Contender& b) {
    return a.key != b.key ? a.key < b.key : a.position < b.position;
  }
};

void check_counts(const DispatchArgs& args, const char* where) {
  const bool good = args.tokens >= 0 && args.k >= 1 && args.k <= 64 && args.experts >= 1 &&
                    args.experts <= kMostDispatched && args.capacity >= kNoCapacity &&
                    args.tokens <= std::numeric_limits<std::int32_t>::max() / args.k;
  ZR_CHECK(good, ErrorCode::kUsage, "no such dispatch",
           ErrorContext{.where = where,
                        .expected = "tokens from 0 on, k from 1 to 64, below 2^31 entries, 1 to 2^20 experts, a "
                                    "capacity from 0 on or -1",
                        .got = std::to_string(args.tokens) + " tokens, k " + std::to_string(args.k) + ", " +
                               std::to_string(args.experts) + " experts, capacity " + std::to_string(args.capacity)});
  if (args.policy != DropPolicy::kByScore || args.capacity == kNoCapacity) return;
  ZR_CHECK((args.weights != nullptr || args.tokens == 0) &&
               (args.weights_dtype == DType::kFloat32 || args.weights_dtype == DType::kFloat64),
           ErrorCode::kUsage, "dropping by score needs weights of float32 or float64", ErrorContext{.where = where});
}

void check_experts(const DispatchArgs& args, std::int64_t first, std::int64_t last, const char* where) {
  check_counts(args, where);
  ZR_CHECK(first >= 0 && first <= last && last <= args.experts, ErrorCode::kUsage, "no such range of experts",
           ErrorContext{.where = where, .got = std::to_string(first) + " to " + std::to_string(last)});
}

std::uint64_t key_of_entry(const DispatchArgs& args, std::int64_t t, std::int64_t j) {
  if (args.policy == DropPolicy::kRandom) return priority_of(args.seed, args.first_token + t, j);
  const std::int64_t entry = t * args.k + j;
  return rank_of(args.weights_dtype == DType::kFloat64
                     ? static_cast<const double*>(args.weights)[entry]
                     : static_cast<double>(static_cast<const float*>(args.weights)[entry]));
}

/// Keeps the first `capacity` entries by position; slot_of of the others is -1.
void keep_first(const DispatchArgs& args, std::int64_t first, std::int64_t last) {
  std::fill(args.counts + first, args.counts + last, 0);
  for (std::int64_t j = 0; j < args.k; ++j) {
    for (std::int64_t entry = j; entry < args.tokens * args.k; entry += args.k) {
      const std::int64_t e = args.chosen[entry];
      if (e < first || e >= last) continue;
      const bool kept = args.counts[e] < args.capacity;
      args.slot_of[entry] = kept ? 0 : -1;
      args.counts[e] += kept ? 1 : 0;
    }
  }
}

/// Keeps all entries, and counts them.
void keep_all(const DispatchArgs& args, std::int64_t first, std::int64_t last) {
  std::fill(args.counts + first, args.counts + last, 0);
  for (std::int64_t entry = 0; entry < args.tokens * args.k; ++entry) {
    const std::int64_t e = args.chosen[entry];
    if (e < first || e >= last) continue;
    args.slot_of[entry] = 0;
    ++args.counts[e];
  }
}

/// Of the experts that are too full, drops all but the contenders of the least keys. After keep_all().
void drop_last(const DispatchArgs& args, std::int64_t first, std::int64_t last) {
  auto* const next = static_cast<std::int64_t*>(args.workspace);  // of an expert's contenders
  auto* const contenders = reinterpret_cast<Contender*>(next + (last - first));
  std::int64_t room = 0;
  for (std::int64_t e = first; e < last; ++e) {
    next[e - first] = room;
    if (args.counts[e] > args.capacity) room += args.counts[e];
  }
  if (room == 0) return;
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    for (std::int64_t j = 0; j < args.k; ++j) {
      const std::int64_t e = args.chosen[t * args.k + j];
      if (e < first || e >= last || args.counts[e] <= args.capacity) continue;
      contenders[next[e - first]++] = {key_of_entry(args, t, j), j * args.tokens + t};
    }
  }
  for (std::int64_t e = first; e < last; ++e) {
    if (args.counts[e] <= args.capacity) continue;
    Contender* const end = contenders + next[e - first];
    Contender* const kept = end - args.counts[e] + args.capacity;
    std::nth_element(end - args.counts[e], kept, end);
    for (const Contender* one = kept; one < end; ++one)
      args.slot_of[one->position % args.tokens * args.k + one->position / args.tokens] = -1;
    args.counts[e] = args.capacity;
  }
}

}  // namespace

std::size_t dispatch_workspace_bytes(const DispatchArgs& args, std::int64_t num_experts) {
  check_counts(args, "kernels.dispatch");
  const bool drops = args.capacity != kNoCapacity && args.policy != DropPolicy::kByPosition;
  const std::int64_t contenders = drops ? args.tokens * args.k : 0;
  return static_cast<std::size_t>(num_experts) * sizeof(std::int64_t) +
         static_cast<std::size_t>(contenders) * sizeof(Contender);
}

void dispatch_check(const DispatchArgs& args) {
  check_counts(args, "kernels.dispatch");
  std::int32_t most = -1;
  for (std::int64_t entry = 0; entry < args.tokens * args.k; ++entry) most = std::max(most, args.chosen[entry]);
  if (most < args.experts) return;
  const std::int32_t* const wrong =
      std::find_if(args.chosen, args.chosen + args.tokens * args.k, [&](std::int32_t e) { return e >= args.experts; });
  throw Error(ErrorCode::kUsage, "no such expert",
              ErrorContext{.where = "kernels.dispatch",
                           .expected = "below " + std::to_string(args.experts) + ", or negative: not routed",
                           .got = "token " + std::to_string((wrong - args.chosen) / args.k) + ", expert " +
                                  std::to_string(*wrong)});
}

void dispatch_keep(const DispatchArgs& args, std::int64_t first, std::int64_t last) {
  check_experts(args, first, last, "kernels.dispatch_keep");
  if (first == 0) {
    for (std::int64_t entry = 0; entry < args.tokens * args.k; ++entry) {
      if (args.chosen[entry] < 0) args.slot_of[entry] = -1;
    }
  }
  if (args.capacity != kNoCapacity && args.policy == DropPolicy::kByPosition) return keep_first(args, first, last);
  keep_all(args, first, last);
  if (args.capacity != kNoCapacity) drop_last(args, first, last);
}

void dispatch_offsets(const DispatchArgs& args) {
  check_counts(args, "kernels.dispatch_offsets");
  args.offsets[0] = 0;
  for (std::int64_t e = 0; e < args.experts; ++e) args.offsets[e + 1] = args.offsets[e] + args.counts[e];
}

void dispatch_place(const DispatchArgs& args, std::int64_t first, std::int64_t last) {
  check_experts(args, first, last, "kernels.dispatch_place");
  auto* const next = static_cast<std::int64_t*>(args.workspace);
  std::copy(args.offsets + first, args.offsets + last, next);
  for (std::int64_t entry = 0; entry < args.tokens * args.k; ++entry) {
    const std::int64_t e = args.chosen[entry];
    if (e < first || e >= last || args.slot_of[entry] < 0) continue;
    const std::int64_t slot = next[e - first]++;
    args.slot_of[entry] = static_cast<std::int32_t>(slot);
    args.source_of[slot] = static_cast<std::int32_t>(entry);
  }
}

void dispatch(const DispatchArgs& args) {
  dispatch_check(args);
  dispatch_keep(args, 0, args.experts);
  dispatch_offsets(args);
  dispatch_place(args, 0, args.experts);
}

void jitter(const JitterArgs& args, Isa isa) {
  ZR_CHECK(args.tokens >= 0 && args.width >= 0 && args.width <= std::numeric_limits<std::uint32_t>::max(),
           ErrorCode::kUsage, "no such rows",
           ErrorContext{.where = "kernels.jitter",
                        .got = std::to_string(args.tokens) + " tokens of " + std::to_string(args.width)});
  ZR_CHECK(args.dtype == DType::kFloat32 || args.dtype == DType::kBFloat16 || args.dtype == DType::kFloat16,
           ErrorCode::kUsage, "jitter needs float32, bfloat16 or float16", ErrorContext{.where = "kernels.jitter"});
  ZR_CHECK(args.epsilon >= 0.0F && args.epsilon <= 1.0F, ErrorCode::kUsage, "epsilon is from 0 to 1",
           ErrorContext{.where = "kernels.jitter", .got = std::to_string(args.epsilon)});
  detail::require_supported(isa, "jitter");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::jitter_scalar, detail::jitter_avx2, detail::jitter_avx512)(args);
}

}  // namespace zeroth::kernels
