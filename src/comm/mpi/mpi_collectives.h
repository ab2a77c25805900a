// Collectives by MPI's own algorithms: Reduction::kTransport over MPI.
#pragma once

#include "comm/mpi/mpi_world.h"

#include <zeroth/comm/backend.h>
#include <zeroth/comm/factory.h>

#include <memory>

namespace zeroth::detail {

/// A group of all ranks of MPI's world, whose collectives are MPI's (the non-blocking ones, which a thread that
/// waits moves on). `messages`: the same ranks, over messages; it carries sends and receives, and agrees about new
/// groups.
///
/// Bits. Every call but a sum gives the bits of any other backend. So do all sums in groups of up to 8 ranks, and in
/// larger ones those to or from 16 bits (but bf16 to fp32) and parts in another order than the ranks': the parts
/// travel, and the kernels of the other backends add them up. Other sums are formed by MPI, in an order that depends on
/// its algorithm: on size, number of ranks and MPI's parameters. See docs/numbers.md.
///
/// Ranks do not compare what they call: a mismatch is wrong data, an error of MPI, or a wait until the deadline;
/// CheckedBackend compares. A call that ends with an error on one rank cannot be taken back: that rank tells the others
/// (kAborted there) and makes no more calls of MPI. Traffic is what a call must at least receive; MPI does not say what
/// its algorithms move.
///
/// Memory: size() pieces of options.staging_bytes, twice, for the sums that the kernels form; beside that, a rank that
/// gives bf16 to a sum in fp32 keeps its buffer in fp32 meanwhile, and one that accumulates, or reduces in place, its
/// part of the sum.
[[nodiscard]] std::unique_ptr<CommBackend> make_mpi_collectives(std::shared_ptr<MpiWorld> mpi,
                                                                std::unique_ptr<CommBackend> messages,
                                                                const CommOptions& options);

}  // namespace zeroth::detail
