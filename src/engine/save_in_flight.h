// SaveInFlight: what an engine and its caller know of a save that runs behind.
#pragma once

#include "engine/background_save.h"

#include <zeroth/base/error.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace zeroth {

class SaveInFlight {
 public:
  SaveInFlight(std::string path, std::unique_ptr<BackgroundSave> background, std::function<void()> settle_together)
      : path_(std::move(path)), background_(std::move(background)), settle_together_(std::move(settle_together)) {}

  [[nodiscard]] const std::string& path() const { return path_; }
  /// The path of a checkpoint that is there; "" once the save has failed. Of one that is settled.
  [[nodiscard]] const std::string& committed_path() const { return error_ ? none_ : path_; }
  [[nodiscard]] BackgroundSave& background() { return *background_; }
  /// This rank's thread has ended, or rank 0 has told all ranks that the save has, which may come first.
  [[nodiscard]] bool has_ended() const { return settled_ || background_->has_ended(); }
  [[nodiscard]] bool has_failed() const { return background_->has_ended() && background_->error().has_value(); }

  /// All ranks know how it ended; the same on all of them.
  [[nodiscard]] bool is_settled() const { return settled_; }
  void settle(std::optional<Error> error) {
    settled_ = true;
    error_ = std::move(error);
    if (!error_ && when_there_) when_there_();
    when_there_ = nullptr;
  }
  /// Called once all ranks know that the checkpoint is there.
  void set_when_there(std::function<void()> hook) { when_there_ = std::move(hook); }
  /// The engine goes: each rank knows what it has seen.
  void part_from_engine() {
    settle_together_ = nullptr;
    when_there_ = nullptr;
    if (!settled_) settle(background_->error());
  }
  /// Collective unless it is settled.
  void settle_together() {
    if (!settled_) settle_together_();
  }
  /// Throws what it ended with, if nobody has thrown it yet.
  void throw_if_failed() {
    if (!settled_ || !error_ || told_) return;
    told_ = true;
    throw Error(*error_);
  }

 private:
  std::string path_;
  std::string none_;
  std::unique_ptr<BackgroundSave> background_;
  std::function<void()> settle_together_;
  std::function<void()> when_there_;
  bool settled_ = false;
  bool told_ = false;
  std::optional<Error> error_;
};

}  // namespace zeroth
