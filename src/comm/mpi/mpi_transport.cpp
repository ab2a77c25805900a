#include "comm/mpi/mpi_transport.h"

#include "comm/peers.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

namespace zeroth::detail {
namespace {

using std::chrono::microseconds;

constexpr std::size_t kPieceBytes = std::size_t{1} << 30U;  // MPI counts with an int
constexpr int kNoteTag = 1 << 29;                          // above every tag of a group
constexpr std::size_t kNoteBytes = 1'024;
constexpr Milliseconds kCancelTime{100};
constexpr Milliseconds kAbortTime{200};
constexpr int kLooksBetweenProbes = 64;

void check_code(const MpiTable& table, int code, std::string_view call, int rank, int size) {
  if (code == 0) [[likely]]
    return;
  char text[512] = "";
  table.text(code, text, sizeof text);
  throw Error(ErrorCode::kPeerLost,
              fmt::format("MPI refused {}", call),
              {.where = "comm.mpi",
               .who = fmt::format("rank {}/{}", rank, size),
               .got = text[0] == '\0' ? fmt::format("error {}", code) : std::string(text),
               .hint = "look at what mpirun and the other ranks have printed"});
}

/// A rank's seat in MPI's world. All calls of MPI are made under `mutex`.
class Seat {
 public:
  Seat(const MpiTable& table, const MpiWorldFacts& facts, void* world, const CommOptions& options)
      : table_(table),
        facts_(facts),
        world_(world),
        spin_(options.spin.value_or(default_spin(facts.size))) {}
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;

  [[nodiscard]] int rank() const { return facts_.rank; }
  [[nodiscard]] int size() const { return facts_.size; }

  /// The requests of one message, in pieces that MPI can count.
  std::vector<void*> start(bool sends, int peer, std::uint32_t tag, std::byte* data, std::size_t bytes) {
    ZR_FAILPOINT("mpi.start");
    const std::lock_guard lock(mutex_);
    throw_if_stopped();
    std::vector<void*> requests;
    for (std::size_t done = 0; done < bytes; done += kPieceBytes) {
      const int piece = static_cast<int>(std::min(kPieceBytes, bytes - done));
      void* request = nullptr;
      const int code = sends ? table_.send(world_, data + done, piece, peer, static_cast<int>(tag), &request)
                             : table_.receive(world_, data + done, piece, peer, static_cast<int>(tag), &request);
      if (code != 0) {
        forget_locked(requests);
        check_code(table_, code, sends ? fmt::format("a message to rank {}", peer) : fmt::format("a message from rank {}", peer), rank(), size());
      }
      requests.push_back(request);
    }
    return requests;
  }

  /// Blocks for at most `slice`; true once all requests are done, and `requests` is empty. `waited`: for these so far.
  bool wait(std::vector<void*>& requests, std::size_t bytes, Milliseconds slice, microseconds& waited) {
    ZR_FAILPOINT("mpi.wait");
    const auto begin = SteadyClock::now();
    // By then a transfer that nobody holds up has ended, also over a slow link: later it is the peer that is waited for.
    const microseconds busy = std::chrono::milliseconds{10} + microseconds{bytes / 200};
    const microseconds spin = spin_.count() > 0 ? spin_ + microseconds{bytes / 2'000} : spin_;  // as long as memory takes to carry it
    for (int looks = 0;; ++looks) {
      if (look(requests, looks % kLooksBetweenProbes == 0)) return true;
      const auto now = std::chrono::duration_cast<microseconds>(SteadyClock::now() - begin);
      if (now >= slice) {
        waited += now;
        return false;
      }
      const microseconds all = waited + now;
      if (all < spin) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(all < busy ? microseconds{20} : microseconds{1'000});
      }
    }
  }

  /// Afterwards MPI does not touch the bytes of these requests; or, if it does not give them back, is not called any more.
  void forget(std::vector<void*>& requests) noexcept {
    const std::lock_guard lock(mutex_);
    if (stopped_.empty()) forget_locked(requests);
  }

  /// Tells the others, and leaves.
  void abort(std::string_view text) noexcept {
    const std::lock_guard lock(mutex_);
    if (!stopped_.empty()) return;
    ZR_FAILPOINT("abort.mpi");
    const std::string message(text.substr(0, kNoteBytes));
    std::vector<void*> requests;
    for (int peer = 0; peer < size(); ++peer) {
      void* request = nullptr;
      if (peer == rank()) continue;
      if (table_.send(world_, message.data(), static_cast<int>(message.size()), peer, kNoteTag, &request) == 0) requests.push_back(request);
    }
    const Deadline deadline(kAbortTime);
    while (!advance(requests) && !deadline.passed()) std::this_thread::sleep_for(microseconds{100});
    // What is not sent by now stays with MPI: its text must stay, too.
    if (!requests.empty()) new std::string(message);
    stop(fmt::format("this rank stopped the job: {}", message));
  }

 private:
  /// Moves what is under way; true once these are done.
  bool advance(std::vector<void*>& requests) noexcept {
    std::erase_if(requests, [&](void* request) {
      int done = 0;
      return table_.test(request, &done) != 0 || done != 0;
    });
    return requests.empty();
  }

  bool look(std::vector<void*>& requests, bool probes) {
    const std::lock_guard lock(mutex_);
    throw_if_stopped();
    while (!requests.empty()) {
      int done = 0;
      const int code = table_.test(requests.back(), &done);
      if (code != 0) requests.pop_back();
      check_code(table_, code, "to go on with a message", rank(), size());
      if (done == 0) break;
      requests.pop_back();
    }
    if (requests.empty()) return true;
    if (probes) listen();
    return false;
  }

  /// Has another rank stopped the job?
  void listen() {
    int from = -1;
    int bytes = 0;
    check_code(table_, table_.probe(world_, kNoteTag, &from, &bytes), "to look for a message", rank(), size());
    if (from < 0) return;
    std::string text(static_cast<std::size_t>(std::clamp(bytes, 0, static_cast<int>(kNoteBytes))), '\0');
    void* request = nullptr;
    check_code(table_, table_.receive(world_, text.data(), static_cast<int>(text.size()), from, kNoteTag, &request), "a message", rank(), size());
    std::vector<void*> requests{request};
    const Deadline deadline(kAbortTime);
    while (!advance(requests) && !deadline.passed()) std::this_thread::yield();
    // Bytes that may still come must not come into memory that is gone.
    if (!requests.empty()) new std::string(std::move(text));
    stop(fmt::format("rank {} stopped the job: {}", from, requests.empty() ? text : "its text has not come"));
    throw_if_stopped();
  }

  void forget_locked(std::vector<void*>& requests) noexcept {
    if (requests.empty()) return;
    for (void* request : requests) (void)table_.cancel(request);
    const Deadline deadline(kCancelTime);
    while (!advance(requests) && !deadline.passed()) std::this_thread::sleep_for(microseconds{100});
    if (!requests.empty()) stop("a message was left unfinished, and MPI does not give its memory back");
  }

  void stop(std::string why) noexcept {
    table_.leave_unfinished();
    stopped_ = std::move(why);
  }

  void throw_if_stopped() const {
    if (stopped_.empty()) [[likely]]
      return;
    throw Error(ErrorCode::kAborted, stopped_, {.where = "comm.mpi", .who = fmt::format("rank {}/{}", rank(), size())});
  }

  const MpiTable& table_;
  MpiWorldFacts facts_;
  void* world_;
  microseconds spin_;
  std::mutex mutex_;
  std::string stopped_;  ///< under mutex: why MPI is not called any more
};

class MpiTransfer final : public Transfer {
 public:
  MpiTransfer(std::shared_ptr<Seat> seat, std::vector<void*> requests, std::size_t bytes)
      : seat_(std::move(seat)), requests_(std::move(requests)), bytes_(bytes) {}
  ~MpiTransfer() override {
    if (!requests_.empty()) seat_->forget(requests_);
  }
  bool wait(Milliseconds slice) override { return requests_.empty() || seat_->wait(requests_, bytes_, slice, waited_); }

 private:
  std::shared_ptr<Seat> seat_;
  std::vector<void*> requests_;
  std::size_t bytes_;
  microseconds waited_{0};
};

class MpiTransport final : public MessageTransport {
 public:
  explicit MpiTransport(std::shared_ptr<Seat> seat) : seat_(std::move(seat)) {}
  [[nodiscard]] int rank() const override { return seat_->rank(); }
  [[nodiscard]] int size() const override { return seat_->size(); }
  [[nodiscard]] std::string_view kind() const override { return "mpi"; }
  std::unique_ptr<Transfer> send(int to, std::uint32_t tag, std::span<const std::byte> bytes) override {
    return start(true, to, tag, const_cast<std::byte*>(bytes.data()), bytes.size());
  }
  std::unique_ptr<Transfer> receive(int from, std::uint32_t tag, std::span<std::byte> bytes) override {
    return start(false, from, tag, bytes.data(), bytes.size());
  }
  void abort(std::string_view text) noexcept override { seat_->abort(text); }

 private:
  std::unique_ptr<Transfer> start(bool sends, int peer, std::uint32_t tag, std::byte* data, std::size_t bytes) {
    return std::make_unique<MpiTransfer>(seat_, seat_->start(sends, peer, tag, data, bytes), bytes);
  }

  std::shared_ptr<Seat> seat_;
};

/// What open() has found, once it has come back.
struct Opening {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  int code = 0;
  MpiWorldFacts facts;
  void* world = nullptr;
};

/// open() has no deadline. So a thread makes the call, and is left behind where it does not come back: the process will end soon.
std::shared_ptr<Opening> open_world(const MpiTable& table, int rank, int size, Milliseconds timeout) {
  auto opening = std::make_shared<Opening>();
  std::thread([opening, &table] {
    MpiWorldFacts facts;
    void* world = nullptr;
    const int code = table.open(&facts, &world);
    const std::lock_guard lock(opening->mutex);
    opening->code = code;
    opening->facts = facts;
    opening->world = world;
    opening->done = true;
    opening->changed.notify_all();
  }).detach();
  std::unique_lock lock(opening->mutex);
  if (!opening->changed.wait_for(lock, timeout, [&] { return opening->done; })) {
    table.leave_unfinished();
    throw Error(ErrorCode::kTimeout,
                fmt::format("MPI's world was not complete within {:.1f} s", std::chrono::duration<double>(timeout).count()),
                {.where = "comm.mpi",
                 .who = fmt::format("rank {}/{}", rank, size),
                 .expected = fmt::format("{} ranks that open it", size),
                 .got = "at least one that has not",
                 .hint = "look at the ranks that have printed nothing; MPI does not say who is missing"});
  }
  return opening;
}

}  // namespace

std::shared_ptr<MessageTransport> make_mpi_transport(const MpiTable& table, int rank, int size, const CommOptions& options) {
  ZR_FAILPOINT("mpi.open");
  const std::shared_ptr<Opening> opening = open_world(table, rank, size, options.timeout);
  const MpiWorldFacts& facts = opening->facts;
  check_code(table, opening->code, "to open its world", rank, size);
  const std::string who = fmt::format("rank {}/{}", rank, size);
  ZR_CHECK(facts.rank == rank && facts.size == size,
           ErrorCode::kMismatch,
           "MPI and the launcher's variables describe different worlds",
           {.where = "comm.mpi",
            .who = who,
            .expected = fmt::format("rank {} of {}", rank, size),
            .got = fmt::format("rank {} of {} from {}", facts.rank, facts.size, table.library),
            .hint = "start the ranks with mpirun of the same MPI; under zeroth-run and torchrun each rank is an MPI world of its own"});
  // In a process that had MPI before, others may call it at any time; where it was started here, calls come one by one.
  const MpiThreads least = facts.started_here != 0 ? MpiThreads::kSerialized : MpiThreads::kMultiple;
  ZR_CHECK(facts.threads >= least,
           ErrorCode::kEnvironment,
           "this MPI was initialised for fewer threads than call it",
           {.where = "comm.mpi",
            .who = who,
            .expected = least == MpiThreads::kMultiple ? "MPI_THREAD_MULTIPLE" : "MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE",
            .got = fmt::format("thread level {} of 3 from {}", static_cast<int>(facts.threads), table.library),
            .hint = "initialise MPI with MPI_Init_thread(MPI_THREAD_MULTIPLE), or let Zeroth do it first"});
  ZR_CHECK(facts.largest_tag >= kNoteTag,
           ErrorCode::kEnvironment,
           "this MPI has too few tags",
           {.where = "comm.mpi", .who = who, .expected = fmt::format("at least {}", kNoteTag), .got = fmt::format("{}", facts.largest_tag)});
  return std::make_shared<MpiTransport>(std::make_shared<Seat>(table, facts, opening->world, options));
}

}  // namespace zeroth::detail
