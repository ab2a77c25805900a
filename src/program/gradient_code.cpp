#include <zeroth/base/error.h>
#include <zeroth/program/gradient_code.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <string>
#include <utility>

namespace zeroth {
namespace {

constexpr const char* kCode = "program.gradient_code";
constexpr int kDraws = 32;          // of which the code with the smallest coefficients is taken
constexpr double kMostLeft = 1e-9;  // of an equation of 1

using Vector = std::vector<double>;
using Matrix = std::vector<Vector>;  // by rows

/// Solves columns x = right for the least sum of squares, by reflections that make the columns a triangle. Empty where
/// a column depends on the others.
Vector least_squares(Matrix columns, Vector right) {
  const std::size_t unknowns = columns.size();
  const std::size_t equations = right.size();
  for (std::size_t k = 0; k < unknowns; ++k) {
    Vector& column = columns[k];
    double length = 0.0;
    double whole = 0.0;
    for (std::size_t i = 0; i < equations; ++i) {
      whole += column[i] * column[i];
      if (i >= k) length += column[i] * column[i];
    }
    if (length <= 1e-20 * whole || k >= equations) return {};
    length = std::sqrt(length);
    Vector mirror(column.begin() + static_cast<std::ptrdiff_t>(k), column.end());
    mirror[0] += column[k] < 0 ? -length : length;
    double square = 0.0;
    for (const double x : mirror) square += x * x;
    const auto reflect = [&](Vector& at) {
      double part = 0.0;
      for (std::size_t i = 0; i < mirror.size(); ++i) part += mirror[i] * at[k + i];
      for (std::size_t i = 0; i < mirror.size(); ++i) at[k + i] -= 2.0 * part / square * mirror[i];
    };
    for (std::size_t other = k; other < unknowns; ++other) reflect(columns[other]);
    reflect(right);
  }
  Vector x(unknowns);
  for (std::size_t k = unknowns; k-- > 0;) {
    x[k] = right[k];
    for (std::size_t other = k + 1; other < unknowns; ++other) x[k] -= columns[other][k] * x[other];
    x[k] /= columns[k][k];
  }
  return x;
}

/// From -1 to 1, the same with every library.
double drawn_coefficient(std::mt19937_64& random) {
  return static_cast<double>(random() >> 11U) * 0x1p-52 - 1.0;
}

/// Rows of a drawn cyclic code; empty where some chunks' columns of the drawn matrix depend on each other.
std::vector<std::vector<CodedChunk>> cyclic_rows(int workers, int stragglers, std::mt19937_64& random) {
  const auto n = static_cast<std::size_t>(workers);
  const auto s = static_cast<std::size_t>(stragglers);
  Matrix columns(n, Vector(s));  // of the matrix whose null space has the rows
  for (std::size_t c = 0; c + 1 < n; ++c) {
    for (std::size_t k = 0; k < s; ++k) {
      columns[c][k] = drawn_coefficient(random);
      columns[n - 1][k] -= columns[c][k];
    }
  }
  std::vector<std::vector<CodedChunk>> rows(n);
  for (std::size_t worker = 0; worker < n; ++worker) {
    rows[worker].push_back({static_cast<int>(worker), 1.0});
    Matrix others;
    Vector right = columns[worker];
    for (double& x : right) x = -x;
    for (std::size_t k = 1; k <= s; ++k) others.push_back(columns[(worker + k) % n]);
    const Vector coefficients = least_squares(std::move(others), std::move(right));
    if (coefficients.empty()) return {};
    for (std::size_t k = 1; k <= s; ++k)
      rows[worker].push_back({static_cast<int>((worker + k) % n), coefficients[k - 1]});
    std::sort(rows[worker].begin(), rows[worker].end(), [](auto a, auto b) { return a.chunk < b.chunk; });
  }
  return rows;
}

double greatest_coefficient(const std::vector<std::vector<CodedChunk>>& rows) {
  double greatest = 0.0;
  double least = std::numeric_limits<double>::infinity();
  for (const auto& row : rows) {
    for (const CodedChunk& chunk : row) {
      greatest = std::max(greatest, std::fabs(chunk.coefficient));
      least = std::min(least, std::fabs(chunk.coefficient));
    }
  }
  return greatest / least;
}

std::vector<std::size_t> known_workers(const GradientCode& code, std::span<const int> survivors) {
  std::vector<std::size_t> workers;
  std::vector<bool> seen(static_cast<std::size_t>(code.workers), false);
  for (const int survivor : survivors) {
    ZR_CHECK(survivor >= 0 && survivor < code.workers && !seen[static_cast<std::size_t>(survivor)], ErrorCode::kUsage,
             "a sum of coded gradients has another worker twice, or one that is none",
             {.where = kCode,
              .expected = "different workers from 0 to " + std::to_string(code.workers - 1),
              .got = std::to_string(survivor)});
    workers.push_back(static_cast<std::size_t>(survivor));
    seen[static_cast<std::size_t>(survivor)] = true;
  }
  return workers;
}

[[noreturn]] void refuse_survivors(const GradientCode& code, std::size_t survivors) {
  throw Error(ErrorCode::kUsage, "these workers do not determine the sum of the gradients",
              {.where = kCode,
               .expected = "at least " + std::to_string(code.workers - code.stragglers) + " of " +
                           std::to_string(code.workers) + " workers",
               .got = std::to_string(survivors)});
}

}  // namespace

GradientCode gradient_code(int workers, int stragglers, std::uint64_t seed) {
  ZR_CHECK(stragglers >= 0 && stragglers < workers, ErrorCode::kUsage, "no code has so many stragglers",
           {.where = kCode,
            .expected = "0 to " + std::to_string(workers - 1) + " stragglers of " + std::to_string(workers),
            .got = std::to_string(stragglers)});
  GradientCode code{.workers = workers, .stragglers = stragglers, .rows = {}};
  if (code.is_fractional()) {
    for (int worker = 0; worker < workers; ++worker) {
      const int first = worker - worker % (stragglers + 1);
      auto& row = code.rows.emplace_back();
      for (int chunk = first; chunk <= first + stragglers; ++chunk) row.push_back({chunk, 1.0});
    }
    return code;
  }
  std::mt19937_64 random(seed);
  double best = std::numeric_limits<double>::infinity();
  for (int draw = 0; draw < kDraws; ++draw) {
    auto rows = cyclic_rows(workers, stragglers, random);
    if (rows.empty() || !(greatest_coefficient(rows) < best)) continue;
    best = greatest_coefficient(rows);
    code.rows = std::move(rows);
  }
  ZR_ASSERT(!code.rows.empty(), "no drawn code has independent rows");
  return code;
}

std::vector<double> decode_coefficients(const GradientCode& code, std::span<const int> survivors) {
  const std::vector<std::size_t> workers = known_workers(code, survivors);
  Vector coefficients(workers.size(), 0.0);
  if (code.is_fractional()) {
    const auto size = static_cast<std::size_t>(code.stragglers + 1);
    std::vector<bool> has(static_cast<std::size_t>(code.workers) / size, false);
    for (std::size_t k = 0; k < workers.size(); ++k) {
      if (has[workers[k] / size]) continue;
      has[workers[k] / size] = true;
      coefficients[k] = 1.0;
    }
    if (std::find(has.begin(), has.end(), false) != has.end()) refuse_survivors(code, workers.size());
    return coefficients;
  }
  // So many rows are independent; more would not be.
  const auto enough = static_cast<std::size_t>(code.workers - code.stragglers);
  if (workers.size() < enough) refuse_survivors(code, workers.size());
  Matrix columns;
  for (std::size_t k = 0; k < enough; ++k) {
    Vector& column = columns.emplace_back(static_cast<std::size_t>(code.workers), 0.0);
    for (const CodedChunk& chunk : code.rows[workers[k]])
      column[static_cast<std::size_t>(chunk.chunk)] = chunk.coefficient;
  }
  const Vector solved = least_squares(columns, Vector(static_cast<std::size_t>(code.workers), 1.0));
  if (solved.empty()) refuse_survivors(code, workers.size());
  for (std::size_t c = 0; c < static_cast<std::size_t>(code.workers); ++c) {
    double sum = 0.0;
    for (std::size_t k = 0; k < enough; ++k) sum += solved[k] * columns[k][c];
    ZR_CHECK(std::fabs(sum - 1.0) <= kMostLeft, ErrorCode::kUsage, "a code of so many workers is not exact in double",
             {.where = kCode,
              .which = "chunk " + std::to_string(c),
              .expected = "a factor of 1",
              .got = std::to_string(sum),
              .hint = "stragglers + 1 that divide the workers need no solution"});
  }
  std::copy(solved.begin(), solved.end(), coefficients.begin());
  return coefficients;
}

}  // namespace zeroth
