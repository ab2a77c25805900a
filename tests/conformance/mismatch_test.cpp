// Ranks that make different calls: an error at once, on every rank, with both sides in it.
#include "conformance/world_runner.h"
#include "support/sanitizer.h"

#include <zeroth/base/deadline.h>

#include <gmock/gmock.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <regex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

struct Case {
  std::string name{};
  std::function<void(const Communicator&)> most{};  ///< what all ranks but the last do
  std::function<void(const Communicator&)> last{};  ///< what the last one does
  std::vector<std::string> both_sides{};            ///< texts that every rank's error must hold
  bool across = false;                              ///< a table may give the two sides to two backends
};

std::vector<Case> cases() {
  const auto reduce = [](std::size_t count, MessageTag tag) {
    return [count, tag](const Communicator& comm) {
      std::vector<float> data(count, 1.0F);
      comm.all_reduce(std::span(data), tag);
    };
  };
  const auto both = [](const auto& first, const auto& second) {
    return [first, second](const Communicator& comm) {
      first(comm);
      second(comm);
    };
  };
  const auto gather = [](std::vector<std::int64_t> shape) {
    return [shape](const Communicator& comm) {
      std::vector<std::int64_t> counts(static_cast<std::size_t>(comm.size()), 5);
      counts.front() += shape[0];
      counts.back() += shape[1];
      std::int64_t total = 0;
      for (const std::int64_t count : counts) total += count;
      const std::vector<float> in(static_cast<std::size_t>(counts[static_cast<std::size_t>(comm.rank())]));
      std::vector<float> out(static_cast<std::size_t>(total));
      comm.all_gather(std::span<const float>(in), std::span(out), counts);
    };
  };
  const auto scatter_at = [](bool in_rank_order) {
    return [in_rank_order](const Communicator& comm) {
      const std::vector<float> in(2 * static_cast<std::size_t>(comm.size()));
      float out[2];
      Collective call{.kind = CollectiveKind::kReduceScatter,
                      .in_dtype = DType::kFloat32,
                      .out_dtype = DType::kFloat32,
                      .send = reinterpret_cast<const std::byte*>(in.data()),
                      .recv = reinterpret_cast<std::byte*>(out),
                      .counts = std::vector<std::int64_t>(static_cast<std::size_t>(comm.size()), 2)};
      for (int rank = 0; rank < comm.size(); ++rank)
        call.offsets.push_back(2 * (in_rank_order ? rank : comm.size() - 1 - rank));
      comm.backend().submit({&call, 1}, comm.stream()).wait();
    };
  };
  const auto extreme = [](ReduceOp op) {
    return [op](const Communicator& comm) {
      std::vector<float> data(64, 1.0F);
      comm.all_reduce(std::span(data), op, {.unit = 1, .label = 0});
    };
  };
  const auto broadcast = [](int root) {
    return [root](const Communicator& comm) {
      std::vector<float> data(10);
      comm.broadcast(std::span(data), root);
    };
  };
  const auto gather_at = [](int root) {
    return [root](const Communicator& comm) {
      std::vector<float> all(comm.rank() == root ? static_cast<std::size_t>(comm.size()) : 0);
      const float own = 1;
      comm.gather(std::span<const float>(&own, 1), std::span(all), root);
    };
  };
  const auto exchange = [](const Communicator& comm) {
    std::vector<float> data(2 * static_cast<std::size_t>(comm.size()));
    std::vector<float> out(data.size());
    comm.all_to_all(std::span<const float>(data), std::span(out), {.unit = 1, .label = 0});
  };
  const auto exchange_unequal = [](const Communicator& comm) {
    std::vector<float> data(2 * static_cast<std::size_t>(comm.size()));
    std::vector<float> out(data.size());
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(comm.size()), 2);
    comm.all_to_all(std::span<const float>(data), std::span(out), counts, counts, {.unit = 1, .label = 0});
  };
  const auto attach = [](std::string name) {
    return [name](const Communicator& comm) {
      const Arena arena = Arena::create(comm.backend().capabilities().window_kind, kPageBytes, "test");
      [[maybe_unused]] const PeerWindow window = comm.backend().attach(arena, name);
    };
  };
  const auto split = [](std::string name) {
    return [name](const Communicator& comm) {
      [[maybe_unused]] const std::unique_ptr<CommBackend> part = comm.backend().split(0, comm.rank(), name);
    };
  };
  const auto integers = [](const Communicator& comm) {
    std::vector<std::int32_t> data(64);
    comm.all_reduce(std::span(data), {.unit = 1, .label = 0});
  };
  const auto barrier = [](const Communicator& comm) { comm.barrier(); };
  const auto named = [](std::string name) { return [name](const Communicator& comm) { comm.barrier(name); }; };
  const std::string long_name = "a name that is too long for a description, and ends in ";
  const MessageTag one{.unit = 1, .label = 0};
  const MessageTag two{.unit = 2, .label = 0};
  const MessageTag later{.unit = 1, .label = 7};
  return {
      {"Skipped", both(reduce(64, one), reduce(64, two)), reduce(64, two), {"unit 1", "unit 2"}},
      {"SwappedEqualShapes",
       both(reduce(64, one), reduce(64, two)),
       both(reduce(64, two), reduce(64, one)),
       {"unit 1", "unit 2"}},
      {"SwappedPhases",
       both(reduce(64, one), reduce(64, later)),
       both(reduce(64, later), reduce(64, one)),
       {"label 0", "label 7"}},
      {"OtherSize", reduce(64, one), reduce(65, one), {"256 B", "260 B"}},
      {"OtherSizeLarge", reduce(100'000, one), reduce(100'001, one), {"400000 B", "400004 B"}},
      {"OneInlineOneStaged", reduce(64, one), reduce(100'000, one), {"256 B", "400000 B"}, true},
      {"OtherDtype", reduce(64, one), integers, {"float32", "int32"}},
      {"OtherOperation", reduce(64, one), barrier, {"all_reduce", "barrier"}, true},
      {"OtherParts", gather({1, 2}), gather({2, 1}), {"parts"}},
      {"OtherOrderOfParts", scatter_at(true), scatter_at(false), {"parts"}},
      {"OtherRoot", broadcast(0), broadcast(1), {"root 0", "root 1"}},
      {"SumAgainstMaximum",
       reduce(64, one),
       extreme(ReduceOp::kMax),
       {"all_reduce#1 float32", "all_reduce#1 max float32"}},
      {"OtherRootOfAGather", gather_at(0), gather_at(1), {"root 0", "root 1"}},
      {"AllToAllAgainstGather", exchange, gather_at(0), {"all_to_all", "gather"}, true},
      {"EqualPartsAgainstParts", exchange, exchange_unequal, {" of equal parts", " of parts of any size"}},
      {"OtherUnit", reduce(64, one), reduce(64, two), {"unit 1", "unit 2"}},
      {"OtherName",
       named("before the export"),
       named("after the export"),
       {"barrier#1 \"before the export\"", "barrier#1 \"after the export\""}},
      {"OtherEndOfALongName",
       named(long_name + "one"),
       named(long_name + "two"),
       {"barrier#1 \"a name that is too long"}},
      {"NameAgainstNone", named("x"), barrier, {"barrier#1 \"x\""}},
      {"OtherWindow", attach("a"), attach("b"), {"attach"}},
      {"OtherSplit", split("a"), split("b"), {"split"}},
      {"CallAgainstSplit", reduce(64, one), split("part"), {"split", "all_reduce"}, true},
      {"CallAgainstAttach", reduce(64, one), attach("b"), {"attach", "all_reduce"}, true},
  };
}

/// Fingerprints are compared by the call itself: nobody waits for a deadline, or for the control plane.
constexpr Milliseconds kFound{1'000};

/// What is found later fails as another error.
void in_time(const std::function<void()>& call) {
  const auto begin = SteadyClock::now();
  try {
    call();
  } catch (const Error& error) {
    const auto took = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - begin);
    if (took >= kFound)
      throw std::runtime_error("found after " + std::to_string(took.count()) + " ms only: " + error.what());
    throw;
  }
}

std::string without_numbers(const std::string& text) {
  return std::regex_replace(text, std::regex("#[0-9]+"), "");
}

class Mismatch : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, Mismatch, ::testing::ValuesIn(several_matched_ranks()), name_of_param);

TEST_P(Mismatch, EveryRankPrintsBothSides) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  for (const Case& item : cases()) {
    SCOPED_TRACE(item.name);
    const bool attaches = item.both_sides.front() == "attach";
    if (attaches && over_messages(GetParam())) continue;  // it has no windows
    if (item.across && GetParam().backend == "shm|mpi")
      continue;  // the calls may be on two backends, where nobody compares them
    const RankReport report = run_world(GetParam(),
                                        [&](int rank, const std::shared_ptr<CommBackend>& backend) {
                                          const Communicator comm(backend);
                                          comm.barrier();
                                          const auto& calls = rank == comm.size() - 1 ? item.last : item.most;
                                          if (kSanitized || has_levels(GetParam())) return calls(comm);
                                          in_time([&] { calls(comm); });
                                        },
                                        {.abort_on_failure = false});
    ASSERT_EQ(report.failures.size(), static_cast<std::size_t>(GetParam().size)) << report.text();
    for (const RankFailure& failure : report.failures) {
      // Calls are numbered by the backend that makes them, and the first of a mixture has made some for the mixture.
      const bool numbered = GetParam().backend != "shm|mpi";
      for (const std::string& side : item.both_sides)
        EXPECT_THAT(numbered ? failure.text : without_numbers(failure.text),
                    ::testing::HasSubstr(numbered ? side : without_numbers(side)));
      if (tells_others(GetParam()) && failure.code == ErrorCode::kAborted) {
        EXPECT_NE(failure.text.find("[MISMATCH] ranks make different calls"), std::string::npos) << failure.text;
        continue;
      }
      EXPECT_EQ(failure.code, ErrorCode::kMismatch) << failure.text;
      if (tells_others(GetParam())) continue;  // numbers are those of the level, or the words those of who found it
      const std::string own = "(rank " + std::to_string(failure.rank) + ")";
      EXPECT_NE(failure.text.find(own), std::string::npos) << failure.text;
      const int last = GetParam().size - 1;
      const std::string other = "(rank " + std::to_string(failure.rank == last ? 0 : last) + ")";
      EXPECT_NE(failure.text.find(other), std::string::npos) << failure.text;
    }
  }
}

TEST_P(Mismatch, TwoRanksThatDisagreeAboutAPartOfAnAllToAllAreNamed) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const int last = GetParam().size - 1;
  const bool messages = over_messages(GetParam()) || GetParam().backend == "shm|mpi";  // where an all_to_all is of MPI
  WorldOptions options{.abort_on_failure = false};
  if (messages) options.comm.timeout = Milliseconds{2'000};  // of the ranks that see nothing; and of the meeting before
  for (const std::int64_t part : {3, 70'000}) {
    const RankReport report = run_world(
        GetParam(),
        [&](int rank, const std::shared_ptr<CommBackend>& backend) {
          std::vector<std::int64_t> counts(static_cast<std::size_t>(GetParam().size), part);
          const std::vector<std::int64_t> recv_counts = counts;
          if (rank == last) counts.front() += 2;
          std::vector<float> in(static_cast<std::size_t>(part * GetParam().size + (rank == last ? 2 : 0)));
          std::vector<float> out(static_cast<std::size_t>(part * GetParam().size));
          Communicator(backend).all_to_all(std::span<const float>(in), std::span(out), counts, recv_counts,
                                           {.unit = 4});
        },
        options);
    int named = 0;
    for (const RankFailure& failure : report.failures) {
      const bool of_the_pair = failure.rank == 0 || failure.rank == last;
      if (messages && !of_the_pair) continue;  // a part is known to its two ranks only
      // Over messages the first of the pair may tell the second one before that sees it.
      const bool was_told =
          messages && failure.code == ErrorCode::kAborted && failure.text.find("[MISMATCH]") != std::string::npos;
      EXPECT_TRUE(was_told || failure.code == ErrorCode::kMismatch) << failure.text;
      const std::string taken =
          std::to_string(part) + " elements, which rank 0 takes from rank " + std::to_string(last);
      const std::string given =
          std::to_string(part + 2) + " elements, which rank " + std::to_string(last) + " gives to rank 0";
      EXPECT_NE(failure.text.find(taken), std::string::npos) << failure.text;
      EXPECT_NE(failure.text.find(given), std::string::npos) << failure.text;
      EXPECT_THAT(failure.text, ::testing::ContainsRegex("all_to_all#[02] unit 4"));
      ++named;
    }
    EXPECT_EQ(named, messages ? 2 : GetParam().size) << report.text();
  }
}

TEST_P(Mismatch, ABrokenGroupStaysBroken) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report =
      run_world(GetParam(),
                [](int rank, const std::shared_ptr<CommBackend>& backend) {
                  const Communicator comm(backend);
                  comm.barrier();  // else ranks of another node may still be meeting, and hear of it there
                  // Or in the barrier: that all have left a call no call can say.
                  std::this_thread::sleep_for(Milliseconds{50});
                  std::vector<float> data(4);
                  for (int attempt = 0; attempt < 3; ++attempt) {
                    try {
                      comm.all_reduce(std::span(data), {.unit = rank, .label = 0});
                    } catch (const Error& error) {
                      const bool told = tells_others(GetParam()) && error.code() == ErrorCode::kAborted &&
                                        std::string_view(error.what()).find("[MISMATCH]") != std::string_view::npos;
                      require(told || error.code() == ErrorCode::kMismatch, error.what());
                      continue;
                    }
                    throw std::runtime_error("a broken group made a call");
                  }
                },
                {.abort_on_failure = false});
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(Mismatch, UsageErrorsAreLocalAndLeaveTheGroupWhole) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    std::vector<float> data(4, 1.0F);
    std::vector<float> wrong(3);
    try {
      comm.all_reduce(std::span<const float>(data), std::span(wrong));
      throw std::runtime_error("a span of the wrong size was taken");
    } catch (const Error& error) {
      require(error.code() == ErrorCode::kUsage, error.what());
    }
    try {
      comm.broadcast(std::span(data), comm.size());
      throw std::runtime_error("a root outside the group was taken");
    } catch (const Error& error) {
      require(error.code() == ErrorCode::kUsage, error.what());
    }
    comm.all_reduce(std::span(data));
    require(data[0] == static_cast<float>(comm.size()), "the group was harmed");
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// MPI's own calls, which nobody compares: only under mpirun.
std::vector<WorldParam> uncompared_worlds() {
  return mpi_world_size() > 1 ? std::vector<WorldParam>{{"mpi_own_sums", mpi_world_size()}} : std::vector<WorldParam>{};
}
class Uncompared : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, Uncompared, ::testing::ValuesIn(uncompared_worlds()), name_of_param);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Uncompared);

TEST_P(Uncompared, RanksThatMakeTheirCallsInDifferentWaysAreRefusedAtTheStart) {
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    for (const bool checks : {false, true}) {
      CommOptions options = quick_options();
      if (rank == 0 || checks) options.reduction = Reduction::kTransport;
      options.check_calls = checks && rank == 0;
      try {
        (void)make_backend("mpi",
                           {.rank = rank, .size = backend->size(), .job = {}, .hub = nullptr, .options = options});
      } catch (const Error& error) {
        const std::string text = error.what();
        require(error.code() == ErrorCode::kMismatch &&
                    text.find("zeroth.reduction transport, zeroth.check_calls false") != std::string::npos,
                text);
        continue;
      }
      throw std::runtime_error("ranks that make different calls were let in");
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// MPI keeps the buffers of a call of its own that does not end, so this process is without MPI afterwards:
/// mpi_failpoints_test runs it.
class WithoutMpi : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, WithoutMpi,
                         ::testing::ValuesIn(std::getenv("ZEROTH_TEST_LOSES_MPI") == nullptr ? std::vector<WorldParam>{}
                                                                                             : uncompared_worlds()),
                         name_of_param);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(WithoutMpi);

TEST_P(WithoutMpi, ACallThatOneRankSkipsEndsAtTheDeadlineAndMpiWithIt) {
  const int rank = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK"));
  const int last = GetParam().size - 1;
  CommOptions options = quick_options();
  options.timeout = options.first_timeout = Milliseconds{1'000};
  options.reduction = Reduction::kTransport;
  const auto open = [&] {
    return std::shared_ptr<CommBackend>(
        make_backend("mpi", {.rank = rank, .size = last + 1, .job = {}, .hub = nullptr, .options = options}));
  };
  try {
    const Communicator comm(open());
    std::vector<float> data(100'000);
    comm.barrier();
    if (rank == last) std::this_thread::sleep_for(Milliseconds{2'500});
    if (rank != last) comm.all_reduce(std::span(data), {.unit = 3});
    comm.barrier();
    ADD_FAILURE() << "ranks that made different calls have ended them";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_TRUE(error.code() == ErrorCode::kTimeout ||
                (error.code() == ErrorCode::kAborted && text.find("[TIMEOUT]") != std::string::npos))
        << text;
    EXPECT_NE(text.find("all_reduce#1"), std::string::npos) << text;
  }
  if (rank != last) return;  // what they were in are messages, which end
  try {
    (void)open();
    ADD_FAILURE() << "MPI would go on with the call, in memory that is gone";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kAborted) << error.what();
    EXPECT_NE(std::string(error.what()).find("MPI still has memory of a call that failed before in this process"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace zeroth::test
