#include "zero/exchange_choice.h"

namespace zeroth {

ExchangeChoice choose_exchange(const Capabilities& transport, ArenaKind memory, bool codes) {
  const bool on_host = memory != ArenaKind::kDevice;
  return {.one_sided = on_host && !codes && transport.one_sided,
          .one_sided_on_nodes = on_host && !codes && transport.one_sided_on_nodes,
          .window = on_host ? transport.window_kind : memory,
          .narrow_buckets = on_host || transport.widens_device_sums};
}

}  // namespace zeroth
