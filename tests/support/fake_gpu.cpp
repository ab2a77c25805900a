#include "support/fake_gpu.h"

#include <zeroth/base/dtype.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace zeroth::test {

using detail::CudaStatus;
using detail::NcclOp;
using detail::NcclStatus;
using detail::NcclType;

struct FakeGpu::Event {
  int number = 0;
  int device = 0;
  std::uint64_t recorded = 0;          ///< times
  std::set<std::uint64_t> happened{};  ///< which of them: each record is a point of its own
  std::uint64_t looked_at = 0;         ///< which of them, last
  int looks = 0;                       ///< at it
};

/// One call of NCCL of one rank.
struct FakeGpu::Operation {
  std::string kind;
  const void* send = nullptr;
  void* recv = nullptr;
  std::size_t count = 0;
  NcclType type = NcclType::kUInt8;
  NcclOp op = NcclOp::kSum;
  int root = 0;  ///< or peer
  Batch* batch = nullptr;
  Comm* comm = nullptr;
};

/// The calls of a group.
struct FakeGpu::Batch {
  std::deque<Operation> operations;
  std::size_t left = 0;
  bool offered = false;
};

struct FakeGpu::Item {
  Event* record = nullptr;
  Event* wait = nullptr;
  std::uint64_t number = 0;
  std::function<void()> task{};
  std::shared_ptr<Batch> batch{};
};

struct FakeGpu::Stream {
  int number = 0;
  int device = 0;
  bool held = false;
  std::deque<Item> items{};
};

/// Ranks of one communicator.
struct FakeGpu::Clique {
  int size = 0;
  int joined = 0;
  int splits = 0;
  std::map<int, std::deque<Operation*>> matched;                ///< by rank
  std::map<std::pair<int, int>, std::deque<Operation*>> sends;  ///< from, to
  std::map<std::pair<int, int>, std::deque<Operation*>> receives;
  struct Split {
    int color = 0;
    int key = 0;
    int rank = 0;
    void** to = nullptr;
    int device = 0;
  };
  std::map<int, std::vector<Split>> splitting;  ///< by number of the split
};

struct FakeGpu::Comm {
  std::shared_ptr<Clique> clique;
  std::string name;
  int rank = 0;
  int device = 0;
  bool opened = false;
  bool finalizing = false;
  int splits = 0;
  int polls_left = 0;
  NcclStatus status = NcclStatus::kSuccess;
  std::shared_ptr<Batch> building{};
  Stream* building_on = nullptr;
  std::deque<std::pair<Stream*, std::shared_ptr<Batch>>> taken{};  ///< not yet on their streams
  std::vector<std::shared_ptr<Batch>> given{};
};

FakeGpu* FakeGpu::one = nullptr;
thread_local int FakeGpu::current = 0;
thread_local int FakeGpu::group_depth = 0;
thread_local std::vector<FakeGpu::Comm*> FakeGpu::grouped;

namespace {

std::size_t element_of(NcclType type) {
  switch (type) {
    case NcclType::kInt8:
    case NcclType::kUInt8:
      return 1;
    case NcclType::kFloat16:
    case NcclType::kBFloat16:
      return 2;
    case NcclType::kInt32:
    case NcclType::kUInt32:
    case NcclType::kFloat32:
      return 4;
    default:
      return 8;
  }
}

std::string_view text_of(NcclType type) {
  static constexpr std::string_view kNames[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                                "uint64", "float16", "float32", "float64", "bfloat16"};
  return kNames[static_cast<std::size_t>(type)];
}

std::string_view text_of(NcclOp op) {
  static constexpr std::string_view kNames[] = {"sum", "product", "max", "min"};
  return kNames[static_cast<std::size_t>(op)];
}

/// Integers wrap, as NCCL's do.
template <class T>
T sum_of(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
  } else {
    return a + b;
  }
}

template <class T>
void join(T* to, const T* from, std::size_t count, NcclOp op) {
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
      const float a = static_cast<float>(to[i]);
      const float b = static_cast<float>(from[i]);
      to[i] = T(op == NcclOp::kSum ? a + b : op == NcclOp::kMax ? std::max(a, b) : std::min(a, b));
    } else {
      to[i] = static_cast<T>(op == NcclOp::kSum   ? sum_of(to[i], from[i])
                             : op == NcclOp::kMax ? std::max(to[i], from[i])
                                                  : std::min(to[i], from[i]));
    }
  }
}

/// The sum from the last rank down: not in rank order, as NCCL's need not be.
std::vector<std::byte> joined(const std::vector<const void*>& from, std::size_t count, NcclType type, NcclOp op) {
  const std::size_t bytes = count * element_of(type);
  std::vector<std::byte> to(bytes);
  std::memcpy(to.data(), from.back(), bytes);
  for (std::size_t rank = from.size() - 1; rank-- > 0;) {
    const auto add = [&](auto example) {
      using T = decltype(example);
      std::vector<T> other(count);
      std::memcpy(static_cast<void*>(other.data()), from[rank], bytes);
      join(reinterpret_cast<T*>(to.data()), other.data(), count, op);
    };
    switch (type) {
      case NcclType::kFloat64:
        add(double{});
        break;
      case NcclType::kFloat32:
        add(float{});
        break;
      case NcclType::kBFloat16:
        add(BFloat16{});
        break;
      case NcclType::kFloat16:
        add(Float16{});
        break;
      case NcclType::kInt64:
        add(std::int64_t{});
        break;
      case NcclType::kInt32:
        add(std::int32_t{});
        break;
      default:
        add(std::uint8_t{});
        break;
    }
  }
  return to;
}

}  // namespace

FakeGpu::FakeGpu(int devices) : devices_(devices) {
  one = this;
  current = 0;
}

FakeGpu::~FakeGpu() {
  for (Stream* const stream : streams_) delete stream;
  for (Event* const event : events_) delete event;
  for (Event* const event : ended_events_) delete event;
  for (Comm* const comm : comms_) delete comm;
  one = nullptr;
}

void FakeGpu::say(const std::string& line) {
  log_[current].push_back(line);
}

void FakeGpu::hold(void* stream, bool held) {
  const std::lock_guard lock(mutex_);
  static_cast<Stream*>(stream)->held = held;
}

void FakeGpu::release_aborts() {
  const std::lock_guard lock(mutex_);
  may_abort_ = true;
  changed_.notify_all();
}

void FakeGpu::fail_comms(int device, NcclStatus status) {
  const std::lock_guard lock(mutex_);
  for (Comm* const comm : comms_) {
    if (comm->device == device) comm->status = status;
  }
}

void FakeGpu::enqueue(void* stream, std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  static_cast<Stream*>(stream)->items.push_back({.task = std::move(task)});
}

std::byte* FakeGpu::allocate(int device, std::size_t bytes, bool pinned) {
  const std::lock_guard lock(mutex_);
  auto owned = std::make_unique<std::byte[]>(bytes);
  std::byte* const address = owned.get();
  memory_[reinterpret_cast<std::uintptr_t>(address)] = {
      .bytes = bytes, .device = device, .owned = std::move(owned), .pinned = pinned};
  return address;
}

std::size_t FakeGpu::allocated(int device) {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& [address, memory] : memory_) bytes += memory.device == device && !memory.pinned ? memory.bytes : 0;
  return bytes;
}

void FakeGpu::pretend(int device, std::uintptr_t address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  memory_[address] = {.bytes = bytes, .device = device};
}

std::vector<std::string> FakeGpu::log(int device) {
  const std::lock_guard lock(mutex_);
  return log_[device];
}

std::vector<std::string> FakeGpu::log(int device, const std::vector<std::string>& words) {
  std::vector<std::string> lines = log(device);
  std::erase_if(lines, [&](const std::string& line) {
    return std::ranges::none_of(words, [&](const std::string& word) { return line.starts_with(word); });
  });
  return lines;
}

void FakeGpu::clear_log() {
  const std::lock_guard lock(mutex_);
  log_.clear();
}

std::vector<std::string> FakeGpu::violations() {
  const std::lock_guard lock(mutex_);
  return violations_;
}

std::size_t FakeGpu::living_comms() {
  const std::lock_guard lock(mutex_);
  return comms_.size();
}

std::size_t FakeGpu::living_streams() {
  const std::lock_guard lock(mutex_);
  return streams_.size();
}

std::size_t FakeGpu::living_events() {
  const std::lock_guard lock(mutex_);
  return events_.size();
}

void FakeGpu::advance() {
  for (bool moved = true; moved;) {
    moved = false;
    for (Stream* const stream : streams_) moved = advance(*stream) || moved;
  }
}

void FakeGpu::advance_to(const Event& event, std::uint64_t number) {
  const auto is_point = [&](const Item& item) { return item.record == &event && item.number == number; };
  for (Stream* const stream : streams_) {
    if (std::ranges::none_of(stream->items, is_point)) continue;
    while (!event.happened.contains(number)) {
      const Item& head = stream->items.front();
      if (head.wait != nullptr && head.number > 0) advance_to(*head.wait, head.number);
      if (!advance(*stream)) return;
    }
  }
}

bool FakeGpu::advance(Stream& stream) {
  if (stream.held || stream.items.empty()) return false;
  Item& head = stream.items.front();
  if (head.wait != nullptr && head.number > 0 && !head.wait->happened.contains(head.number)) return false;
  if (head.record != nullptr) head.record->happened.insert(head.number);
  if (head.task) head.task();
  if (head.batch) {
    bool moved = false;
    if (!head.batch->offered) {
      head.batch->offered = true;
      moved = true;
      for (Operation& operation : head.batch->operations) offer(operation);
    }
    if (head.batch->left > 0) return moved;
  }
  stream.items.pop_front();
  return true;
}

void FakeGpu::offer(Operation& operation) {
  Comm& comm = *operation.comm;
  Clique& clique = *comm.clique;
  if (operation.kind == "send") {
    clique.sends[{comm.rank, operation.root}].push_back(&operation);
  } else if (operation.kind == "recv") {
    clique.receives[{operation.root, comm.rank}].push_back(&operation);
  } else {
    clique.matched[comm.rank].push_back(&operation);
  }
  match(clique);
}

void FakeGpu::match(Clique& clique) {
  for (auto& [pair, sends] : clique.sends) {
    auto& receives = clique.receives[pair];
    while (!sends.empty() && !receives.empty()) {
      Operation& sent = *sends.front();
      Operation& wanted = *receives.front();
      if (sent.count != wanted.count || sent.type != wanted.type) violate("a send and a recv differ");
      if (moves_data) std::memcpy(wanted.recv, sent.send, std::min(sent.count, wanted.count) * element_of(sent.type));
      --sent.batch->left;
      --wanted.batch->left;
      sends.pop_front();
      receives.pop_front();
    }
  }
  for (;;) {
    std::vector<Operation*> all;
    for (int rank = 0; rank < clique.size; ++rank) {
      if (clique.matched[rank].empty()) return;
      all.push_back(clique.matched[rank].front());
    }
    const Operation& first = *all.front();
    const bool same = std::ranges::all_of(all, [&](const Operation* other) {
      return other->kind == first.kind && other->count == first.count && other->type == first.type &&
             other->root == first.root;
    });
    if (!same) return;  // a real one hangs
    const std::size_t bytes = first.count * element_of(first.type);
    std::vector<const void*> sources;
    for (const Operation* const operation : all) sources.push_back(operation->send);
    if (moves_data) {
      std::vector<std::byte> whole;  // apart from the buffers: calls may be in place
      if (first.kind == "all_gather") {
        for (const void* const source : sources) {
          const auto* const data = static_cast<const std::byte*>(source);
          whole.insert(whole.end(), data, data + bytes);
        }
      } else if (first.kind == "broadcast") {
        const auto* const data = static_cast<const std::byte*>(sources[static_cast<std::size_t>(first.root)]);
        whole.assign(data, data + bytes);
      } else {
        const std::size_t parts = first.kind == "reduce_scatter" ? static_cast<std::size_t>(clique.size) : 1;
        whole = joined(sources, first.count * parts, first.type, first.op);
      }
      for (int rank = 0; rank < clique.size; ++rank) {
        Operation& own = *all[static_cast<std::size_t>(rank)];
        if (own.kind == "reduce" && rank != own.root) continue;
        const bool scatters = own.kind == "reduce_scatter";
        std::memcpy(own.recv, whole.data() + (scatters ? static_cast<std::size_t>(rank) * bytes : 0),
                    scatters ? bytes : whole.size());
      }
    }
    for (int rank = 0; rank < clique.size; ++rank) {
      --clique.matched[rank].front()->batch->left;
      clique.matched[rank].pop_front();
    }
  }
}

void FakeGpu::give(Comm& comm) {
  while (!comm.taken.empty()) {
    auto [stream, batch] = comm.taken.front();
    comm.taken.pop_front();
    comm.given.push_back(batch);
    if (stream != nullptr) stream->items.push_back({.batch = batch});
  }
}

/// The C functions.
struct Calls {
  using Guard = std::lock_guard<std::mutex>;
  static FakeGpu& gpu() { return *FakeGpu::one; }
  static FakeGpu::Stream* stream_of(void* stream) { return static_cast<FakeGpu::Stream*>(stream); }
  static FakeGpu::Event* event_of(void* event) { return static_cast<FakeGpu::Event*>(event); }

  // CUDA.
  static CudaStatus driver_version(int* version) { return *version = 13'000, detail::kCudaSuccess; }
  static CudaStatus device_count(int* count) { return *count = gpu().devices_, gpu().count_status; }
  static CudaStatus set_device(int device) {
    if (device < 0 || device >= gpu().devices_) return 101;
    return FakeGpu::current = device, detail::kCudaSuccess;
  }
  static CudaStatus get_device(int* device) { return *device = FakeGpu::current, detail::kCudaSuccess; }
  static CudaStatus device_bus_id(char* text, int bytes, int device) {
    if (!gpu().same_bus.empty())
      return std::snprintf(text, static_cast<std::size_t>(bytes), "%s", gpu().same_bus.c_str()), detail::kCudaSuccess;
    return std::snprintf(text, static_cast<std::size_t>(bytes), "0000:%02x:00.0", device), detail::kCudaSuccess;
  }
  static CudaStatus stream_create(void** stream, unsigned flags) {
    const Guard lock(gpu().mutex_);
    if (flags != detail::kCudaStreamNonBlocking) gpu().violate("a stream that waits for the default stream");
    auto* const made =
        new FakeGpu::Stream{.number = gpu().next_stream_[FakeGpu::current]++, .device = FakeGpu::current};
    gpu().streams_.insert(made);
    return *stream = made, detail::kCudaSuccess;
  }
  static CudaStatus stream_destroy(void* stream) {
    const Guard lock(gpu().mutex_);
    gpu().advance();
    if (gpu().streams_.erase(stream_of(stream)) == 0) gpu().violate("a stream that is gone");
    delete stream_of(stream);
    return detail::kCudaSuccess;
  }
  static CudaStatus stream_wait_event(void* stream, void* event, unsigned) {
    const Guard lock(gpu().mutex_);
    gpu().say("stream_wait s" + std::to_string(stream_of(stream)->number) + " e" +
              std::to_string(event_of(event)->number));
    stream_of(stream)->items.push_back({.wait = event_of(event), .number = event_of(event)->recorded});
    return detail::kCudaSuccess;
  }
  static CudaStatus event_create(void** event, unsigned flags) {
    const Guard lock(gpu().mutex_);
    if (flags != detail::kCudaEventDisableTiming) gpu().violate("an event with timing");
    auto* const made = new FakeGpu::Event{.number = gpu().next_event_[FakeGpu::current]++, .device = FakeGpu::current};
    gpu().events_.insert(made);
    return *event = made, detail::kCudaSuccess;
  }
  static CudaStatus event_destroy(void* event) {
    const Guard lock(gpu().mutex_);
    if (gpu().events_.erase(event_of(event)) == 0) gpu().violate("an event that is gone");
    gpu().ended_events_.push_back(event_of(event));  // streams may still have to come to it
    return detail::kCudaSuccess;
  }
  static CudaStatus event_record(void* event, void* stream) {
    const Guard lock(gpu().mutex_);
    if (stream_of(stream)->device != FakeGpu::current) gpu().violate("an event on a stream of another device");
    gpu().say("event_record e" + std::to_string(event_of(event)->number) + " s" +
              std::to_string(stream_of(stream)->number));
    stream_of(stream)->items.push_back({.record = event_of(event), .number = ++event_of(event)->recorded});
    return detail::kCudaSuccess;
  }
  static CudaStatus event_query(void* event) {
    const Guard lock(gpu().mutex_);
    if (gpu().event_status != detail::kCudaSuccess) return gpu().event_status;
    if (gpu().broken_device == event_of(event)->device) return FakeGpu::kBroken;
    FakeGpu::Event& asked = *event_of(event);
    if (std::exchange(asked.looked_at, asked.recorded) != asked.recorded) asked.looks = 0;
    if (asked.recorded > 0 && !asked.happened.contains(asked.recorded) && asked.looks++ < gpu().looks)
      return detail::kCudaNotReady;
    gpu().late ? gpu().advance_to(asked, asked.recorded) : gpu().advance();
    return asked.recorded == 0 || asked.happened.contains(asked.recorded) ? detail::kCudaSuccess
                                                                          : detail::kCudaNotReady;
  }
  static CudaStatus copy(void* to, const void* from, std::size_t bytes, int, void* stream) {
    const Guard lock(gpu().mutex_);
    gpu().say("copy " + std::to_string(bytes) + " s" + std::to_string(stream_of(stream)->number));
    const bool moves = gpu().moves_data;
    stream_of(stream)->items.push_back({.task = [=] {
      if (moves) std::memcpy(to, from, bytes);
    }});
    return detail::kCudaSuccess;
  }
  static CudaStatus allocate(void** memory, std::size_t bytes) {
    const std::size_t most = gpu().device_bytes;
    if (bytes > (std::size_t{1} << 32U)) return detail::kCudaOutOfMemory;
    if (most > 0 && gpu().allocated(FakeGpu::current) + bytes > most) return detail::kCudaOutOfMemory;
    return *memory = gpu().allocate(FakeGpu::current, bytes), detail::kCudaSuccess;
  }
  static CudaStatus release(void* memory) {
    const Guard lock(gpu().mutex_);
    if (gpu().memory_.erase(reinterpret_cast<std::uintptr_t>(memory)) == 0) gpu().violate("memory that is gone");
    return detail::kCudaSuccess;
  }
  static CudaStatus allocate_pinned(void** memory, std::size_t bytes, unsigned) {
    const std::size_t most = gpu().most_pinned;
    if (bytes > (std::size_t{1} << 32U) || (most > 0 && bytes > most)) return detail::kCudaOutOfMemory;
    return *memory = gpu().allocate(FakeGpu::current, bytes, /*pinned=*/true), detail::kCudaSuccess;
  }
  static CudaStatus pointer(detail::CudaPointer* about, const void* address) {
    const Guard lock(gpu().mutex_);
    const auto wanted = reinterpret_cast<std::uintptr_t>(address);
    *about = {};
    const auto after = gpu().memory_.upper_bound(wanted);
    const auto found = after == gpu().memory_.begin() ? gpu().memory_.end() : std::prev(after);
    const bool known = found != gpu().memory_.end() && wanted < found->first + found->second.bytes;
    if (!known && !gpu().host_memory_is_managed) return detail::kCudaSuccess;
    about->type = known ? detail::kCudaMemoryDevice : detail::kCudaMemoryManaged;
    about->device = known ? found->second.device : FakeGpu::current;
    about->device_address = const_cast<void*>(address);
    return detail::kCudaSuccess;
  }
  static const char* cuda_text(CudaStatus status) {
    return status == FakeGpu::kBroken ? "an illegal memory access was encountered" : "a fake error";
  }
  static CudaStatus take_last_error() { return detail::kCudaSuccess; }

  // NCCL.
  static FakeGpu::Comm* comm_of(void* comm) { return static_cast<FakeGpu::Comm*>(comm); }
  static bool known(void* comm, const char* call) {
    if (gpu().comms_.contains(comm_of(comm))) return true;
    gpu().violate(std::string(call) + " on a communicator that is gone");
    return false;
  }
  static bool refused(const char* call) { return gpu().refuse == call; }
  static NcclStatus unique_id(detail::NcclId* id) {
    const Guard lock(gpu().mutex_);
    if (refused("unique_id")) return NcclStatus::kSystemError;
    std::snprintf(id->bytes, sizeof id->bytes, "id%d", gpu().next_id_++);
    return NcclStatus::kSuccess;
  }
  static FakeGpu::Comm* make_comm(const std::string& name, int size, int rank, int device) {
    std::shared_ptr<FakeGpu::Clique>& clique = gpu().cliques_[name];
    if (!clique) clique = std::make_shared<FakeGpu::Clique>();
    clique->size = size;
    ++clique->joined;
    auto* const made = new FakeGpu::Comm{
        .clique = clique, .name = name, .rank = rank, .device = device, .polls_left = gpu().polls_in_progress};
    gpu().comms_.insert(made);
    return made;
  }
  static NcclStatus init(void** comm, int size, detail::NcclId id, int rank, detail::NcclConfig* config) {
    const Guard lock(gpu().mutex_);
    gpu().say("init " + std::to_string(rank) + "/" + std::to_string(size) +
              " blocking=" + std::to_string(config->blocking));
    if (config->blocking != 0 || config->magic != 0xcafebeef || config->size != sizeof(detail::NcclConfig))
      gpu().violate("a config that NCCL would refuse");
    if (refused("init")) return NcclStatus::kSystemError;
    *comm = make_comm(id.bytes, size, rank, FakeGpu::current);
    return NcclStatus::kInProgress;
  }
  static NcclStatus split(void* parent, int color, int key, void** part, detail::NcclConfig*) {
    const Guard lock(gpu().mutex_);
    if (!known(parent, "split")) return NcclStatus::kInvalidArgument;
    FakeGpu::Comm& comm = *comm_of(parent);
    gpu().say("split color=" + std::to_string(color) + " key=" + std::to_string(key));
    const int number = comm.splits++;
    auto& all = comm.clique->splitting[number];
    all.push_back({.color = color, .key = key, .rank = comm.rank, .to = part, .device = comm.device});
    comm.polls_left = gpu().polls_in_progress;
    if (static_cast<int>(all.size()) < comm.clique->size) return NcclStatus::kInProgress;
    std::ranges::sort(all,
                      [](const auto& a, const auto& b) { return std::pair(a.key, a.rank) < std::pair(b.key, b.rank); });
    std::map<int, int> sizes;
    for (const auto& asked : all) ++sizes[asked.color];
    std::map<int, int> next;
    for (const auto& asked : all) {
      if (asked.color < 0) continue;
      const std::string name = comm.name + "/" + std::to_string(number) + "." + std::to_string(asked.color);
      *asked.to = make_comm(name, sizes[asked.color], next[asked.color]++, asked.device);
    }
    return NcclStatus::kInProgress;
  }
  static NcclStatus finalize(void* comm) {
    const Guard lock(gpu().mutex_);
    if (!known(comm, "finalize")) return NcclStatus::kInvalidArgument;
    gpu().log_[comm_of(comm)->device].emplace_back("finalize");
    if (FakeGpu::current != comm_of(comm)->device)
      gpu().violate("finalize with another device than the communicator's");
    comm_of(comm)->finalizing = true;
    comm_of(comm)->polls_left = gpu().polls_in_progress;
    return NcclStatus::kInProgress;
  }
  static void remove(FakeGpu::Comm* comm) {
    // Kernels that spin come to an end: their calls are done, without a result.
    for (const auto& batch : comm->given) {
      batch->left = 0;
      batch->offered = true;
      for (FakeGpu::Operation& operation : batch->operations) {
        std::erase(comm->clique->matched[comm->rank], &operation);
        for (auto& [pair, list] : comm->clique->sends) std::erase(list, &operation);
        for (auto& [pair, list] : comm->clique->receives) std::erase(list, &operation);
      }
    }
    gpu().comms_.erase(comm);
    delete comm;
  }
  static NcclStatus destroy(void* comm) {
    const Guard lock(gpu().mutex_);
    if (!known(comm, "destroy")) return NcclStatus::kInvalidArgument;
    gpu().log_[comm_of(comm)->device].emplace_back("destroy");
    if (FakeGpu::current != comm_of(comm)->device) gpu().violate("destroy with another device than the communicator's");
    if (!comm_of(comm)->finalizing) gpu().violate("a communicator is destroyed that was not finalized");
    remove(comm_of(comm));
    return NcclStatus::kSuccess;
  }
  static NcclStatus abort(void* comm) {
    std::unique_lock lock(gpu().mutex_);
    if (!known(comm, "abort")) return NcclStatus::kInvalidArgument;
    gpu().log_[comm_of(comm)->device].emplace_back("abort");
    if (FakeGpu::current != comm_of(comm)->device) gpu().violate("abort with another device than the communicator's");
    FakeGpu& mine = gpu();
    mine.changed_.wait(lock, [&] { return !mine.abort_blocks || mine.may_abort_; });
    remove(comm_of(comm));
    return NcclStatus::kSuccess;
  }
  static NcclStatus async_error(void* handle, NcclStatus* status) {
    const Guard lock(gpu().mutex_);
    if (!known(handle, "async_error")) return NcclStatus::kInvalidArgument;
    FakeGpu::Comm& comm = *comm_of(handle);
    *status = comm.status;
    if (comm.status != NcclStatus::kSuccess) return NcclStatus::kSuccess;
    *status = NcclStatus::kInProgress;
    if (!comm.opened && (gpu().never_opens || comm.clique->joined < comm.clique->size)) return NcclStatus::kSuccess;
    if (comm.finalizing && gpu().finalize_blocks) return NcclStatus::kSuccess;
    const auto splitting = comm.clique->splitting.find(comm.splits - 1);
    if (splitting != comm.clique->splitting.end() && static_cast<int>(splitting->second.size()) < comm.clique->size)
      return NcclStatus::kSuccess;
    if (comm.polls_left-- > 0) return NcclStatus::kSuccess;
    comm.polls_left = 0;
    comm.opened = true;
    gpu().give(comm);
    *status = NcclStatus::kSuccess;
    return NcclStatus::kSuccess;
  }
  static const char* nccl_text(NcclStatus status) {
    return status == NcclStatus::kRemoteError ? "remote process exited or there was a network error" : "a fake error";
  }
  static const char* last_error(void*) { return "socket closed by a fake peer"; }
  static NcclStatus group_start() {
    const Guard lock(gpu().mutex_);
    gpu().say("group_start");
    ++FakeGpu::group_depth;
    return NcclStatus::kSuccess;
  }
  static NcclStatus group_end() {
    const Guard lock(gpu().mutex_);
    gpu().say("group_end");
    --FakeGpu::group_depth;
    for (FakeGpu::Comm* const comm : std::exchange(FakeGpu::grouped, {})) {
      comm->building->left = comm->building->operations.size();
      comm->taken.emplace_back(comm->building_on, std::exchange(comm->building, nullptr));
      comm->polls_left = gpu().polls_in_progress;
    }
    return refused("group_end") ? NcclStatus::kSystemError : NcclStatus::kInProgress;
  }
  static NcclStatus add(FakeGpu::Operation operation, void* handle, void* stream) {
    const Guard lock(gpu().mutex_);
    if (!known(handle, operation.kind.c_str())) return NcclStatus::kInvalidArgument;
    FakeGpu::Comm& comm = *comm_of(handle);
    std::string line =
        operation.kind + " " + std::to_string(operation.count) + " " + std::string(text_of(operation.type));
    const bool reduces = operation.kind.find("reduce") != std::string::npos;
    if (reduces) line += " " + std::string(text_of(operation.op));
    if (operation.kind == "broadcast" || operation.kind == "reduce") line += " root=" + std::to_string(operation.root);
    if (operation.kind == "send" || operation.kind == "recv") line += " peer=" + std::to_string(operation.root);
    gpu().say(line + " s" + std::to_string(stream_of(stream)->number));
    if (FakeGpu::current != comm.device) gpu().violate("a call with another device than the communicator's");
    if (FakeGpu::group_depth == 0) gpu().violate("a call outside a group");
    if (!comm.opened) gpu().violate("a call before the communicator is open");
    if (refused(operation.kind.c_str())) return NcclStatus::kSystemError;
    if (!comm.building) {
      comm.building = std::make_shared<FakeGpu::Batch>();
      comm.building_on = stream_of(stream);
      FakeGpu::grouped.push_back(&comm);
    }
    operation.batch = comm.building.get();
    operation.comm = &comm;
    comm.building->operations.push_back(std::move(operation));
    return NcclStatus::kInProgress;
  }
  static NcclStatus all_gather(const void* send, void* recv, std::size_t count, NcclType type, void* comm,
                               void* stream) {
    return add({.kind = "all_gather", .send = send, .recv = recv, .count = count, .type = type}, comm, stream);
  }
  static NcclStatus reduce_scatter(const void* send, void* recv, std::size_t count, NcclType type, NcclOp op,
                                   void* comm, void* stream) {
    return add({.kind = "reduce_scatter", .send = send, .recv = recv, .count = count, .type = type, .op = op}, comm,
               stream);
  }
  static NcclStatus all_reduce(const void* send, void* recv, std::size_t count, NcclType type, NcclOp op, void* comm,
                               void* stream) {
    return add({.kind = "all_reduce", .send = send, .recv = recv, .count = count, .type = type, .op = op}, comm,
               stream);
  }
  static NcclStatus reduce(const void* send, void* recv, std::size_t count, NcclType type, NcclOp op, int root,
                           void* comm, void* stream) {
    return add({.kind = "reduce", .send = send, .recv = recv, .count = count, .type = type, .op = op, .root = root},
               comm, stream);
  }
  static NcclStatus broadcast(const void* send, void* recv, std::size_t count, NcclType type, int root, void* comm,
                              void* stream) {
    return add({.kind = "broadcast", .send = send, .recv = recv, .count = count, .type = type, .root = root}, comm,
               stream);
  }
  static NcclStatus send(const void* data, std::size_t count, NcclType type, int peer, void* comm, void* stream) {
    return add({.kind = "send", .send = data, .count = count, .type = type, .root = peer}, comm, stream);
  }
  static NcclStatus recv(void* data, std::size_t count, NcclType type, int peer, void* comm, void* stream) {
    return add({.kind = "recv", .recv = data, .count = count, .type = type, .root = peer}, comm, stream);
  }
  static NcclStatus register_buffer(void* comm, void*, std::size_t bytes, void** handle) {
    const Guard lock(gpu().mutex_);
    if (!known(comm, "register")) return NcclStatus::kInvalidArgument;
    gpu().say("register " + std::to_string(bytes));
    return *handle = gpu().registers ? comm : nullptr, NcclStatus::kSuccess;
  }
  static NcclStatus deregister_buffer(void* comm, void* handle) {
    const Guard lock(gpu().mutex_);
    if (handle == nullptr) gpu().violate("a buffer is deregistered that never was registered");
    if (!known(comm, "deregister")) return NcclStatus::kInvalidArgument;
    gpu().log_[comm_of(comm)->device].emplace_back("deregister");
    return NcclStatus::kSuccess;
  }
};

detail::CudaTable FakeGpu::cuda_table() const {
  return {.library = "a fake CUDA",
          .version = 13'000,
          .driver_version = Calls::driver_version,
          .device_count = Calls::device_count,
          .set_device = Calls::set_device,
          .get_device = Calls::get_device,
          .device_bus_id = Calls::device_bus_id,
          .stream_create = Calls::stream_create,
          .stream_destroy = Calls::stream_destroy,
          .stream_wait_event = Calls::stream_wait_event,
          .event_create = Calls::event_create,
          .event_destroy = Calls::event_destroy,
          .event_record = Calls::event_record,
          .event_query = Calls::event_query,
          .copy = Calls::copy,
          .allocate = Calls::allocate,
          .release = Calls::release,
          .allocate_pinned = Calls::allocate_pinned,
          .release_pinned = Calls::release,
          .pointer = Calls::pointer,
          .error_string = Calls::cuda_text,
          .take_last_error = Calls::take_last_error};
}

detail::NcclTable FakeGpu::nccl_table() const {
  return {.library = "a fake NCCL",
          .version = 22'809,
          .unique_id = Calls::unique_id,
          .init = Calls::init,
          .split = Calls::split,
          .finalize = Calls::finalize,
          .destroy = Calls::destroy,
          .abort = Calls::abort,
          .async_error = Calls::async_error,
          .error_string = Calls::nccl_text,
          .last_error = Calls::last_error,
          .group_start = Calls::group_start,
          .group_end = Calls::group_end,
          .all_gather = Calls::all_gather,
          .reduce_scatter = Calls::reduce_scatter,
          .all_reduce = Calls::all_reduce,
          .reduce = Calls::reduce,
          .broadcast = Calls::broadcast,
          .send = Calls::send,
          .recv = Calls::recv,
          .register_buffer = Calls::register_buffer,
          .deregister_buffer = Calls::deregister_buffer};
}

}  // namespace zeroth::test
