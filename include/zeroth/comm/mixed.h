// Several backends of the same ranks, each for the calls in which it is fastest (MCR-DL, arXiv 2303.08374). Only kind
// and size of a call decide its backend, so all ranks choose the same one. zeroth-bench measures the table.
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

/// Size of a matched call for a CallTable: bytes of all its counts, in the dtype of the result. The same on all ranks.
/// It is CallTable::kNoBound for sends and receives, and for an all_to_all without equal parts, because only two ranks
/// know such counts.
[[nodiscard]] std::uint64_t table_bytes(const Collective& call);

/// The backend of each call. A value; as JSON
///   {"zeroth_calls": 1, "rows": [{"call": "all_reduce", "up_to_bytes": 65536, "backend": "mpi"}, {"call":
///   "all_reduce", "backend": "shm"}]}
/// The rows of a kind go from small to large, and the last has no bound. The first backend makes calls of kinds without
/// rows. send and barrier have at most one row. The row of send is also for recv, which has no row of its own.
class CallTable {
 public:
  static constexpr std::uint64_t kNoBound = std::numeric_limits<std::uint64_t>::max();
  struct Row {
    CollectiveKind kind = CollectiveKind::kBarrier;
    std::uint64_t up_to_bytes = kNoBound;  ///< largest table_bytes() of this row
    std::string backend{};
    bool operator==(const Row&) const = default;
  };

  CallTable() = default;
  /// Throws kConfig for rows that break the rules above: which, expected, got.
  explicit CallTable(std::vector<Row> rows);
  /// Reads such a document of at most 1 MiB. Throws kConfig for any other text. `where`: its origin, for errors.
  [[nodiscard]] static CallTable from_json(std::string_view text, std::string_view where);
  [[nodiscard]] std::string to_json() const;

  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }
  /// The backend in the row of such a call; "" if it has no row.
  [[nodiscard]] std::string_view backend_of(CollectiveKind kind, std::uint64_t bytes) const;
  [[nodiscard]] bool operator==(const CallTable&) const = default;

 private:
  std::vector<Row> rows_;
};

/// A backend with its name in tables.
struct NamedBackend {
  std::string name{};
  std::unique_ptr<CommBackend> backend{};
};

/// One group over several backends of its ranks. The first makes the one-sided calls; `table` gives each matched call
/// its backend. An error or abort of one backend is passed to all. Owns the backends. Collective, blocks. Throws
/// kMismatch if ranks have different tables. Throws kConfig if the table names an unknown backend, or if ranks, groups
/// or nodes of the backends differ (sums must have the same order).
[[nodiscard]] std::unique_ptr<CommBackend> make_mixed_backend(std::vector<NamedBackend> backends, CallTable table);

}  // namespace zeroth
