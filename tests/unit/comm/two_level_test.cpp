// Groups in two levels beside what the conformance suite holds: which groups have levels, their memory, who hears of a
// failure; and nodes.
#include "comm/levels/levels_of_hosts.h"
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/comm/two_level.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ThreadRanksOptions in_levels(int world, int per_node) {
  ThreadRanksOptions options;
  options.transport = ThreadTransport::kLevels;
  options.comm.nodes = nodes_of_ranks(world, per_node);
  return options;
}

/// 1 + 2 + ... over the group, in a size that goes in pieces.
void require_sums(const std::shared_ptr<CommBackend>& backend) {
  const Communicator comm(backend);
  std::vector<std::int64_t> data(200'003, comm.rank() + 1);
  comm.all_reduce(std::span(data));
  const std::int64_t expected = static_cast<std::int64_t>(comm.size()) * (comm.size() + 1) / 2;
  require(std::ranges::all_of(data, [&](std::int64_t value) { return value == expected; }),
          "a wrong sum in " + backend->group_name());
}

TEST(TwoLevels, PartsOfAGroupHaveTheLevelsThatTheirRanksAllow) {
  run_ranks(
      8,
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        require(backend->kind() == "inproc+messages" && backend->node_sizes().size() == 2, "two nodes");
        require(!backend->capabilities().one_sided, "no windows over both");
        // Inside a node: its own group, with windows.
        const std::shared_ptr<CommBackend> node = backend->split(rank / 4, rank, "node");
        require(node->kind() == "inproc" && node->capabilities().one_sided && node->size() == 4,
                "the part inside a node");
        require(node->group_name() == "world/node", node->group_name());
        require_sums(node);
        // Half of each node: levels again. Turned around, too: the nodes are then in the other order.
        for (const int key : {rank, -rank}) {
          const std::shared_ptr<CommBackend> half = backend->split(rank % 4 / 2, key, "half");
          require(half->kind() == "inproc+messages" && half->size() == 4,
                  "a part with levels is over " + std::string(half->kind()));
          require_sums(half);
        }
        // One of each node, and ranks of both nodes in turn: no level of which each byte crosses once.
        const std::shared_ptr<CommBackend> pair = backend->split(rank % 4, rank, "pair");
        require(pair->kind() == "messages" && pair->size() == 2, "one rank of each node");
        require_sums(pair);
        const std::shared_ptr<CommBackend> mixed = backend->split(0, rank % 4 * 2 + rank / 4, "mixed");
        require(mixed->kind() == "messages" && mixed->node_sizes().size() == 8, "nodes in turn");
        require_sums(mixed);
        const std::shared_ptr<CommBackend> none = backend->split(rank == 5 ? -1 : 0, rank, "without");
        require((none == nullptr) == (rank == 5), "membership");
        if (none) require(none->kind() == "messages", "nodes of four and of three");
        if (none) require_sums(none);
        require_sums(backend);
      },
      in_levels(8, 4));
}

TEST(TwoLevels, MemoryIsAPieceForEachNodeAndEachRankOfOneOnceASumNeedsThem) {
  ThreadRanksOptions options = in_levels(6, 3);
  options.comm.ledger = MemoryLedger::create();
  run_ranks(
      6,
      [&](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
        const Communicator comm(backend);
        const std::size_t before = backend->memory_bytes();
        std::vector<float> part(100);
        std::vector<float> whole(600);
        comm.all_gather(std::span<const float>(part), std::span(whole));
        comm.broadcast(std::span(whole), 4);
        EXPECT_EQ(backend->memory_bytes(), before);
        comm.all_reduce(std::span(part));
        EXPECT_EQ(backend->memory_bytes(), before + (2 + 3) * options.comm.staging_bytes);
      },
      options);
  EXPECT_EQ(options.comm.ledger->live().total(), 0U);
}

TEST(TwoLevels, AFailureInOneNodeIsHeardInTheOthers) {
  ThreadRanksOptions options = in_levels(4, 2);
  options.abort_on_failure = false;
  const RankReport report = try_ranks(
      4,
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        std::vector<float> data(rank == 3 ? 5 : 4);
        Communicator(backend).all_reduce(std::span(data), {.unit = 7});
      },
      options);
  ASSERT_EQ(report.failures.size(), 4U) << report.text();
  for (const RankFailure& failure : report.failures) {
    EXPECT_EQ(failure.code, ErrorCode::kMismatch) << failure.text;
    EXPECT_THAT(failure.text, HasSubstr("a step of all_reduce float32, 5 elements (20 B)"));
    EXPECT_THAT(failure.text, HasSubstr("a step of all_reduce float32, 4 elements (16 B)"));
    EXPECT_THAT(failure.text, HasSubstr("of node 1"));
  }
}

TEST(TwoLevels, DifferentCallsOnDifferentNodesAreFoundAtOnce) {
  ThreadRanksOptions options = in_levels(4, 2);
  options.abort_on_failure = false;
  options.deadline = Milliseconds{20'000};  // less than the timeout of a wait
  using Step = std::function<void(const Communicator&)>;
  const std::vector<Step> calls{[](const Communicator& comm) { comm.barrier(); },
                                [](const Communicator& comm) {
                                  std::vector<float> data(4);
                                  comm.all_reduce(std::span(data));
                                },
                                [](const Communicator& comm) {
                                  std::vector<float> data(40'000);
                                  comm.all_reduce(std::span(data));
                                },
                                [](const Communicator& comm) {
                                  std::vector<float> data(4);
                                  comm.broadcast(std::span(data), 1);
                                },
                                [](const Communicator& comm) {
                                  const float own = 1;
                                  std::vector<float> all(4);
                                  comm.all_gather(std::span(&own, 1), std::span(all));
                                },
                                [](const Communicator& comm) {
                                  std::vector<float> data(4);
                                  std::vector<float> out(4);
                                  comm.all_to_all(std::span<const float>(data), std::span(out));
                                }};
  for (std::size_t one = 0; one < calls.size(); ++one) {
    for (std::size_t other = 0; other < calls.size(); ++other) {
      if (one == other) continue;
      const RankReport report = try_ranks(
          4,
          [&](int rank, const std::shared_ptr<CommBackend>& backend) {
            calls[rank < 2 ? one : other](Communicator(backend));
          },
          options);
      EXPECT_EQ(report.failures.size(), 4U) << one << " against " << other << "\n" << report.text();
      for (const RankFailure& failure : report.failures) {
        EXPECT_TRUE(failure.code == ErrorCode::kMismatch || failure.code == ErrorCode::kAborted) << failure.text;
        EXPECT_THAT(failure.text, HasSubstr("[MISMATCH] ranks make different calls"));
      }
    }
  }
}

/// A rank that cannot send any more after `messages` of them.
class Breaking final : public MessageTransport {
 public:
  Breaking(std::shared_ptr<MessageTransport> inner, int messages) : inner_(std::move(inner)), left_(messages) {}
  [[nodiscard]] int rank() const override { return inner_->rank(); }
  [[nodiscard]] int size() const override { return inner_->size(); }
  [[nodiscard]] std::string_view kind() const override { return inner_->kind(); }
  [[nodiscard]] std::unique_ptr<Transfer> send(int to, std::uint32_t tag, std::span<const std::byte> bytes) override {
    ZR_CHECK(left_-- > 0, ErrorCode::kResource, "planted", {});
    return inner_->send(to, tag, bytes);
  }
  [[nodiscard]] std::unique_ptr<Transfer> receive(int from, std::uint32_t tag, std::span<std::byte> bytes) override {
    return inner_->receive(from, tag, bytes);
  }
  void abort(std::string_view text) noexcept override { inner_->abort(text); }

 private:
  std::shared_ptr<MessageTransport> inner_;
  int left_;
};

/// Wherever on the way to its groups a rank fails: the other one does not wait for the deadline.
TEST(LevelsOfHosts, ARankThatFailsOnTheWayTellsTheOthers) {
  for (const int messages : {0, 1, 2, 3}) {
    SCOPED_TRACE(messages);
    const auto hub = std::make_shared<MessageHub>(2, true);
    std::vector<std::string> errors(2);
    const auto live = [&](int rank) {
      std::shared_ptr<MessageTransport> transport = hub->transport(rank);
      if (rank == 0) transport = std::make_shared<Breaking>(std::move(transport), messages);
      try {
        WorldSpec spec{.rank = rank, .size = 2, .job = "two_level_test", .options = quick_options()};
        spec.options.nodes = {0, 1};  // one each: nobody meets anybody in shared memory
        (void)detail::make_levels_of_hosts(transport, spec);
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    };
    std::thread other([&] { live(1); });
    live(0);
    other.join();
    EXPECT_THAT(errors[0], HasSubstr("[RESOURCE] planted"));
    EXPECT_THAT(errors[1], HasSubstr("planted"));
  }
}

/// What two ranks on one host get whose nodes are these: the kind of their backend, or an error.
std::vector<std::string> kinds_over_hosts(const std::vector<std::vector<int>>& nodes) {
  const auto hub = std::make_shared<MessageHub>(2, true);
  std::vector<std::string> kinds(2);
  const auto live = [&](std::size_t rank) {
    CommOptions options = quick_options();
    options.nodes = nodes[rank];
    try {
      const std::shared_ptr<CommBackend> backend =
          make_backend_over_hosts(hub->transport(static_cast<int>(rank)), options);
      require_sums(backend);
      kinds[rank] = backend->kind();
    } catch (const Error& error) {
      kinds[rank] = error.what();
    }
  };
  std::thread other([&] { live(1); });
  live(0);
  other.join();
  return kinds;
}

/// Levels of several ranks each need processes: tests/python/c10d_test.py.
TEST(LevelsOfHosts, RanksOfOneNodeHaveMessagesAlone) {
  EXPECT_THAT(kinds_over_hosts({{}, {}}), ElementsAre("messages", "messages"));
  EXPECT_THAT(kinds_over_hosts({{0, 1}, {0, 1}}), ElementsAre("messages", "messages")) << "one rank on each";
  EXPECT_THAT(kinds_over_hosts({{}, {0, 1}}),
              ::testing::Each(AllOf(HasSubstr("[MISMATCH]"), HasSubstr("zeroth.ranks_per_node"))));
}

TEST(Nodes, AreHostsOrPartsOfThem) {
  using detail::nodes_of_hosts;
  EXPECT_THAT(nodes_of_hosts({"a", "a", "b", "b"}, {}), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(nodes_of_hosts({"b", "a", "b"}, {}), ElementsAre(0, 1, 0));
  EXPECT_THAT(nodes_of_hosts({"a", "a", "a", "b"}, {0, 0, 1, 2}), ElementsAre(0, 0, 1, 2));
  try {
    (void)nodes_of_hosts({"a", "a", "a", "b"}, {0, 0, 1, 1});
    ADD_FAILURE() << "a node on two hosts";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kConfig);
    EXPECT_THAT(error.what(), HasSubstr("ranks 2 and 3 on node 1"));
    EXPECT_THAT(error.what(), HasSubstr("zeroth.ranks_per_node"));
  }
}

TEST(Nodes, AHostIsItsBootAndItsNamespaces) {
  const std::string identity = detail::host_identity();
  EXPECT_EQ(identity, detail::host_identity());
  EXPECT_THAT(identity, HasSubstr("net:["));
  EXPECT_THAT(identity, HasSubstr("pid:["));
  EXPECT_LT(identity.size(), 160U);
}

TEST(Nodes, ThatAreNotThoseOfTheWorldAreRefused) {
  CommOptions options = quick_options();
  options.nodes = {0, 0, 1};
  const auto hub = make_inproc_hub(1);
  try {
    (void)make_backend("inproc", {.rank = 0, .size = 1, .job = {}, .hub = hub, .options = options});
    ADD_FAILURE() << "three nodes' ranks of a world of one";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("CommOptions::nodes"));
  }
}

/// Nodes of ranks that send messages alone, each on a host of this name; or the errors.
RankReport expect_nodes(const std::vector<std::string>& hosts, const std::function<std::vector<int>(int rank)>& wanted,
                        const std::vector<int>& nodes) {
  const auto size = static_cast<int>(hosts.size());
  const auto hub = std::make_shared<MessageHub>(size);
  return try_ranks(size, [&](int rank, const std::shared_ptr<CommBackend>&) {
    CommOptions options = quick_options();
    options.nodes = wanted(rank);
    const auto transport = hub->transport(rank);
    options.nodes = detail::nodes_of_ranks(transport, options, hosts[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(options.nodes, nodes);
    const auto table = std::make_shared<TrafficTable>();
    const std::unique_ptr<CommBackend> backend = make_message_backend(transport, options);
    backend->set_observer(table);
    std::vector<float> data(100'000, 1.0F);
    Communicator(std::shared_ptr<CommBackend>(backend.get(), [](CommBackend*) {})).all_reduce(std::span(data));
    EXPECT_EQ(table->far_bytes() > 0, nodes.front() != nodes.back());
  });
}

TEST(NodesOfHosts, RanksWithOneLevelCountHostsAsTwoLevelsDo) {
  const auto nothing = [](int /*rank*/) { return std::vector<int>{}; };
  EXPECT_EQ(expect_nodes({"a", "a", "b", "b"}, nothing, {0, 0, 1, 1}).text(), "");
  EXPECT_EQ(expect_nodes({"a", "a"}, nothing, {0, 0}).text(), "");
  EXPECT_EQ(expect_nodes({"a", "b", "b"}, nothing, {0, 1, 1}).text(), "");
  EXPECT_EQ(expect_nodes({"a", "a", "a", "a"}, [](int /*rank*/) { return std::vector<int>{0, 0, 1, 1}; }, {0, 0, 1, 1})
                .text(),
            "");
  const RankReport odd =
      expect_nodes({"a", "b"}, [](int rank) { return rank == 0 ? std::vector<int>{} : std::vector<int>{0, 0}; }, {});
  ASSERT_EQ(odd.failures.size(), 2U) << odd.text();
  EXPECT_EQ(odd.failures.front().code, ErrorCode::kMismatch) << odd.text();
  EXPECT_THAT(odd.text(), HasSubstr("zeroth.ranks_per_node"));
}

}  // namespace
}  // namespace zeroth::test
