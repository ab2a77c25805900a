// Built in place of io_uring_engine.cpp where liburing is not.
#include "io/engine.h"

#include <zeroth/base/error.h>

namespace zeroth::detail {

std::unique_ptr<IoEngine> make_io_uring_engine(int /*depth*/, bool /*one_thread*/) {
  throw Error(ErrorCode::kIo, "this Zeroth was built without liburing",
              {.where = "io.io_uring", .hint = "install liburing-dev and configure again"});
}

}  // namespace zeroth::detail
