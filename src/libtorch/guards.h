// Guards: tensors with a shape and no memory, that stand where a parameter or a gradient is not.
#pragma once

#include <zeroth/base/error.h>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace zeroth::libtorch {

/// Throws an Error, or another exception of the front end's that stands for it.
using Rethrow = std::function<void(const Error&)>;

using Storages = std::vector<const c10::StorageImpl*>;

/// Where the values are that guards stand for.
class ValueSource {
 public:
  ValueSource() = default;
  ValueSource(const ValueSource&) = delete;
  ValueSource& operator=(const ValueSource&) = delete;
  virtual ~ValueSource() = default;
  /// An operator is about to use the values of these parameters. True: they have memory for it, at least. False: the
  /// use is refused. `used`: storages of all its arguments, which keep their memory. May block for other ranks, and
  /// throw.
  [[nodiscard]] virtual bool bring(const std::vector<int>& params, const Storages& used) = 0;
  /// `alias` was made of the parameter's guard, which bring() has replaced: it gets the parameter's memory too.
  virtual void attach(int param, const at::Tensor& alias) = 0;
};

/// Of one parameter.
struct GuardedValue {
  std::weak_ptr<ValueSource> source{};
  int param = -1;
};

/// A tensor with the sizes, strides and dtype of `like` and no memory. Whatever would read or write it throws `error`
/// through `rethrow`; what only asks for shapes, or makes views, works. Views of a guard are guards.
///
/// [Note: Two ways to a guard] Operators come through torch's dispatcher: a key of the guard's own leads them to a
/// function that throws. Other readers ask the storage for its pointer. One that may be written through is refused by
/// the storage: torch asks it to make a copy first, as if its memory were copied on write. One that is only looked at
/// is null, and no error: torch's profiler notes the pointer of every parameter, and an exception would end the process
/// there.
///
/// An operator that only reads guards with a source, or views of them, asks it for their values first.
[[nodiscard]] at::Tensor make_guard(const at::Tensor& like, const Error& error, const Rethrow& rethrow = nullptr,
                                    GuardedValue value = {});

/// Storage of one parameter, behind the parameter while it is bound and behind all views of it. What was saved for
/// backward, or kept by the user, sees memory that comes and goes; while there is none, reading it throws c10::Error.
class ParameterStorage {
 public:
  /// Released. `text`: of the error.
  ParameterStorage(std::size_t bytes, c10::Device device, std::string text);
  void bind(at::DataPtr data);
  void release();
  /// For ever, with another text.
  void retire(std::string text);
  /// The text of the error from now on.
  void set_text(std::string text);
  [[nodiscard]] const c10::Storage& storage() const { return storage_; }

 private:
  c10::Storage storage_;
  c10::Device device_;
  std::string text_;
  bool released_ = true;
};

}  // namespace zeroth::libtorch
