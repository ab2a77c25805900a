// What both machines compute on the host.
#pragma once

#include <kernels/common/dispatch.h>
#include <kernels/norm/norm.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::detail {

/// Sets n entries to `value`, rounded to `dtype`.
void fill_entries(void* data, std::int64_t n, DType dtype, double value);

/// Adds the squares of n gradients, each times `factor`: the norm is that of what the update sees.
void add_to_norm(kernels::NormAccumulator& norm, const void* data, DType dtype, std::int64_t n, double factor,
                 kernels::Isa isa);

}  // namespace zeroth::detail
