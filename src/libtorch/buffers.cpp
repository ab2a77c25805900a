#include "libtorch/buffers.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <functional>

namespace zeroth::libtorch {
namespace {

/// What of a buffer has memory of its own: where expand() shows one element several times, that one alone.
at::Tensor base_of(const at::Tensor& buffer) {
  at::Tensor base = buffer;
  for (std::int64_t dim = 0; dim < buffer.dim(); ++dim) {
    if (buffer.stride(dim) == 0 && buffer.size(dim) > 1) base = base.narrow(dim, 0, 1);
  }
  return base;
}

/// Sizes of a buffer, and of what is sent of it where that is less.
std::string extents_of(const at::Tensor& buffer) {
  std::string text;
  const at::Tensor base = base_of(buffer);
  for (const std::int64_t extent : buffer.sizes()) text += " " + std::to_string(extent);
  if (base.sizes() == buffer.sizes()) return text;
  text += " of";
  for (const std::int64_t extent : base.sizes()) text += " " + std::to_string(extent);
  return text;
}

/// One digest a buffer: what must be alike, in order.
std::vector<std::int64_t> structure_of(const ModelDescription& model) {
  std::vector<std::int64_t> digests;
  for (const auto& [name, buffer, _] : model.buffers) {
    if (!buffer.defined()) {
      digests.push_back(static_cast<std::int64_t>(digest64(name + " None") >> 1U));
      continue;
    }
    ZR_CHECK((buffer.is_cpu() || buffer.is_cuda()) && buffer.layout() == at::kStrided && !buffer.is_nested(),
             ErrorCode::kModel, "a buffer cannot be shared between ranks",
             {.where = "libtorch.buffers",
              .which = name,
              .expected = "a dense tensor on the CPU or a GPU",
              .got = buffer.is_nested() ? "a nested tensor" : buffer.toString(),
              .hint = "make it dense, or keep it as an ordinary attribute, which no rank shares"});
    const std::string text = name + " " + c10::toString(buffer.scalar_type()) + extents_of(buffer);
    digests.push_back(static_cast<std::int64_t>(digest64(text) >> 1U));
  }
  return digests;
}

void require_same_structure(const ModelDescription& model, const Communicator& communicator) {
  const auto world = static_cast<std::size_t>(communicator.size());
  const std::vector<std::int64_t> own = structure_of(model);
  const auto refuse = [&](std::size_t rank, const std::string& which, std::int64_t expected, std::int64_t got) {
    throw Error(ErrorCode::kMismatch, "ranks do not have the same buffers",
                {.where = "libtorch.buffers",
                 .who = "rank " + std::to_string(rank) + "/" + std::to_string(world),
                 .which = which,
                 .expected = std::to_string(expected) + " (rank 0)",
                 .got = std::to_string(got) + " (rank " + std::to_string(rank) + ")",
                 .hint = "build the same model on every rank, and change buffers alike; zeroth.broadcast_buffers = "
                         "false shares none"});
  };
  std::vector<std::int64_t> counts(world);
  const auto count = static_cast<std::int64_t>(own.size());
  communicator.all_gather(std::span(&count, 1), std::span(counts));
  for (std::size_t rank = 1; rank < world; ++rank) {
    if (counts[rank] != counts[0]) refuse(rank, "number of buffers", counts[0], counts[rank]);
  }
  if (own.empty()) return;
  std::vector<std::int64_t> all(world * own.size());
  communicator.all_gather(std::span(own), std::span(all));
  for (std::size_t rank = 1; rank < world; ++rank) {
    for (std::size_t index = 0; index < own.size(); ++index) {
      const std::int64_t expected = all[index];
      const std::int64_t got = all[rank * own.size() + index];
      if (expected != got) refuse(rank, model.buffers[index].name + " (name, shape or dtype)", expected, got);
    }
  }
}

/// Ranks may have replaced buffers: what is sent must have one size everywhere. All ranks find a difference together.
/// `counts` are summed over the ranks in the same message.
void require_same_now(const ModelDescription& model, const Communicator& communicator,
                      std::vector<std::int64_t>& counts) {
  std::string look;
  for (const auto& [name, buffer, _] : model.buffers) {
    if (!buffer.defined()) {
      look += "-;";
      continue;
    }
    const bool dense = buffer.layout() == at::kStrided && !buffer.is_nested();
    look += std::to_string(static_cast<int>(buffer.scalar_type()));
    look += dense ? extents_of(buffer) : "?" + std::to_string(communicator.rank());  // unlike all: refused by name
    look += ";";
  }
  const auto world = static_cast<std::size_t>(communicator.size());
  std::vector<std::int64_t> looks(world);
  looks[static_cast<std::size_t>(communicator.rank())] = static_cast<std::int64_t>(digest64(look) >> 1U);
  communicator.all_reduce(std::span(looks));
  if (std::ranges::adjacent_find(looks, std::not_equal_to<>()) != looks.end())
    require_same_structure(model, communicator);
  if (!counts.empty()) communicator.all_reduce(std::span(counts));
}

/// The values that rank `owner` has of its buffers among these, in one message. `chosen`: one a buffer, alike on all
/// ranks.
void send_as_one(const ModelDescription& model, const std::vector<bool>& chosen, int owner,
                 const Communicator& communicator) {
  struct Sent {
    at::Tensor base;
    at::Tensor dense;
  };
  std::vector<Sent> sent;
  std::size_t bytes = 0;
  for (std::size_t index = 0; index < model.buffers.size(); ++index) {
    const at::Tensor& buffer = model.buffers[index].tensor;
    const auto found = model.buffer_owners.find(model.buffers[index].name);
    if ((found == model.buffer_owners.end() ? 0 : found->second) != owner) continue;
    if (!chosen[index] || !buffer.defined() || buffer.nbytes() == 0) continue;
    const at::Tensor base = base_of(buffer);
    sent.push_back({base, base.to(at::kCPU).contiguous()});
    bytes += sent.back().dense.nbytes();
  }
  if (bytes == 0) return;
  std::vector<std::uint8_t> slab(bytes);
  const auto each = [&sent, &slab](const auto& body) {
    std::size_t offset = 0;
    for (const Sent& one : sent) {
      body(one, slab.data() + offset);
      offset += one.dense.nbytes();
    }
  };
  if (communicator.rank() == owner)
    each([](const Sent& one, std::uint8_t* at) { std::memcpy(at, one.dense.const_data_ptr(), one.dense.nbytes()); });
  communicator.broadcast(std::span(slab), owner);
  if (communicator.rank() == owner) return;
  each([](const Sent& one, const std::uint8_t* at) {
    std::memcpy(one.dense.mutable_data_ptr(), at, one.dense.nbytes());
    // Without autograd's count where that can be: graphs of forwards before this one may have saved the buffer.
    if (one.dense.const_data_ptr() != one.base.const_data_ptr()) one.base.copy_(one.dense);
  });
}

/// A message of each owner.
void send_chosen(const ModelDescription& model, const std::vector<bool>& chosen, const Communicator& communicator) {
  std::set<int> owners{0};
  for (const auto& [name, owner] : model.buffer_owners) owners.insert(owner);
  for (const int owner : owners) send_as_one(model, chosen, owner, communicator);
}

}  // namespace

std::vector<std::uint64_t> buffer_digests(const ModelDescription& model) {
  std::vector<std::uint64_t> digests;
  for (const auto& [name, buffer, _] : model.buffers) {
    if (!buffer.defined()) {
      digests.push_back(0);
      continue;
    }
    const at::Tensor dense = buffer.to(at::kCPU).contiguous();
    digests.push_back(digest64({static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()}));
  }
  return digests;
}

void require_shareable(const ModelDescription& model, const Communicator& communicator) {
  if (communicator.size() > 1) require_same_structure(model, communicator);
}

std::string share_buffers(const ModelDescription& model, const Communicator& communicator) {
  if (communicator.size() == 1) return "";
  const std::vector<std::uint64_t> before = buffer_digests(model);
  send_buffers(model, communicator);
  const std::vector<std::uint64_t> after = buffer_digests(model);
  const auto differ = std::ranges::mismatch(before, after).in1;
  return differ != before.end() ? model.buffers[static_cast<std::size_t>(differ - before.begin())].name : "";
}

void send_buffers(const ModelDescription& model, const Communicator& communicator) {
  const at::NoGradGuard no_grad;
  std::vector<std::int64_t> none;
  require_same_now(model, communicator, none);
  send_chosen(model, std::vector<bool>(model.buffers.size(), true), communicator);
}

bool has_statistics(const ModelDescription& model) {
  return std::ranges::any_of(model.buffers, [](const NamedBuffer& one) {
    return one.persistent && one.tensor.defined() && one.tensor.is_floating_point();
  });
}

void send_changed_buffers(const ModelDescription& model, const std::vector<bool>& changed,
                          const Communicator& communicator) {
  const at::NoGradGuard no_grad;
  std::vector<std::int64_t> counts(changed.begin(), changed.end());
  require_same_now(model, communicator, counts);
  send_chosen(model, {counts.begin(), counts.end()}, communicator);
}

}  // namespace zeroth::libtorch
