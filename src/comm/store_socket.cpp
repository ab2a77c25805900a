// A store over a unix socket: one process serves its table, the others ask. A request is one message {op, key
// length, key, value}, an answer is {status, value}. Waiting is done by the client, which asks again: meeting
// is rare, and a server without memory of waits cannot leak them.
#include "comm/store_table.h"
#include "comm/unix_socket.h"

#include <zeroth/base/error.h>

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth {
namespace detail {
namespace {

enum class Request : char { kSet, kFind, kAdd };
enum class Answer : char { kOk, kMissing, kError };

constexpr std::size_t kMaxMessageBytes = kMaxEntryBytes + 64;

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
std::span<const std::byte> bytes_of_text(std::string_view text) {
  return std::as_bytes(std::span<const char>(text.data(), text.size()));
}

std::string make_request(Request op, std::string_view key, std::string_view value) {
  const auto length = static_cast<std::uint32_t>(key.size());
  std::string message(1 + sizeof length, '\0');
  message[0] = static_cast<char>(op);
  std::memcpy(message.data() + 1, &length, sizeof length);
  return message.append(key).append(value);
}

class ServedStore final : public Store {
 public:
  explicit ServedStore(std::string_view name) {
    std::optional<UniqueFd> listener = listen_at(socket_name("store", name));
    ZR_CHECK(listener.has_value(),
             ErrorCode::kResource,
             "another process serves a store of this name",
             {.where = "comm.store", .which = std::string(name)});
    listener_ = std::move(*listener);
    stop_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
    ZR_CHECK(stop_, ErrorCode::kResource, "eventfd failed: " + errno_text(errno), {.where = "comm.store"});
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to the threads of the program
    thread_ = std::thread([this] { serve(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
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
      for (const UniqueFd& client : clients)
        watched.push_back({.fd = client.get(), .events = POLLIN, .revents = 0});
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

  /// False if the client has gone or talks nonsense.
  bool answer(int client) {
    try {
      const std::optional<Message> message = receive_message(client, kMaxMessageBytes, [] {});
      std::uint32_t length = 0;
      if (!message || message->bytes.size() < 1 + sizeof length) return false;
      const std::string_view text = text_of(message->bytes);
      std::memcpy(&length, text.data() + 1, sizeof length);
      const std::string_view rest = text.substr(1 + sizeof length);
      if (length > rest.size()) return false;
      return send_message(client,
                          bytes_of_text(perform(text[0], rest.substr(0, length), rest.substr(length))));
    } catch (const Error&) {
      return false;
    }
  }

  std::string perform(char op, std::string_view key, std::string_view value) {
    try {
      switch (static_cast<Request>(op)) {
        case Request::kSet:
          table_.set(key, value);
          return {static_cast<char>(Answer::kOk)};
        case Request::kFind:
          if (const auto found = table_.find(key)) return static_cast<char>(Answer::kOk) + *found;
          return {static_cast<char>(Answer::kMissing)};
        case Request::kAdd: {
          std::int64_t delta = 0;
          if (value.size() == sizeof delta) std::memcpy(&delta, value.data(), sizeof delta);
          return static_cast<char>(Answer::kOk) + std::to_string(table_.add(key, delta));
        }
      }
      return static_cast<char>(Answer::kError) + std::string("unknown request");
    } catch (const Error& error) {
      return static_cast<char>(Answer::kError) + error.message();
    }
  }

  StoreTable table_;
  UniqueFd listener_;
  UniqueFd stop_;
  std::thread thread_;
};

class ClientStore final : public Store {
 public:
  ClientStore(std::string_view name, Milliseconds timeout) : name_(name) {
    const Deadline deadline(timeout);
    socket_ = connect_to(socket_name("store", name), [&] {
      ZR_CHECK(!deadline.passed(),
               ErrorCode::kTimeout,
               "nobody serves the store",
               ErrorContext{.where = "comm.store", .which = name_});
    });
  }

  void set(std::string_view key, std::string_view value) override {
    check_entry(key, value);
    [[maybe_unused]] const auto answer = ask(Request::kSet, key, value, request_timeout());
  }

  [[nodiscard]] std::string get(std::string_view key, Milliseconds timeout) override {
    check_entry(key, {});
    const Deadline deadline(timeout);
    for (Milliseconds pause{1};; pause = std::min(pause * 2, Milliseconds{20})) {
      if (std::optional<std::string> value = ask(Request::kFind, key, {}, request_timeout()))
        return *std::move(value);
      if (deadline.passed()) throw_missing(key, timeout);
      std::this_thread::sleep_for(std::min(pause, deadline.slice()));
    }
  }

  std::int64_t add(std::string_view key, std::int64_t delta) override {
    check_entry(key, {});
    const std::string text =
        ask(Request::kAdd, key, {reinterpret_cast<const char*>(&delta), sizeof delta}, request_timeout())
            .value_or("0");
    std::int64_t sum = 0;
    std::from_chars(text.data(), text.data() + text.size(), sum);
    return sum;
  }

  void wait(std::span<const std::string> keys, Milliseconds timeout) override {
    const Deadline deadline(timeout);
    for (const std::string& key : keys)
      [[maybe_unused]] const std::string value = get(key, deadline.remaining());
  }

 private:
  /// For one question and its answer; a server that is alive needs microseconds.
  static Milliseconds request_timeout() { return Milliseconds{30'000}; }

  /// The value, or empty if the key is missing.
  std::optional<std::string> ask(Request op,
                                 std::string_view key,
                                 std::string_view value,
                                 Milliseconds timeout) {
    const Deadline deadline(timeout);
    const std::lock_guard lock(mutex_);
    const bool sent = send_message(socket_.get(), bytes_of_text(make_request(op, key, value)));
    const std::optional<Message> message =
        sent ? receive_message(socket_.get(),
                               kMaxMessageBytes,
                               [&] {
                                 ZR_CHECK(!deadline.passed(),
                                          ErrorCode::kTimeout,
                                          "the store does not answer",
                                          ErrorContext{.where = "comm.store", .which = name_});
                               })
             : std::nullopt;
    ZR_CHECK(message && !message->bytes.empty(),
             ErrorCode::kPeerLost,
             "the process that serves the store has gone",
             {.where = "comm.store", .which = name_});
    const std::string_view text = text_of(message->bytes);
    const auto status = static_cast<Answer>(text.front());
    if (status == Answer::kMissing) return std::nullopt;
    std::string rest(text.substr(1));
    ZR_CHECK(
        status == Answer::kOk, ErrorCode::kUsage, rest, {.where = "comm.store", .which = std::string(key)});
    return rest;
  }

  std::string name_;
  std::mutex mutex_;
  UniqueFd socket_;
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
