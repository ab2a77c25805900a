#include "comm/mpi/mpi_world.h"

#include "comm/control/end_of_job.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/interrupt.h>

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <new>
#include <thread>
#include <utility>

namespace zeroth::detail {
namespace {

using std::chrono::microseconds;

constexpr std::size_t kPieceBytes = std::size_t{1} << 30U;  // MPI counts with an int
constexpr int kNoteTag = 1 << 29;                           // above every tag of a group
constexpr int kExchangeTag = kNoteTag + 1;                  // of calls of a group
constexpr int kLeftTag = kNoteTag + 2;                      // the sender has left, and nothing of it is under way
constexpr int kAnyTag = -1;
constexpr std::size_t kNoteBytes = 1'024;
constexpr Milliseconds kCancelTime{100};
constexpr Milliseconds kAbortTime{200};
constexpr Milliseconds kTakeBackTime{300};
constexpr int kLooksBetweenProbes = 64;
constexpr int kFirstLooks = 16;
constexpr int kLooksBetweenYields = 8;     // MPI yields in each where it is told that it has no processor of its own
constexpr std::size_t kSentAhead = 4'096;  // of one message: Open MPI's limit in shared memory, the least that it has
constexpr std::size_t kEnvelope = 256;     // and what it puts before a message at most
constexpr std::int64_t kAwayNs = 10'000'000;

void check_code(const MpiTable& table, int code, std::string_view call, int rank, int size) {
  if (code == 0) [[likely]]
    return;
  char text[512] = "";
  table.text(code, text, sizeof text);
  throw Error(ErrorCode::kPeerLost, fmt::format("MPI refused {}", call),
              {.where = "comm.mpi",
               .who = fmt::format("rank {}/{}", rank, size),
               .got = text[0] == '\0' ? fmt::format("error {}", code) : std::string(text),
               .hint = "look at what mpirun and the other ranks have printed"});
}

/// A call of MPI that blocks has no deadline. So a thread makes it, and is left behind where it does not come back: the
/// process will end soon. `call` returns MPI's code and what it has found; null: it has not come back within `timeout`.
/// What `check` throws ends the wait, too.
struct Blocking {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  int code = 0;
  MpiWorldFacts facts;
  void* group = nullptr;
};

template <class Call, class Check>
std::shared_ptr<Blocking> make_blocking_call(Milliseconds timeout, const Call& call, const Check& check) {
  auto blocking = std::make_shared<Blocking>();
  std::thread([blocking, call] {
    MpiWorldFacts facts;
    void* group = nullptr;
    const int code = call(facts, group);
    const std::lock_guard lock(blocking->mutex);
    blocking->code = code;
    blocking->facts = facts;
    blocking->group = group;
    blocking->done = true;
    blocking->changed.notify_all();
  }).detach();
  const Deadline deadline(timeout);
  std::unique_lock lock(blocking->mutex);
  while (!blocking->changed.wait_for(lock, deadline.slice(), [&] { return blocking->done; })) {
    if (deadline.passed()) return nullptr;
    lock.unlock();
    check();
    lock.lock();
  }
  return blocking;
}

[[noreturn]] void throw_memory_left(int rank, int size) {
  throw Error(ErrorCode::kAborted, "MPI still has memory of a call that failed before in this process",
              {.where = "comm.mpi",
               .who = fmt::format("rank {}/{}", rank, size),
               .expected = "MPI as it was started",
               .hint = "end this process and start the job again: MPI would write where that memory was"});
}

/// Some milliseconds off, and a quarter of the price of an exact clock.
std::int64_t coarse_ns() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

std::string seconds(Milliseconds time) {
  return fmt::format("{:.1f} s", std::chrono::duration<double>(time).count());
}

}  // namespace

MpiWorld::MpiWorld(const MpiTable& table, const MpiWorldFacts& facts, void* world, const CommOptions& options)
    : table_(table),
      facts_(facts),
      world_(world),
      polling_(polling_of(options.spin, facts.size_here)),
      groups_{world} {}

MpiRequests MpiWorld::start(bool sends, int peer, std::uint32_t tag, std::byte* data, std::size_t bytes) {
  ZR_FAILPOINT("mpi.start");
  const std::lock_guard lock(mutex_);
  enter();
  MpiRequests requests;
  start_locked({world_, sends, peer, static_cast<int>(tag), data, bytes}, requests);
  requests.confirms = sends && bytes + kEnvelope > kSentAhead;
  return requests;
}

MpiRequests MpiWorld::start_exchange(void* group, int rank, std::span<const MpiPiece> to,
                                     std::span<const MpiPiece> from) {
  ZR_FAILPOINT("mpi.start");
  const std::lock_guard lock(mutex_);
  enter();
  MpiRequests requests;
  const auto size = static_cast<int>(to.size());
  requests.list.reserve(2 * to.size());
  for (int distance = 1; distance < size; ++distance) {  // every rank begins with another one
    const int source = (rank + size - distance) % size;
    const MpiPiece& piece = from[static_cast<std::size_t>(source)];
    start_locked({group, false, source, kExchangeTag, piece.data, piece.bytes}, requests);
  }
  for (int distance = 1; distance < size; ++distance) {
    const int target = (rank + distance) % size;
    const MpiPiece& piece = to[static_cast<std::size_t>(target)];
    start_locked({group, true, target, kExchangeTag, piece.data, piece.bytes}, requests);
  }
  return requests;
}

void MpiWorld::start_locked(const Message& message, MpiRequests& requests) {
  for (std::size_t done = 0; done < message.bytes; done += kPieceBytes) {
    const int piece = static_cast<int>(std::min(kPieceBytes, message.bytes - done));
    void* request = nullptr;
    const int code =
        message.sends ? table_.send(message.group, message.data + done, piece, message.peer, message.tag, &request)
                      : table_.receive(message.group, message.data + done, piece, message.peer, message.tag, &request);
    if (code != 0) {
      forget_locked(requests.list);
      check(code, fmt::format("a message {} rank {}", message.sends ? "to" : "from", message.peer));
    }
    requests.list.push_back(request);
    under_way_.push_back({request, message.sends ? Kind::kSend : Kind::kReceive});
  }
  requests.bytes += message.bytes;
}

void MpiWorld::enter() {
  throw_if_stopped();
  const std::int64_t now = coarse_ns();
  if (now - heard_at_ < kAwayNs) return;
  heard_at_ = now;
  listen();
}

void* MpiWorld::split(void* group, int color, int key, Milliseconds timeout) {
  const std::lock_guard lock(mutex_);  // nobody else calls MPI meanwhile
  throw_if_stopped();
  const auto divide = [group, color, key, &table = table_](MpiWorldFacts& /*facts*/, void*& part) {
    return table.split(group, color, key, &part);
  };
  const auto made =
      make_blocking_call(timeout, divide, [] {});  // no interrupt under a lock; all have said that they come
  if (!made) {                                     // the thread is still inside MPI, and may be for ever
    table_.leave_unfinished();
    table_.leave_memory();
    stopped_ = "a group was never complete";
    throw Error(ErrorCode::kTimeout, "MPI did not make a group within " + seconds(timeout),
                {.where = "comm.mpi",
                 .who = fmt::format("rank {}/{}", rank(), size()),
                 .expected = "all ranks of the group that is divided",
                 .got = "at least one that has not come, after it said that it would",
                 .hint = "look at what mpirun and the other ranks have printed"});
  }
  check(made->code, "to divide a group");
  if (made->group != nullptr) groups_.push_back(made->group);
  return made->group;
}

bool MpiWorld::wait(MpiRequests& requests, Milliseconds slice, MpiPatience patience) {
  ZR_FAILPOINT("mpi.wait");
  if (requests.list.empty()) return true;
  const bool has_core = patience == MpiPatience::kEager && !polling_.yields && polling_.time.count() > 0;
  // A short call ends before the others' aborts are looked for, and before it is worth a look at the clock, which takes
  // as long as one at a message.
  for (int looks = 0; has_core && looks < kFirstLooks; ++looks) {
    if (look(requests, false)) return true;
  }
  const auto begin = SteadyClock::now();
  // By then a transfer that nobody holds up has ended, also over a slow link: later it is the peer that is waited for.
  const microseconds busy = std::chrono::milliseconds{10} + microseconds{requests.bytes / 200};
  const microseconds memory{requests.bytes / 2'000};  // time in which it carries them
  const microseconds spin = polling_.time.count() > 0 ? polling_.time + memory : polling_.time;
  // MPI does not say whether anybody is there: so even who looks all the time does so no longer than memory takes for
  // them.
  const microseconds looking = patience == MpiPatience::kEager ? std::chrono::milliseconds{10} + memory : spin;
  for (int looks = 1;; ++looks) {
    if (look(requests, looks % kLooksBetweenProbes == 0)) return true;
    const auto now = std::chrono::duration_cast<microseconds>(SteadyClock::now() - begin);
    if (now >= slice) {
      requests.waited += now;
      return false;
    }
    const microseconds all = requests.waited + now;
    if (all < looking) {
      if ((!has_core || all >= spin) && looks % kLooksBetweenYields == 0) std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(all < busy ? microseconds{20} : microseconds{1'000});
    }
  }
}

void MpiWorld::forget(MpiRequests& requests) noexcept {
  const std::lock_guard lock(mutex_);
  if (stopped_.empty() && table_.memory_is_left() == 0) forget_locked(requests.list);
}

// Tells the others, and leaves.
void MpiWorld::abort(std::string_view text) noexcept {
  const std::lock_guard lock(mutex_);
  if (table_.memory_is_left() != 0 || std::exchange(has_told_, true)) return;
  ZR_FAILPOINT("abort.mpi");
  const std::string message(text.substr(0, kNoteBytes));
  std::vector<void*> requests;
  for (int peer = 0; peer < size(); ++peer) {
    void* request = nullptr;
    if (peer == rank()) continue;
    if (table_.send(world_, message.data(), static_cast<int>(message.size()), peer, kNoteTag, &request) == 0)
      requests.push_back(request);
  }
  const Deadline deadline(kAbortTime);
  while (!advance(requests) && !deadline.passed()) std::this_thread::sleep_for(microseconds{100});
  // What is not sent by now stays with MPI: its text must stay, too.
  if (!requests.empty()) new std::string(message);
  if (stopped_.empty()) stop(fmt::format("this rank stopped the job: {}", message));
}

void MpiWorld::hear() {
  const std::lock_guard lock(mutex_);
  enter();
}

bool MpiWorld::is_done(void* request) const noexcept {
  int done = 0;
  return table_.test(request, &done) != 0 || done != 0;
}

// Moves what is under way; true once these, which nobody else waits for, are done.
bool MpiWorld::advance(std::vector<void*>& requests) const noexcept {
  std::erase_if(requests, [&](void* request) { return is_done(request); });
  return requests.empty();
}

void MpiWorld::ended(void* request) noexcept {
  for (std::size_t index = under_way_.size(); index-- > 0;) {
    if (under_way_[index].request != request) continue;
    under_way_[index] = under_way_.back();
    return under_way_.pop_back();
  }
}

bool MpiWorld::look(MpiRequests& asked, bool probes) {
  const std::lock_guard lock(mutex_);
  throw_if_stopped();
  std::vector<void*>& requests = asked.list;
  while (!requests.empty()) {
    int done = 0;
    const int code = table_.test(requests.back(), &done);
    if (code != 0 || done != 0) {
      ended(requests.back());
      requests.pop_back();
    }
    check(code, "to go on with a message");
    if (done == 0) break;
  }
  // What MPI does not send ahead may have been taken to nowhere, by a rank that has left.
  const bool all_done = requests.empty();
  if (all_done ? asked.confirms : probes) {
    heard_at_ = coarse_ns();
    listen();
  }
  return all_done;
}

// Has another rank stopped the job?
void MpiWorld::listen() {
  int tag = kNoteTag;
  int from = -1;
  int bytes = 0;
  check(table_.probe(world_, &tag, &from, &bytes), "to look for a message");
  if (from < 0) return;
  std::string text(static_cast<std::size_t>(std::clamp(bytes, 0, static_cast<int>(kNoteBytes))), '\0');
  void* request = nullptr;
  check(table_.receive(world_, text.data(), static_cast<int>(text.size()), from, kNoteTag, &request), "a message");
  std::vector<void*> requests{request};
  const Deadline deadline(kAbortTime);
  while (!advance(requests) && !deadline.passed()) std::this_thread::yield();
  // Bytes that may still come must not come into memory that is gone.
  if (!requests.empty()) new std::string(std::move(text));
  has_told_ = true;
  stop(fmt::format("rank {} stopped the job: {}", from,
                   requests.empty() ? detail::without_who(text) : "its text has not come"));
  throw_if_stopped();
}

void MpiWorld::forget_locked(std::vector<void*>& requests) noexcept {
  if (requests.empty()) return;
  for (void* request : requests) (void)table_.cancel(request);
  const Deadline deadline(kCancelTime);
  const auto all_done = [&] {
    std::erase_if(requests, [&](void* request) {
      if (!is_done(request)) return false;
      ended(request);
      return true;
    });
    return requests.empty();
  };
  while (!all_done() && !deadline.passed()) std::this_thread::sleep_for(microseconds{100});
  if (!requests.empty()) stop("a message was left unfinished");
}

class MpiWorld::Drain {
 public:
  explicit Drain(const MpiWorld& mpi) : mpi_(mpi), left_(static_cast<std::size_t>(mpi.size()), false) {
    left_[static_cast<std::size_t>(mpi.rank())] = true;
  }
  Drain(const Drain&) = delete;
  Drain& operator=(const Drain&) = delete;
  ~Drain() {
    for (Taken& taken : taken_) (void)taken.bytes.release();  // may still be written: stays for good
  }

  void look() noexcept {
    for (void* const group : mpi_.groups_) take_from(group);
    std::erase_if(taken_, [this](const Taken& taken) { return mpi_.is_done(taken.request); });
  }
  [[nodiscard]] bool all_have_left() const {
    return std::ranges::all_of(left_, [](bool left) { return left; });
  }

 private:
  struct Taken {
    void* request;
    std::unique_ptr<std::byte[]> bytes;
  };

  void take_from(void* group) noexcept {
    while (true) {
      int tag = kAnyTag;
      int from = -1;
      int bytes = 0;
      if (mpi_.table_.probe(group, &tag, &from, &bytes) != 0 || from < 0 || bytes < 0) return;
      std::unique_ptr<std::byte[]> room(new (std::nothrow) std::byte[static_cast<std::size_t>(bytes) + 1]);
      void* request = nullptr;
      if (!room || mpi_.table_.receive(group, room.get(), bytes, from, tag, &request) != 0) return;
      taken_.push_back({request, std::move(room)});
      if (tag == kLeftTag) left_[static_cast<std::size_t>(from)] = true;
    }
  }

  const MpiWorld& mpi_;
  std::vector<bool> left_;
  std::vector<Taken> taken_;
};

// True if MPI writes nowhere any more. It does not forget a message that the other rank knows of, so whoever leaves
// takes what comes until all others have nothing under way; a rank that is dead or has not heard of it does not say so.
bool MpiWorld::take_back_all() noexcept {
  for (const UnderWay& mine : under_way_) {
    if (mine.kind != Kind::kCall) (void)table_.cancel(mine.request);
  }
  Drain drain(*this);
  std::vector<void*> words;
  bool has_said = false;
  for (const Deadline deadline(kTakeBackTime); !deadline.passed(); std::this_thread::sleep_for(microseconds{50})) {
    std::erase_if(under_way_, [this](const UnderWay& mine) { return is_done(mine.request); });
    drain.look();
    if (under_way_.empty() && !std::exchange(has_said, true)) {
      for (int peer = 0; peer < size(); ++peer) {
        void* request = nullptr;
        if (peer != rank() && table_.send(world_, "", 0, peer, kLeftTag, &request) == 0) words.push_back(request);
      }
    }
    if (has_said && advance(words) && drain.all_have_left()) return true;
  }
  return std::ranges::all_of(under_way_, [](const UnderWay& mine) { return mine.kind == Kind::kSend; });
}

void MpiWorld::stop(std::string why) noexcept {
  table_.leave_unfinished();
  stopped_ = std::move(why);
  if (take_back_all()) return;
  table_.leave_memory();
  stopped_ += "; MPI has not given memory back";
}

void MpiWorld::throw_if_stopped() const {
  if (stopped_.empty() && table_.memory_is_left() == 0) [[likely]]
    return;
  if (stopped_.empty()) throw_memory_left(rank(), size());
  throw Error(ErrorCode::kAborted, stopped_, {.where = "comm.mpi", .who = fmt::format("rank {}/{}", rank(), size())});
}

void MpiWorld::check(int code, std::string_view call) const {
  check_code(table_, code, call, rank(), size());
}

std::shared_ptr<MpiWorld> open_mpi_world(const MpiTable& table, int rank, int size, const CommOptions& options) {
  ZR_FAILPOINT("mpi.open");
  if (table.memory_is_left() != 0) throw_memory_left(rank, size);
  const auto open = [&table](MpiWorldFacts& found, void*& world) { return table.open(&found, &world); };
  const auto check = [&table] {
    try {
      check_interrupt();
    } catch (...) {
      table.leave_unfinished();
      throw;
    }
  };
  const auto opening = make_blocking_call(options.timeout, open, check);
  if (!opening) {
    table.leave_unfinished();
    throw Error(ErrorCode::kTimeout, "MPI's world was not complete within " + seconds(options.timeout),
                {.where = "comm.mpi",
                 .who = fmt::format("rank {}/{}", rank, size),
                 .expected = fmt::format("{} ranks that open it", size),
                 .got = "at least one that has not",
                 .hint = "look at the ranks that have printed nothing; MPI does not say who is missing"});
  }
  const MpiWorldFacts& facts = opening->facts;
  check_code(table, opening->code, "to open its world", rank, size);
  const std::string who = fmt::format("rank {}/{}", rank, size);
  ZR_CHECK(facts.rank == rank && facts.size == size, ErrorCode::kMismatch,
           "MPI and the launcher's variables describe different worlds",
           {.where = "comm.mpi",
            .who = who,
            .expected = fmt::format("rank {} of {}", rank, size),
            .got = fmt::format("rank {} of {} from {}", facts.rank, facts.size, table.library),
            .hint = "start the ranks with mpirun of the same MPI; under zeroth-run and torchrun each rank is an MPI "
                    "world of its own"});
  // In a process that had MPI before, others may call it at any time; where it was started here, calls come one by one.
  const MpiThreads least = facts.started_here != 0 ? MpiThreads::kSerialized : MpiThreads::kMultiple;
  ZR_CHECK(facts.threads >= least, ErrorCode::kEnvironment, "this MPI was initialised for fewer threads than call it",
           {.where = "comm.mpi",
            .who = who,
            .expected =
                least == MpiThreads::kMultiple ? "MPI_THREAD_MULTIPLE" : "MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE",
            .got = fmt::format("thread level {} of 3 from {}", static_cast<int>(facts.threads), table.library),
            .hint = "initialise MPI with MPI_Init_thread(MPI_THREAD_MULTIPLE), or let Zeroth do it first"});
  ZR_CHECK(facts.largest_tag >= kLeftTag, ErrorCode::kEnvironment, "this MPI has too few tags",
           {.where = "comm.mpi",
            .who = who,
            .expected = fmt::format("at least {}", kLeftTag),
            .got = fmt::format("{}", facts.largest_tag)});
  return std::make_shared<MpiWorld>(table, facts, opening->group, options);
}

}  // namespace zeroth::detail
