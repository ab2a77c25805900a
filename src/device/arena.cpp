#include "base/unique_fd.h"

#include <zeroth/base/text.h>
#include <zeroth/device/memory.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace zeroth {
namespace {

constexpr int kSetVma = 0x53564d41;  // PR_SET_VMA, Linux 5.17; older headers lack it
constexpr unsigned long kSetVmaAnonName = 0;
constexpr std::size_t kMostBytes = std::size_t{1} << 56U;

[[noreturn]] void throw_memory(const std::string& what, std::size_t bytes, const std::string& name, int error_number) {
  const bool refused = error_number == EPERM || error_number == ENOSYS || error_number == EACCES;
  throw Error(
      refused ? ErrorCode::kResource : ErrorCode::kOutOfMemory, what + " failed: " + errno_text(error_number),
      {.where = "device.arena",
       .which = name + ", " + format_bytes(bytes),
       .hint = refused ? "the container refuses this system call: allow memfd_create and mmap in its seccomp profile"
                       : "free memory, raise the limit (ulimit -v, cgroup), or choose a higher ZeRO stage"});
}

}  // namespace

struct Arena::Mapping {
  pid_t owner =
      0;  ///< of a mapping that forked children do not get: by then something else may lie at its address there
  void* address = nullptr;
  std::size_t bytes = 0;
  UniqueFd fd{};
  std::size_t used = 0;
  std::shared_ptr<void> keep{};  ///< of memory that is not mapped here

  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (address != nullptr && (owner == 0 || owner == ::getpid())) ::munmap(address, bytes);
  }
};

Arena Arena::create(ArenaKind kind, std::size_t bytes, std::string_view name) {
  ZR_CHECK(kind != ArenaKind::kDevice, ErrorCode::kUsage, "memory of a device is made by that device",
           {.where = "device.arena", .which = std::string(name), .hint = "Device::make_arena() of the CUDA device"});
  Arena arena;
  arena.kind_ = kind;
  arena.name_ = std::string(name);
  if (bytes == 0) return arena;
  // More than any address space has; it would wrap around below.
  if (bytes > kMostBytes) throw_memory("an arena of this size", bytes, arena.name_, ENOMEM);
  const std::size_t capacity = align_up(bytes, kPageBytes);
  std::byte* base = nullptr;
  auto mapping = std::make_shared<Mapping>();
  const std::string label = "zeroth:" + arena.name_;
  if (kind == ArenaKind::kShared) {
    mapping->bytes = capacity;
    mapping->fd.reset(::memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!mapping->fd) throw_memory("memfd_create", bytes, arena.name_, errno);
    if (::ftruncate(mapping->fd.get(), static_cast<off_t>(mapping->bytes)) != 0) {
      throw_memory("ftruncate of a memfd", bytes, arena.name_, errno);
    }
    // A peer that could shrink the file would turn our next access into SIGBUS.
    if (::fcntl(mapping->fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      throw_memory("sealing a memfd", bytes, arena.name_, errno);
    }
    void* address = ::mmap(nullptr, mapping->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, mapping->fd.get(), 0);
    if (address == MAP_FAILED) throw_memory("mmap", bytes, arena.name_, errno);
    mapping->address = address;
    base = static_cast<std::byte*>(address);
    // Without it a forked child could write into the parameters of its parent.
    if (::madvise(address, mapping->bytes, MADV_DONTFORK) != 0) throw_memory("madvise", bytes, arena.name_, errno);
    mapping->owner = ::getpid();
  } else {
    // The usable part starts at a huge-page boundary and ends at its capacity; at least a page on either side stays
    // without access. So no neighbour merges with it, no huge page reaches beyond it, and its resident bytes are its
    // own.
    mapping->bytes = capacity + kHugePageBytes + kPageBytes;
    void* address = ::mmap(nullptr, mapping->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) throw_memory("mmap", bytes, arena.name_, errno);
    mapping->address = address;
    base =
        reinterpret_cast<std::byte*>(align_up(reinterpret_cast<std::uintptr_t>(address) + kPageBytes, kHugePageBytes));
    if (::mprotect(base, capacity, PROT_READ | PROT_WRITE) != 0) throw_memory("mprotect", bytes, arena.name_, errno);
    // Both are hints: without huge pages everything works, slower; without names resident_bytes(name) does not see it.
    if (capacity >= kHugePageBytes) ::madvise(base, capacity, MADV_HUGEPAGE);
    ::prctl(kSetVma, kSetVmaAnonName, base, capacity, label.c_str());
  }
  arena.bytes_ = {base, capacity};
  arena.mapping_ = std::move(mapping);
  return arena;
}

Arena Arena::over(ArenaKind kind, std::span<std::byte> bytes, std::string_view name, std::shared_ptr<void> keep) {
  Arena arena;
  arena.kind_ = kind;
  arena.name_ = std::string(name);
  arena.bytes_ = bytes;
  arena.mapping_ = std::make_shared<Mapping>();
  arena.mapping_->keep = std::move(keep);
  return arena;
}

std::size_t Arena::used() const {
  return mapping_ ? mapping_->used : 0;
}

int Arena::fd() const {
  return mapping_ ? mapping_->fd.get() : -1;
}

std::span<std::byte> Arena::reserve(std::size_t bytes, std::size_t alignment) {
  if (bytes == 0) return {};
  const std::size_t offset = align_up(used(), alignment);
  ZR_CHECK(offset <= capacity() && bytes <= capacity() - offset, ErrorCode::kInternal,
           "an arena is smaller than what is put into it",
           {.where = "device.arena",
            .which = name_,
            .expected = "at most " + std::to_string(capacity()) + " bytes",
            .got = std::to_string(offset) + " and " + std::to_string(bytes) + " more"});
  mapping_->used = offset + bytes;
  return bytes_.subspan(offset, bytes);
}

Buffer Arena::allocate(std::size_t bytes, Tag tag, MemoryLedger& ledger, std::size_t alignment) {
  const std::span<std::byte> part = reserve(bytes, alignment);
  return {mapping_, part, ledger.hold(tag, bytes)};
}

ForeignMapping map_foreign(int fd, std::size_t bytes) {
  const auto context = [fd, bytes](std::string expected, std::string got, std::string hint = {}) {
    return ErrorContext{.where = "device.map_foreign",
                        .which = format_bytes(bytes) + " behind descriptor " + std::to_string(fd),
                        .expected = std::move(expected),
                        .got = std::move(got),
                        .hint = std::move(hint)};
  };
  struct stat status{};
  ZR_CHECK(::fstat(fd, &status) == 0, ErrorCode::kResource, "fstat of a peer's memory failed: " + errno_text(errno),
           context("an open descriptor of a memfd", std::to_string(fd)));
  ZR_CHECK(status.st_size >= 0 && static_cast<std::size_t>(status.st_size) >= bytes, ErrorCode::kMismatch,
           "a peer's shared memory is smaller than it says",
           context(std::to_string(bytes) + " bytes", std::to_string(status.st_size)));
  const int seals = ::fcntl(fd, F_GET_SEALS);
  ZR_CHECK(seals >= 0 && (seals & F_SEAL_SHRINK) != 0, ErrorCode::kMismatch,
           "a peer's shared memory is not sealed against shrinking",
           context("F_SEAL_SHRINK", seals < 0 ? "no memfd" : "seals " + std::to_string(seals)));
  if (bytes == 0) return {};
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ZR_CHECK(address != MAP_FAILED, ErrorCode::kOutOfMemory, "mmap of a peer's memory failed: " + errno_text(errno),
           context(std::to_string(bytes) + " bytes of address space", "none",
                   "every rank maps the shared memory of all: raise the limit (ulimit -v) or use fewer ranks a host"));
  const pid_t owner = ::madvise(address, bytes, MADV_DONTFORK) == 0 ? ::getpid() : 0;
  std::shared_ptr<void> keep(address, [bytes, owner](void* mapped) {
    if (owner == 0 || owner == ::getpid()) ::munmap(mapped, bytes);
  });
  return {std::move(keep), {static_cast<std::byte*>(address), bytes}};
}

}  // namespace zeroth
