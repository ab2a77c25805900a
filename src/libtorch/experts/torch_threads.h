// Loops of kernels on the threads of torch's operators.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace zeroth::libtorch {

/// Calls body(begin, end) for parts that make up [0, count), of `grain` or more but for the last, on torch's threads.
/// Blocks, and throws what a part throws.
void for_parts(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body);

/// Rows of so many bytes each that are worth a thread's start.
[[nodiscard]] std::int64_t grain_of_rows(std::int64_t row_bytes);

/// The dtypes that the kernels of a mixture of experts compute with.
[[nodiscard]] std::optional<DType> kernel_dtype(c10::ScalarType dtype);
/// Of the weights of such rows: float64 for float64, else float32.
[[nodiscard]] c10::ScalarType weight_dtype(c10::ScalarType of_rows);

}  // namespace zeroth::libtorch
