// What every benchmark program that runs as ranks of a job shares: threads, allocator, a communicator, the
// way out.
#pragma once

#include <zeroth/comm/communicator.h>
#include <zeroth/engine/world.h>

#include <functional>
#include <string>

namespace zeroth::benchmarks {

/// What glibc's malloc does with freed memory. kDefault: returns large blocks to the system, so that they
/// fault again; kKeep: never unmaps nor trims. Same for all contestants, since they share the process.
enum class MallocMode { kDefault, kKeep };
/// To be called before anything large is allocated.
void set_malloc_mode(MallocMode mode);

/// "zeroth-run -n 2 " in a job, nothing for a bare process.
[[nodiscard]] std::string launcher_prefix(const World& world);

/// A group of its own for barriers and times. Collective.
[[nodiscard]] Communicator make_bench_communicator(const World& world);

/// Connects, sets torch to one thread, runs `body`, reports what it throws to the other ranks. Returns the
/// exit code.
[[nodiscard]] int run_job(const std::function<void(const World&)>& body);

}  // namespace zeroth::benchmarks
