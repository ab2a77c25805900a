// The sums of a step, wherever they lie, for ranks that go through the model in one order or in many.
#include "stores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

/// Units in the order in which their gradients come in one backward.
using Backward = std::vector<int>;

struct Story {
  std::string name;
  std::function<std::vector<Backward>(int rank)> backwards;
  bool makes_room;  ///< sums of some rank have to leave a bucket slot
};

/// A small whole number: sums are exact in any order.
float value_of(int param, std::size_t index, int rank, int step, std::size_t backward) {
  const std::size_t mixed = static_cast<std::size_t>(param) * 7 + index * 3 + static_cast<std::size_t>(rank) * 5 +
                            static_cast<std::size_t>(step) * 11 + backward * 13;
  return static_cast<float>(mixed % 31) - 15.0F;
}

std::vector<float> gradient_of(const ModelLayout& model, int param, int rank, int step, std::size_t backward) {
  std::vector<float> grad(static_cast<std::size_t>(model.params[static_cast<std::size_t>(param)].numel()));
  for (std::size_t index = 0; index < grad.size(); ++index) grad[index] = value_of(param, index, rank, step, backward);
  return grad;
}

void run_backward(Stores& stores, const Backward& order, int step, std::size_t backward) {
  for (const int unit : order) {
    for (const int param : stores.model.units[static_cast<std::size_t>(unit)].params) {
      const ParamSpec& spec = stores.model.params[static_cast<std::size_t>(param)];
      if (spec.dtype != DType::kFloat32 || !spec.trainable) continue;
      const std::vector<float> grad = gradient_of(stores.model, param, stores.memory.rank(), step, backward);
      stores.gradients.add(param, {reinterpret_cast<const std::byte*>(grad.data()), spec.shape, spec.dtype});
    }
    stores.gradients.close_unit(unit);
  }
  stores.gradients.close_backward();
}

/// The sum over ranks and backwards of a flat's gradients, padding zero; empty if nobody has any.
std::vector<float> sum_of(const ModelLayout& model, int flat, int step, const Story& story) {
  std::vector<float> sum;
  const FlatLayout& layout = model.flat(flat);
  for (int rank = 0; rank < model.world; ++rank) {
    const std::vector<Backward> backwards = story.backwards(rank);
    for (std::size_t backward = 0; backward < backwards.size(); ++backward) {
      if (std::ranges::count(backwards[backward], layout.unit) == 0) continue;
      sum.resize(static_cast<std::size_t>(layout.length));
      for (const Segment& segment : layout.segments) {
        const std::vector<float> grad = gradient_of(model, segment.param, rank, step, backward);
        for (std::size_t index = 0; index < grad.size(); ++index)
          sum[static_cast<std::size_t>(segment.offset) + index] += grad[index];
      }
    }
  }
  return sum;
}

/// Throws unless this rank's shard of the flat holds its part of `sum`.
void require_shard(Stores& stores, int flat, const std::vector<float>& sum, const std::string& where) {
  const auto* got = reinterpret_cast<const float*>(stores.memory.reduced(flat));
  const Range shard = stores.model.flat(flat).shard(stores.memory.rank());
  for (std::int64_t at = shard.begin; at < shard.end; ++at) {
    const float expected = sum[static_cast<std::size_t>(at)];
    if (got[at - shard.begin] == expected) continue;
    require(false, where + ", element " + std::to_string(at) + ": expected " + std::to_string(expected) + ", got " +
                       std::to_string(got[at - shard.begin]));
  }
}

void require_sums(Stores& stores, int step, const Story& story) {
  for (int flat = 0; flat < static_cast<int>(stores.model.flats.size()); ++flat) {
    const FlatLayout& layout = stores.model.flat(flat);
    if (!layout.trainable || layout.dtype != DType::kFloat32 || layout.shard(stores.memory.rank()).size() == 0)
      continue;
    const std::vector<float> sum = sum_of(stores.model, flat, step, story);
    const std::string where = story.name + ", step " + std::to_string(step) + ", flat " + std::to_string(flat);
    require(stores.gradients.has_sums(flat) == !sum.empty(), where + ": sums are there, or not");
    if (sum.empty()) continue;
    require_shard(stores, flat, sum, where);
  }
}

const std::vector<Story> kStories{
    {"in order", [](int) { return std::vector<Backward>{{kBlock2, kBlock1, kBlock0, 0}}; }, false},
    {"in the opposite order", [](int) { return std::vector<Backward>{{kBlock0, kBlock1, kBlock2, 0}}; }, true},
    {"each in an order of its own",
     [](int rank) {
       return std::vector<Backward>{rank == 0 ? Backward{kBlock2, kBlock1, kBlock0, 0}
                                              : Backward{kBlock0, 0, kBlock2, kBlock1}};
     },
     true},
    {"one rank alone has gradients of the first block, the others fill its slot",
     [](int rank) {
       return std::vector<Backward>{rank == 0 ? Backward{kBlock2, kBlock0, 0} : Backward{kBlock2, kBlock1, 0}};
     },
     true},
    {"one rank alone has gradients at all",
     [](int rank) { return std::vector<Backward>{rank == 0 ? Backward{kBlock0} : Backward{}}; }, false},
    {"two backwards", [](int) { return std::vector<Backward>(2, {kBlock2, kBlock1, kBlock0, 0}); }, true},
    {"two backwards, the blocks in another order",
     [](int rank) {
       return std::vector<Backward>{{kBlock0, 0}, rank == 1 ? Backward{kBlock2} : Backward{kBlock1, kBlock2, kBlock0}};
     },
     true},
};

/// Blocks of two bf16 parameters in one flat.
ModelLayout make_narrow_model(int world) {
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> units;
  for (int block = 0; block < 3; ++block) {
    for (const char* name : {".first", ".second"}) {
      params.push_back({.name = std::to_string(block) + name, .shape = {1, 1500 + block}, .dtype = DType::kBFloat16});
    }
    units.push_back({.name = std::to_string(block), .params = {2 * block, 2 * block + 1}, .repeated = true});
  }
  return make_model_layout(std::move(params), std::move(units), world);
}

struct Arrival {
  int which;  ///< of the block's parameters
  DType dtype;
};

struct NarrowStory {
  std::string name;
  std::function<std::vector<Arrival>(int rank)> arrivals;  ///< in each block
  std::function<bool(int rank)> widens;
};

constexpr DType kHalf = DType::kBFloat16;
constexpr DType kWhole = DType::kFloat32;

const std::vector<NarrowStory> kNarrowStories{
    {"both as computed", [](int) { return std::vector<Arrival>{{0, kHalf}, {1, kHalf}}; }, [](int) { return false; }},
    {"the second one wide", [](int) { return std::vector<Arrival>{{0, kHalf}, {1, kWhole}}; },
     [](int) { return true; }},
    {"the first one wide", [](int) { return std::vector<Arrival>{{0, kWhole}, {1, kHalf}}; }, [](int) { return true; }},
    {"one twice", [](int) { return std::vector<Arrival>{{0, kHalf}, {1, kHalf}, {0, kHalf}}; },
     [](int) { return true; }},
    {"one alone", [](int) { return std::vector<Arrival>{{1, kHalf}}; }, [](int) { return false; }},
    {"wide on one rank", [](int rank) { return std::vector<Arrival>{{0, kHalf}, {1, rank == 1 ? kWhole : kHalf}}; },
     [](int rank) { return rank == 1; }},
};

/// What comes for a parameter at its `arrival`: bf16 values, so that a wide gradient could be a narrow one.
std::vector<BFloat16> narrow_gradient(const ModelLayout& model, int param, int rank, int step, std::size_t arrival) {
  std::vector<BFloat16> grad;
  const auto numel = static_cast<std::size_t>(model.params[static_cast<std::size_t>(param)].numel());
  for (std::size_t index = 0; index < numel; ++index) {
    grad.emplace_back(value_of(param, index, rank, step, arrival) * 0x1.8p-3F);
  }
  return grad;
}

/// In the second step everything is as planned.
std::vector<Arrival> arrivals_of(const NarrowStory& story, int rank, int step) {
  return (step == 1 ? kNarrowStories[0] : story).arrivals(rank);
}

void run_narrow_backward(Stores& stores, const NarrowStory& story, int step) {
  const int rank = stores.memory.rank();
  for (int block = 2; block >= 0; --block) {
    const std::vector<Arrival> arrivals = arrivals_of(story, rank, step);
    for (std::size_t arrival = 0; arrival < arrivals.size(); ++arrival) {
      const int param = 2 * block + arrivals[arrival].which;
      const std::vector<BFloat16> grad = narrow_gradient(stores.model, param, rank, step, arrival);
      const std::vector<float> wide(grad.begin(), grad.end());
      const void* const data = arrivals[arrival].dtype == kWhole ? static_cast<const void*>(wide.data()) : grad.data();
      stores.gradients.add(
          param, {static_cast<const std::byte*>(data), stores.model.params[static_cast<std::size_t>(param)].shape,
                  arrivals[arrival].dtype});
    }
    stores.gradients.close_unit(block);
  }
  stores.gradients.close_backward();
}

/// The sum over ranks and arrivals of a block's gradients, padding zero.
std::vector<float> narrow_sum_of(const ModelLayout& model, int flat, int step, const NarrowStory& story) {
  std::vector<float> sum(static_cast<std::size_t>(model.flat(flat).length));
  for (int rank = 0; rank < model.world; ++rank) {
    const std::vector<Arrival> arrivals = arrivals_of(story, rank, step);
    for (std::size_t arrival = 0; arrival < arrivals.size(); ++arrival) {
      const int param = 2 * flat + arrivals[arrival].which;
      const std::vector<BFloat16> grad = narrow_gradient(model, param, rank, step, arrival);
      const auto offset = static_cast<std::size_t>(model.segment(param).offset);
      for (std::size_t index = 0; index < grad.size(); ++index) sum[offset + index] += static_cast<float>(grad[index]);
    }
  }
  return sum;
}

TEST(GradientStore, BucketsOf16BitsBecomeWideForTheEventThatNeedsIt) {
  for (const bool messages : {false, true}) {
    for (const int stage : {1, 2, 3}) {
      for (const int world : {2, 3}) {
        for (const NarrowStory& story : kNarrowStories) {
          const std::string where = story.name + ", stage " + std::to_string(stage) + ", world " +
                                    std::to_string(world) + ", messages " + std::to_string(messages);
          const auto body = [&](int rank, const Backend& backend) {
            Stores stores(backend, zero_plan(stage, {"dp"}), make_narrow_model(world));
            for (int step = 0; step < 3; ++step) {
              run_narrow_backward(stores, story, step);
              stores.gradients.complete();
              for (int flat = 0; flat < 3; ++flat) {
                require_shard(stores, flat, narrow_sum_of(stores.model, flat, step, story),
                              where + ", step " + std::to_string(step) + ", flat " + std::to_string(flat));
              }
              stores.barrier();  // the commit vote's
              stores.gradients.begin_step();
            }
            const bool beyond = stores.device->ledger().state_peaks()[MemoryState::kOverflow] > 0;
            require(beyond == story.widens(rank), where + ": memory beyond the plan");
            require((stores.gradients.first_wide() >= 0) == story.widens(rank),
                    where + ": the first wide gradient is known");
          };
          run_ranks(world, body, {.transport = messages ? ThreadTransport::kMessages : ThreadTransport::kMemory});
        }
      }
    }
  }
}

TEST(GradientStore, SumsAreThereHoweverRanksGoThroughTheModel) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const int ring_slots : {1, 2}) {
      for (const auto& [world, gradient_degree] : {std::pair{1, 0}, {2, 0}, {3, 0}, {4, 2}}) {
        if (gradient_degree > 0 && (ring_slots > 1 || stage == 1 || stage == 2))
          continue;  // much of the same, and slow under sanitizers
        for (const Story& story : kStories) {
          ShardingPlan plan = zero_plan(stage, {"dp"});
          plan.ring_slots = ring_slots;
          plan.gradient_degree = gradient_degree;
          std::vector<std::uint64_t> room(static_cast<std::size_t>(world));
          bool ring = false;
          run_ranks(world, [&](int rank, const Backend& backend) {
            Stores stores(backend, plan);
            const std::vector<Backward> backwards = story.backwards(rank);
            for (int step = 0; step < 3; ++step) {
              for (std::size_t backward = 0; backward < backwards.size(); ++backward) {
                run_backward(stores, backwards[backward], step, backward);
              }
              stores.gradients.complete();
              require_sums(stores, step, story);
              stores.barrier();  // the commit vote's
              stores.gradients.begin_step();
            }
            room[static_cast<std::size_t>(rank)] = stores.device->ledger().state_peaks()[MemoryState::kOverflow];
            if (rank == 0) ring = stores.memory.bucket_table().slot_bytes.size() < 4;
          });
          const bool made = std::ranges::any_of(room, [](std::uint64_t bytes) { return bytes > 0; });
          const std::string where = story.name + ", stage " + std::to_string(stage) + ", world " +
                                    std::to_string(world) + ", ring of " + std::to_string(ring_slots) +
                                    ", gradients over " + std::to_string(gradient_degree);
          EXPECT_TRUE(!ring || made || !story.makes_room) << where;
          EXPECT_TRUE(!made || story.name != "in order") << where;
        }
      }
    }
  }
}

/// A rank may be long in its update, which reads other ranks' sums: those of another run, too, who could go on without
/// it.
TEST(GradientStore, NobodyAddsToSumsThatOthersStillUpdateWith) {
  const Story story = kStories.front();
  for (const int gradient_degree : {0, 2}) {
    ShardingPlan plan = hsdp_plan(2, {"dp"});
    plan.gradient_degree = gradient_degree;
    std::atomic<int> looked{0};
    run_ranks(4, [&](int rank, const Backend& backend) {
      // Of several micro-steps, so that sums are in memory of their own.
      Stores stores(backend, plan, make_model(plan.degrees(4)), 2);
      const auto backward = [&](int step) { run_backward(stores, story.backwards(rank).front(), step, 0); };
      backward(0);
      stores.gradients.complete();
      stores.barrier();  // the commit vote's
      if (rank == 3) {
        // Time for the others to come as far as they get.
        std::this_thread::sleep_for(std::chrono::milliseconds{100});
        for (int flat = 0; flat < static_cast<int>(stores.model.flats.size()); ++flat) {
          const FlatLayout& layout = stores.model.flat(flat);
          if (!layout.trainable || layout.dtype != DType::kFloat32) continue;
          const std::vector<float> sum = sum_of(stores.model, flat, 0, story);
          for (const int owner : {0, 1, 2, 3}) {
            const Range piece = layout.shard(owner);
            const auto* got = reinterpret_cast<const float*>(owner == rank ? stores.memory.reduced(flat)
                                                                           : stores.memory.peer_reduced(flat, owner));
            for (std::int64_t at = piece.begin; at < piece.end; ++at) {
              if (got[at - piece.begin] != sum[static_cast<std::size_t>(at)]) {
                require(false, "the sums of rank " + std::to_string(owner) + " are those of another step");
              }
              ++looked;
            }
          }
        }
      }
      stores.gradients.begin_step();
      backward(1);
      stores.gradients.complete();
      require_sums(stores, 1, story);
      stores.barrier();  // the commit vote's
      stores.gradients.begin_step();
    });
    EXPECT_GT(looked.load(), 0);
  }
}

/// Sums are formed over a sub-group, over backwards, over runs: numbers that are lost in any other order.
TEST(GradientStore, RunsOfRanksAreSummedFirstThenBackwardsThenRuns) {
  constexpr float kLarge = 0x1p25F;  // one unit in the last place is 4: next to it 1 and 2 are lost
  // [rank][backward]; runs of two ranks. ((L + 1) + (-L + 3)) + ((1 + 1) + (1 + 1)): the first run has L and -L + 4, or
  // -L + 2.
  constexpr float kGradients[4][2] = {{kLarge, -kLarge}, {1.0F, 3.0F}, {1.0F, 1.0F}, {1.0F, 1.0F}};
  const auto pairs = [&](int first, int backward) {
    return kGradients[first][backward] + kGradients[first + 1][backward];
  };
  const float in_runs = (pairs(0, 0) + pairs(0, 1)) + (pairs(2, 0) + pairs(2, 1));
  const auto of_all = [&](int backward) {
    return ((kGradients[0][backward] + kGradients[1][backward]) + kGradients[2][backward]) + kGradients[3][backward];
  };
  ASSERT_NE(in_runs, of_all(0) + of_all(1)) << "the orders are not told apart";
  for (const int stage : {0, 1, 2, 3}) {
    for (const bool messages : {false, true}) {
      for (const int degree : {0, 2}) {
        ShardingPlan plan = zero_plan(stage, {"dp"});
        plan.gradient_degree = degree;
        const float expected = degree == 0 ? of_all(0) + of_all(1) : in_runs;
        run_ranks(4,
                  [&](int rank, const Backend& backend) {
                    Stores stores(backend, plan);
                    const int flat = stores.model.unit_flats[kBlock1].front();
                    const int param = stores.model.flat(flat).segments.front().param;
                    const ParamSpec& spec = stores.model.params[static_cast<std::size_t>(param)];
                    for (int backward = 0; backward < 2; ++backward) {
                      const std::vector<float> grad(static_cast<std::size_t>(spec.numel()), kGradients[rank][backward]);
                      stores.gradients.add(param,
                                           {reinterpret_cast<const std::byte*>(grad.data()), spec.shape, spec.dtype});
                      stores.gradients.close_unit(kBlock1);
                      stores.gradients.close_backward();
                    }
                    stores.gradients.complete();
                    const auto* got = reinterpret_cast<const float*>(stores.memory.reduced(flat));
                    const Range piece = intersect(stores.model.flat(flat).shard(rank), {0, spec.numel()});
                    for (std::int64_t at = 0; at < piece.size(); ++at) {
                      require(got[at] == expected, "stage " + std::to_string(stage) + ", degree " +
                                                       std::to_string(degree) + ": expected " +
                                                       std::to_string(expected) + ", got " + std::to_string(got[at]));
                    }
                    stores.barrier();  // the commit vote's
                    stores.gradients.begin_step();
                  },
                  {.transport = messages ? ThreadTransport::kMessages : ThreadTransport::kMemory});
      }
    }
  }
}

}  // namespace
}  // namespace zeroth::test
