#include <zeroth/base/error.h>
#include <zeroth/comm/collective.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <vector>

namespace zeroth {
namespace {

alignas(64) std::array<std::byte, 4096> memory;

Collective good(CollectiveKind kind) {
  Collective collective{.kind = kind,
                        .in_dtype = DType::kFloat32,
                        .out_dtype = DType::kFloat32,
                        .send = memory.data(),
                        .recv = memory.data() + 2048,
                        .counts = {3, 4},
                        .root = 0,
                        .tag = {.unit = 2, .label = 5}};
  if (kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kBroadcast || is_point_to_point(kind)) {
    collective.counts = {7};
  }
  if (kind == CollectiveKind::kBarrier) collective.counts = {};
  if (kind == CollectiveKind::kGather) collective.root = 1;
  if (kind == CollectiveKind::kAllToAll) collective.recv_counts = {2, 4};
  return collective;
}

std::string problem(const Collective& collective, int rank = 1) {
  try {
    validate(collective, rank, 2, "test");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.message();
  }
  return "";
}

constexpr CollectiveKind kKinds[] = {
    CollectiveKind::kAllGather, CollectiveKind::kReduceScatter, CollectiveKind::kAllReduce, CollectiveKind::kBroadcast,
    CollectiveKind::kGather,    CollectiveKind::kScatter,       CollectiveKind::kAllToAll,  CollectiveKind::kSend,
    CollectiveKind::kRecv,      CollectiveKind::kBarrier};

TEST(Collective, GoodCallsPass) {
  for (const CollectiveKind kind : kKinds) EXPECT_EQ(problem(good(kind)), "") << name_of(kind);
}

TEST(Collective, WhatOneRankCanSeeIsRefused) {
  using Change = std::function<void(Collective&)>;
  const std::vector<std::pair<std::string, Change>> changes{
      {"wrong number of counts", [](Collective& c) { c.counts.push_back(1); }},
      {"a count is negative or too large", [](Collective& c) { c.counts[0] = -1; }},
      {"a count is negative or too large", [](Collective& c) { c.counts[0] = std::int64_t{1} << 62U; }},
      {"recv is null", [](Collective& c) { c.recv = nullptr; }},
      {"recv is not aligned to its dtype", [](Collective& c) { c.recv += 2; }},
  };
  for (const auto& [text, change] : changes) {
    for (const CollectiveKind kind : kKinds) {
      if (kind == CollectiveKind::kBarrier) continue;
      Collective collective = good(kind);
      change(collective);
      const bool unused = kind == CollectiveKind::kSend && text.starts_with("recv");
      EXPECT_EQ(problem(collective), unused ? "" : text) << name_of(kind);
    }
  }
  for (const CollectiveKind kind : kKinds) {
    if (kind == CollectiveKind::kBarrier) continue;
    Collective collective = good(kind);
    collective.root = 2;
    EXPECT_EQ(problem(collective),
              is_point_to_point(kind) ? "the other rank is not in the group" : "the root is not in the group");
    collective.root = 1;
    if (is_point_to_point(kind)) {
      EXPECT_EQ(problem(collective), "a rank sends to itself");
    }
  }
  Collective send = good(CollectiveKind::kSend);
  send.send = nullptr;
  EXPECT_EQ(problem(send), "send is null");
  for (const CollectiveKind kind : kKinds) {
    Collective collective = good(kind);
    collective.recv_counts.push_back(1);
    EXPECT_EQ(problem(collective),
              kind == CollectiveKind::kBarrier ? "a barrier has no data" : "wrong number of counts to receive");
  }
  Collective negative = good(CollectiveKind::kAllToAll);
  negative.recv_counts[1] = -1;
  EXPECT_EQ(problem(negative), "a count is negative or too large");
  Collective uneven = good(CollectiveKind::kAllToAll);
  uneven.equal_parts = true;
  EXPECT_EQ(problem(uneven), "the parts are not equal");
  uneven.recv_counts = uneven.counts = {3, 3};
  EXPECT_EQ(problem(uneven), "");
  Collective no_parts = good(CollectiveKind::kAllReduce);
  no_parts.equal_parts = true;
  EXPECT_EQ(problem(no_parts), "the parts are not equal");
  Collective barrier = good(CollectiveKind::kBarrier);
  barrier.counts = {1};
  EXPECT_EQ(problem(barrier), "a barrier has no data");
}

TEST(Collective, SumsKnowTheirDtypes) {
  const std::vector<std::pair<DType, DType>> sums{
      {DType::kFloat64, DType::kFloat64},  {DType::kFloat32, DType::kFloat32},  {DType::kBFloat16, DType::kBFloat16},
      {DType::kBFloat16, DType::kFloat32}, {DType::kFloat32, DType::kBFloat16}, {DType::kFloat16, DType::kFloat16},
      {DType::kFloat16, DType::kFloat32},  {DType::kFloat32, DType::kFloat16},  {DType::kInt64, DType::kInt64},
      {DType::kInt32, DType::kInt32}};
  for (int in = 0; in <= static_cast<int>(DType::kUInt8); ++in) {
    for (int out = 0; out <= static_cast<int>(DType::kUInt8); ++out) {
      Collective collective = good(CollectiveKind::kAllReduce);
      collective.in_dtype = static_cast<DType>(in);
      collective.out_dtype = static_cast<DType>(out);
      const bool allowed = std::ranges::find(sums, std::pair{collective.in_dtype, collective.out_dtype}) != sums.end();
      EXPECT_EQ(problem(collective).empty(), allowed) << describe(collective);
      collective.kind = CollectiveKind::kBroadcast;
      EXPECT_EQ(problem(collective).empty(), in == out) << describe(collective);
    }
  }
}

TEST(Collective, AMinimumTakesEveryDtypeAndKeepsIt) {
  for (const CollectiveKind kind : kKinds) {
    const bool reduces = kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduceScatter;
    for (int in = 0; in <= static_cast<int>(DType::kUInt8); ++in) {
      for (int out = 0; out <= static_cast<int>(DType::kUInt8); ++out) {
        Collective collective = good(kind);
        if (kind == CollectiveKind::kBarrier) continue;
        collective.op = ReduceOp::kMin;
        collective.in_dtype = static_cast<DType>(in);
        collective.out_dtype = static_cast<DType>(out);
        EXPECT_EQ(problem(collective).empty(), reduces && in == out) << describe(collective);
      }
    }
  }
  Collective collective = good(CollectiveKind::kReduceScatter);
  collective.op = ReduceOp::kMax;
  EXPECT_EQ(describe(collective), "reduce_scatter max float32 [3, 4] unit=2 label=5");
  collective.accumulate = true;
  EXPECT_EQ(problem(collective), "only the sum of a reduce_scatter accumulates");
}

TEST(Collective, OverlapsOtherThanInPlaceAreRefused) {
  for (const int shift : {0, 4, 12, 16}) {
    Collective gather = good(CollectiveKind::kAllGather);
    gather.recv = memory.data();
    gather.send = memory.data() + shift;
    EXPECT_EQ(problem(gather).empty(), shift == 12) << shift;  // rank 1's part begins behind 3 elements
    Collective scatter = good(CollectiveKind::kReduceScatter);
    scatter.send = memory.data();
    scatter.recv = memory.data() + shift;
    EXPECT_EQ(problem(scatter).empty(), shift == 12) << shift;
    Collective reduce = good(CollectiveKind::kAllReduce);
    reduce.send = memory.data();
    reduce.recv = memory.data() + shift;
    EXPECT_EQ(problem(reduce).empty(), shift == 0) << shift;
  }
  for (const int shift : {0, 4, 12, 16}) {
    Collective gather = good(CollectiveKind::kGather);
    gather.recv = memory.data();
    gather.send = memory.data() + shift;
    EXPECT_EQ(problem(gather).empty(), shift == 12) << shift;
    gather.root = 0;
    EXPECT_EQ(problem(gather), "") << "this rank's recv is not used";
    Collective scatter = good(CollectiveKind::kScatter);
    scatter.send = memory.data();
    scatter.recv = memory.data() + shift;
    EXPECT_EQ(problem(scatter), "") << "this rank's send is not used";
    scatter.root = 1;
    EXPECT_EQ(problem(scatter).empty(), shift == 12) << shift;
    Collective exchange = good(CollectiveKind::kAllToAll);
    exchange.send = memory.data();
    exchange.recv = memory.data() + shift;
    EXPECT_EQ(problem(exchange), "send and recv overlap") << shift;
  }
  Collective onto_itself = good(CollectiveKind::kReduceScatter);
  onto_itself.send = memory.data();
  onto_itself.recv = memory.data() + 12;
  onto_itself.accumulate = true;
  EXPECT_EQ(problem(onto_itself), "send and recv overlap");
  onto_itself.recv = memory.data() + 512;
  EXPECT_EQ(problem(onto_itself), "");
  onto_itself.kind = CollectiveKind::kAllReduce;
  onto_itself.counts = {7};
  EXPECT_EQ(problem(onto_itself), "only the sum of a reduce_scatter accumulates");
  Collective cast = good(CollectiveKind::kAllReduce);
  cast.recv = memory.data();
  cast.out_dtype = DType::kBFloat16;
  EXPECT_EQ(problem(cast), "send and recv overlap");
}

TEST(Collective, SendMayBeNullWhereNothingIsSent) {
  Collective gather = good(CollectiveKind::kAllGather);
  gather.counts = {7, 0};
  gather.send = nullptr;
  EXPECT_EQ(problem(gather), "");
  Collective broadcast = good(CollectiveKind::kBroadcast);
  broadcast.send = nullptr;
  EXPECT_EQ(problem(broadcast), "");
  EXPECT_EQ(problem(broadcast, 0), "send is null");
}

TEST(Collective, OffsetsPutThePartsOneAfterTheOther) {
  Collective collective = good(CollectiveKind::kReduceScatter);  // parts of 3 and 4
  const std::vector<std::vector<std::int64_t>> fine{{0, 3}, {4, 0}};
  for (const auto& offsets : fine) {
    collective.offsets = offsets;
    EXPECT_EQ(problem(collective), "");
  }
  EXPECT_EQ(describe(collective), "reduce_scatter float32 [3, 4] at [4, 0] unit=2 label=5");
  const std::vector<std::vector<std::int64_t>> wrong{{0}, {0, 3, 7}, {0, 4}, {0, 2}, {3, 0}, {-3, 0}, {0, 0}};
  for (const auto& offsets : wrong) {
    collective.offsets = offsets;
    EXPECT_EQ(problem(collective), "the parts are not one after the other") << offsets.front();
  }
  collective.offsets = {7, 0};
  collective.counts = {0, 7};
  EXPECT_EQ(problem(collective), "") << "an empty part is anywhere";
  // In place at its own offset.
  collective.counts = {3, 4};
  collective.offsets = {4, 0};
  collective.recv = const_cast<std::byte*>(collective.send);
  EXPECT_EQ(problem(collective, 1), "");
  EXPECT_EQ(problem(collective, 0), "send and recv overlap");
  collective.recv += 4 * sizeof(float);
  EXPECT_EQ(problem(collective, 0), "");
  for (const CollectiveKind kind : kKinds) {
    if (kind == CollectiveKind::kReduceScatter || kind == CollectiveKind::kBarrier) continue;
    Collective other = good(kind);
    other.offsets = {0, 3};
    EXPECT_EQ(problem(other), "only a reduce_scatter has offsets") << name_of(kind);
  }
}

TEST(Collective, DescriptionsAreShort) {
  Collective collective = good(CollectiveKind::kReduceScatter);
  EXPECT_EQ(describe(collective), "reduce_scatter float32 [3, 4] unit=2 label=5");
  collective.counts.assign(100, 1);
  collective.out_dtype = DType::kBFloat16;
  EXPECT_EQ(describe(collective), "reduce_scatter float32->bfloat16 [1, 1, 1, 1, 1, 1, 1, 1, ...] unit=2 label=5");
  EXPECT_EQ(describe(good(CollectiveKind::kAllToAll)), "all_to_all float32 [3, 4] from [2, 4] unit=2 label=5");
  EXPECT_EQ(describe(good(CollectiveKind::kSend)), "send float32 [7] to rank 0 unit=2 label=5");
  EXPECT_EQ(describe(good(CollectiveKind::kRecv)), "recv float32 [7] from rank 0 unit=2 label=5");
  EXPECT_EQ(describe(good(CollectiveKind::kBarrier)), "barrier unit=2 label=5");
}

}  // namespace
}  // namespace zeroth
