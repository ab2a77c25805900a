// Which address of this machine others reach it by.
#pragma once

#include <string>

namespace zeroth::launcher {

/// The address of the ssh client, if this process was started over ssh: the head as this host sees it. "" if
/// not.
[[nodiscard]] std::string ssh_client_address();

}  // namespace zeroth::launcher
