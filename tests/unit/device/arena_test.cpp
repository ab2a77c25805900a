#include "base/unique_fd.h"
#include "support/sanitizer.h"

#include <zeroth/device/device.h>
#include <zeroth/device/memory.h>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace zeroth {
namespace {

constexpr ArenaKind kKinds[] = {ArenaKind::kPrivate, ArenaKind::kShared};

ErrorCode code_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "did not throw";
  return ErrorCode::kInternal;
}

std::uintptr_t address(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

TEST(Arena, EmptyOnesHoldNothing) {
  for (const ArenaKind kind : kKinds) {
    Arena arena = Arena::create(kind, 0, "empty");
    EXPECT_EQ(arena.capacity(), 0U);
    EXPECT_EQ(arena.used(), 0U);
    EXPECT_EQ(arena.fd(), -1);
    EXPECT_EQ(arena.resident_bytes(), 0U);
    EXPECT_TRUE(arena.reserve(0).empty());
    EXPECT_EQ(code_of([&] { (void)arena.reserve(1); }), ErrorCode::kInternal);
  }
  EXPECT_EQ(Arena().capacity(), 0U);
}

TEST(Arena, IsZeroAlignedAndWholePages) {
  for (const ArenaKind kind : kKinds) {
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{4095}, std::size_t{4097}, kHugePageBytes + 1}) {
      const Arena arena = Arena::create(kind, bytes, "zeros");
      EXPECT_EQ(arena.kind(), kind);
      EXPECT_EQ(arena.capacity(), align_up(bytes, kPageBytes));
      EXPECT_EQ(address(arena.data()) % (kind == ArenaKind::kPrivate ? kHugePageBytes : kPageBytes), 0U);
      EXPECT_TRUE(std::all_of(arena.data(), arena.data() + arena.capacity(),
                              [](std::byte value) { return value == std::byte{0}; }));
      std::memset(arena.data(), 0x5a, arena.capacity());
    }
  }
}

TEST(Arena, AbsurdSizesAreRefused) {
  for (const ArenaKind kind : kKinds) {
    for (const std::size_t bytes : {std::numeric_limits<std::size_t>::max(),
                                    std::numeric_limits<std::size_t>::max() - kHugePageBytes, std::size_t{1} << 62U}) {
      EXPECT_EQ(code_of([&] { (void)Arena::create(kind, bytes, "absurd"); }), ErrorCode::kOutOfMemory) << bytes;
    }
  }
}

TEST(Arena, ReservesInOrderUntilItIsFull) {
  Arena arena = Arena::create(ArenaKind::kPrivate, 3 * kPageBytes, "order");
  const auto a = arena.reserve(10, 64);
  const auto b = arena.reserve(1, 64);
  EXPECT_EQ(a.data(), arena.data());
  EXPECT_EQ(b.data(), arena.data() + 64);
  const auto c = arena.reserve(kPageBytes);
  EXPECT_EQ(c.data(), arena.data() + kPageBytes);
  EXPECT_EQ(arena.used(), 2 * kPageBytes);
  EXPECT_EQ(code_of([&] { (void)arena.reserve(kPageBytes + 1); }), ErrorCode::kInternal);
  EXPECT_EQ(code_of([&] { (void)arena.reserve(~std::size_t{0} - 100); }), ErrorCode::kInternal);
  EXPECT_EQ(arena.used(), 2 * kPageBytes) << "a refused reservation takes nothing";
  EXPECT_EQ(arena.reserve(kPageBytes).size(), kPageBytes);
}

RC_GTEST_PROP(ArenaProperty, ReservationsAreAlignedDisjointAndInside, ()) {
  const auto sizes = *rc::gen::container<std::vector<std::size_t>>(rc::gen::inRange<std::size_t>(0, 5000));
  const auto powers = *rc::gen::container<std::vector<std::size_t>>(sizes.size(), rc::gen::inRange<std::size_t>(0, 13));
  Arena arena = Arena::create(ArenaKind::kPrivate, std::max<std::size_t>(1, sizes.size()) * 4 * kPageBytes, "rc");
  const std::byte* end = arena.data();
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    const std::size_t alignment = std::size_t{1} << powers[index];
    const auto part = arena.reserve(sizes[index], alignment);
    RC_ASSERT(part.size() == sizes[index]);
    if (part.empty()) continue;
    RC_ASSERT(address(part.data()) % alignment == 0U);
    RC_ASSERT(part.data() >= end);
    end = part.data() + part.size();
    RC_ASSERT(end <= arena.data() + arena.capacity());
  }
}

TEST(Buffer, CountsAndKeepsTheMappingAlive) {
  const auto device = make_cpu_device();
  Buffer buffer;
  {
    Arena arena = device->make_arena(ArenaKind::kShared, 2 * kPageBytes, "kept");
    buffer = arena.allocate(100, {2, MemoryState::kReduced}, device->ledger());
    EXPECT_EQ(device->ledger().live()[MemoryState::kReduced], 100U);
  }
  buffer.as<float>()[3] = 1.5F;
  EXPECT_EQ(buffer.size(), 100U);
  EXPECT_EQ(buffer.bytes().data(), buffer.data());
  const Buffer moved = std::move(buffer);
  EXPECT_EQ(moved.as<float>()[3], 1.5F);
  EXPECT_EQ(device->ledger().live().total(), 100U);
}

TEST(Buffer, TooLargeIsNotCounted) {
  const auto ledger = MemoryLedger::create();
  Arena arena = Arena::create(ArenaKind::kPrivate, kPageBytes, "small");
  EXPECT_EQ(code_of([&] { (void)arena.allocate(2 * kPageBytes, {}, *ledger); }), ErrorCode::kInternal);
  EXPECT_EQ(ledger->at_peak().total(), 0U);
}

TEST(ArenaResidency, PagesCostNothingUntilTouchedAndThenExactlyThemselves) {
  for (const ArenaKind kind : kKinds) {
    // Not a multiple of a huge page: none may reach beyond the end.
    const Arena arena = Arena::create(kind, 2 * kHugePageBytes + 5 * kPageBytes, "residency");
    EXPECT_EQ(arena.resident_bytes(), 0U);
    std::memset(arena.data() + 2 * kHugePageBytes, 1, 3 * kPageBytes);
    EXPECT_EQ(arena.resident_bytes(), 3 * kPageBytes);
    std::memset(arena.data(), 1, arena.capacity());
    EXPECT_EQ(arena.resident_bytes(), arena.capacity());
  }
}

TEST(ArenaResidency, NeighboursAreNotCounted) {
  std::vector<Arena> arenas;
  for (int index = 0; index < 8; ++index) {
    arenas.push_back(Arena::create(ArenaKind::kPrivate, static_cast<std::size_t>(index + 1) * kPageBytes, "twin"));
    std::memset(arenas.back().data(), 1, arenas.back().capacity());
  }
  for (const Arena& arena : arenas) EXPECT_EQ(arena.resident_bytes(), arena.capacity());
}

TEST(ArenaResidency, SharedOnesAreSeenByName) {
  const Arena arena = Arena::create(ArenaKind::kShared, 1U << 20U, "named-by-this-test");
  const Arena other = Arena::create(ArenaKind::kShared, 1U << 20U, "named-otherwise");
  std::memset(arena.data(), 1, 10 * kPageBytes);
  std::memset(other.data(), 1, 3 * kPageBytes);
  EXPECT_EQ(resident_bytes("zeroth:named-by-this-test"), 10 * kPageBytes);
  EXPECT_EQ(resident_bytes("zeroth:named-"), 13 * kPageBytes);
  EXPECT_EQ(resident_bytes("zeroth:nobody"), 0U);
}

TEST(ArenaResidency, PrivateOnesAreSeenByNameWhereTheKernelNamesThem) {
  const Arena arena = Arena::create(ArenaKind::kPrivate, 1U << 20U, "private-by-name");
  std::memset(arena.data(), 1, 10 * kPageBytes);
  const std::uint64_t seen = resident_bytes("zeroth:private-by-name");
  if (seen == 0) GTEST_SKIP() << "not permitted: this kernel does not name anonymous memory";
  EXPECT_EQ(seen, 10 * kPageBytes);
}

TEST(ArenaBounds, WritingBeyondAPrivateArenaIsCaught) {
  if (test::kSanitized) GTEST_SKIP() << "not under sanitizers: they take the signal";
  const Arena arena = Arena::create(ArenaKind::kPrivate, 3 * kPageBytes, "bounds");
  EXPECT_EXIT(arena.data()[arena.capacity()] = std::byte{1}, ::testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT(*(arena.data() - 1) = std::byte{1}, ::testing::KilledBySignal(SIGSEGV), "");
}

TEST(SharedArena, CannotBeResizedOrUnsealedByAnotherOpener) {
  const Arena arena = Arena::create(ArenaKind::kShared, 2 * kPageBytes, "sealed");
  std::memset(arena.data(), 7, arena.capacity());
  const UniqueFd other(::open(("/proc/self/fd/" + std::to_string(arena.fd())).c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_GE(other.get(), 0);
  EXPECT_EQ(::ftruncate(other.get(), 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(other.get(), 1 << 20), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::fcntl(other.get(), F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(arena.data()[kPageBytes], std::byte{7});
  EXPECT_NE(::fcntl(arena.fd(), F_GETFD) & FD_CLOEXEC, 0) << "a started program must not inherit it";
}

TEST(MapForeign, SeesTheSameBytesAndOutlivesTheArena) {
  ForeignMapping foreign;
  {
    const Arena arena = Arena::create(ArenaKind::kShared, 3 * kPageBytes, "pair");
    foreign = map_foreign(arena.fd(), 3 * kPageBytes);
    ASSERT_NE(foreign.bytes.data(), arena.data());
    arena.data()[kPageBytes + 1] = std::byte{42};
    foreign.bytes[5] = std::byte{43};
    EXPECT_EQ(arena.data()[5], std::byte{43});
  }
  EXPECT_EQ(foreign.bytes[kPageBytes + 1], std::byte{42});
}

TEST(MapForeign, RefusesWhatCouldTakeMemoryAwayLater) {
  const Arena arena = Arena::create(ArenaKind::kShared, kPageBytes, "short");
  EXPECT_EQ(code_of([&] { (void)map_foreign(arena.fd(), kPageBytes + 1); }), ErrorCode::kMismatch) << "too small";
  EXPECT_EQ(code_of([&] { (void)map_foreign(arena.fd(), ~std::size_t{0}); }), ErrorCode::kMismatch);
  const UniqueFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), kPageBytes), 0);
  EXPECT_EQ(code_of([&] { (void)map_foreign(unsealed.get(), kPageBytes); }), ErrorCode::kMismatch) << "unsealed";
  const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(code_of([&] { (void)map_foreign(file.get(), 1); }), ErrorCode::kMismatch) << "not a memfd";
  EXPECT_EQ(code_of([&] { (void)map_foreign(-1, 1); }), ErrorCode::kResource) << "no descriptor";
}

TEST(MapForeign, ErrorsSayWhereAndWhichAndHowMuch) {
  const auto text_of = [](int fd, std::size_t bytes) {
    try {
      (void)map_foreign(fd, bytes);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const auto expect_parts = [](const std::string& text, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect_parts(text_of(-1, 8192), {"[RESOURCE] fstat", "where: device.map_foreign", "8.00 KiB behind descriptor -1"});
  // More than the address space has: the file is sparse and costs nothing.
  constexpr std::size_t kTooMuch = std::size_t{1} << 48;
  const UniqueFd large(::memfd_create("large", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(large.get(), kTooMuch), 0) << std::strerror(errno);
  ASSERT_EQ(::fcntl(large.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  expect_parts(text_of(large.get(), kTooMuch),
               {"[OUT_OF_MEMORY] mmap", "where: device.map_foreign", "behind descriptor " + std::to_string(large.get()),
                "expected: 281474976710656 bytes of address space", "ulimit -v"});
}

TEST(MapForeign, NothingOfAPeerIsNothing) {
  const Arena arena = Arena::create(ArenaKind::kShared, kPageBytes, "none");
  EXPECT_TRUE(map_foreign(arena.fd(), 0).bytes.empty());
}

TEST(AlignUp, RoundsToMultiples) {
  static_assert(align_up(0, 64) == 0 && align_up(1, 64) == 64 && align_up(64, 64) == 64 && align_up(65, 64) == 128);
  static_assert(align_up(7, 3) == 9);
}

}  // namespace
}  // namespace zeroth
