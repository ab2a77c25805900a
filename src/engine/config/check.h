// Holds a document to the schema and fills a Config from it.
#pragma once

#include "engine/config/document.h"
#include "engine/config/problems.h"
#include "engine/config/schema.h"

namespace zeroth::config {

/// Reads every honoured key that is there, notes the hints, reports all the rest. The Config is of use only
/// if no problem was found.
[[nodiscard]] Config check_document(const Document& document, Problems& problems);

/// Whether the value of a refused key asks for nothing.
[[nodiscard]] bool is_off(const KeySpec& key, const Json& value);

/// Reports what is contradictory between keys that are each good.
void check_together(const Config& config, const Document& document, Problems& problems);

}  // namespace zeroth::config
