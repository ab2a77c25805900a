#include <kernels/common/fp_environment.h>
#include <kernels/moe/gate.h>
#include <kernels/moe/gate_math.h>
#include <kernels/moe/gate_variants.h>
#include <zeroth/base/error.h>

#include <cmath>
#include <string>

namespace zeroth::kernels {
namespace {

void check_gate(const GateRule& rule, DType dtype, std::int64_t tokens, const char* op, const char* where, Isa isa) {
  ZR_CHECK(tokens >= 0, ErrorCode::kUsage, "negative number of tokens", ErrorContext{.where = where});
  ZR_CHECK(has_gate(dtype), ErrorCode::kUsage, "logits of a router are float64, float32, bfloat16 or float16",
           ErrorContext{.where = where});
  ZR_CHECK(is_gate_rule(rule), ErrorCode::kUsage, "no such router",
           ErrorContext{.where = where,
                        .expected = "1 to 1024 experts; k from 1 to 64, at most the experts of the kept groups; "
                                    "groups that divide the experts; a finite scale",
                        .got = std::to_string(rule.experts) + " experts, k " + std::to_string(rule.k) + ", " +
                               std::to_string(rule.kept_groups) + " of " + std::to_string(rule.groups) +
                               " groups, scale " + std::to_string(rule.scale)});
  detail::require_supported(isa, op);
}

}  // namespace

void gate(const GateArgs& args, Isa isa) {
  check_gate(args.rule, args.dtype, args.tokens, "gate", "kernels.gate", isa);
  for (std::int64_t e = 0; args.bias != nullptr && e < args.rule.experts; ++e) {
    ZR_CHECK(std::isfinite(args.bias[e]), ErrorCode::kUsage, "a bias that is not finite",
             ErrorContext{.where = "kernels.gate", .got = "expert " + std::to_string(e)});
  }
  const detail::FpEnvironment environment;
  detail::select(isa, detail::gate_scalar, detail::gate_avx2, detail::gate_avx512)(args);
}

void gate_backward(const GateBackwardArgs& args, Isa isa) {
  check_gate(args.rule, args.dtype, args.tokens, "gate_backward", "kernels.gate_backward", isa);
  std::int64_t wrong = -1;
  {
    const detail::FpEnvironment environment;
    wrong = detail::select(isa, detail::gate_backward_scalar, detail::gate_backward_avx2,
                           detail::gate_backward_avx512)(args);
  }
  ZR_CHECK(wrong < 0, ErrorCode::kUsage, "no such expert",
           ErrorContext{.where = "kernels.gate_backward",
                        .expected = "0 to " + std::to_string(args.rule.experts - 1),
                        .got = "token " + std::to_string(wrong / args.rule.k) + ", expert " +
                               std::to_string(args.chosen[wrong])});
}

}  // namespace zeroth::kernels
