#include <kernels/common/arch.h>
#include <kernels/common/dispatch.h>
#include <zeroth/base/error.h>

#include <cpuid.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

namespace zeroth::kernels {
namespace {

/// By the instruction itself: clang 14 has no such word for __builtin_cpu_supports.
bool has_f16c() noexcept {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool has_avx2() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 && has_f16c();
}

bool has_avx512() noexcept {
  return has_avx2() && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512vl") != 0;
}

constexpr const char* kVariable = "ZEROTH_ISA";

/// Asked once: in a virtual machine the cpuid instruction takes microseconds, and every call of a kernel wants to know.
Isa widest_isa() noexcept {
  static const Isa widest = has_avx512() ? Isa::kAvx512 : has_avx2() ? Isa::kAvx2 : Isa::kScalar;
  return widest;
}

/// What the environment asks for, if it is one of the three.
std::optional<Isa> asked_isa() noexcept {
  const char* asked = std::getenv(kVariable);
  if (asked == nullptr) {
    return std::nullopt;
  }
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (name_of(isa) == asked) {
      return isa;
    }
  }
  return std::nullopt;
}

}  // namespace

Isa best_isa() noexcept {
  static const Isa chosen = std::min(widest_isa(), asked_isa().value_or(Isa::kAvx512));
  return chosen;
}

void require_isa_override() {
  const char* asked = std::getenv(kVariable);
  if (asked == nullptr) {
    return;
  }
  const std::optional<Isa> isa = asked_isa();
  ZR_CHECK(isa.has_value() && *isa <= widest_isa(), ErrorCode::kEnvironment,
           isa.has_value() ? "this processor lacks the instruction set that is asked for" : "no such instruction set",
           ErrorContext{.where = "kernels",
                        .which = kVariable,
                        .expected = "scalar, avx2 or avx512, at most " + std::string(name_of(widest_isa())) + " here",
                        .got = asked,
                        .hint = "unset it: the widest set is chosen by itself, and all give the same bits"});
}

bool is_supported(Isa isa) noexcept {
  return isa <= widest_isa();  // each set holds the ones before it
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
  note(has_f16c(), "f16c");
  note(__builtin_cpu_supports("avx512f") != 0, "avx512f");
  note(__builtin_cpu_supports("avx512dq") != 0, "avx512dq");
  note(__builtin_cpu_supports("avx512bw") != 0, "avx512bw");
  note(__builtin_cpu_supports("avx512vl") != 0, "avx512vl");
  const bool asked = std::getenv(kVariable) != nullptr;
  return std::string(name_of(best_isa())) + (asked ? ", as " + std::string(kVariable) + " says" : "") + " (" +
         (features.empty() ? "no AVX2" : features) + ")";
}

namespace detail {

bool has_fast_string_copy() noexcept {
  static const bool has = [] {
    constexpr unsigned kErms = 1U << 9U;
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & kErms) != 0;
  }();
  return has;
}

void require_supported(Isa isa, const char* op) {
  ZR_CHECK(is_supported(isa), ErrorCode::kUsage, "instruction set not supported by this processor",
           ErrorContext{.where = std::string("kernels.") + op,
                        .expected = "at most " + describe_isa(),
                        .got = std::string(name_of(isa)),
                        .hint = "pass zeroth::kernels::best_isa()"});
}

}  // namespace detail
}  // namespace zeroth::kernels
