#include <kernels/common/arch.h>
#include <kernels/common/dispatch.h>
#include <zeroth/base/error.h>

namespace zeroth::kernels {
namespace {

bool has_avx2() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}

bool has_avx512() noexcept {
  return has_avx2() && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512vl") != 0;
}

}  // namespace

Isa best_isa() noexcept {
  if (has_avx512()) {
    return Isa::kAvx512;
  }
  return has_avx2() ? Isa::kAvx2 : Isa::kScalar;
}

bool is_supported(Isa isa) noexcept {
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return has_avx2();
    case Isa::kAvx512:
      return has_avx512();
  }
  return false;
}

std::string_view name_of(Isa isa) noexcept {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

std::string describe_isa() {
  std::string features;
  const auto note = [&features](bool present, const char* name) {
    if (present) {
      features += features.empty() ? name : std::string(" ") + name;
    }
  };
  __builtin_cpu_init();
  note(__builtin_cpu_supports("avx2") != 0, "avx2");
  note(__builtin_cpu_supports("fma") != 0, "fma");
  note(__builtin_cpu_supports("avx512f") != 0, "avx512f");
  note(__builtin_cpu_supports("avx512dq") != 0, "avx512dq");
  note(__builtin_cpu_supports("avx512bw") != 0, "avx512bw");
  note(__builtin_cpu_supports("avx512vl") != 0, "avx512vl");
  return std::string(name_of(best_isa())) + " (" + (features.empty() ? "no AVX2" : features) + ")";
}

namespace detail {

void require_supported(Isa isa, const char* op) {
  ZR_CHECK(is_supported(isa),
           ErrorCode::kUsage,
           "instruction set not supported by this processor",
           ErrorContext{.where = std::string("kernels.") + op,
                        .expected = "at most " + describe_isa(),
                        .got = std::string(name_of(isa)),
                        .hint = "pass zeroth::kernels::best_isa()"});
}

}  // namespace detail
}  // namespace zeroth::kernels
