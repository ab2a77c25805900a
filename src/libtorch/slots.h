// ParameterSlots: binds the user's parameters to flat storages that come and go.
//
// Every parameter has one at::Storage. Gathered, it points into the slot; else at nothing, and the parameter carries a
// guard instead: full shape, no memory, any access is an error with the parameter's name. Views that autograd or the
// user keeps alias the storage, so nothing leaks and nothing dangles while a lease is out. See
// docs/life-of-a-parameter.md.
#pragma once

#include "libtorch/device_copies.h"
#include "libtorch/guards.h"
#include "libtorch/words.h"

#include <zeroth/base/tensor_view.h>
#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/parameter_store.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

class ParameterSlots final : public ParameterBinder {
 public:
  /// `tensors`: one a parameter, the user's own. They are kept, and changed only by bind().
  ParameterSlots(std::vector<at::Tensor> tensors, std::vector<ParamSpec> specs);
  void set_rethrow(Rethrow rethrow) { rethrow_ = std::move(rethrow); }  ///< before set_layout(); see make_guard()
  /// Of values that are used while they are not gathered; before set_layout().
  void set_source(std::weak_ptr<ValueSource> source) { source_ = std::move(source); }

  void set_words(const Words& words) { words_ = &words; }  ///< of hints

  /// Call once the layout is known, before the first bind(). With `copies` storages point at these and not at the
  /// engine's memory. `gathered`: parameters at rest are shards.
  void set_layout(const ModelLayout& layout, bool gathered, std::unique_ptr<DeviceCopies> copies);
  /// Dense host memory with the values of a parameter as the user made it; until drop_initial().
  [[nodiscard]] ConstTensorView initial_value(int param);
  /// See EngineOptions::initial_value.
  void set_initial(std::function<at::Tensor(const std::string& name)> make) { make_initial_ = std::move(make); }
  /// Bytes of what it has made, at most at once.
  [[nodiscard]] std::uint64_t initial_peak() const { return initial_peak_; }
  /// Drops the user's original memory of these parameters: they become guards.
  void drop_initial(std::span<const int> params);

  void bind(int flat, std::byte* data) override;
  void begin_update(int flat) override;
  void lose_write(int flat, std::int64_t element) noexcept override;
  enum class Renewed : std::uint8_t { kTrainable, kAll };
  /// The engine's memory has new values of these parameters: the copies of what is bound get them too.
  void refresh(Renewed renewed);
  /// Where parameters are not gathered: what was written to copies of them goes to the engine's memory. See [Note:
  /// Writes to copies].
  void take_writes();
  /// The parameters take `own`, one a parameter, for their data; the engine binds none of them any more.
  void give_back(const std::vector<at::Tensor>& own);
  /// The memory behind the parameters goes away: they, and all views that graphs saved of them, become guards for ever.
  void retire();
  /// Throws kModel if a parameter of the unit no longer has the memory or dtype that it was given: module.to(), .data =
  /// ...; or if it was written in place while it was gathered. Other writes, which autograd's version tells, are taken
  /// note of.
  void require_bound(int unit);
  /// The first half of require_bound(): parameters are where and what the engine made them.
  void require_ours(int unit) const;
  /// Throws kModel if a parameter of the unit was written since require_bound(), in the forward that began with it.
  void require_unwritten(int unit) const;
  /// Throws kModel if a parameter was written in place while it was gathered, or while an update of it ran: such writes
  /// are lost.
  void require_kept();
  /// The part of require_kept() that costs nothing as a rule: writes that left no trace in autograd.
  void require_nothing_lost();
  /// Tells autograd that every listed parameter has new values, so that a stale graph is an error, as in plain torch.
  void bump_versions(const std::vector<int>& params);
  /// After an error of require_unwritten(): where parameters are gathered, the write went away with the slot, and no
  /// later call has to refuse it again.
  void forget_writes(int unit);
  /// What has been written to these since take_versions() or require_bound() is the engine's own.
  void own_versions(const std::vector<int>& params);
  /// The parameters have the values that all ranks have: the beginning.
  void take_versions();
  /// Where none are gathered: parameters that the script has written to since agree(), as autograd's version tells, or
  /// all of them, each with a digest of its value in the engine's memory.
  enum class Digests : std::uint8_t { kWritten, kAll };
  [[nodiscard]] std::vector<std::pair<int, std::int64_t>> digests(Digests which);
  /// The script has written to it since agree().
  [[nodiscard]] bool is_written(int param) const { return written_[static_cast<std::size_t>(param)]; }
  /// All ranks have the same values of these, or of all.
  void agree(const std::vector<int>& params);
  void agree();
  [[nodiscard]] const at::Tensor& tensor(int param) const { return tensors_[static_cast<std::size_t>(param)]; }
  /// Where the parameters are, and what is computed with them.
  [[nodiscard]] c10::Device device() const { return device_; }
  [[nodiscard]] const DeviceCopies* copies() const { return copies_.get(); }

  /// See ValueSource::attach(); the parameter is bound.
  void attach(int param, const at::Tensor& alias) const;
  /// Tensors beside the unit's parameters have their memory: views, or what graphs have saved of these.
  [[nodiscard]] bool has_aliases(int unit) const;
  /// One of the storages is that of a parameter of the unit.
  [[nodiscard]] bool has_any(int unit, const Storages& storages) const;
  [[nodiscard]] bool is_bound(int unit) const;
  [[nodiscard]] std::vector<int> bound_units() const;

  /// Something with the shape of a parameter and no memory: any access is this error.
  [[nodiscard]] at::Tensor guard_like(int param, const Error& error) const;
  /// Why the unit's parameters have no memory, instead of the usual text. Views of them say so until explain("").
  void explain(int unit, const std::string& text);

 private:
  [[nodiscard]] Error not_gathered(int param) const;
  void require_not_lost(std::size_t param) const;
  /// Takes note of what the script has written.
  void look(std::size_t param);
  /// Names of the flat's parameters, or of the one that has the element.
  [[nodiscard]] std::string names_at(int flat, std::int64_t element) const;
  [[noreturn]] void throw_lost(const std::string& name) const;

  std::vector<at::Tensor> tensors_;
  std::vector<ParamSpec> specs_;
  const ModelLayout* layout_ = nullptr;
  const Words* words_ = &kCppWords;
  Rethrow rethrow_;
  std::weak_ptr<ValueSource> source_;
  std::vector<ParameterStorage> memory_;  // one a parameter
  std::vector<at::Tensor> views_;         // one a parameter, of all of its storage
  std::vector<at::Tensor> guards_;        // one a parameter
  c10::Device device_;
  std::unique_ptr<DeviceCopies> copies_;
  std::vector<std::byte*> bound_;    // one a flat: the engine's memory behind it, nullptr if it is not bound
  std::vector<at::Tensor> initial_;  // host copies of initial values of one unit
  std::function<at::Tensor(const std::string& name)> make_initial_;
  std::uint64_t initial_bytes_ = 0;
  std::uint64_t initial_peak_ = 0;
  std::vector<bool> changing_;          // one a flat: the engine's memory is ahead of the copy
  std::vector<bool> forgiven_;          // one a flat: writes to it have been refused already
  std::string lost_{};                  // names of what was written to and lost, as it was first seen
  std::vector<std::int64_t> versions_;  // one a parameter: autograd's count of writes, as it was last known
  std::vector<bool> written_;           // one a parameter: the script has written to it since agree()
  bool taken_ = false;                  // drop_initial() has begun: users' memory is going away
  bool given_back_ = false;
  bool gathered_ = false;
};

}  // namespace zeroth::libtorch
