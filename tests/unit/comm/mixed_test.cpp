// Tables of which backend makes which calls: what they say, what they refuse, and that all ranks must have one.
#include "support/error_of.h"
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/comm/mixed.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Row = CallTable::Row;
using Kind = CollectiveKind;

TEST(CallTable, GivesEachSizeToTheFirstRowThatHoldsIt) {
  const CallTable table({{Kind::kAllReduce, 100, "a"},
                         {Kind::kBroadcast, CallTable::kNoBound, "c"},
                         {Kind::kAllReduce, 1'000, "b"},
                         {Kind::kAllReduce, CallTable::kNoBound, "a"},
                         {Kind::kSend, CallTable::kNoBound, "b"}});
  EXPECT_EQ(table.backend_of(Kind::kAllReduce, 0), "a");
  EXPECT_EQ(table.backend_of(Kind::kAllReduce, 100), "a");
  EXPECT_EQ(table.backend_of(Kind::kAllReduce, 101), "b");
  EXPECT_EQ(table.backend_of(Kind::kAllReduce, 1'001), "a");
  EXPECT_EQ(table.backend_of(Kind::kAllGather, 5), "");
  EXPECT_EQ(table.backend_of(Kind::kRecv, 5), "b");  // where sends go
  EXPECT_EQ(CallTable::from_json(table.to_json(), "here"), table);
}

TEST(CallTable, SizesAreThoseThatAllRanksKnow) {
  EXPECT_EQ(
      table_bytes(
          {.kind = Kind::kAllGather, .in_dtype = DType::kFloat32, .out_dtype = DType::kFloat32, .counts = {3, 0, 4}}),
      28U);
  // Ranks may give a reduction sums of either width.
  EXPECT_EQ(
      table_bytes(
          {.kind = Kind::kReduceScatter, .in_dtype = DType::kBFloat16, .out_dtype = DType::kFloat32, .counts = {3, 4}}),
      28U);
  EXPECT_EQ(table_bytes({.kind = Kind::kAllToAll,
                         .in_dtype = DType::kFloat32,
                         .out_dtype = DType::kFloat32,
                         .counts = {3, 4},
                         .recv_counts = {1, 1}}),
            CallTable::kNoBound);
  EXPECT_EQ(table_bytes({.kind = Kind::kAllToAll,
                         .in_dtype = DType::kFloat32,
                         .out_dtype = DType::kFloat32,
                         .counts = {3, 3},
                         .recv_counts = {3, 3},
                         .equal_parts = true}),
            24U);
  EXPECT_EQ(
      table_bytes({.kind = Kind::kSend, .in_dtype = DType::kFloat32, .out_dtype = DType::kFloat32, .counts = {3}}),
      CallTable::kNoBound);
}

TEST(CallTable, RowsThatCannotBeFollowedAreRefused) {
  struct Case {
    std::vector<Row> rows;
    const char* text;
  };
  const Case cases[] = {
      {{{Kind::kAllReduce, 100, "a"}}, "the last row of a call has a bound"},
      {{{Kind::kAllReduce, 100, "a"}, {Kind::kAllReduce, 100, "b"}, {Kind::kAllReduce, CallTable::kNoBound, "a"}},
       "do not go from small to large"},
      {{{Kind::kAllReduce, CallTable::kNoBound, "a"}, {Kind::kAllReduce, CallTable::kNoBound, "b"}},
       "do not go from small to large"},
      {{{Kind::kBarrier, 100, "a"}, {Kind::kBarrier, CallTable::kNoBound, "b"}}, "such calls have one row"},
      {{{Kind::kSend, 100, "a"}, {Kind::kSend, CallTable::kNoBound, "b"}}, "such calls have one row"},
      {{{Kind::kRecv, CallTable::kNoBound, "a"}}, "receives go where sends go"},
  };
  for (const Case& wrong : cases) {
    EXPECT_THAT(error_of(ErrorCode::kConfig, [&] { (void)CallTable(wrong.rows); }), HasSubstr(wrong.text));
  }
}

TEST(CallTable, TextsThatAreNoTableAreRefusedByTheirPlace) {
  struct Case {
    std::string json;
    const char* text;
  };
  const Case cases[] = {
      {"", "no JSON"},
      {"[1, 2]", "got: array"},
      {R"({"rows": []})", "expected: \"zeroth_calls\": 1; got: none"},
      {R"({"zeroth_calls": 2, "rows": []})", "got: 2"},
      {R"({"zeroth_calls": 1})", "has no rows"},
      {R"({"zeroth_calls": 1, "rows": [3]})", "which: row 0"},
      {R"({"zeroth_calls": 1, "rows": [{"call": "broadcast", "backend": "a"}, {"backend": "a"}]})",
       "which: row 1; expected: call"},
      {R"({"zeroth_calls": 1, "rows": [{"call": "all_reduce"}]})", "expected: backend"},
      {R"({"zeroth_calls": 1, "rows": [{"call": "allreduce", "backend": "a"}]})", "got: \"allreduce\""},
      {R"({"zeroth_calls": 1, "rows": [{"call": "recv", "backend": "a"}]})", "got: \"recv\""},
      {R"({"zeroth_calls": 1, "rows": [{"call": 3, "backend": "a"}]})", "got: 3"},
      {R"({"zeroth_calls": 1, "rows": [{"call": "all_reduce", "backend": ""}]})", "names no backend"},
      {R"({"zeroth_calls": 1, "rows": [{"call": "all_reduce", "backend": "a", "up_to_bytes": -1}]})", "got: -1"},
      {R"({"zeroth_calls": 1, "rows": [{"call": "all_reduce", "backend": "a", "up_to_bytes": "1KiB"}]})",
       "bound that is no size"},
      {R"({"zeroth_calls": 1, "rows": [{"call": "all_reduce", "backend": "a", "upto": 1}]})", "got: upto"},
      {std::string((std::size_t{1} << 20U) + 1, ' '), "too long"},
  };
  for (const Case& wrong : cases) {
    EXPECT_THAT(error_of(ErrorCode::kConfig, [&] { (void)CallTable::from_json(wrong.json, "table.json"); }),
                AllOf(HasSubstr(wrong.text), HasSubstr("where: table.json")));
  }
}

/// Two inproc worlds under two names, on each rank.
class TwoWorlds {
 public:
  explicit TwoWorlds(int size, std::vector<int> other_nodes = {})
      : size_(size), one_(make_inproc_hub(size)), other_(make_inproc_hub(size)), other_nodes_(std::move(other_nodes)) {}
  [[nodiscard]] std::vector<NamedBackend> backends(int rank,
                                                   std::vector<std::shared_ptr<TrafficTable>> tables = {}) const {
    std::vector<NamedBackend> backends;
    for (const auto& [name, hub] : {std::pair{"one", one_}, std::pair{"other", other_}}) {
      CommOptions options = quick_options();
      if (hub == other_) options.nodes = other_nodes_;
      std::unique_ptr<CommBackend> backend =
          make_backend("inproc", {.rank = rank, .size = size_, .job = {}, .hub = hub, .options = options});
      if (!tables.empty()) backend = std::make_unique<CountingBackend>(std::move(backend), tables[backends.size()]);
      backends.push_back({name, std::move(backend)});
    }
    return backends;
  }

 private:
  int size_;
  std::shared_ptr<InprocHub> one_;
  std::shared_ptr<InprocHub> other_;
  std::vector<int> other_nodes_;
};

RankReport on_threads(int size, const std::function<void(int)>& body) {
  return try_ranks(size, [&](int rank, const std::shared_ptr<CommBackend>&) { body(rank); },
                   {.abort_on_failure = false});
}

TEST(MixedBackend, EachCallIsMadeByTheBackendOfItsRow) {
  const TwoWorlds worlds(2);
  const RankReport report = on_threads(2, [&](int rank) {
    const std::vector<std::shared_ptr<TrafficTable>> counted{std::make_shared<TrafficTable>(),
                                                             std::make_shared<TrafficTable>()};
    const CallTable table({{Kind::kAllReduce, 64, "other"},
                           {Kind::kAllReduce, CallTable::kNoBound, "one"},
                           {Kind::kBarrier, CallTable::kNoBound, "other"},
                           {Kind::kAllToAll, 64, "one"},
                           {Kind::kAllToAll, CallTable::kNoBound, "other"}});
    // Its counting observers are those of the backends: none is set on the whole.
    const std::shared_ptr<CommBackend> mixed = make_mixed_backend(worlds.backends(rank, counted), table);
    const auto calls = [&](std::size_t backend, Kind kind) { return counted[backend]->row(kind).calls; };
    require(mixed->kind() == "one|other", "kind");
    const std::uint64_t before = calls(0, Kind::kAllReduce);
    std::vector<float> small(16);
    std::vector<float> large(17);
    const Communicator ranks(mixed);
    ranks.all_reduce(std::span(small));
    require(calls(1, Kind::kAllReduce) == 1 && calls(0, Kind::kAllReduce) == before, "64 bytes");
    ranks.all_reduce(std::span(large));
    require(calls(1, Kind::kAllReduce) == 1 && calls(0, Kind::kAllReduce) == before + 1, "68 bytes");
    ranks.barrier();
    ranks.broadcast(std::span(small), 0);
    require(calls(1, Kind::kBarrier) == 1 && calls(0, Kind::kBarrier) == 0, "barrier");
    require(calls(1, Kind::kBroadcast) == 0 && calls(0, Kind::kBroadcast) == 1, "no row: the first");
    std::vector<float> taken(16);
    ranks.all_to_all(std::span<const float>(small), std::span(taken));
    require(calls(0, Kind::kAllToAll) == 1 && calls(1, Kind::kAllToAll) == 0, "an all_to_all of equal parts, 64 bytes");
    ranks.all_to_all(std::span<const float>(small), std::span(taken), {8, 8}, {8, 8});
    require(calls(0, Kind::kAllToAll) == 1 && calls(1, Kind::kAllToAll) == 1,
            "one of whose size only two ranks know: the last row");
  });
  EXPECT_EQ(report.text(), "");
}

TEST(MixedBackend, AnErrorOfOneBackendEndsCallsOfTheOther) {
  const TwoWorlds worlds(2);
  const auto begin = SteadyClock::now();
  const RankReport report = on_threads(2, [&](int rank) {
    const std::shared_ptr<CommBackend> mixed = make_mixed_backend(
        worlds.backends(rank),
        CallTable({{Kind::kAllReduce, 64, "other"}, {Kind::kAllReduce, CallTable::kNoBound, "one"}}));
    std::vector<float> data(rank == 0 ? 16 : 1'000);  // the ranks do not even come to the same backend
    if (rank == 0) std::this_thread::sleep_for(Milliseconds{100});
    if (rank == 0) mixed->abort(Error(ErrorCode::kInternal, "planted"));
    Communicator(mixed).all_reduce(std::span(data));
  });
  EXPECT_LT(SteadyClock::now() - begin, Milliseconds{10'000});
  ASSERT_EQ(report.failures.size(), 2U) << report.text();
  EXPECT_THAT(report.text(), HasSubstr("planted"));
}

TEST(MixedBackend, WhatDoesNotGoTogetherIsRefused) {
  const TwoWorlds worlds(2);
  EXPECT_THAT(on_threads(2,
                         [&](int rank) {
                           (void)make_mixed_backend(
                               worlds.backends(rank),
                               CallTable({{Kind::kBarrier, CallTable::kNoBound, rank == 0 ? "one" : "other"}}));
                         })
                  .text(),
              AllOf(HasSubstr("[MISMATCH] ranks have different call tables"), HasSubstr("another one on rank 1"),
                    HasSubstr("who: rank 0/2"), HasSubstr("who: rank 1/2")));
  const TwoWorlds again(2);
  EXPECT_THAT(
      on_threads(2,
                 [&](int rank) {
                   (void)make_mixed_backend(again.backends(rank),
                                            CallTable({{Kind::kBarrier, CallTable::kNoBound, "third"}}));
                 })
          .text(),
      AllOf(HasSubstr("names a backend that is not there"), HasSubstr("expected: one of one, other; got: third")));
  const TwoWorlds nodes(2, {0, 1});
  EXPECT_THAT(on_threads(2, [&](int rank) { (void)make_mixed_backend(nodes.backends(rank), CallTable()); }).text(),
              AllOf(HasSubstr("see other nodes"), HasSubstr("expected: [2], as one does; got: [1, 1]")));
  error_of(ErrorCode::kConfig, [] { (void)make_mixed_backend({}, CallTable()); });
  EXPECT_THAT(error_of(ErrorCode::kConfig, [] { (void)make_backend("shm|mpi", {.rank = 0, .size = 2, .job = "x"}); }),
              HasSubstr("needs a table"));
  EXPECT_THAT(error_of(ErrorCode::kConfig, [] { (void)make_backend("shm|mpj", {.rank = 0, .size = 2, .job = "x"}); }),
              HasSubstr("no such communication backend"));
  for (const char* name : {"nccl|mpi", "shm|nccl", "shm+mpi|nccl+mpi"}) {
    EXPECT_THAT(error_of(ErrorCode::kConfig, [&] { (void)make_backend(name, {.rank = 0, .size = 2, .job = "x"}); }),
                AllOf(HasSubstr("a backend of devices cannot be part of a mixture"), HasSubstr("which: nccl"),
                      HasSubstr("alone")));
  }
  CommOptions own_sums = quick_options();
  own_sums.reduction = Reduction::kTransport;
  EXPECT_THAT(error_of(ErrorCode::kConfig,
                       [&] { (void)make_backend("shm|mpi", {.rank = 0, .size = 2, .job = "x", .options = own_sums}); }),
              AllOf(HasSubstr("no sums of its own; where: comm.shm"), HasSubstr("zeroth.reduction")));
}

/// Sees a rank that is lost, whenever it is asked.
class Bereaved final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  void check_peers(const WaitContext& context) override {
    throw Error(ErrorCode::kPeerLost, "rank 5 left early", {.which = context.what});
  }
};

TEST(MixedBackend, WhoWaitsForSomethingElseSeesThePeersOfAllBackends) {
  for (const std::size_t lost : {0U, 1U, 2U}) {  // the last: of none
    std::vector<NamedBackend> backends;
    for (const char* name : {"one", "other"}) {
      std::unique_ptr<CommBackend> backend = make_backend("self", {});
      if (backends.size() == lost) backend = std::make_unique<Bereaved>(std::move(backend));
      backends.push_back({name, std::move(backend)});
    }
    const auto mixed = make_mixed_backend(std::move(backends), CallTable());
    const auto look = [&] { mixed->check_peers({.what = "a kernel"}); };
    if (lost == 2) {
      EXPECT_NO_THROW(look());
    } else {
      EXPECT_THAT(error_of(ErrorCode::kPeerLost, look), HasSubstr("rank 5 left early; which: a kernel"));
    }
  }
}

}  // namespace
}  // namespace zeroth::test
