#include <kernels/common/fp_environment.h>
#include <kernels/lowrank/lowrank.h>
#include <kernels/lowrank/lowrank_math.h>
#include <kernels/lowrank/lowrank_variants.h>
#include <zeroth/base/error.h>

#include <string>

namespace zeroth::kernels {
namespace {

void check(const LowRankShape& shape, const char* op, const char* where, Isa isa) {
  ZR_CHECK(is_matrix(shape), ErrorCode::kUsage, "no such matrix",
           ErrorContext{.where = where,
                        .expected = "rows and columns from 0 on, and a stride of at least the columns",
                        .got = std::to_string(shape.rows) + " x " + std::to_string(shape.columns) + ", stride " +
                               std::to_string(shape.stride)});
  ZR_CHECK(has_rank(shape.rank), ErrorCode::kUsage, "no such rank",
           ErrorContext{.where = where, .expected = "1 to 64", .got = std::to_string(shape.rank)});
  detail::require_supported(isa, op);
}

}  // namespace

void lowrank_product(const LowRankProductArgs& args, Isa isa) {
  check(args.shape, "lowrank_product", "kernels.lowrank_product", isa);
  const detail::FpEnvironment environment;
  detail::select(isa, detail::lowrank_product_scalar, detail::lowrank_product_avx2,
                 detail::lowrank_product_avx512)(args);
}

void lowrank_transposed_product(const LowRankProductArgs& args, Isa isa) {
  check(args.shape, "lowrank_transposed_product", "kernels.lowrank_transposed_product", isa);
  const detail::FpEnvironment environment;
  detail::select(isa, detail::lowrank_transposed_scalar, detail::lowrank_transposed_avx2,
                 detail::lowrank_transposed_avx512)(args);
}

void lowrank_restore(const LowRankRestoreArgs& args, Isa isa) {
  check(args.shape, "lowrank_restore", "kernels.lowrank_restore", isa);
  const detail::FpEnvironment environment;
  detail::select(isa, detail::lowrank_restore_scalar, detail::lowrank_restore_avx2,
                 detail::lowrank_restore_avx512)(args);
}

int lowrank_orthonormalize(const OrthonormalizeArgs& args, Isa isa) {
  check(shape_of_factor(args.rows, args.stride, args.rank), "lowrank_orthonormalize", "kernels.lowrank_orthonormalize",
        isa);
  const detail::FpEnvironment environment;
  return detail::select(isa, detail::lowrank_orthonormalize_scalar, detail::lowrank_orthonormalize_avx2,
                        detail::lowrank_orthonormalize_avx512)(args);
}

void lowrank_draw(float* column, std::int64_t n, std::uint32_t seed) {
  const detail::FpEnvironment environment;
  detail::lowrank_draw_scalar(column, n, seed);
}

void lowrank_draw_missing(const LowRankDrawArgs& args) {
  check(shape_of_factor(args.n, args.stride, args.rank), "lowrank_draw_missing", "kernels.lowrank_draw_missing",
        Isa::kScalar);
  const detail::FpEnvironment environment;
  detail::lowrank_draw_missing_scalar(args);
}

}  // namespace zeroth::kernels
