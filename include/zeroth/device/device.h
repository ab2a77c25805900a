// The device interface: memory and streams of one kind of execution place. `cpu` is made here, CUDA in cuda.h.
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

/// One device as seen by one rank. Ranks that are threads have one each. Its streams end with it: tasks that have not
/// run by then never do, and who waits for them gets kAborted.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  [[nodiscard]] virtual std::string_view kind() const = 0;
  [[nodiscard]] virtual Arena make_arena(ArenaKind kind, std::size_t bytes, std::string_view name) = 0;
  /// Streams are named, and named in traces: "gather", "reduce", ...
  [[nodiscard]] virtual Stream make_stream(std::string name) = 0;
  /// Whether work on a stream can overlap the caller's compute: if not, prefetching only costs memory.
  [[nodiscard]] virtual bool asynchronous() const = 0;
  [[nodiscard]] virtual ExecutionMode execution_mode() const = 0;
  /// Bytes held by everything that was made by this device.
  [[nodiscard]] MemoryLedger& ledger() const { return *ledger_; }

 private:
  std::shared_ptr<MemoryLedger> ledger_ = MemoryLedger::create();
};

/// The CPU as a device. In chaos mode `seed` decides the order of tasks and which are delayed (up to 200 us each).
[[nodiscard]] std::unique_ptr<Device> make_cpu_device(ExecutionMode mode = ExecutionMode::kInline,
                                                      std::uint64_t seed = 0);

/// For what a task submits while it runs, as the steps of one call: done at once, on its thread, and ordered where the
/// task itself is. So order_after() waits for nothing, since what was submitted after the task may never run before it;
/// it only hands on errors that are known.
[[nodiscard]] Stream make_nested_stream(std::string name);

}  // namespace zeroth
