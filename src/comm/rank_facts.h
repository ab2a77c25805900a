// What ranks say of themselves before there are groups.
#pragma once

#include <zeroth/comm/messages.h>

#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

namespace zeroth::detail {

/// A collective of all ranks of `transport`: everybody's bytes, as many as `own` on each rank, in the order of ranks.
/// Nobody judges errors yet, so a rank that fails here tells the others itself.
void gather_facts(const std::shared_ptr<MessageTransport>& transport, const CommOptions& options,
                  std::span<const std::byte> own, std::span<std::byte> all);

template <class Facts>
[[nodiscard]] std::vector<Facts> facts_of_ranks(const std::shared_ptr<MessageTransport>& transport,
                                                const CommOptions& options, const Facts& own) {
  static_assert(std::is_trivially_copyable_v<Facts>);
  std::vector<Facts> all(static_cast<std::size_t>(transport->size()));
  gather_facts(transport, options, std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

}  // namespace zeroth::detail
