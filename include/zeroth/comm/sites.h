// Sites that are jobs of their own, with a hub between them (zeroth-run --sites): where the hub is.
#pragma once

#include <string>

namespace zeroth {

struct SitePlace {
  int site = 0;
  int sites = 1;
  std::string hub{};  ///< "127.0.0.1:40123"
  std::string secret{};

  bool operator==(const SitePlace&) const = default;
};

}  // namespace zeroth
