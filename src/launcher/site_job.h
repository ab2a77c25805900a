// zeroth-run --sites: a hub, and a zeroth-run for each site, so that a site which is lost ends no other one.
// docs/decisions/0063-a-site-that-is-lost.md.
#pragma once

#include "launcher/console.h"
#include "launcher/options.h"

#include <span>

namespace zeroth::launcher {

/// Runs the hub and all sites on this host, or with --hub the hub alone. `arguments`: of this program, for those of the
/// sites. Blocks; returns the exit code: 0, or that of the first site that has ended badly. Throws Error if nothing can
/// be started.
[[nodiscard]] int run_sites(const Options& options, std::span<const char* const> arguments, const Console& console);

/// Sets or forgets the variables by which ranks know their site, in this process. Throws Error(kUsage).
void take_site_variables(const Options& options);

}  // namespace zeroth::launcher
