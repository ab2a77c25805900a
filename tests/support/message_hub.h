// A message transport between threads, stricter than any real one: a message is not sent before its receive is posted,
// and a receive of another size is an error.
#pragma once

#include <zeroth/base/error.h>
#include <zeroth/comm/messages.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

namespace zeroth::test {

class MessageHub : public std::enable_shared_from_this<MessageHub> {
 public:
  /// `tells`: a rank that stops the job is heard by the others.
  explicit MessageHub(int size, bool tells = false) : size_(size), tells_(tells) {}

  [[nodiscard]] std::shared_ptr<MessageTransport> transport(int rank) {
    return std::make_shared<Transport>(shared_from_this(), rank);
  }

 private:
  struct Post {
    std::span<const std::byte> from{};
    std::span<std::byte> to{};
    bool sender_cancelled = false;
    bool receiver_cancelled = false;
    bool sent = false;
    bool received = false;
    bool wrong_size = false;
  };
  using Channel = std::tuple<int, int, std::uint32_t>;  // from, to, tag
  struct Queue {
    std::deque<std::shared_ptr<Post>> posts;  // the n-th send meets the n-th receive
    std::size_t sends = 0;
    std::size_t receives = 0;
    std::size_t gone = 0;  // posts that have left the front
  };

  class Half final : public Transfer {
   public:
    Half(std::shared_ptr<MessageHub> hub, std::shared_ptr<Post> post, bool sends)
        : hub_(std::move(hub)), post_(std::move(post)), sends_(sends) {}
    ~Half() override {
      const std::lock_guard lock(hub_->mutex_);
      (sends_ ? post_->sender_cancelled : post_->receiver_cancelled) = true;
    }
    bool wait(Milliseconds slice) override {
      std::unique_lock lock(hub_->mutex_);
      const auto over = [&] { return sends_ ? post_->sent : post_->received; };
      hub_->changed_.wait_for(lock, slice, [&] { return over() || !hub_->stopped_.empty(); });
      const bool done = over();
      ZR_CHECK(done || hub_->stopped_.empty(), ErrorCode::kAborted, hub_->stopped_, {.where = "test.hub"});
      ZR_CHECK(!post_->wrong_size, ErrorCode::kInternal, "a message has another size than its receive",
               {.where = "test.hub"});
      return done;
    }

   private:
    std::shared_ptr<MessageHub> hub_;
    std::shared_ptr<Post> post_;
    bool sends_;
  };

  class Transport final : public MessageTransport {
   public:
    Transport(std::shared_ptr<MessageHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
    [[nodiscard]] int rank() const override { return rank_; }
    [[nodiscard]] int size() const override { return hub_->size_; }
    [[nodiscard]] std::string_view kind() const override { return "messages"; }
    std::unique_ptr<Transfer> send(int to, std::uint32_t tag, std::span<const std::byte> bytes) override {
      return hub_->post({rank_, to, tag}, [&](Post& post) { post.from = bytes; }, true);
    }
    std::unique_ptr<Transfer> receive(int from, std::uint32_t tag, std::span<std::byte> bytes) override {
      return hub_->post({from, rank_, tag}, [&](Post& post) { post.to = bytes; }, false);
    }

    void check() override {
      const std::lock_guard lock(hub_->mutex_);
      ZR_CHECK(hub_->stopped_.empty(), ErrorCode::kAborted, hub_->stopped_, {.where = "test.hub"});
    }
    void abort(std::string_view text) noexcept override {
      const std::lock_guard lock(hub_->mutex_);
      if (!hub_->tells_ || !hub_->stopped_.empty()) return;
      hub_->stopped_ = "rank " + std::to_string(rank_) + " stopped the job: " + std::string(text);
      hub_->changed_.notify_all();
    }

   private:
    std::shared_ptr<MessageHub> hub_;
    int rank_;
  };

  template <class Fill>
  std::unique_ptr<Transfer> post(const Channel& channel, Fill&& fill, bool sends) {
    const std::lock_guard lock(mutex_);
    Queue& queue = queues_[channel];
    const std::size_t number = (sends ? queue.sends : queue.receives)++ - queue.gone;
    while (queue.posts.size() <= number) queue.posts.push_back(std::make_shared<Post>());
    const std::shared_ptr<Post> own = queue.posts[number];
    fill(*own);
    if (own->from.data() != nullptr && own->to.data() != nullptr) {
      own->wrong_size = own->from.size() != own->to.size();
      if (!own->wrong_size && !own->sender_cancelled && !own->receiver_cancelled) {
        std::memcpy(own->to.data(), own->from.data(), own->to.size());
        own->sent = own->received = true;
      }
      changed_.notify_all();
    }
    while (queue.gone < std::min(queue.sends, queue.receives)) {
      queue.posts.pop_front();
      ++queue.gone;
    }
    return std::make_unique<Half>(shared_from_this(), own, sends);
  }

  int size_;
  bool tells_;
  std::string stopped_{};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Channel, Queue> queues_;
};

}  // namespace zeroth::test
