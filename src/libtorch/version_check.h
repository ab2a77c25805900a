// The adapter works with the torch it was built against, and with no other: LibTorch has no stable C++ interface.
#pragma once

#include <string>

namespace zeroth::libtorch {

/// Throws kEnvironment if the torch library that is loaded says another version than the headers of the build.
/// An installation that says nothing (no version file beside the library) is taken as it is.
void require_same_torch();

/// "torch 2.11.0": what the build was made against, and require_same_torch() has found loaded.
[[nodiscard]] std::string torch_version_text();

/// Version that the torch installation at `folder` (the one with lib/ in it) says: version.py of a wheel or
/// build-version of a LibTorch archive, without the part after '+'. Empty if it says none.
[[nodiscard]] std::string installed_torch_version(const std::string& folder);

/// Throws kEnvironment if both are known and differ.
void compare_torch_versions(const std::string& built, const std::string& loaded, const std::string& folder);

}  // namespace zeroth::libtorch
