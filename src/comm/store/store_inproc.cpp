#include "comm/store/store_table.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>

#include <charconv>

namespace zeroth {
namespace detail {

void check_entry(std::string_view key, std::string_view value) {
  ZR_CHECK(key.size() + value.size() <= kMaxEntryBytes, ErrorCode::kUsage, "an entry of the store is too long",
           {.where = "comm.store",
            .which = std::string(key.substr(0, 64)),
            .expected = fmt::format("at most {} bytes", kMaxEntryBytes),
            .got = fmt::format("{} bytes", key.size() + value.size())});
}

void throw_missing(std::string_view key, Milliseconds timeout) {
  throw Error(ErrorCode::kTimeout, "nobody has set a key of the store",
              {.where = "comm.store",
               .which = std::string(key),
               .got = fmt::format("nothing for {:.1f} s", std::chrono::duration<double>(timeout).count())});
}

void StoreTable::set(std::string_view key, std::string_view value) {
  check_entry(key, value);
  {
    const std::lock_guard lock(mutex_);
    values_.insert_or_assign(std::string(key), std::string(value));
  }
  changed_.notify_all();
}

std::string StoreTable::get(std::string_view key, Milliseconds timeout) {
  const Deadline deadline(timeout);
  std::unique_lock lock(mutex_);
  for (;;) {
    if (const auto found = values_.find(key); found != values_.end()) return found->second;
    if (deadline.passed()) throw_missing(key, timeout);
    changed_.wait_until(lock, SteadyClock::now() + deadline.slice());
  }
}

std::int64_t StoreTable::add(std::string_view key, std::int64_t delta) {
  check_entry(key, {});
  std::int64_t sum = 0;
  {
    const std::lock_guard lock(mutex_);
    std::string& text = values_.try_emplace(std::string(key), "0").first->second;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), sum);
    ZR_CHECK(problem == std::errc() && end == text.data() + text.size(), ErrorCode::kUsage,
             "add() to a key of the store that holds no number",
             {.where = "comm.store", .which = std::string(key), .got = text.substr(0, 64)});
    ZR_CHECK(!__builtin_add_overflow(sum, delta, &sum), ErrorCode::kUsage, "a counter of the store overflows",
             {.where = "comm.store", .which = std::string(key)});
    text = std::to_string(sum);
  }
  changed_.notify_all();
  return sum;
}

void StoreTable::wait(std::span<const std::string> keys, Milliseconds timeout) {
  const Deadline deadline(timeout);
  for (const std::string& key : keys) [[maybe_unused]]
    const std::string value = get(key, deadline.remaining());
}

std::optional<std::string> StoreTable::find(std::string_view key) {
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  return found == values_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace detail

std::shared_ptr<Store> make_inproc_store() {
  return std::make_shared<detail::StoreTable>();
}

}  // namespace zeroth
