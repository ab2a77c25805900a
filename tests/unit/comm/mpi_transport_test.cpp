// The transport over MPI on a table of the test's, which says what a real MPI says only in bad moments.
#include "comm/mpi/mpi_transport.h"

#include "comm/mpi/mpi_collectives.h"
#include "support/error_of.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/communicator.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::detail {
namespace {

using test::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kLeftTag = (1 << 29) + 2;

/// An MPI of rank 1 of 3. C functions have no object, so there is one at a time.
struct FakeMpi {
  struct Request {
    bool sends = false;
    int peer = 0;
    int tag = 0;
    int bytes = 0;
    std::string text{};  ///< what was sent, up to 64 bytes
    bool cancelled = false;
    std::string call{};  ///< of a group: its name and how much; else a message
  };

  MpiWorldFacts facts{.rank = 1,
                      .size = 3,
                      .size_here = 3,
                      .threads = MpiThreads::kMultiple,
                      .largest_tag = 1 << 30,
                      .started_here = 1};
  int refuse_after = -1;  ///< messages until one is refused
  bool completes = true;  ///< test() finds messages done
  bool cancels = true;    ///< and those that were cancelled
  std::string note{};     ///< of rank 2, who stops the job
  int test_code = 0;
  bool left_unfinished = false;
  bool left_memory = false;
  struct Incoming {
    int from;
    int tag;
    int bytes;
  };
  std::vector<Incoming> incoming{};
  int completes_after_taking = -1;  ///< messages of `incoming` until test() finds all done
  int probes_of_any = 0;
  int calls = 0;  ///< of anything but open()
  std::vector<Request> started{};
  std::set<Request*> living{};

  static FakeMpi* one;
  FakeMpi() { one = this; }
  ~FakeMpi() {
    for (Request* request : living) delete request;
    one = nullptr;
  }

  static int start(Request request, void** out) {
    ++one->calls;
    if (one->refuse_after == static_cast<int>(one->started.size())) return 7;
    one->started.push_back(request);
    auto* const made = new Request(std::move(request));
    one->living.insert(made);
    *out = made;
    return 0;
  }

  /// A call of a group: "broadcast 12".
  static int start_call(const std::string& name, std::int64_t amount, void** request) {
    return start({.call = name + " " + std::to_string(amount)}, request);
  }

  static const MpiTable& table() {
    static const MpiTable made{
        .version = kMpiTableVersion,
        .library = "Fake MPI v1",
        .open =
            [](MpiWorldFacts* facts, void** world) {
              *facts = one->facts;
              *world = one;
              return 0;
            },
        .send =
            [](void* /*world*/, const void* data, int bytes, int to, int tag, void** request) {
              const std::string text =
                  bytes <= 64 ? std::string(static_cast<const char*>(data), static_cast<std::size_t>(bytes)) : "";
              return start({.sends = true, .peer = to, .tag = tag, .bytes = bytes, .text = text}, request);
            },
        .receive =
            [](void* /*world*/, void* data, int bytes, int from, int tag, void** request) {
              if (!one->incoming.empty() && one->incoming.front().from == from && one->incoming.front().tag == tag) {
                std::memset(data, 1, static_cast<std::size_t>(bytes));
                one->incoming.erase(one->incoming.begin());
                if (--one->completes_after_taking == 0) one->completes = true;
              }
              if (from == 2 && !one->note.empty()) std::memcpy(data, one->note.data(), static_cast<std::size_t>(bytes));
              return start({.peer = from, .tag = tag, .bytes = bytes}, request);
            },
        .test =
            [](void* handle, int* done) {
              ++one->calls;
              auto* const request = static_cast<Request*>(handle);
              EXPECT_TRUE(one->living.contains(request)) << "a request that is gone";
              const bool is_note = request->tag == 1 << 29;
              const bool ends =
                  one->completes || is_note || (request->cancelled && one->cancels) || one->test_code != 0;
              *done = ends ? 1 : 0;
              if (ends) {
                one->living.erase(request);
                delete request;
              }
              return one->test_code;
            },
        .cancel =
            [](void* request) {
              ++one->calls;
              static_cast<Request*>(request)->cancelled = true;
              return 0;
            },
        .probe =
            [](void* /*world*/, int* tag, int* from, int* bytes) {
              ++one->calls;
              if (*tag == -1) {
                ++one->probes_of_any;
                *from = -1;
                if (one->incoming.empty()) return 0;
                const Incoming next = one->incoming.front();
                *tag = next.tag;
                *from = next.from;
                *bytes = next.bytes;
                return 0;
              }
              *from = *tag == 1 << 29 && !one->note.empty() ? 2 : -1;
              *bytes = static_cast<int>(one->note.size());
              return 0;
            },
        .leave_unfinished = [] { one->left_unfinished = true; },
        .leave_memory = [] { one->left_memory = true; },
        .memory_is_left = [] { return one->left_memory ? 1 : 0; },
        .text = [](int code, char* to,
                   int /*size*/) { std::strcpy(to, code == 7 ? "MPI_ERR_RANK: invalid rank" : ""); },
        .barrier = [](void* /*group*/, void** request) { return start_call("barrier", 0, request); },
        .broadcast = [](void* /*group*/, void* /*data*/, int bytes, int /*root*/,
                        void** request) { return start_call("broadcast", bytes, request); },
        .all_reduce = [](void* /*group*/, const void* /*from*/, void* /*to*/, int count, MpiNumber /*number*/,
                         void** request) { return start_call("all_reduce", count, request); }};
    return made;
  }
};
FakeMpi* FakeMpi::one = nullptr;

std::shared_ptr<MessageTransport> transport_of(const CommOptions& options = {}) {
  return make_mpi_transport(FakeMpi::table(), 1, 3, options);
}

TEST(MpiTransport, KnowsItsPlace) {
  FakeMpi mpi;
  const auto transport = transport_of();
  EXPECT_EQ(transport->rank(), 1);
  EXPECT_EQ(transport->size(), 3);
  EXPECT_EQ(transport->kind(), "mpi");
}

TEST(MpiTransport, AWorldThatDoesNotComeTogetherIsATimeout) {
  static std::atomic<bool> may_open = false;  // the thread that is left behind still looks at it
  static std::atomic<bool> opened = false;
  static MpiTable table = FakeMpi::table();
  table.open = [](MpiWorldFacts* /*facts*/, void** /*world*/) {
    may_open.wait(false);
    opened.store(true);
    return 0;
  };
  FakeMpi mpi;
  CommOptions options;
  options.timeout = Milliseconds{50};
  const std::string text = error_of(ErrorCode::kTimeout, [&] { (void)make_mpi_transport(table, 1, 3, options); });
  EXPECT_THAT(text, HasSubstr("MPI's world was not complete within 0.1 s"));
  EXPECT_THAT(text, HasSubstr("rank 1/3"));
  EXPECT_TRUE(mpi.left_unfinished) << "who failed must not wait for the others in MPI_Finalize";
  may_open.store(true);
  may_open.notify_all();
  while (!opened.load()) std::this_thread::yield();
}

TEST(MpiTransport, AnotherWorldThanTheLaunchersIsAMismatch) {
  FakeMpi mpi;
  mpi.facts.rank = 0;
  mpi.facts.size = 1;
  const std::string text = error_of(ErrorCode::kMismatch, [] { (void)transport_of(); });
  EXPECT_THAT(text, HasSubstr("expected: rank 1 of 3"));
  EXPECT_THAT(text, HasSubstr("got: rank 0 of 1 from Fake MPI v1"));
  EXPECT_THAT(text, HasSubstr("mpirun"));
}

TEST(MpiTransport, WhatThreadsMayDoDependsOnWhoStartedMpi) {
  FakeMpi mpi;
  struct Row {
    int started_here;
    MpiThreads threads;
    bool good;
  };
  for (const Row& row : {Row{1, MpiThreads::kMultiple, true}, Row{1, MpiThreads::kSerialized, true},
                         Row{1, MpiThreads::kFunneled, false}, Row{1, MpiThreads::kSingle, false},
                         Row{0, MpiThreads::kMultiple, true}, Row{0, MpiThreads::kSerialized, false}}) {
    mpi.facts.started_here = row.started_here;
    mpi.facts.threads = row.threads;
    if (row.good) {
      EXPECT_NO_THROW((void)transport_of());
    } else {
      EXPECT_THAT(error_of(ErrorCode::kEnvironment, [] { (void)transport_of(); }), HasSubstr("MPI_THREAD_MULTIPLE"));
    }
  }
}

TEST(MpiTransport, TooFewTagsAreRefused) {
  FakeMpi mpi;
  mpi.facts.largest_tag = 32'767;
  EXPECT_THAT(error_of(ErrorCode::kEnvironment, [] { (void)transport_of(); }), HasSubstr("got: 32767"));
}

TEST(MpiTransport, MessagesBeyondTwoGigabytesGoInPiecesThatMpiCanCount) {
  FakeMpi mpi;
  const auto transport = transport_of();
  const std::byte one{};
  constexpr std::size_t kBytes = (std::size_t{5} << 29U) + 3;  // 2.5 GiB and 3 bytes; nobody reads them
  auto transfer = transport->send(0, 9, {&one, kBytes});
  std::vector<int> pieces;
  for (const FakeMpi::Request& request : mpi.started) pieces.push_back(request.bytes);
  EXPECT_THAT(pieces, ElementsAre(1 << 30, 1 << 30, (1 << 29) + 3));
  EXPECT_TRUE(transfer->wait(Milliseconds{10}));
  EXPECT_TRUE(transfer->wait(Milliseconds{10})) << "asking again is allowed";
  EXPECT_TRUE(mpi.living.empty());
}

TEST(MpiTransport, ARefusalNamesThePeerAndTakesBackThePieces) {
  FakeMpi mpi;
  mpi.refuse_after = 1;
  mpi.completes = false;
  const auto transport = transport_of();
  const std::byte one{};
  const std::string text =
      error_of(ErrorCode::kPeerLost, [&] { (void)transport->send(2, 0, {&one, std::size_t{3} << 29U}); });
  EXPECT_THAT(text, HasSubstr("a message to rank 2"));
  EXPECT_THAT(text, HasSubstr("MPI_ERR_RANK"));
  EXPECT_TRUE(mpi.living.empty()) << "the first piece";
}

TEST(MpiTransport, AnErrorOfAMessageIsPeerLost) {
  FakeMpi mpi;
  const auto transport = transport_of();
  std::byte data[4]{};
  const auto transfer = transport->receive(0, 0, data);
  mpi.test_code = 7;
  EXPECT_THAT(error_of(ErrorCode::kPeerLost, [&] { (void)transfer->wait(Milliseconds{10}); }),
              HasSubstr("MPI_ERR_RANK"));
}

TEST(MpiTransport, ADroppedMessageIsCancelled) {
  FakeMpi mpi;
  mpi.completes = false;
  const auto transport = transport_of();
  std::byte data[4]{};
  {
    const auto transfer = transport->receive(0, 5, data);
    EXPECT_FALSE(transfer->wait(Milliseconds{5}));
  }
  EXPECT_TRUE(mpi.living.empty());
  EXPECT_FALSE(mpi.left_unfinished);
  mpi.completes = true;
  EXPECT_TRUE(transport->receive(0, 5, data)->wait(Milliseconds{5})) << "the transport is whole";
}

TEST(MpiTransport, MemoryThatMpiKeepsEndsTheTransport) {
  FakeMpi mpi;
  mpi.completes = mpi.cancels = false;
  const auto transport = transport_of();
  std::byte data[4]{};
  const auto other = transport->receive(2, 0, data);
  (void)transport->send(0, 5, data);  // and dropped
  EXPECT_TRUE(mpi.left_unfinished);
  const int calls = mpi.calls;
  EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { (void)other->wait(Milliseconds{5}); }), HasSubstr("left unfinished"));
  error_of(ErrorCode::kAborted, [&] { (void)transport->receive(0, 5, data); });
  EXPECT_EQ(mpi.calls, calls) << "what is under way would move, into memory that is gone";
  EXPECT_THAT(error_of(ErrorCode::kAborted, [] { (void)transport_of(); }),
              HasSubstr("MPI still has memory of a call that failed before"));
}

TEST(MpiTransport, WhoLeavesWaitsForWhatIsUnderWayAndTakesWhatOthersHaveSent) {
  FakeMpi mpi;
  mpi.completes = mpi.cancels = false;
  mpi.incoming = {{0, 5, 300'000}, {2, 7, 8}};
  mpi.completes_after_taking = 2;  // the others take theirs, too
  const auto transport = transport_of();
  std::byte data[4]{};
  const auto transfer = transport->send(0, 5, data);
  transport->abort("the disk is full");
  EXPECT_TRUE(mpi.incoming.empty());
  EXPECT_FALSE(mpi.left_memory);
  EXPECT_TRUE(mpi.living.empty());
  EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { (void)transfer->wait(Milliseconds{5}); }),
              HasSubstr("the disk is full"));
  EXPECT_NO_THROW((void)transport_of()) << "MPI is whole";
}

TEST(MpiTransport, AMessageThatNobodyHasTakenIsNoMemoryThatMpiWrites) {
  FakeMpi mpi;
  mpi.completes = mpi.cancels = false;
  const auto transport = transport_of();
  std::byte data[4]{};
  {
    const auto dropped = transport->send(0, 5, data);
  }
  EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { (void)transport->send(0, 5, data); }), HasSubstr("left unfinished"));
  EXPECT_FALSE(mpi.left_memory);
  const std::size_t before = mpi.started.size();
  transport->abort("the disk is full");
  EXPECT_EQ(mpi.started.size(), before + 2) << "the others have not heard yet";
  EXPECT_NO_THROW((void)transport_of());
}

TEST(MpiTransport, WhoComesBackHearsFirstWhetherAnotherRankHasLeft) {
  FakeMpi mpi;
  const auto transport = transport_of();
  mpi.note = "bad block 7";
  std::byte data[4]{};
  std::this_thread::sleep_for(Milliseconds{30});
  EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { (void)transport->receive(0, 5, data); }),
              HasSubstr("rank 2 stopped the job: bad block 7"));
  for (const FakeMpi::Request& request : mpi.started) EXPECT_NE(request.tag, 5) << "it may never be received";
}

TEST(MpiTransport, WhoHasHeardThatAllHaveLeftWaitsNoLonger) {
  FakeMpi mpi;
  mpi.incoming = {{0, kLeftTag, 0}, {2, kLeftTag, 0}};
  transport_of()->abort("the disk is full");
  EXPECT_EQ(mpi.probes_of_any, 3) << "two words, and nothing more";
}

TEST(MpiTransport, AbortTellsEveryOtherRankOnce) {
  FakeMpi mpi;
  const auto transport = transport_of();
  transport->abort("the disk is full");
  transport->abort("something else");
  ASSERT_EQ(mpi.started.size(), 4U) << "and two words that this rank has left";
  for (const std::size_t word : {2U, 3U}) EXPECT_EQ(mpi.started[word].tag, kLeftTag);
  for (const int index : {0, 1}) {
    EXPECT_EQ(mpi.started[static_cast<std::size_t>(index)].peer, 2 * index);
    EXPECT_EQ(mpi.started[static_cast<std::size_t>(index)].text, "the disk is full");
  }
  std::byte data[4]{};
  EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { (void)transport->receive(0, 5, data); }),
              HasSubstr("this rank stopped the job: the disk is full"));
}

TEST(MpiTransport, ATransferHearsThatAnotherRankStoppedTheJob) {
  FakeMpi mpi;
  mpi.completes = false;
  const auto transport = transport_of();
  std::byte data[4]{};
  const auto transfer = transport->receive(0, 0, data);
  mpi.note = "bad block 7";
  EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { (void)transfer->wait(Milliseconds{100}); }),
              HasSubstr("rank 2 stopped the job: bad block 7"));
  EXPECT_TRUE(mpi.left_unfinished);
}

/// The world's group on rank 1, with MPI's own calls.
Communicator own_calls(const CommOptions& options = {}) {
  const auto mpi = open_mpi_world(FakeMpi::table(), 1, FakeMpi::one->facts.size, options);
  return Communicator(make_mpi_collectives(mpi, make_message_backend(make_mpi_transport(mpi), options), options));
}

std::vector<std::string> calls_of(const FakeMpi& mpi) {
  std::vector<std::string> calls;
  for (const FakeMpi::Request& request : mpi.started) {
    calls.push_back(!request.call.empty() ? request.call
                                          : (request.sends ? "to " : "from ") + std::to_string(request.peer) + ": " +
                                                std::to_string(request.bytes));
  }
  return calls;
}

TEST(MpiCollectives, GoInPiecesThatMpiCanCount) {
  FakeMpi mpi;
  mpi.facts.size = 9;  // where MPI forms sums
  const Communicator comm = own_calls();
  std::uint8_t byte = 0;  // nobody reads more
  comm.broadcast(std::span(&byte, (std::size_t{5} << 29U) + 3), 0);
  EXPECT_THAT(calls_of(mpi), ElementsAre("broadcast 1073741824", "broadcast 1073741824", "broadcast 536870915"));
  mpi.started.clear();
  double number = 0;
  comm.all_reduce(std::span(&number, (std::size_t{1} << 30U) + 2));
  EXPECT_THAT(calls_of(mpi), ElementsAre("all_reduce 1073741824", "all_reduce 2"));
  mpi.started.clear();
  // Together more than an int counts: messages, which go in pieces.
  std::vector<std::int64_t> counts(9, 1);
  counts[1] = std::int64_t{5} << 29;
  comm.gather(std::span<const std::uint8_t>(&byte, static_cast<std::size_t>(counts[1])), std::span<std::uint8_t>(),
              counts, 0);
  EXPECT_THAT(calls_of(mpi), ElementsAre("to 0: 1073741824", "to 0: 1073741824", "to 0: 536870912"));
}

TEST(MpiCollectives, ACallThatDoesNotEndIsATimeoutThatTheOthersHear) {
  FakeMpi mpi;
  mpi.completes = false;
  CommOptions options;
  options.timeout = options.first_timeout = Milliseconds{50};
  const Communicator comm = own_calls(options);
  const std::string text = error_of(ErrorCode::kTimeout, [&] { comm.barrier({.unit = 4}); });
  for (const char* part : {"MPI did not end a call within 0.1 s", "rank 1/3", "barrier#0", "unit 4", "group=world",
                           "zeroth.check_calls"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  ASSERT_EQ(mpi.started.size(), 3U) << "the call, and a note to each other rank";
  for (const std::size_t note : {1U, 2U}) EXPECT_EQ(mpi.started[note].tag, 1 << 29);
  EXPECT_TRUE(mpi.left_unfinished);
  const int calls = mpi.calls;
  error_of(ErrorCode::kTimeout, [&] { comm.barrier(); });  // the first error again
  EXPECT_EQ(mpi.calls, calls) << "what was left would move, into memory that is gone";
}

TEST(MpiCollectives, AnErrorOfMpiNamesTheCallAndEndsTheJob) {
  FakeMpi mpi;
  mpi.test_code = 7;
  const Communicator comm = own_calls();
  const std::string text = error_of(ErrorCode::kPeerLost, [&] { comm.barrier(); });
  for (const char* part : {"MPI_ERR_RANK", "barrier#0", "group=world"}) EXPECT_THAT(text, HasSubstr(part));
  EXPECT_TRUE(mpi.left_unfinished);
}

TEST(MpiCollectives, AnotherRanksAbortEndsAWait) {
  FakeMpi mpi;
  mpi.completes = false;
  mpi.note = "bad block 7";
  const Communicator comm = own_calls();
  const std::string text = error_of(ErrorCode::kAborted, [&] { comm.barrier(); });
  for (const char* part : {"rank 2 stopped the job: bad block 7", "barrier#0"}) EXPECT_THAT(text, HasSubstr(part));
}

TEST(MpiCollectives, TheOwnPartOfAnAllToAllMustFit) {
  FakeMpi mpi;
  const Communicator comm = own_calls();
  std::vector<float> in(6);
  std::vector<float> out(7);
  const std::string text = error_of(
      ErrorCode::kMismatch, [&] { comm.all_to_all(std::span<const float>(in), std::span(out), {2, 2, 2}, {2, 3, 2}); });
  EXPECT_THAT(text, HasSubstr("3 elements, which rank 1 takes from rank 1"));
}

TEST(MpiLibrary, IsLookedForBesideTheCodeUnlessAVariableSaysWhere) {
  EXPECT_THAT(mpi_library_places("/opt/z/bin/zeroth-gpt", std::nullopt),
              ElementsAre("/opt/z/bin/libzeroth_mpi.so", "/opt/z/lib/libzeroth_mpi.so", "libzeroth_mpi.so"));
  EXPECT_THAT(mpi_library_places("/opt/z/bin/zeroth-gpt", "/x/y.so"), ElementsAre("/x/y.so"));
  EXPECT_THAT(mpi_library_places("", std::nullopt), ElementsAre("libzeroth_mpi.so"));
}

TEST(MpiLibrary, ThatIsNotThereIsNamedWithWhatToDo) {
  const char* const before = std::getenv("ZEROTH_MPI_LIBRARY");
  const std::string kept = before == nullptr ? "" : before;
  ::setenv("ZEROTH_MPI_LIBRARY", "/no/such/library.so", 1);
  const std::string text = error_of(ErrorCode::kEnvironment, [] { (void)load_mpi(); });
  EXPECT_THAT(text, HasSubstr("/no/such/library.so"));
  EXPECT_THAT(text, HasSubstr("libopenmpi-dev"));
  before == nullptr ? ::unsetenv("ZEROTH_MPI_LIBRARY") : ::setenv("ZEROTH_MPI_LIBRARY", kept.c_str(), 1);
}

}  // namespace
}  // namespace zeroth::detail
