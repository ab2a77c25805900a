// Figures as people read them.
#pragma once

#include <string>

namespace zeroth::doctor {

/// "1.10 GB/s", "940 MB/s": thousands, as networks have them.
[[nodiscard]] std::string rate_text(double bytes_per_s);
/// "23.1 us", "1.50 ms".
[[nodiscard]] std::string latency_text(double microseconds);
/// "0.21 s", "12.3 ms".
[[nodiscard]] std::string seconds_text(double seconds);

}  // namespace zeroth::doctor
