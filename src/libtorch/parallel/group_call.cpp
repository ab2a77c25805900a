#include "libtorch/parallel/group_call.h"

#include "libtorch/parallel/kept_call.h"

#include <zeroth/base/error.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/comm/collective.h>
#include <zeroth/libtorch/model_description.h>
#include <zeroth/parallel/slices.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <optional>
#include <typeinfo>
#include <utility>

namespace zeroth::libtorch {
namespace {

constexpr const char* kExchangeable = "float64, float32, bfloat16, float16, int64, int32 or uint8";

/// Labels of these calls have the highest bit; the Python side's calls with tags of a user have small labels. Ranks
/// compare them: the call, forward or backward, whether a backward follows, and the shape without the split dims.
MessageTag tag_of(const CallName& name, const std::vector<std::int64_t>& shape) {
  std::uint32_t hash = 2166136261U;  // FNV-1a
  for (const std::int64_t size : shape) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash ^= static_cast<std::uint32_t>(size >> shift & 0xff);
      hash *= 16777619U;
    }
  }
  return {.unit = -1,
          .label = 1U << 31U | name.number << 24U | (name.is_backward ? 1U << 23U : 0U) |
                   (name.has_grad ? 1U << 22U : 0U) | (hash & 0x3fffffU)};
}

std::vector<std::int64_t> with(at::IntArrayRef shape, std::int64_t dim, std::int64_t size) {
  std::vector<std::int64_t> result = shape.vec();
  result[static_cast<std::size_t>(dim)] = size;
  return result;
}

std::int64_t elements_of(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

/// The values in a row of memory. Shares `x` if that is one.
at::Tensor dense(const at::Tensor& x) {
  return x.resolve_neg().contiguous();
}

const std::byte* bytes_of(const at::Tensor& x) {
  return static_cast<const std::byte*>(x.const_data_ptr());
}

Collective call_of(CollectiveKind kind, const at::Tensor& send, const at::Tensor& recv, MessageTag tag) {
  const DType dtype = *dtype_of(send.scalar_type());
  return {.kind = kind,
          .in_dtype = dtype,
          .out_dtype = dtype,
          .send = bytes_of(send),
          .recv = static_cast<std::byte*>(recv.mutable_data_ptr()),
          .tag = tag};
}

/// Slices of `x` along a dim, one after the other in memory. Shares `x` if they lie there so.
at::Tensor slices_in_a_row(const at::Tensor& x, std::int64_t dim, SizeSpan sizes) {
  const auto outer = x.sizes().slice(0, static_cast<std::size_t>(dim));
  if (std::ranges::all_of(outer, [](std::int64_t size) { return size == 1; })) return dense(x).view(-1);
  std::vector<at::Tensor> parts;
  std::int64_t begin = 0;
  for (const std::int64_t size : sizes) {
    parts.push_back(x.narrow(dim, begin, size).reshape(-1));
    begin += size;
  }
  return at::cat(parts);
}

/// The other way: slices that lie one after the other, of `shape` but for the dim.
at::Tensor joined(const at::Tensor& row, const std::vector<std::int64_t>& shape, std::int64_t dim, SizeSpan sizes) {
  const auto outer = at::IntArrayRef(shape).slice(0, static_cast<std::size_t>(dim));
  const bool lies_so = std::ranges::all_of(outer, [](std::int64_t size) { return size == 1; });
  if (lies_so) return row.view(with(shape, dim, sum_of_sizes(sizes)));
  std::vector<at::Tensor> parts;
  std::int64_t begin = 0;
  for (const std::int64_t size : sizes) {
    const std::vector<std::int64_t> part = with(shape, dim, size);
    const std::int64_t elements = elements_of(part);
    parts.push_back(row.narrow(0, begin, elements).view(part));
    begin += elements;
  }
  return at::cat(parts, dim);
}

/// Elements of each slice.
std::vector<std::int64_t> counts_of(at::IntArrayRef shape, std::int64_t dim, SizeSpan sizes) {
  std::vector<std::int64_t> counts;
  for (const std::int64_t size : sizes) counts.push_back(elements_of(with(shape, dim, size)));
  return counts;
}

/// The error of a transport, with the call that the user made.
Error named_error(const Error& error, const CallName& name, const std::string& what) {
  ErrorContext context = error.context();
  const std::string call = name.text() + " of " + what;
  context.which = context.which.empty() ? call : call + "; " + context.which;
  if (error.code() == ErrorCode::kMismatch) {
    context.hint = "all ranks of a group call " + std::string(name.call) +
                   " alike: the same order, dtype, dims and sizes, and requires_grad on all ranks or on none";
    if (*name.uneven != '\0')
      context.hint += "; where ranks have slices of different sizes, give " + std::string(name.uneven) + ", one a rank";
  }
  return Error(error.code(), error.message(), std::move(context));
}

/// Of a call that was not made, because an earlier one had failed with `first`.
Error earlier_error(const Error& first, const CallName& name, const std::string& what) {
  ErrorContext context = first.context();
  context.which = name.text() + " of " + what + ", which was not made";
  context.hint = "the ranks are at different places since then: leave the loop, and close() what uses the group";
  return Error(first.code(), "an earlier error has ended the group: " + first.message(), std::move(context));
}

void run(std::span<const Collective> calls, const RankGroup& group, const CallName& name, const at::Tensor& x) {
  with_name_of(group, name, x, [&] { group.communicator().batch(calls); });
}

}  // namespace

std::int64_t sum_of_sizes(SizeSpan sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

void with_name_of(const RankGroup& group, const CallName& name, const at::Tensor& x,
                  const std::function<void()>& call) {
  std::optional<Error> named;
  try {
    call();
    return;
  } catch (const Error& error) {
    const std::string what = c10::str(name_of(*dtype_of(x.scalar_type())), " ", x.sizes());
    if (const std::optional<Error> left = group.left()) {
      named = earlier_error(*left, name, what);
    } else {
      group.leave(error);
      // The verdict about the job names its cause; of other calls it knows what a transport saw, and not the user's
      // call.
      if (typeid(error) != typeid(Error) && error.code() != ErrorCode::kMismatch) {
        if (name.is_backward && group.rethrow()) group.rethrow()(error);
        throw;
      }
      named = named_error(error, name, what);
    }
  } catch (...) {
    // An exception that is no Error (Ctrl-C in a wait) separates this rank from the others for good: they hear of it.
    group.communicator().backend().abort(
        Error(ErrorCode::kAborted, interrupted_text(),
              {.where = "libtorch.collectives", .who = group.who(), .which = name.text()}));
    throw;
  }
  if (name.is_backward && group.rethrow()) group.rethrow()(*named);
  throw *named;
}

std::string CallName::text() const {
  return std::string(call) + (is_backward ? ", backward" : "");
}

void refuse(const RankGroup& group, const CallName& name, std::string_view argument, const std::string& message,
            std::string expected, std::string got, std::string hint) {
  const Error error(ErrorCode::kUsage, message,
                    {.where = "libtorch.collectives",
                     .who = group.who(),
                     .which = std::string(argument) + " of " + name.text(),
                     .expected = std::move(expected),
                     .got = std::move(got),
                     .hint = std::move(hint)});
  if (name.is_backward && group.rethrow()) group.rethrow()(error);
  throw error;
}

void require_exchangeable(const at::Tensor& x, const RankGroup& group, const CallName& name,
                          std::string_view argument) {
  if (!x.defined()) refuse(group, name, argument, "a tensor is undefined", "a tensor", "an undefined one");
  if (x.layout() != at::kStrided)
    refuse(group, name, argument, "a tensor is not dense", "a strided tensor", c10::str(x.layout()),
           "pass tensor.to_dense()");
  if (!x.is_cpu() && !x.is_cuda())
    refuse(group, name, argument, "a tensor is on another device", "cpu or cuda", x.device().str());
  if (dtype_of(x.scalar_type()).has_value()) return;
  std::string hint = "convert it with tensor.to()";
  if (x.scalar_type() == at::kBool) hint = "pass tensor.to(torch.uint8)";
  if (x.is_complex()) hint = "pass torch.view_as_real(tensor)";
  refuse(group, name, argument, "ranks do not exchange this dtype", kExchangeable, c10::toString(x.scalar_type()),
         hint);
}

std::int64_t dim_of(const at::Tensor& x, std::int64_t dim, const RankGroup& group, const CallName& name,
                    std::string_view argument) {
  const std::int64_t dims = x.dim();
  if (dim < -dims || dim >= dims)
    refuse(group, name, argument, "the tensor does not have this dim",
           dims == 0 ? "a tensor with dims" : c10::str(-dims, " to ", dims - 1),
           c10::str(dim, " for shape ", x.sizes()));
  return dim < 0 ? dim + dims : dim;
}

void require_one_a_rank(const std::vector<std::int64_t>& sizes, const RankGroup& group, const CallName& name,
                        std::string_view argument) {
  const bool valid = sizes.size() == static_cast<std::size_t>(group.size()) &&
                     std::ranges::all_of(sizes, [](std::int64_t size) { return size >= 0; });
  if (!valid)
    refuse(group, name, argument, "sizes are not one a rank", std::to_string(group.size()) + " sizes, from 0",
           c10::str(at::IntArrayRef(sizes)));
}

std::vector<std::int64_t> sizes_of_whole(std::int64_t elements, std::int64_t dim, const SliceSizes& sizes,
                                         const RankGroup& group, const CallName& name, std::string_view argument) {
  if (!sizes) return slice_sizes(elements, group.size());
  require_one_a_rank(*sizes, group, name, argument);
  if (sum_of_sizes(*sizes) != elements)
    refuse(group, name, argument, "the slices of all ranks are not the dim of the tensor",
           c10::str(elements, " in all, along dim ", dim), c10::str(at::IntArrayRef(*sizes)));
  return *sizes;
}

std::vector<std::int64_t> sizes_with_own(const at::Tensor& x, std::int64_t dim, const SliceSizes& sizes,
                                         const RankGroup& group, const CallName& name, std::string_view argument) {
  if (!sizes) return std::vector<std::int64_t>(static_cast<std::size_t>(group.size()), x.size(dim));
  require_one_a_rank(*sizes, group, name, argument);
  if ((*sizes)[static_cast<std::size_t>(group.rank())] != x.size(dim))
    refuse(group, name, argument, "this rank's slice is not the dim of the tensor",
           c10::str(x.size(dim), " for rank ", group.rank(), ", along dim ", dim), c10::str(at::IntArrayRef(*sizes)));
  return *sizes;
}

OwnPart own_part(SizeSpan sizes, int rank) {
  const auto own = static_cast<std::size_t>(rank);
  return {.begin = sum_of_sizes(sizes.first(own)), .length = sizes[own]};
}

namespace {

at::Tensor make_sum(const at::Tensor& x, const RankGroup& group, const CallName& name, ReduceOp op) {
  if (!x.is_cpu()) return make_sum(x.cpu(), group, name, op).to(x.device());
  const at::Tensor in = dense(x);
  at::Tensor out = at::empty(x.sizes(), x.options());
  Collective call = call_of(CollectiveKind::kAllReduce, in, out, tag_of(name, x.sizes().vec()));
  call.op = op;
  call.counts = {x.numel()};
  run({&call, 1}, group, name, x);
  return out;
}

at::Tensor make_gather(const at::Tensor& x, std::int64_t dim, SizeSpan sizes, const RankGroup& group,
                       const CallName& name) {
  if (!x.is_cpu()) return make_gather(x.cpu(), dim, sizes, group, name).to(x.device());
  const std::vector<std::int64_t> shape = x.sizes().vec();
  const std::vector<std::int64_t> whole = with(shape, dim, sum_of_sizes(sizes));
  const at::Tensor in = dense(x);
  const at::Tensor row = at::empty({elements_of(whole)}, x.options());
  Collective call = call_of(CollectiveKind::kAllGather, in, row, tag_of(name, whole));
  call.counts = counts_of(shape, dim, sizes);
  run({&call, 1}, group, name, x);
  return joined(row, shape, dim, sizes);
}

at::Tensor make_reduce_scatter(const at::Tensor& x, std::int64_t dim, SizeSpan sizes, const RankGroup& group,
                               const CallName& name) {
  if (!x.is_cpu()) return make_reduce_scatter(x.cpu(), dim, sizes, group, name).to(x.device());
  const at::Tensor in = slices_in_a_row(x, dim, sizes);
  at::Tensor out = at::empty(with(x.sizes(), dim, own_part(sizes, group.rank()).length), x.options());
  Collective call = call_of(CollectiveKind::kReduceScatter, in, out, tag_of(name, x.sizes().vec()));
  call.counts = counts_of(x.sizes(), dim, sizes);
  run({&call, 1}, group, name, x);
  return out;
}

at::Tensor make_exchange(const at::Tensor& x, std::int64_t split_dim, SizeSpan split_sizes, std::int64_t concat_dim,
                         SizeSpan concat_sizes, const RankGroup& group, const CallName& name) {
  if (!x.is_cpu())
    return make_exchange(x.cpu(), split_dim, split_sizes, concat_dim, concat_sizes, group, name).to(x.device());
  const at::Tensor in = slices_in_a_row(x, split_dim, split_sizes);
  // What comes from a rank: its slice along split_dim for this rank, and all that it has along concat_dim.
  std::vector<std::int64_t> part = x.sizes().vec();
  if (split_dim != concat_dim) part = with(part, split_dim, own_part(split_sizes, group.rank()).length);
  const at::Tensor row = at::empty({elements_of(with(part, concat_dim, sum_of_sizes(concat_sizes)))}, x.options());
  std::vector<std::int64_t> whole = with(x.sizes(), concat_dim, sum_of_sizes(concat_sizes));
  if (split_dim == concat_dim) whole[static_cast<std::size_t>(concat_dim)] = 0;  // ranks may have any number there
  Collective call = call_of(CollectiveKind::kAllToAll, in, row, tag_of(name, whole));
  call.counts = counts_of(x.sizes(), split_dim, split_sizes);
  call.recv_counts = counts_of(part, concat_dim, concat_sizes);
  run({&call, 1}, group, name, x);
  return joined(row, part, concat_dim, concat_sizes);
}

}  // namespace

at::Tensor sum_over(const at::Tensor& x, const RankGroup& group, const CallName& name, ReduceOp op) {
  return made_once(name, x, group, [&] { return make_sum(x, group, name, op); });
}

at::Tensor gather_along(const at::Tensor& x, std::int64_t dim, SizeSpan sizes, const RankGroup& group,
                        const CallName& name) {
  return made_once(name, x, group, [&] { return make_gather(x, dim, sizes, group, name); });
}

at::Tensor reduce_scatter_along(const at::Tensor& x, std::int64_t dim, SizeSpan sizes, const RankGroup& group,
                                const CallName& name) {
  return made_once(name, x, group, [&] { return make_reduce_scatter(x, dim, sizes, group, name); });
}

at::Tensor exchange_along(const at::Tensor& x, std::int64_t split_dim, SizeSpan split_sizes, std::int64_t concat_dim,
                          SizeSpan concat_sizes, const RankGroup& group, const CallName& name) {
  return made_once(name, x, group,
                   [&] { return make_exchange(x, split_dim, split_sizes, concat_dim, concat_sizes, group, name); });
}

std::vector<at::Tensor> shift_along_ring(const std::vector<at::Tensor>& tensors, int by, const RankGroup& group,
                                         const CallName& name) {
  RegionCall region(name, tensors, group);
  if (region.hands_out()) return region.keep(region.kept());
  const int size = group.size();
  const int step = (by % size + size) % size;
  const int to = (group.rank() + step) % size;
  const int from = (group.rank() + size - step) % size;
  std::vector<at::Tensor> given;
  std::vector<at::Tensor> taken;
  std::vector<Collective> calls;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor& in = given.emplace_back(dense(tensor.cpu()));
    const at::Tensor& out = taken.emplace_back(at::empty(in.sizes(), in.options()));
    CallName own = name;
    own.has_grad = name.has_grad && tensor.requires_grad();
    const MessageTag tag = tag_of(own, tensor.sizes().vec());
    Collective send = call_of(CollectiveKind::kSend, in, out, tag);
    send.counts = {tensor.numel()};
    Collective recv = send;
    send.recv = nullptr;
    send.root = to;
    recv.kind = CollectiveKind::kRecv;
    recv.send = nullptr;
    recv.root = from;
    calls.push_back(std::move(send));
    calls.push_back(std::move(recv));
  }
  if (!calls.empty()) run(calls, group, name, tensors.front());
  for (std::size_t index = 0; index < taken.size(); ++index) taken[index] = taken[index].to(tensors[index].device());
  return region.keep(std::move(taken));
}

std::unique_ptr<PendingPoints> start_rows_between(const at::Tensor& sent, std::span<const RowsOfRank> give,
                                                  const at::Tensor& taken, std::span<const RowsOfRank> take,
                                                  const RankGroup& group, const CallName& name) {
  const MessageTag tag = tag_of(name, with(sent.sizes(), 0, 0));
  const DType dtype = *dtype_of(sent.scalar_type());
  const std::int64_t elements = elements_of(with(sent.sizes(), 0, 1));
  const auto bytes_before = [&](std::int64_t row) {
    return static_cast<std::size_t>(row * elements) * sent.element_size();
  };
  std::vector<Collective> points;
  const auto add = [&](const RowsOfRank& rows, CollectiveKind kind) -> Collective* {
    if (rows.rank == group.rank() || rows.count * elements == 0) return nullptr;
    points.push_back({.kind = kind,
                      .in_dtype = dtype,
                      .out_dtype = dtype,
                      .counts = {rows.count * elements},
                      .root = rows.rank,
                      .tag = tag});
    return &points.back();
  };
  for (const RowsOfRank& rows : give)
    if (Collective* const send = add(rows, CollectiveKind::kSend))
      send->send = bytes_of(sent) + bytes_before(rows.first);
  for (const RowsOfRank& rows : take)
    if (Collective* const recv = add(rows, CollectiveKind::kRecv))
      recv->recv = static_cast<std::byte*>(taken.mutable_data_ptr()) + bytes_before(rows.first);
  return points.empty() ? nullptr : group.communicator().start(points);
}

std::unique_ptr<PendingPoints> start_rows_of_ranks(const at::Tensor& sent, SizeSpan given, const at::Tensor& taken,
                                                   SizeSpan from, const RankGroup& group, const CallName& name) {
  const auto runs_of = [](SizeSpan counts) {
    std::vector<RowsOfRank> runs;
    std::int64_t first = 0;
    for (const std::int64_t count : counts) {
      runs.push_back({static_cast<int>(runs.size()), first, count});
      first += count;
    }
    return runs;
  };
  return start_rows_between(sent, runs_of(given), taken, runs_of(from), group, name);
}

}  // namespace zeroth::libtorch
