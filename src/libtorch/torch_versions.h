// What differs between the torch versions that Zeroth builds beside (2.11.0 to 2.15.0). No other file knows of it.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

namespace zeroth::libtorch {

/// How an edge of autograd holds its node: std::shared_ptr, since torch 2.13 c10::intrusive_ptr.
using NodePointer = decltype(torch::autograd::Edge::function);

/// A node of autograd, held as edges hold it. A graph of any depth that it leads to is freed without recursion.
template <typename NodeType, typename... Arguments>
[[nodiscard]] auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<torch::autograd::Node>>) {
    // Found by the argument, when this is instantiated: torch 2.13 and later do not declare it.
    return std::shared_ptr<NodeType>(new NodeType(std::forward<Arguments>(arguments)...),
                                     [](NodeType* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<NodeType>(std::forward<Arguments>(arguments)...);
  }
}

/// A place of our own in the values of a thread that torch carries to the threads of a backward: the kinds are an enum,
/// since torch 2.15 (or earlier) addresses of names.
template <typename Kind = c10::DebugInfoKind>
[[nodiscard]] Kind own_debug_info() {
  if constexpr (std::is_enum_v<Kind>) {
    return static_cast<Kind>(0x5A);  // torch's own are below 10
  } else {
    static constexpr std::string_view kName = "ZEROTH_GRADIENT_LEVEL";
    return Kind(&kName);
  }
}

}  // namespace zeroth::libtorch
