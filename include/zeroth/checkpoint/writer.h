// CheckpointWriter: a checkpoint of one file, for one process that writes it without an engine.
#pragma once

#include <zeroth/checkpoint/folder.h>
#include <zeroth/checkpoint/manifest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// Follows [Note: Commit]: without commit() nothing of it stays. For one thread at a time. All calls block.
class CheckpointWriter {
 public:
  /// Makes the folder and the file, with room for all of it. `manifest` has all parameters with their states, and the
  /// extras; its world, files and run are the writer's to fill in. Throws kUsage if the step is there already, for two
  /// states of one name and for a dtype that no checkpoint has; kIo.
  CheckpointWriter(const std::string& folder, Manifest manifest);
  CheckpointWriter(CheckpointWriter&&) noexcept;
  CheckpointWriter& operator=(CheckpointWriter&&) noexcept;
  ~CheckpointWriter();

  /// Keys in the order in which write() wants them: states parameter by parameter, then extras.
  [[nodiscard]] const std::vector<std::string>& keys() const;
  /// Appends bytes of the tensors, row major, in the order of keys(), in pieces of any size. Throws kIo; kUsage for
  /// more than there is room for.
  void write(std::span<const std::byte> data);
  /// Returns the path of the checkpoint, which is on the disk then. Throws kIo; kUsage if bytes are missing.
  std::string commit(const Retention& retention);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zeroth
