#include "comm/rank_facts.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/communicator.h>

namespace zeroth::detail {

void gather_facts(const std::shared_ptr<MessageTransport>& transport, const CommOptions& options,
                  std::span<const std::byte> own, std::span<std::byte> all) {
  CommOptions plain = options;
  plain.nodes.clear();
  const std::shared_ptr<CommBackend> backend = make_message_backend(transport, plain);
  try {
    Communicator(backend).all_gather(std::span(reinterpret_cast<const std::uint8_t*>(own.data()), own.size()),
                                     std::span(reinterpret_cast<std::uint8_t*>(all.data()), all.size()));
  } catch (const Error& error) {
    backend->abort(error);
    throw;
  }
}

}  // namespace zeroth::detail
