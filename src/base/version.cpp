#include <zeroth/base/version.h>

namespace zeroth {

std::string_view version_text() noexcept {
  return ZEROTH_VERSION_TEXT;
}

}  // namespace zeroth
