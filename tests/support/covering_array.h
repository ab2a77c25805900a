// Few rows instead of a whole product: every combination of the values of any two (or three) factors is in some row.
//
// A fault that needs one value of each of two factors shows in such rows as surely as in the product, and the number of
// rows grows with the logarithm of the number of factors. Deterministic: the same rows on every machine.
// Ref: Cohen, Dalal, Fredman, Patton, "The AETG system", 1997: greedy rows, some candidates each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

namespace zeroth::test {

/// The level of each factor, from 0.
using FactorRow = std::vector<int>;
/// Whether a whole row can be; a combination that is in no such row needs none.
using FactorRule = std::function<bool(const FactorRow&)>;

namespace covering {

/// A choice of factors, ascending, and a level of each.
using Tuple = std::vector<std::pair<std::size_t, int>>;

/// All tuples of `strength` of the factors, in lexicographic order.
inline void add_tuples(const std::vector<int>& levels, int strength, std::size_t first, Tuple& begun,
                       std::vector<Tuple>& all) {
  if (strength == 0) return all.push_back(begun);
  for (std::size_t factor = first; factor < levels.size(); ++factor) {
    for (int level = 0; level < levels[factor]; ++level) {
      begun.emplace_back(factor, level);
      add_tuples(levels, strength - 1, factor + 1, begun, all);
      begun.pop_back();
    }
  }
}

[[nodiscard]] inline std::vector<Tuple> tuples_of(const std::vector<int>& levels, int strength) {
  std::vector<Tuple> all;
  Tuple begun;
  add_tuples(levels, strength, 0, begun, all);
  return all;
}

[[nodiscard]] inline bool holds(const FactorRow& row, const Tuple& tuple) {
  return std::ranges::all_of(tuple, [&](const auto& value) { return row[value.first] == value.second; });
}

/// Which tuples are not in a row yet, found by the numbers that they have.
class Missing {
 public:
  Missing(const std::vector<int>& levels, int strength) : levels_(levels), strength_(strength) {
    std::vector<std::size_t> chosen;
    add_choices(0, chosen);
  }
  /// Tuples that the row has and no row before; a factor at -1 is not chosen. With `only`, those of that factor.
  [[nodiscard]] int gain(const FactorRow& row, std::size_t only) const {
    int count = 0;
    for (const std::size_t index : choices_of_[only]) {
      const std::size_t at = number(choices_[index], row);
      count += at != kNone && missing_[index][at] ? 1 : 0;
    }
    return count;
  }
  [[nodiscard]] int gain(const FactorRow& row) const {
    int count = 0;
    for (std::size_t index = 0; index < choices_.size(); ++index) {
      const std::size_t at = number(choices_[index], row);
      count += at != kNone && missing_[index][at] ? 1 : 0;
    }
    return count;
  }
  void take(const FactorRow& row) {
    for (std::size_t index = 0; index < choices_.size(); ++index) {
      const std::size_t at = number(choices_[index], row);
      if (at != kNone) missing_[index][at] = false;
    }
  }
  /// The first tuple that is missing, as a row in which nothing else is chosen; empty where all are there.
  [[nodiscard]] FactorRow next() {
    for (; next_choice_ < choices_.size(); ++next_choice_, next_at_ = 0) {
      const std::vector<bool>& all = missing_[next_choice_];
      for (; next_at_ < all.size(); ++next_at_) {
        if (all[next_at_]) return row_of(choices_[next_choice_], next_at_);
      }
    }
    return {};
  }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  void add_choices(std::size_t first, std::vector<std::size_t>& chosen) {
    if (chosen.size() == static_cast<std::size_t>(strength_)) {
      choices_of_.resize(levels_.size());
      std::size_t combinations = 1;
      for (const std::size_t factor : chosen) {
        choices_of_[factor].push_back(choices_.size());
        combinations *= static_cast<std::size_t>(levels_[factor]);
      }
      choices_.push_back(chosen);
      missing_.emplace_back(combinations, true);
      return;
    }
    for (std::size_t factor = first; factor < levels_.size(); ++factor) {
      chosen.push_back(factor);
      add_choices(factor + 1, chosen);
      chosen.pop_back();
    }
  }
  [[nodiscard]] std::size_t number(const std::vector<std::size_t>& choice, const FactorRow& row) const {
    std::size_t at = 0;
    for (const std::size_t factor : choice) {
      if (row[factor] < 0) return kNone;
      at = at * static_cast<std::size_t>(levels_[factor]) + static_cast<std::size_t>(row[factor]);
    }
    return at;
  }
  [[nodiscard]] FactorRow row_of(const std::vector<std::size_t>& choice, std::size_t at) const {
    FactorRow row(levels_.size(), -1);
    for (std::size_t place = choice.size(); place-- > 0;) {
      const auto levels = static_cast<std::size_t>(levels_[choice[place]]);
      row[choice[place]] = static_cast<int>(at % levels);
      at /= levels;
    }
    return row;
  }

  std::vector<int> levels_;
  int strength_;
  std::vector<std::vector<std::size_t>> choices_;     ///< of `strength` factors
  std::vector<std::vector<std::size_t>> choices_of_;  ///< those that a factor is in
  std::vector<std::vector<bool>> missing_;
  std::size_t next_choice_ = 0;
  std::size_t next_at_ = 0;
};

/// Chooses what is left of a row, factor by factor in this order, the level with the most missing tuples first; goes
/// back where no row can be. False where there is none.
inline bool fill(FactorRow& row, const std::vector<std::size_t>& order, std::size_t place,
                 const std::vector<int>& levels, const Missing& missing, const FactorRule& valid) {
  while (place < order.size() && row[order[place]] >= 0) ++place;
  if (place == order.size()) return !valid || valid(row);
  const std::size_t factor = order[place];
  std::vector<std::pair<int, int>> tries;  // minus the gain, and the level
  for (int level = 0; level < levels[factor]; ++level) {
    row[factor] = level;
    tries.emplace_back(-missing.gain(row, factor), level);
  }
  std::ranges::sort(tries);
  for (const auto& [gain, level] : tries) {
    row[factor] = level;
    if (fill(row, order, place + 1, levels, missing, valid)) return true;
  }
  row[factor] = -1;
  return false;
}

}  // namespace covering

/// Rows in which each valid combination of levels of `strength` factors is at least once, and from which none can be
/// taken away. `levels`: how many a factor has; `strength` at most as many as there are factors; without `valid` all
/// rows can be. Throws std::invalid_argument. Time: rows x factors x levels x combinations of factors.
[[nodiscard]] inline std::vector<FactorRow> covering_array(const std::vector<int>& levels, int strength,
                                                           const FactorRule& valid = {}) {
  const std::size_t factors = levels.size();
  if (strength < 1 || static_cast<std::size_t>(strength) > factors || std::ranges::min(levels) < 1)
    throw std::invalid_argument("a covering array needs a strength from 1 to the number of factors, and levels");
  // Factors with many levels first: they decide how many rows there must be.
  std::vector<std::size_t> by_levels(factors);
  std::iota(by_levels.begin(), by_levels.end(), std::size_t{0});
  std::ranges::stable_sort(by_levels, [&](std::size_t a, std::size_t b) { return levels[a] > levels[b]; });
  covering::Missing missing(levels, strength);
  std::vector<FactorRow> rows;
  for (FactorRow begun = missing.next(); !begun.empty(); begun = missing.next()) {
    FactorRow best;
    int most = -1;
    for (std::size_t turn = 0; turn < factors; ++turn) {  // candidates: the factors in other orders
      std::vector<std::size_t> order = by_levels;
      std::ranges::rotate(order, order.begin() + static_cast<std::ptrdiff_t>(turn));
      FactorRow row = begun;
      if (!covering::fill(row, order, 0, levels, missing, valid)) break;
      const int gain = missing.gain(row);
      if (gain > most) {
        most = gain;
        best = std::move(row);
      }
    }
    missing.take(best.empty() ? begun : best);  // a combination that no row can have is not missing
    if (!best.empty()) rows.push_back(std::move(best));
  }
  // A row of the beginning may have nothing of its own left.
  std::map<covering::Tuple, int> times;
  const std::vector<covering::Tuple> tuples = covering::tuples_of(levels, strength);
  std::vector<std::vector<int*>> of_row(rows.size());
  for (const covering::Tuple& tuple : tuples) {
    for (std::size_t row = 0; row < rows.size(); ++row) {
      if (!covering::holds(rows[row], tuple)) continue;
      int& count = times[tuple];
      ++count;
      of_row[row].push_back(&count);
    }
  }
  std::vector<FactorRow> needed;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (std::ranges::any_of(of_row[row], [](const int* count) { return *count == 1; })) {
      needed.push_back(std::move(rows[row]));
    } else {
      for (int* count : of_row[row]) --*count;
    }
  }
  return needed;
}

/// All valid rows: the product.
[[nodiscard]] inline std::vector<FactorRow> whole_grid(const std::vector<int>& levels, const FactorRule& valid = {}) {
  std::vector<FactorRow> rows;
  FactorRow row(levels.size(), 0);
  for (bool more = true; more;) {
    if (!valid || valid(row)) rows.push_back(row);
    more = false;
    for (std::size_t factor = levels.size(); factor-- > 0 && !more;) {
      more = ++row[factor] < levels[factor];
      if (!more) row[factor] = 0;
    }
  }
  return rows;
}

}  // namespace zeroth::test
