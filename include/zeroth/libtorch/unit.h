// Unit: the parameters that are gathered and reduced together. A wrapper around a LibTorch module, because LibTorch has
// no forward hooks.
//
//   struct BlockImpl : torch::nn::Module { torch::Tensor forward(torch::Tensor x_BTD); ... };
//   TORCH_MODULE(Block);
//   zeroth::libtorch::Unit<Block> unit{Block(...)};   // a module holder: register it, call unit->forward(x)
//
// Without an engine a Unit passes calls on. Parameter names stay those of the plain model.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

class Runtime;

/// Name under which a Unit registers the module it wraps; the engine leaves it out of parameter names.
inline constexpr const char* kInnerName = "zeroth_inner";

/// One running forward of a unit. The constructor calls pre_forward, which may block for other ranks. finish() calls
/// post_forward. The destructor gives the lease back if an exception came before finish().
class UnitScope {
 public:
  enum class Kind : std::uint8_t { kForward, kReading };
  /// `runtime`: null makes all calls do nothing. kReading: for code that is no forward, see Gathered.
  UnitScope(std::shared_ptr<Runtime> runtime, int unit, Kind kind = Kind::kForward);
  UnitScope(const UnitScope&) = delete;
  UnitScope& operator=(const UnitScope&) = delete;
  ~UnitScope();
  /// Before the forward computes, for each tensor that is handed over to it: what it takes in its place, so that the
  /// tensor's gradient has no loss scale. Another tensor of the same memory for a leaf that requires a gradient, under
  /// fp16; else `tensor` itself.
  [[nodiscard]] at::Tensor input(const at::Tensor& tensor);
  /// Attaches the hooks of the unit's backward to `outputs` and ends the forward.
  void finish(const std::vector<at::Tensor>& outputs);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Who may write to what is gathered; see EngineBase::gathered().
struct Writers {
  static constexpr int kNobody = -2;
  static constexpr int kAll = -1;  ///< every rank writes the same values
  int rank = kNobody;              ///< or the one whose values count
  [[nodiscard]] bool any() const { return rank != kNobody; }
};

/// Units whose parameters are gathered for code outside of their forwards; see EngineBase::gathered().
class Gathered {
 public:
  Gathered(std::shared_ptr<Runtime> runtime, const std::vector<at::Tensor>& parameters, Writers writers);
  Gathered(Gathered&&) noexcept;
  Gathered& operator=(Gathered&&) = delete;
  ~Gathered();
  /// Gives the parameters back, and makes what was written the value on all ranks: collective then. The destructor
  /// gives them back without throwing, and writes are undone. Throws kModel if one was written to that must not be,
  /// kMismatch if ranks wrote different values where all should write the same; nothing is changed then.
  void finish();

 private:
  void undo() noexcept;
  void end_scale() noexcept;

  std::shared_ptr<Runtime> runtime_;
  Writers writers_;
  std::vector<at::Tensor> scaled_{};  // that have the loss scale meanwhile
  std::vector<int> units_{};
  std::vector<int> params_{};         // that may be written
  std::vector<at::Tensor> before_{};  // values of these, on ranks that write
  std::vector<std::unique_ptr<UnitScope>> scopes_;
};

namespace detail {

/// Calls look(tensor) for the tensors inside of a value: a tensor, or optionals, pairs, tuples, vectors and maps of
/// tensors. `kAll`: a type that may hold others does not compile; else it counts as one without tensors.
template <bool kAll, class T, class Look>
void for_tensors_in(const T& value, const Look& look) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    const at::Tensor& tensor = value;
    look(tensor);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&look](const auto&... parts) { (for_tensors_in<kAll>(parts, look), ...); }, value);
  } else if constexpr (requires {
                         value.has_value();
                         *value;
                       }) {
    if (value.has_value()) for_tensors_in<kAll>(*value, look);
  } else if constexpr (requires {
                         value.begin();
                         value.end();
                         typename T::value_type;
                       } && !std::is_same_v<T, std::string>) {
    for (const auto& part : value) for_tensors_in<kAll>(part, look);
  } else if constexpr (kAll) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_convertible_v<const T&, std::string_view>,
                  "a unit's forward returns tensors, or optionals, pairs, tuples, vectors or maps of them");
  }
}

/// Type of a pointer to Impl::forward; void: it is a template, overloaded, or not there.
template <class Impl>
struct SignatureOf {
  using Type = void;
};
template <class Impl>
  requires requires { &Impl::forward; }
struct SignatureOf<Impl> {
  using Type = decltype(&Impl::forward);
};

/// What Impl::forward returns for such arguments; a substitution failure where it takes others.
template <class Impl, class... Given>
using ForwardResult = std::remove_cvref_t<decltype(std::declval<Impl&>().forward(std::declval<Given>()...))>;

/// Impl::forward can be called with the first arguments of a list.
template <class Impl, class Arguments, class Indices>
inline constexpr bool kTakesFirst = false;
template <class Impl, class... Args, std::size_t... At>
inline constexpr bool kTakesFirst<Impl, std::tuple<Args...>, std::index_sequence<At...>> =
    requires(Impl& impl) { impl.forward(std::declval<std::tuple_element_t<At, std::tuple<Args...>>>()...); };

/// The last argument of Impl::forward, which takes Args, has a default.
template <class Impl, class... Args>
inline constexpr bool kHasDefaults = false;
template <class Impl, class First, class... Others>
inline constexpr bool kHasDefaults<Impl, First, Others...> =
    kTakesFirst<Impl, std::tuple<First, Others...>, std::make_index_sequence<sizeof...(Others)>>;

}  // namespace detail

/// Appends to `into` the tensors inside the result of a forward: a tensor, or optionals, pairs, tuples, vectors and
/// maps of tensors. Other types that may hold a tensor do not compile.
template <class T>
void collect_tensors(const T& value, std::vector<at::Tensor>& into) {
  detail::for_tensors_in<true>(value, [&into](const at::Tensor& tensor) {
    if (tensor.defined()) into.push_back(tensor);
  });
}

/// Runs `body(args...)` as one forward of the unit and returns its result. May block for other ranks.
template <class Body, class... Args>
auto run_as_unit(std::shared_ptr<Runtime> runtime, int unit, Body&& body, Args&&... args) {
  UnitScope scope(std::move(runtime), unit);
  [[maybe_unused]] const auto taken = [&scope]<class T>(T&& value) -> decltype(auto) {
    if constexpr (std::is_same_v<std::remove_cvref_t<T>, at::Tensor>) {
      return scope.input(value);
    } else {
      return std::forward<T>(value);
    }
  };
  auto result = std::forward<Body>(body)(taken(std::forward<Args>(args))...);
  std::vector<at::Tensor> outputs;
  collect_tensors(result, outputs);
  scope.finish(outputs);
  return result;
}

/// The engine's interface to a Unit.
class UnitBase {
 public:
  UnitBase() = default;
  UnitBase(const UnitBase&) = delete;
  UnitBase& operator=(const UnitBase&) = delete;
  virtual ~UnitBase() = default;

  /// Type of the wrapped module; units of one type may be repeated units.
  [[nodiscard]] virtual const std::type_info& inner_type() const = 0;
  void connect(std::weak_ptr<Runtime> runtime, int unit) {
    runtime_ = std::move(runtime);
    unit_ = unit;
  }

 protected:
  std::weak_ptr<Runtime> runtime_;
  int unit_ = -1;
};

namespace detail {

/// What all units are: the wrapped module, under a name that the engine leaves out.
template <class Holder>
class UnitOf : public torch::nn::Module, public UnitBase {
 public:
  using Impl = typename Holder::ContainedType;
  explicit UnitOf(Holder inner) : inner_(register_module(kInnerName, std::move(inner))) {}

  Holder& inner() { return inner_; }
  [[nodiscard]] const std::type_info& inner_type() const override { return typeid(Impl); }

 protected:
  /// As the module's forward is called.
  template <class... Args>
  auto call(Args&&... args) {
    return run_as_unit(
        runtime_.lock(), unit_,
        [this](auto&&... inner) { return inner_->forward(std::forward<decltype(inner)>(inner)...); },
        std::forward<Args>(args)...);
  }
  /// The same for a forward without defaults, with arguments of its own types.
  template <class R, class... Args>
  R call_exactly(Args&... args) {
    return run_as_unit(
        runtime_.lock(), unit_, [this](Args... inner_args) { return inner_->forward(inner_args...); }, args...);
  }

 private:
  Holder inner_;
};

}  // namespace detail

/// Module that wraps `Holder` (a TORCH_MODULE holder) and is called as that is: with defaults of its forward, and also
/// where that is a template or overloaded, as of torch::nn::Sequential. Only a unit whose forward is one function
/// without defaults can be in a torch::nn::Sequential.
template <class Holder, class Signature = typename detail::SignatureOf<typename Holder::ContainedType>::Type>
class UnitImpl;

template <class Holder, class C, class R, class... Args>
  requires(!detail::kHasDefaults<typename Holder::ContainedType, Args...>)
class UnitImpl<Holder, R (C::*)(Args...)> : public detail::UnitOf<Holder> {
 public:
  using detail::UnitOf<Holder>::UnitOf;
  R forward(Args... args) { return this->template call_exactly<R, Args...>(args...); }
};

template <class Holder, class C, class R, class... Args>
  requires(detail::kHasDefaults<typename Holder::ContainedType, Args...>)
class UnitImpl<Holder, R (C::*)(Args...)> : public detail::UnitOf<Holder> {
 public:
  using detail::UnitOf<Holder>::UnitOf;
  R forward(Args... args) { return this->template call_exactly<R, Args...>(args...); }
  template <class... Given>
    requires(sizeof...(Given) < sizeof...(Args))
  detail::ForwardResult<typename Holder::ContainedType, Given...> forward(Given&&... given) {
    return this->call(std::forward<Given>(given)...);
  }
};

template <class Holder, class C, class R, class... Args>
class UnitImpl<Holder, R (C::*)(Args...) const> : public UnitImpl<Holder, R (C::*)(Args...)> {
 public:
  using UnitImpl<Holder, R (C::*)(Args...)>::UnitImpl;
};

template <class Holder>
class UnitImpl<Holder, void> : public detail::UnitOf<Holder> {
 public:
  using detail::UnitOf<Holder>::UnitOf;
  template <class... Given>
  detail::ForwardResult<typename Holder::ContainedType, Given...> forward(Given&&... given) {
    return this->call(std::forward<Given>(given)...);
  }
};

/// Holder of a UnitImpl; use it like any module holder.
template <class Holder>
class Unit : public torch::nn::ModuleHolder<UnitImpl<Holder>> {
 public:
  Unit(std::nullptr_t) : torch::nn::ModuleHolder<UnitImpl<Holder>>(nullptr) {}  // NOLINT: as torch's own holders
  explicit Unit(Holder inner)
      : torch::nn::ModuleHolder<UnitImpl<Holder>>(std::make_shared<UnitImpl<Holder>>(std::move(inner))) {}
  Unit(std::shared_ptr<UnitImpl<Holder>> impl)  // NOLINT: as torch's own holders
      : torch::nn::ModuleHolder<UnitImpl<Holder>>(std::move(impl)) {}

  /// As forward(); torch's own holder calls a forward only that is one function.
  template <class... Args>
  auto operator()(Args&&... args) {
    return this->get()->forward(std::forward<Args>(args)...);
  }
};

}  // namespace zeroth::libtorch
