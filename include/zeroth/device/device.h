// The device interface: memory and streams of a CPU or a GPU. The CPU is made here, CUDA in cuda.h.
#pragma once

#include <zeroth/device/memory.h>
#include <zeroth/device/stream.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace zeroth {

/// kDevice: on streams of the device itself (CUDA).
enum class ExecutionMode : std::uint8_t { kInline, kChaos, kDevice };

/// Memory of the host, for copies to and from a device.
struct CopyMemory {
  Arena arena{};
  std::string refusal{};  ///< why it is not pinned, as the driver says it: copies wait then; empty: it is
};

/// One rank's device. Ranks that are threads have one each. Its streams end with it: tasks that have not run by then
/// never run, and waits for them throw kAborted.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  [[nodiscard]] virtual std::string_view kind() const = 0;
  /// Of the GPUs that this process sees; -1 for the CPU.
  [[nodiscard]] virtual int ordinal() const { return -1; }
  [[nodiscard]] virtual Arena make_arena(ArenaKind kind, std::size_t bytes, std::string_view name) = 0;
  /// Memory of the host that copies of a stream use without a wait of the host: pinned, where there is a bus to cross
  /// and the driver can.
  [[nodiscard]] virtual CopyMemory make_copy_memory(std::size_t bytes, std::string_view name) {
    return {.arena = make_arena(ArenaKind::kPrivate, bytes, name)};
  }
  /// Makes a stream; `name` appears in traces: "gather", "reduce", ...
  [[nodiscard]] virtual Stream make_stream(std::string name) = 0;
  /// True if work on a stream can overlap the caller's computation. If false, prefetching only costs memory.
  [[nodiscard]] virtual bool asynchronous() const = 0;
  [[nodiscard]] virtual ExecutionMode execution_mode() const = 0;
  /// The ledger of all bytes that this device has handed out.
  [[nodiscard]] MemoryLedger& ledger() const { return *ledger_; }

 private:
  std::shared_ptr<MemoryLedger> ledger_ = MemoryLedger::create();
};

/// The CPU as a device. In chaos mode `seed` decides the order of tasks and their delays (up to 200 us each).
[[nodiscard]] std::unique_ptr<Device> make_cpu_device(ExecutionMode mode = ExecutionMode::kInline,
                                                      std::uint64_t seed = 0);

/// A stream for the work that a running task submits, such as the steps of one call. The work runs at once on the
/// task's thread, at the task's place in the order. So order_after() never waits, because work submitted after the task
/// cannot run before it. It only passes known errors on.
[[nodiscard]] Stream make_nested_stream(std::string name);

}  // namespace zeroth
