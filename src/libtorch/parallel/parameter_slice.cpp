#include "libtorch/parallel/parameter_slice.h"

#include <ATen/core/grad_mode.h>

#include <cstddef>

namespace zeroth::libtorch {

at::Tensor part_of(const at::Tensor& whole, std::int64_t dim, SizeSpan sizes, const RankGroup& group, int parts) {
  const at::NoGradGuard no_gradient;
  const OwnPart own = own_part(sizes, group.rank());
  const at::Tensor blocks = whole.detach().unflatten(dim, {parts, sum_of_sizes(sizes)});
  return blocks.narrow(dim + 1, own.begin, own.length).flatten(dim, dim + 1).clone(at::MemoryFormat::Contiguous);
}

ParameterBox box_of(const at::Tensor& part, std::int64_t dim, SizeSpan sizes, const RankGroup& group,
                    const std::string& axis, int parts) {
  ParameterBox box;
  if (group.size() == 1) return box;
  box.parts = parts;
  box.parts_dim = static_cast<int>(dim);
  box.logical_shape = part.sizes().vec();
  box.logical_shape[static_cast<std::size_t>(dim)] = parts * sum_of_sizes(sizes);
  box.offset.assign(box.logical_shape.size(), 0);
  box.offset[static_cast<std::size_t>(dim)] = own_part(sizes, group.rank()).begin;
  box.axes.distinct = axis;
  return box;
}

}  // namespace zeroth::libtorch
