// Several backends of the same ranks, each for the calls that it is best at (MCR-DL, arXiv 2303.08374). Which one makes
// a call follows from its kind and size alone, so that all ranks choose alike; zeroth-bench measures the table.
#pragma once

#include <zeroth/comm/backend.h>

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

/// Bytes of a matched call, as a CallTable counts them: of all its counts, in the dtype of the result. The same on all
/// ranks. Of an all_to_all only if it is one of equal parts: else two ranks alone know of their counts, and it is
/// CallTable::kNoBound. So are sends and receives.
[[nodiscard]] std::uint64_t table_bytes(const Collective& call);

/// Who makes a call. A value; as JSON
///   {"zeroth_calls": 1, "rows": [{"call": "all_reduce", "up_to_bytes": 65536, "backend": "mpi"}, {"call":
///   "all_reduce", "backend": "shm"}]}
/// The rows of a kind go from small to large, and the last has no bound. Kinds without rows are the first backend's.
/// send and barrier have one row at most; that of send is also of recv, which has none.
class CallTable {
 public:
  static constexpr std::uint64_t kNoBound = std::numeric_limits<std::uint64_t>::max();
  struct Row {
    CollectiveKind kind = CollectiveKind::kBarrier;
    std::uint64_t up_to_bytes = kNoBound;  ///< table_bytes(), this included
    std::string backend{};
    bool operator==(const Row&) const = default;
  };

  CallTable() = default;
  /// Throws kConfig for rows that break the rules above: which, expected, got.
  explicit CallTable(std::vector<Row> rows);
  /// Throws kConfig for anything else than such a document, with `where` it is from. At most 1 MiB.
  [[nodiscard]] static CallTable from_json(std::string_view text, std::string_view where);
  [[nodiscard]] std::string to_json() const;

  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }
  /// The name in the row of such a call, "" without one.
  [[nodiscard]] std::string_view backend_of(CollectiveKind kind, std::uint64_t bytes) const;
  [[nodiscard]] bool operator==(const CallTable&) const = default;

 private:
  std::vector<Row> rows_;
};

/// A backend under the name that tables have for it.
struct NamedBackend {
  std::string name{};
  std::unique_ptr<CommBackend> backend{};
};

/// Seats of one rank in the same group: the first one's one-sided calls, and of the matched ones those that `table`
/// gives it; the others the rest. An error or abort of one is told to all. Collective: throws kMismatch where ranks
/// have different tables; kConfig for a table that names none of the backends, and for backends whose ranks, groups or
/// nodes differ (sums must have the same order).
[[nodiscard]] std::unique_ptr<CommBackend> make_mixed_backend(std::vector<NamedBackend> backends, CallTable table);

}  // namespace zeroth
