// Direct transfers read where peers say that their data lies; what they say is checked before anything is
// read.
#include "comm/shm/control_block.h"
#include "comm/shm/inproc_exchange.h"
#include "comm/shm/shared_memory_engine.h"
#include "support/fork_ranks.h"

#include <zeroth/comm/communicator.h>

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::detail {
namespace {

constexpr int kWorld = 2;
constexpr std::int64_t kElements = 8192;
constexpr std::size_t kArenaBytes = kElements * sizeof(float);

CommOptions quick_options() {
  CommOptions options;
  options.timeout = Milliseconds{20'000};
  return options;
}

/// Rank 1 of an inproc world that has no engine: it posts what rank 0 posts, changed by `tamper`.
class Parrot {
 public:
  explicit Parrot(const std::shared_ptr<InprocHub>& hub) : exchange_(hub, "world", 1, kWorld) {}

  void join() {
    segment_ =
        Arena::create(ArenaKind::kPrivate, SharedMemoryEngine::reserved_bytes(quick_options(), true, kWorld), "parrot");
    segments_ = exchange_.exchange(segment_, [] {});
  }
  void repeat(const std::function<void(CallDescriptor&)>& tamper) {
    const Deadline deadline(Milliseconds{20'000});
    while (control(0).posted.load() <= sequence_) {
      ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "rank 0 posts nothing");
      std::this_thread::sleep_for(Milliseconds{1});
    }
    CallDescriptor descriptor = control(0).slots[sequence_ % 2].descriptor;
    tamper(descriptor);
    control(1).slots[sequence_ % 2].descriptor = descriptor;
    control(1).posted.store(++sequence_);
  }
  void attach(const Arena& arena) {
    repeat([](CallDescriptor&) {});
    attached_ = exchange_.exchange(arena, [] {});
  }

 private:
  [[nodiscard]] GroupControl& control(std::size_t rank) const {
    return *reinterpret_cast<GroupControl*>(segments_[rank].bytes.data() + kJobControlBytes);
  }
  InprocExchange exchange_;
  Arena segment_;
  std::vector<SharedSpan> segments_;
  std::vector<SharedSpan> attached_;
  std::uint64_t sequence_ = 0;
};

/// Rank 0 gathers with a parrot whose description is changed by `tamper`; returns the error.
Error gather_with(const std::function<void(CallDescriptor&)>& tamper) {
  const auto hub = make_inproc_hub(kWorld);
  Parrot parrot(hub);
  const Arena foreign = Arena::create(ArenaKind::kPrivate, kArenaBytes, "foreign");
  std::thread peer([&] {
    parrot.join();
    parrot.attach(foreign);
    parrot.repeat(tamper);
  });
  Error caught(ErrorCode::kUsage, "no error");
  try {
    const auto engine = SharedMemoryEngine::make_world(std::make_unique<InprocExchange>(hub, "world", 0, kWorld), 0,
                                                       kWorld, quick_options());
    const Arena arena = Arena::create(ArenaKind::kPrivate, kArenaBytes, "own");
    const PeerWindow window = engine->attach(arena, "data");
    std::vector<std::byte> out(kWorld * kArenaBytes);
    const std::vector<std::int64_t> counts{kElements, kElements};
    const Collective gather{.kind = CollectiveKind::kAllGather,
                            .in_dtype = DType::kFloat32,
                            .out_dtype = DType::kFloat32,
                            .send = arena.data(),
                            .recv = out.data(),
                            .counts = counts};
    engine->run({&gather, 1});
  } catch (const Error& error) {
    caught = error;
  }
  peer.join();
  return caught;
}

void expect_mismatch(const Error& error, const std::vector<std::string>& parts) {
  EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
  for (const std::string& part : parts)
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
}

TEST(DirectTransfer, AnArenaThatIsNotAttachedIsNamedWithItsRankAndCall) {
  expect_mismatch(gather_with([](CallDescriptor& call) { call.send_window = 7; }),
                  {"rank 1 names an arena that is not attached", "where: comm.inproc group=world", "who: rank 0/2",
                   "which: all_gather#1", "one of 1 attached arenas", "got: arena 7"});
}

TEST(DirectTransfer, BytesOutsideAnAttachedArenaAreNamedWithTheirPlace) {
  expect_mismatch(gather_with([](CallDescriptor& call) {
                    call.send_window = 0;
                    call.send_offset = 64;
                  }),
                  {"rank 1 names bytes outside its attached arena", "who: rank 0/2", "arena 0, which has 32768",
                   "got: 32768 bytes at 64"});
}

}  // namespace
}  // namespace zeroth::detail
