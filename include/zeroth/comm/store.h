// Store: a small table of strings that the ranks of a job share, for rendezvous and configuration, not for data.
#pragma once

#include <zeroth/base/deadline.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace zeroth {

/// Thread safe. Keys and values are any bytes, together at most 64 KiB. Every wait has a deadline: kTimeout names the
/// missing keys.
class Store {
 public:
  Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  virtual ~Store() = default;

  virtual void set(std::string_view key, std::string_view value) = 0;
  /// Blocks until the key exists, and returns its value. Throws kTimeout.
  [[nodiscard]] virtual std::string get(std::string_view key, Milliseconds timeout) = 0;
  /// Adds to a number that starts as 0, and returns the sum. The stored value is its decimal text. Throws kUsage if the
  /// value is not a number.
  virtual std::int64_t add(std::string_view key, std::int64_t delta) = 0;
  /// Blocks until all keys exist. Throws kTimeout.
  virtual void wait(std::span<const std::string> keys, Milliseconds timeout) = 0;
};

/// For ranks that are threads: share the pointer.
[[nodiscard]] std::shared_ptr<Store> make_inproc_store();

/// The server. The table lives in this process, with a thread that ends with the object. `name` is the name of an
/// abstract unix socket, after "zeroth-store-" and the user id; nothing is left in the file system. Only processes of
/// the same user may connect. Throws kResource if the name is in use.
[[nodiscard]] std::shared_ptr<Store> serve_store(std::string_view name);
/// A client. Blocks until it is connected, at most `timeout`. Requests throw kPeerLost if the server has ended, and
/// kTimeout if it does not answer within `timeout` (at least 1 s, at most 30 s).
[[nodiscard]] std::shared_ptr<Store> connect_store(std::string_view name, Milliseconds timeout);

}  // namespace zeroth
