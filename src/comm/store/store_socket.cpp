// A store over a unix socket: one process serves its table, the others ask. A request is one message {head,
// key, value}, an answer is {head, value}. Waiting is done by the client, which asks again: meeting is rare,
// and a server without memory of waits cannot leak them. An answer carries the number of its request, so that
// one that comes after its client has given up is not taken for the answer to the next.
#include "base/own_thread.h"
#include "comm/rendezvous/unix_socket.h"
#include "comm/store/store_messages.h"
#include "comm/store/store_table.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/interrupt.h>

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth {
namespace detail {
namespace {

/// What an answer may take at most, however long a client was ready to wait for the server to appear.
constexpr Milliseconds kMostPatience{30'000};
/// And what it may take in any case: a server that is alive needs microseconds, but the machine may be busy.
constexpr Milliseconds kLeastPatience{1'000};

std::span<const std::byte> bytes_of_text(std::string_view text) {
  return std::as_bytes(std::span<const char>(text.data(), text.size()));
}

class ServedStore final : public Store {
 public:
  explicit ServedStore(std::string_view name) {
    std::optional<UniqueFd> listener = listen_at(socket_name("store", name));
    ZR_CHECK(listener.has_value(), ErrorCode::kResource, "another process serves a store of this name",
             {.where = "comm.store", .which = std::string(name)});
    listener_ = std::move(*listener);
    stop_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
    ZR_CHECK(stop_, ErrorCode::kResource, "eventfd failed: " + errno_text(errno), {.where = "comm.store"});
    thread_ = start_own_thread([this] { serve(); }, "the store", {.where = "comm.store"});
  }
  ~ServedStore() override {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
    thread_.join();
  }

  void set(std::string_view key, std::string_view value) override { table_.set(key, value); }
  [[nodiscard]] std::string get(std::string_view key, Milliseconds timeout) override {
    return table_.get(key, timeout);
  }
  std::int64_t add(std::string_view key, std::int64_t delta) override { return table_.add(key, delta); }
  void wait(std::span<const std::string> keys, Milliseconds timeout) override { table_.wait(keys, timeout); }

 private:
  void serve() {
    std::vector<UniqueFd> clients;
    for (;;) {
      std::vector<pollfd> watched{{.fd = stop_.get(), .events = POLLIN, .revents = 0},
                                  {.fd = listener_.get(), .events = POLLIN, .revents = 0}};
      for (const UniqueFd& client : clients) watched.push_back({.fd = client.get(), .events = POLLIN, .revents = 0});
      ::poll(watched.data(), watched.size(), -1);
      if (watched[0].revents != 0) return;
      for (std::size_t index = clients.size(); index-- > 0;) {
        if (watched[index + 2].revents != 0 && !answer(clients[index].get())) {
          clients.erase(clients.begin() + static_cast<std::ptrdiff_t>(index));
        }
      }
      if (watched[1].revents != 0) admit(clients);
    }
  }

  void admit(std::vector<UniqueFd>& clients) const {
    UniqueFd client = accept_from(listener_.get());
    try {
      if (client && identity_of(client.get()).uid == ::getuid()) clients.push_back(std::move(client));
    } catch (const Error&) {
      // It has gone again, or is not what it seems: the connection closes.
    }
  }

  /// False if the client has gone, talks nonsense, or asks without reading the answers: the others must not
  /// wait for it.
  bool answer(int client) {
    try {
      const std::optional<Message> message = receive_message(client, kMaxStoreMessageBytes, [] {
        throw Error(ErrorCode::kInternal, "the message that woke the store is gone", {.where = "comm.store"});
      });
      const auto request = message ? parse_request(message->bytes) : std::nullopt;
      if (!request) return false;
      ZR_FAILPOINT("store.answer");
      const std::string text = perform(table_, *request);
      return send_message(client, bytes_of_text(text), {}, [] {
        throw Error(ErrorCode::kTimeout, "a client does not read its answers", {.where = "comm.store"});
      });
    } catch (const Error&) {
      return false;
    }
  }

  StoreTable table_;
  UniqueFd listener_;
  UniqueFd stop_;
  std::thread thread_;
};

class ClientStore final : public Store {
 public:
  ClientStore(std::string_view name, Milliseconds timeout)
      : name_(name), patience_(std::clamp(timeout, kLeastPatience, kMostPatience)) {
    const Deadline deadline(timeout);
    socket_ = connect_to(socket_name("store", name), [&] {
      ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "nobody serves the store",
               ErrorContext{.where = "comm.store", .which = name_});
    });
  }

  void set(std::string_view key, std::string_view value) override {
    check_entry(key, value);
    [[maybe_unused]] const auto answer = ask(StoreRequestKind::kSet, key, value, patience_);
  }

  [[nodiscard]] std::string get(std::string_view key, Milliseconds timeout) override {
    check_entry(key, {});
    const Deadline deadline(timeout);
    for (Milliseconds pause{1};; pause = std::min(pause * 2, Milliseconds{20})) {
      const Milliseconds patience = std::min(patience_, std::max(deadline.remaining(), kLeastPatience));
      if (std::optional<std::string> value = ask(StoreRequestKind::kFind, key, {}, patience)) return *std::move(value);
      if (deadline.passed()) throw_missing(key, timeout);
      std::this_thread::sleep_for(std::min(pause, deadline.slice()));
      check_interrupt();
    }
  }

  std::int64_t add(std::string_view key, std::int64_t delta) override {
    check_entry(key, {});
    const std::string text =
        ask(StoreRequestKind::kAdd, key, {reinterpret_cast<const char*>(&delta), sizeof delta}, patience_)
            .value_or("0");
    std::int64_t sum = 0;
    std::from_chars(text.data(), text.data() + text.size(), sum);
    return sum;
  }

  void wait(std::span<const std::string> keys, Milliseconds timeout) override {
    const Deadline deadline(timeout);
    for (const std::string& key : keys) [[maybe_unused]]
      const std::string value = get(key, deadline.remaining());
  }

 private:
  /// The value, or empty if the key is missing.
  std::optional<std::string> ask(StoreRequestKind kind, std::string_view key, std::string_view value,
                                 Milliseconds timeout) {
    const Deadline deadline(timeout);
    const std::lock_guard lock(mutex_);
    const auto impatient = [&] {
      ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "the store does not answer",
               ErrorContext{.where = "comm.store",
                            .which = name_,
                            .expected = fmt::format("an answer about \"{}\" within {} ms", key, timeout.count()),
                            .hint = "whether the request has been carried out is not known"});
    };
    ZR_FAILPOINT("store.ask");
    const std::uint64_t number = ++requests_;
    const std::string request = bytes_of_request({.number = number, .kind = kind, .key = key, .value = value});
    const bool sent = send_message(socket_.get(), bytes_of_text(request), {}, impatient);
    for (;;) {
      const std::optional<Message> message =
          sent ? receive_message(socket_.get(), kMaxStoreMessageBytes, impatient) : std::nullopt;
      ZR_CHECK(message.has_value(), ErrorCode::kPeerLost, "the process that serves the store has gone",
               {.where = "comm.store", .which = name_});
      const auto answer = parse_answer(message->bytes);
      ZR_CHECK(answer.has_value(), ErrorCode::kMismatch,
               "the process that serves the store answers in another protocol",
               {.where = "comm.store",
                .which = name_,
                .expected = fmt::format("at least {} bytes", kStoreAnswerHeadBytes),
                .got = std::to_string(message->bytes.size()),
                .hint = "all ranks must run the same build of Zeroth"});
      if (answer->number != number) continue;  // to a request that this client gave up
      if (answer->status == StoreStatus::kMissing) return std::nullopt;
      std::string text(answer->value);
      ZR_CHECK(answer->status == StoreStatus::kOk, ErrorCode::kUsage, text,
               {.where = "comm.store", .which = std::string(key)});
      return text;
    }
  }

  std::string name_;
  Milliseconds patience_;  ///< for one answer
  std::mutex mutex_;
  UniqueFd socket_;
  std::uint64_t requests_ = 0;
};

}  // namespace
}  // namespace detail

std::shared_ptr<Store> serve_store(std::string_view name) {
  return std::make_shared<detail::ServedStore>(name);
}

std::shared_ptr<Store> connect_store(std::string_view name, Milliseconds timeout) {
  return std::make_shared<detail::ClientStore>(name, timeout);
}

}  // namespace zeroth
