#include <zeroth/base/error.h>
#include <zeroth/offload/host_rows.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

namespace zeroth {
namespace {

constexpr std::size_t kGrain = 16;  // rows

/// body(i) for each of n rows, on the threads of the pool.
template <class Body>
void for_rows(std::size_t n, ThreadPool& pool, const Body& body) {
  pool.parallel_for(n, kGrain, [&body](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) body(row);
  });
}

void quantize(const float* in, std::int64_t n, std::int8_t* values, float& scale) {
  float largest = 0.0F;
  bool finite = true;
  for (std::int64_t i = 0; i < n; ++i) {
    largest = std::max(largest, std::abs(in[i]));
    finite = finite && std::isfinite(in[i]);
  }
  scale = finite ? largest / 127.0F : std::numeric_limits<float>::quiet_NaN();
  if (!finite || scale == 0.0F) {
    std::memset(values, 0, static_cast<std::size_t>(n));
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const float steps = std::clamp(std::nearbyint(in[i] / scale), -127.0F, 127.0F);
    values[i] = static_cast<std::int8_t>(steps);
  }
}

}  // namespace

void require_rows(std::span<const std::int64_t> indices, std::int64_t rows) {
  for (std::size_t position = 0; position < indices.size(); ++position) {
    const std::int64_t index = indices[position];
    if (index >= 0 && index < rows) continue;
    throw Error(ErrorCode::kUsage, "an index is not a row of the table",
                {.where = "host_table",
                 .which = "position " + std::to_string(position) + " of " + std::to_string(indices.size()),
                 .expected = "0 to " + std::to_string(rows - 1),
                 .got = std::to_string(index)});
  }
}

void gather_rows(const float* table, RowShape shape, std::span<const std::int64_t> indices, float* out,
                 ThreadPool& pool) {
  const std::size_t bytes = static_cast<std::size_t>(shape.dim) * sizeof(float);
  for_rows(indices.size(), pool, [&](std::size_t i) {
    std::memcpy(out + static_cast<std::int64_t>(i) * shape.dim, table + indices[i] * shape.dim, bytes);
  });
}

std::int64_t blocks_of_row(std::int64_t dim, std::int64_t block) {
  ZR_CHECK(dim >= 1 && block >= 1, ErrorCode::kUsage, "a row has no values, or its blocks have none",
           {.where = "host_table",
            .expected = "1 or more",
            .got = std::to_string(dim) + " values in blocks of " + std::to_string(block)});
  return (dim + block - 1) / block;
}

void gather_rows_in_8_bits(const float* table, RowShape shape, std::span<const std::int64_t> indices,
                           std::int64_t block, std::int8_t* values, float* scales, ThreadPool& pool) {
  const std::int64_t blocks = blocks_of_row(shape.dim, block);
  for_rows(indices.size(), pool, [&](std::size_t i) {
    const auto at = static_cast<std::int64_t>(i);
    const float* const row = table + indices[i] * shape.dim;
    for (std::int64_t number = 0; number < blocks; ++number) {
      const std::int64_t begin = number * block;
      quantize(row + begin, std::min(block, shape.dim - begin), values + at * shape.dim + begin,
               scales[at * blocks + number]);
    }
  });
}

TouchedRows sum_touched_rows(std::span<const std::int64_t> indices, const float* grads, std::int64_t dim, float factor,
                             ThreadPool& pool) {
  std::vector<std::size_t> order(indices.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&indices](std::size_t position) { return indices[position]; });
  TouchedRows touched;
  std::vector<std::size_t> begins;  // of each row in `order`
  for (std::size_t at = 0; at < order.size(); ++at) {
    if (at > 0 && indices[order[at]] == indices[order[at - 1]]) continue;
    touched.rows.push_back(indices[order[at]]);
    begins.push_back(at);
  }
  begins.push_back(order.size());
  touched.sums.resize(touched.rows.size() * static_cast<std::size_t>(dim));
  // One thread adds all gradients of a row: the order is that of the positions, whatever the threads.
  for_rows(touched.rows.size(), pool, [&](std::size_t row) {
    float* const sum = touched.sums.data() + row * static_cast<std::size_t>(dim);
    for (std::size_t at = begins[row]; at < begins[row + 1]; ++at) {
      const float* const grad = grads + static_cast<std::int64_t>(order[at]) * dim;
      for (std::int64_t i = 0; i < dim; ++i) sum[i] += grad[i];
    }
    for (std::int64_t i = 0; i < dim; ++i) sum[i] *= factor;
  });
  return touched;
}

namespace {

/// body(place of the row's first value, its gradient) for each touched row.
template <class Body>
void for_touched(RowShape shape, const TouchedRows& touched, ThreadPool& pool, const Body& body) {
  for_rows(touched.rows.size(), pool, [&](std::size_t row) {
    body(touched.rows[row], touched.rows[row] * shape.dim,
         touched.sums.data() + static_cast<std::int64_t>(row) * shape.dim);
  });
}

}  // namespace

void update_rows_sgd(float* table, RowShape shape, const TouchedRows& touched, const RowHyper& hyper,
                     ThreadPool& pool) {
  for_touched(shape, touched, pool, [&](std::int64_t, std::int64_t at, const float* grad) {
    for (std::int64_t i = 0; i < shape.dim; ++i) table[at + i] -= hyper.lr * grad[i];
  });
}

void update_rows_adagrad(float* table, float* sums, RowShape shape, const TouchedRows& touched, const RowHyper& hyper,
                         ThreadPool& pool) {
  for_touched(shape, touched, pool, [&](std::int64_t row, std::int64_t at, const float* grad) {
    double squares = 0.0;
    for (std::int64_t i = 0; i < shape.dim; ++i) squares += static_cast<double>(grad[i]) * static_cast<double>(grad[i]);
    sums[row] += static_cast<float>(squares / static_cast<double>(shape.dim));
    const float rate = hyper.lr / (std::sqrt(sums[row]) + hyper.eps);
    for (std::int64_t i = 0; i < shape.dim; ++i) table[at + i] -= rate * grad[i];
  });
}

void update_rows_adam(float* table, float* first, float* second, RowShape shape, const TouchedRows& touched,
                      const RowHyper& hyper, ThreadPool& pool) {
  const auto steps = static_cast<double>(hyper.step);
  const double debias1 = 1.0 - std::pow(static_cast<double>(hyper.beta1), steps);
  const double debias2 = 1.0 - std::pow(static_cast<double>(hyper.beta2), steps);
  const auto rate = static_cast<float>(static_cast<double>(hyper.lr) * std::sqrt(debias2) / debias1);
  for_touched(shape, touched, pool, [&](std::int64_t, std::int64_t at, const float* grad) {
    for (std::int64_t i = 0; i < shape.dim; ++i) {
      first[at + i] += (1.0F - hyper.beta1) * (grad[i] - first[at + i]);
      second[at + i] += (1.0F - hyper.beta2) * (grad[i] * grad[i] - second[at + i]);
      table[at + i] -= rate * (first[at + i] / (std::sqrt(second[at + i]) + hyper.eps));
    }
  });
}

}  // namespace zeroth
