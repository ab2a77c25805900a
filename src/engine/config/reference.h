// docs/configuration.md, written from the schema.
#pragma once

#include <string>

namespace zeroth::config {

/// The whole page as Markdown.
[[nodiscard]] std::string reference_markdown();

}  // namespace zeroth::config
