// What a rank does from its first to its last breath, in small: meets the others, makes every call once, trains, writes
// a file, leaves. Tests that break ranks at a failpoint let them live this, so that every site is on the way.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/comm/communicator.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

namespace zeroth::test {

struct RankLife {
  /// Meets the others; called once.
  std::function<std::unique_ptr<CommBackend>()> group{};
  std::string store{};  ///< name of a store that rank 0 serves; "": none
  std::chrono::milliseconds store_patience{20'000};
  std::filesystem::path exports{};  ///< the file that this rank writes; "": none
  int gradient_degree = 0;          ///< of the plan
};

/// Tells the others if it throws, as programs do.
void live(const RankLife& life);

/// Every call of a whole group, and messages around a ring.
void call_everything(const Communicator& comm, std::size_t part);

/// Length of the file that a rank writes.
[[nodiscard]] std::uintmax_t exported_bytes();

}  // namespace zeroth::test
