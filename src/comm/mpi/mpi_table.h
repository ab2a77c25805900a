// MPI behind a table of C functions. libzeroth_mpi.so is the one file that is compiled against an MPI, and is loaded
// when an MPI world is asked for: the core knows no MPI, and for another MPI only that file is compiled anew. A test's
// table stands in for a library.
//
// Every function returns 0, or an MPI error code that text() explains. One thread at a time calls them; that need not
// be the same one.
#pragma once

#include <cstdint>

namespace zeroth::detail {

/// Grows with every change of MpiTable.
inline constexpr std::uint32_t kMpiTableVersion = 5;

/// As in MPI: what the library allows threads to do.
enum class MpiThreads : int { kSingle = 0, kFunneled = 1, kSerialized = 2, kMultiple = 3 };

struct MpiWorldFacts {
  int rank = 0;
  int size = 1;
  int size_here = 1;  ///< ranks of this host
  MpiThreads threads = MpiThreads::kSingle;
  int largest_tag = 0;
  int started_here = 0;  ///< open() has initialised MPI: nobody else in this process had
};

/// What MPI adds up. Integers wrap.
enum class MpiNumber : int { kUInt32 = 0, kUInt64 = 1, kFloat = 2, kDouble = 3 };

/// Parts of a buffer of less than 2^31 bytes, one for each rank of a group: how long they are, and where they begin.
struct MpiParts {
  const int* bytes = nullptr;
  const int* offsets = nullptr;
};

struct MpiTable {
  std::uint32_t version = 0;
  const char* library = "";  ///< "Open MPI v4.1.4, ..."

  /// Blocks until all ranks of MPI's world have come. Initialises MPI if nobody has, asking for kMultiple, and then
  /// ends it when the process exits with status 0. `world`: a duplicate of MPI_COMM_WORLD of its own, whose errors are
  /// returned. It is never given back: a message of a call that failed may still be under way, and would be taken for
  /// one of the next world if that had the same number.
  int (*open)(MpiWorldFacts* facts, void** world) = nullptr;
  /// Start a message; `request` is for test(). The bytes must live until it is done. `world` may be a part of one, see
  /// below, and the ranks are its.
  int (*send)(void* world, const void* data, int bytes, int to, int tag, void** request) = nullptr;
  int (*receive)(void* world, void* data, int bytes, int from, int tag, void** request) = nullptr;
  /// Moves what is under way. Once *done is 1 the request is gone.
  int (*test)(void* request, int* done) = nullptr;
  /// Asks to forget a message: test() says when that, or the message, is done. Not for calls of a group.
  int (*cancel)(void* request) = nullptr;
  /// A message with this tag, or of any with *tag -1, that has come and that nobody has received: its tag, from whom,
  /// how long; from -1: none.
  int (*probe)(void* world, int* tag, int* from, int* bytes) = nullptr;
  /// The process will exit without waiting for the others to end MPI, unless another world is opened before.
  void (*leave_unfinished)() = nullptr;
  /// MPI has kept memory of a call that failed, which is gone by now: nobody in this process may call it any more, or
  /// it would go on there.
  void (*leave_memory)() = nullptr;
  int (*memory_is_left)() = nullptr;
  void (*text)(int code, char* to, int size) = nullptr;

  // MPI's own algorithms. A group is a world, or a part of one; every rank of it makes the same calls in the same
  // order. Their buffers must live until the request is done, and nothing takes them back before: there is no
  // cancelling. What the arrays say is copied.

  /// Blocks until all ranks of `group` have come. Ranks of one color are a part, in the order of (key, rank); with a
  /// color below 0 *part is null. Never given back, as a world.
  int (*split)(void* group, int color, int key, void** part) = nullptr;
  int (*barrier)(void* group, void** request) = nullptr;
  int (*broadcast)(void* group, void* data, int bytes, int root, void** request) = nullptr;
  /// `own` null: it lies at its place in `whole`. At the root only `whole` of a gather and a scatter is used.
  int (*all_gather)(void* group, const void* own, void* whole, MpiParts parts, void** request) = nullptr;
  /// `bytes` from and for every rank.
  int (*all_to_all)(void* group, const void* from, void* to, int bytes, void** request) = nullptr;
  int (*gather)(void* group, const void* own, void* whole, MpiParts parts, int root, void** request) = nullptr;
  int (*scatter)(void* group, const void* whole, void* own, MpiParts parts, int root, void** request) = nullptr;
  /// Sums in MPI's order; `from` null: they take the place of what this rank gives.
  int (*all_reduce)(void* group, const void* from, void* to, int count, MpiNumber number, void** request) = nullptr;
  /// counts[r]: elements of rank r's part of `from`, in rank order.
  int (*reduce_scatter)(void* group, const void* from, void* to, const int* counts, MpiNumber number,
                        void** request) = nullptr;
};

/// The one symbol of libzeroth_mpi.so.
inline constexpr const char* kMpiTableSymbol = "zeroth_mpi_table";
using MpiTableFunction = const MpiTable* (*)();

}  // namespace zeroth::detail
