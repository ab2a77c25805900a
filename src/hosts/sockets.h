// TCP sockets as the rendezvous needs them.
#pragma once

#include "base/unique_fd.h"
#include "hosts/option_values.h"

#include <memory>
#include <string>

namespace zeroth {

/// A listening socket that does not block. Throws Error(kLaunch): the address is in use, or cannot be bound.
[[nodiscard]] UniqueFd listen_at(const Endpoint& endpoint);
/// A connection that somebody has made, -1 if there is none now; `address` gets "192.0.2.1:4711".
[[nodiscard]] UniqueFd accept_one(int listening, std::string& address);
/// The numeric address of this end of a connection, "" if it has none; that of IPv4 as such.
[[nodiscard]] std::string local_address(int socket);
/// One attempt at every address of the endpoint, each for at most `patience`; -1 and `why` if none answers.
[[nodiscard]] UniqueFd connect_once(const Endpoint& endpoint, Milliseconds patience, std::string& why);
[[nodiscard]] std::string text_of(const Endpoint& endpoint);

}  // namespace zeroth
