// PartScope: a forward of a part of the model, of a chunk or of the rows of a shared head.
#pragma once

#include "libtorch/runtime.h"

namespace zeroth::libtorch {

class PartScope {
 public:
  explicit PartScope(Runtime& runtime) : runtime_(runtime) { runtime_.begin_part(); }
  PartScope(const PartScope&) = delete;
  PartScope& operator=(const PartScope&) = delete;
  ~PartScope() { runtime_.end_part(); }

 private:
  Runtime& runtime_;
};

}  // namespace zeroth::libtorch
