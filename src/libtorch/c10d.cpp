#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/libtorch/c10d.h>

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::libtorch {
namespace {

using TorchWork = c10::intrusive_ptr<c10d::Work>;

constexpr std::uint32_t kFirstTag = std::uint32_t{1} << 30U;
constexpr std::uint32_t kTagsOfWorld = std::uint32_t{1} << 20U;
constexpr std::uint32_t kWorlds = MessageTransport::kAlone / kTagsOfWorld;  // then tags are used again

/// Torch appends a stack trace to what it says.
std::string first_line(const char* text) {
  const std::string whole(text);
  return whole.substr(0, whole.find('\n'));
}

/// One send or receive, shared by who waits for it and by the thread that waits inside torch.
struct Request {
  TorchWork work;
  int peer = 0;
  bool sends = false;
  bool done = false;
  std::optional<std::string> failure{};
};

/// [Note: Waiting for torch] Work::wait() has no slices: where its timeout passes, gloo closes every connection of the
/// group. So a thread of ours waits inside torch, one request after the other, and everybody else waits for that
/// thread.
class Waiter {
 public:
  Waiter() : thread_([this] { run(); }) {}
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;
  ~Waiter() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      if (current_) current_->work->abort();
    }
    changed_.notify_all();
    thread_.join();
  }

  void add(std::shared_ptr<Request> request) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(request));
    }
    changed_.notify_all();
  }

  /// Blocks for at most `slice`; true once the request is done.
  bool wait(const Request& request, Milliseconds slice) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, slice, [&] { return request.done; });
  }

  /// Torch does not touch the request's bytes after this.
  void cancel(const std::shared_ptr<Request>& request) noexcept {
    std::unique_lock lock(mutex_);
    if (request->done) return;
    if (std::erase(queue_, request) > 0) {
      request->work.reset();
      return;
    }
    request->work->abort();  // the thread is waiting for it
    changed_.wait(lock, [&] { return request->done; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
      current_ = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      std::optional<std::string> failure;
      try {
        if (!current_->work->wait()) failure = "the transfer was aborted";
      } catch (const std::exception& error) {
        failure = first_line(error.what());
      }
      lock.lock();
      current_->work.reset();
      current_->failure = std::move(failure);
      current_->done = true;
      current_.reset();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Request>> queue_;
  std::shared_ptr<Request> current_;
  bool stopping_ = false;
  std::thread thread_;
};

Error lost_peer(int peer, int rank, int size, bool sends, const std::string& text) {
  return Error(
      ErrorCode::kPeerLost, "torch's group lost rank " + std::to_string(peer),
      {.where = "comm.c10d",
       .who = "rank " + std::to_string(rank) + "/" + std::to_string(size),
       .expected = std::string(sends ? "a message to" : "a message from") + " rank " + std::to_string(peer),
       .got = text,
       .hint = "look at the output of that rank; a longer timeout is torch's: init_process_group(timeout=...)"});
}

class C10dTransfer final : public Transfer {
 public:
  C10dTransfer(std::shared_ptr<Waiter> waiter, std::shared_ptr<Request> request, int rank, int size)
      : waiter_(std::move(waiter)), request_(std::move(request)), rank_(rank), size_(size) {}
  ~C10dTransfer() override { waiter_->cancel(request_); }

  bool wait(Milliseconds slice) override {
    if (!waiter_->wait(*request_, slice)) return false;
    if (request_->failure) throw lost_peer(request_->peer, rank_, size_, request_->sends, *request_->failure);
    return true;
  }

 private:
  std::shared_ptr<Waiter> waiter_;
  std::shared_ptr<Request> request_;
  int rank_;
  int size_;
};

/// Worlds over one group of torch have tags of their own, because messages of one may be under way when another one's
/// are exchanged. Ranks use their worlds for the first time in the same order, since that is a call of all of them.
std::uint32_t next_first_tag(const std::string& group_name) {
  static std::mutex mutex;
  static std::map<std::string, std::uint32_t> worlds;
  const std::lock_guard lock(mutex);
  return kFirstTag + worlds[group_name]++ % kWorlds * kTagsOfWorld;
}

class C10dTransport final : public MessageTransport {
 public:
  C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string name, const std::string& beside)
      : group_(std::move(group)),
        name_(std::move(name)),
        kind_("c10d " + group_->getBackend(c10::kCPU)->getBackendName() + (beside.empty() ? "" : " beside " + beside)),
        waiter_(std::make_shared<Waiter>()),
        waiters_alone_(2 * static_cast<std::size_t>(group_->getSize())),
        owner_(::getpid()) {}
  ~C10dTransport() override {
    // A forked child has a copy of the thread's object, but no thread.
    if (::getpid() == owner_) return;
    new std::shared_ptr<Waiter>(std::move(waiter_));
    new std::vector<std::shared_ptr<Waiter>>(std::move(waiters_alone_));
  }

  [[nodiscard]] int rank() const override { return group_->getRank(); }
  [[nodiscard]] int size() const override { return group_->getSize(); }
  [[nodiscard]] std::string_view kind() const override { return kind_; }

  std::unique_ptr<Transfer> send(int to, std::uint32_t tag, std::span<const std::byte> bytes) override {
    return start(to, true, {const_cast<std::byte*>(bytes.data()), bytes.size()}, tag);
  }
  std::unique_ptr<Transfer> receive(int from, std::uint32_t tag, std::span<std::byte> bytes) override {
    return start(from, false, bytes, tag);
  }

 private:
  std::unique_ptr<Transfer> start(int peer, bool sends, std::span<std::byte> bytes, std::uint32_t tag) {
    ZR_CHECK(::getpid() == owner_, ErrorCode::kUsage, "a forked child uses the engine of its parent",
             {.where = "comm.c10d", .hint = "only the process that made the engine may use it"});
    ZR_FAILPOINT_OF("c10d.*", sends ? "send" : "recv");
    std::vector<at::Tensor> tensors{
        at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::TensorOptions().dtype(at::kByte))};
    if (!first_tag_) first_tag_ = next_first_tag(name_);
    const int own_tag = static_cast<int>(*first_tag_ + tag);
    auto request = std::make_shared<Request>();
    request->peer = peer;
    request->sends = sends;
    try {
      request->work = sends ? group_->send(tensors, peer, own_tag) : group_->recv(tensors, peer, own_tag);
    } catch (const std::exception& error) {
      throw lost_peer(peer, rank(), size(), sends, first_line(error.what()));
    }
    const std::shared_ptr<Waiter> waiter = (tag & kAlone) == 0 ? waiter_ : waiter_alone(peer, sends);
    waiter->add(request);
    return std::make_unique<C10dTransfer>(waiter, std::move(request), rank(), size());
  }

  /// A thread of its own for each rank that messages come from, and for each that they go to: nobody may be there yet
  /// who takes one.
  [[nodiscard]] std::shared_ptr<Waiter> waiter_alone(int peer, bool sends) {
    std::shared_ptr<Waiter>& waiter = waiters_alone_[2 * static_cast<std::size_t>(peer) + (sends ? 1 : 0)];
    if (!waiter) waiter = std::make_shared<Waiter>();
    return waiter;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string name_;  // under which torch knows the group: the same on all ranks
  std::string kind_;
  std::shared_ptr<Waiter> waiter_;
  std::vector<std::shared_ptr<Waiter>> waiters_alone_;  // by rank and direction, made when needed
  std::optional<std::uint32_t> first_tag_{};            // from the first message on
  pid_t owner_;
};

}  // namespace

std::shared_ptr<MessageTransport> make_c10d_transport(const std::string& group_name, const std::string& beside) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(group_name);
  } catch (const c10::Error& error) {
    throw Error(ErrorCode::kUsage, "torch.distributed has no such group",
                {.where = "comm.c10d",
                 .which = group_name,
                 .got = first_line(error.what()),
                 .hint = "call torch.distributed.init_process_group() first, and pass a group that it made"});
  }
  ZR_CHECK(std::ranges::any_of(group->getDeviceTypes(), [](const c10::Device& device) { return device.is_cpu(); }),
           ErrorCode::kUsage, "the group has no backend for CPU tensors",
           {.where = "comm.c10d",
            .which = group_name,
            .got = group->getBackendName(),
            .hint = "make one beside it: torch.distributed.new_group(backend=\"gloo\")"});
  return std::make_shared<C10dTransport>(std::move(group), group_name, beside);
}

World world_from_c10d(const std::string& group_name, const std::string& beside) {
  return World::from_transport(make_c10d_transport(group_name, beside), "torch.distributed");
}

}  // namespace zeroth::libtorch
