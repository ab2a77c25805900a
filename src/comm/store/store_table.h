// StoreTable: the table behind both stores.
#pragma once

#include <zeroth/comm/store.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace zeroth::detail {

inline constexpr std::size_t kMaxEntryBytes = std::size_t{64} << 10U;

/// Throws kUsage if key and value together are too long.
void check_entry(std::string_view key, std::string_view value);
[[noreturn]] void throw_missing(std::string_view key, Milliseconds timeout);

class StoreTable final : public Store {
 public:
  void set(std::string_view key, std::string_view value) override;
  [[nodiscard]] std::string get(std::string_view key, Milliseconds timeout) override;
  std::int64_t add(std::string_view key, std::int64_t delta) override;
  void wait(std::span<const std::string> keys, Milliseconds timeout) override;
  [[nodiscard]] std::optional<std::string> find(std::string_view key);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string, std::less<>> values_;
};

}  // namespace zeroth::detail
