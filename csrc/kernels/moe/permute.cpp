#include <kernels/common/fp_environment.h>
#include <kernels/moe/permute.h>
#include <kernels/moe/permute_math.h>
#include <kernels/moe/permute_variants.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <limits>
#include <string>

namespace zeroth::kernels {
namespace {

template <class Args>
void check_moved_rows(const Args& args, const char* op, const std::string& where, Isa isa) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const bool good = args.tokens >= 0 && args.slots >= 0 && args.slots <= kMost && args.width >= 0 && args.k >= 1 &&
                    args.k <= 64 && args.tokens <= kMost / args.k && args.width <= kMost;
  ZR_CHECK(good, ErrorCode::kUsage, "no such rows",
           ErrorContext{.where = where,
                        .expected = "tokens, slots and width from 0 on, k from 1 to 64, below 2^31 entries and slots",
                        .got = std::to_string(args.tokens) + " tokens, k " + std::to_string(args.k) + ", " +
                               std::to_string(args.slots) + " slots, width " + std::to_string(args.width)});
  ZR_CHECK(has_rows(args.dtype), ErrorCode::kUsage, "rows are float64, float32, bfloat16 or float16",
           ErrorContext{.where = where});
  detail::require_supported(isa, op);
}

/// Places are below `limit`; those of slot_of may be negative.
void check_places(const std::int32_t* places, std::int64_t n, std::int64_t limit, bool negative, const char* what,
                  const std::string& where) {
  const std::int32_t* const wrong =
      std::find_if(places, places + n, [&](std::int32_t place) { return place >= limit || (place < 0 && !negative); });
  ZR_CHECK(wrong == places + n, ErrorCode::kUsage, std::string("no such ") + what,
           ErrorContext{.where = where,
                        .expected = "below " + std::to_string(limit),
                        .got = std::to_string(*wrong) + " at " + std::to_string(wrong - places)});
}

}  // namespace

void permute(const PermuteArgs& args, Isa isa) {
  check_moved_rows(args, "permute", "kernels.permute", isa);
  check_places(args.source_of, args.slots, args.tokens * args.k, false, "entry", "kernels.permute");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::permute_scalar, detail::permute_avx2, detail::permute_avx512)(args);
}

void unpermute(const UnpermuteArgs& args, Isa isa) {
  check_moved_rows(args, "unpermute", "kernels.unpermute", isa);
  check_places(args.slot_of, args.tokens * args.k, args.slots, true, "slot", "kernels.unpermute");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::unpermute_scalar, detail::unpermute_avx2, detail::unpermute_avx512)(args);
}

void unpermute_weights(const UnpermuteArgs& args, Isa isa) {
  check_moved_rows(args, "unpermute_weights", "kernels.unpermute_weights", isa);
  check_places(args.slot_of, args.tokens * args.k, args.slots, true, "slot", "kernels.unpermute_weights");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::unpermute_weights_scalar, detail::unpermute_weights_avx2,
                 detail::unpermute_weights_avx512)(args);
}

}  // namespace zeroth::kernels
