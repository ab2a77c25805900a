// A message transport between processes of one host: a pair of connected sockets for every two ranks, made
// before the ranks are forked. What a rank that dies leaves is the end of its streams, as with any transport
// over a network.
#pragma once

#include <zeroth/comm/messages.h>

#include <memory>
#include <string_view>
#include <vector>

namespace zeroth::test {

class SocketMesh {
 public:
  explicit SocketMesh(int size);
  SocketMesh(const SocketMesh&) = delete;
  SocketMesh& operator=(const SocketMesh&) = delete;
  ~SocketMesh();

  /// For a forked rank, once: its ends; those of the others are closed here. `kind` is that of the transport.
  [[nodiscard]] std::shared_ptr<MessageTransport> transport(int rank, std::string_view kind = "sockets");
  /// For the process that has forked them: as long as it holds an end, nobody sees that one closed.
  void close_all();

 private:
  int size_;
  std::vector<int> ends_;  ///< [rank * size + peer]: rank's end of the pair with peer, -1: closed
};

}  // namespace zeroth::test
