// Runtime: states by name as torch tensors, read, written and averaged.
#include "engine/texts.h"
#include "libtorch/buffers.h"
#include "libtorch/runtime.h"
#include "libtorch/safetensors_export.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <utility>

namespace zeroth::libtorch {
namespace {

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return at::kDouble;
    case DType::kFloat32:
      return at::kFloat;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kInt64:
      return at::kLong;
    case DType::kInt32:
      return at::kInt;
    case DType::kUInt8:
      return at::kByte;
  }
  return at::kByte;
}

/// Of values of a parameter: a complex one that trains is kept as pairs of reals.
at::ScalarType scalar_type_of(DType dtype, const at::Tensor& like) {
  if (!like.is_complex()) return scalar_type_of(dtype);
  return dtype == DType::kFloat64 ? at::kComplexDouble : at::kComplexFloat;
}

at::TensorOptions on_cpu(at::ScalarType type) {
  return at::TensorOptions().dtype(type).device(at::kCPU);
}

std::span<const std::byte> bytes_of_dense(const at::Tensor& dense) {
  return {static_cast<const std::byte*>(dense.const_data_ptr()), dense.nbytes()};
}

/// The tensor that a parameter is a part of, as one would hold it: for a parameter of its own the tensor itself; for a
/// box of a larger one a tensor without memory, row major.
at::Tensor whole_of(const ParamSpec& spec, const at::Tensor& parameter) {
  if (spec.logical_shape.empty()) return parameter;
  std::vector<std::int64_t> shape = spec.logical_shape;
  if (parameter.is_complex() && spec.trainable) shape.pop_back();
  return at::empty(shape, at::TensorOptions().dtype(parameter.scalar_type()).device(at::kMeta));
}

/// The values in the memory order of `like`, which is dense.
at::Tensor in_order_of(const at::Tensor& like, const at::Tensor& values, at::ScalarType type) {
  at::Tensor ordered = at::empty_strided(like.sizes(), like.strides(), on_cpu(type));
  ordered.copy_(values);
  return ordered;
}

std::string shape_of_text(at::IntArrayRef sizes) {
  std::vector<std::string> extents;
  for (const std::int64_t extent : sizes) extents.push_back(std::to_string(extent));
  return "[" + join(extents, ", ") + "]";
}

/// What rank 0 has, for all ranks to judge: lines of name, dtype and shape.
struct Given {
  std::string name;
  at::ScalarType type;
  std::vector<std::int64_t> shape;
};

std::string text_of(const std::vector<NamedTensor>& values) {
  std::string text;
  for (const auto& [name, tensor] : values) {
    text += name + '\0' + std::to_string(static_cast<int>(tensor.scalar_type())) + '\0' + std::to_string(tensor.dim()) +
            '\0';
    for (const std::int64_t extent : tensor.sizes()) text += std::to_string(extent) + '\0';
  }
  return text;
}

std::vector<Given> given_in(const std::string& text) {
  std::vector<Given> given;
  std::size_t at = 0;
  const auto next = [&] {
    const std::size_t end = text.find('\0', at);
    ZR_CHECK(end != std::string::npos, ErrorCode::kMismatch, "rank 0's list of weights is cut",
             {.where = "libtorch.load_weights"});
    std::string word = text.substr(at, end - at);
    at = end + 1;
    return word;
  };
  while (at < text.size()) {
    Given one{.name = next(), .type = static_cast<at::ScalarType>(std::stoi(next())), .shape = {}};
    for (int dims = std::stoi(next()); dims > 0; --dims) one.shape.push_back(std::stoll(next()));
    given.push_back(std::move(one));
  }
  return given;
}

/// Of the values that the core takes for a weight.
DType value_dtype(const ParamSpec& spec) {
  return spec.trainable ? accumulation_dtype(spec.dtype) : spec.dtype;
}

/// The core reads only what it keeps, and converts it; `like` is in the same order of memory.
bool is_read_in_place(const at::Tensor& value, const at::Tensor& like) {
  const auto floats = [](at::ScalarType type) {
    return type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  };
  const bool aligned = reinterpret_cast<std::uintptr_t>(value.const_data_ptr()) % value.element_size() == 0;
  return value.is_cpu() && aligned && value.strides() == like.strides() && floats(value.scalar_type()) &&
         floats(like.scalar_type());
}

/// NaN equals NaN.
bool have_same_values(const at::Tensor& a, const at::Tensor& b) {
  if (a.const_data_ptr() == b.const_data_ptr() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type())
    return true;
  const at::Tensor there = b.to(a.device());
  return a.eq(there).logical_or(a.ne(a).logical_and(there.ne(there))).all().item<bool>();
}

/// Two names of one parameter whose values are of one shape and differ; "" if there are none. The later would win.
std::string tied_and_different(const std::vector<NamedTensor>& values,
                               const std::map<std::string, std::size_t>& param_of) {
  std::map<std::size_t, const NamedTensor*> first;
  for (const NamedTensor& one : values) {
    const auto param = param_of.find(one.first);
    if (param == param_of.end()) continue;
    const auto [known, fresh] = first.try_emplace(param->second, &one);
    const auto& [name, tensor] = *known->second;
    if (fresh || tensor.sizes() != one.second.sizes() || have_same_values(tensor, one.second)) continue;
    return name + ", " + one.first;
  }
  return "";
}

/// What all ranks are to judge: rank 0's list, or that of all.
std::string agreed_text(const std::vector<NamedTensor>& values, const std::map<std::string, std::size_t>& param_of,
                        const Runtime::WeightLoad& how, const Communicator& communicator) {
  const bool says = how.everywhere || communicator.rank() == 0;
  std::string own;
  if (says) {
    const auto odd = std::ranges::find_if(values, [](const NamedTensor& one) {
      return !one.second.defined() || one.second.layout() != at::kStrided || one.second.is_meta();
    });
    own = odd == values.end() ? "+" + text_of(values) : "-" + odd->first;
    const std::string tied = odd == values.end() ? tied_and_different(values, param_of) : "";
    if (!tied.empty()) own = "=" + tied;
    if (!how.failure.empty()) own = "!" + how.failure;
  }
  if (how.everywhere) {
    // Digests first: lists of names may be long.
    const std::int64_t mine = own.starts_with("+") ? static_cast<std::int64_t>(digest64(own) >> 1U) : -1;
    std::vector<std::int64_t> all(static_cast<std::size_t>(communicator.size()));
    communicator.all_gather(std::span(&mine, 1), std::span(all));
    if (const auto failed = std::ranges::find(all, -1); failed != all.end()) {
      own = broadcast_text(std::move(own), static_cast<int>(failed - all.begin()), communicator);
      ZR_CHECK(!own.starts_with("!"), ErrorCode::kIo, "weights could not be read, so nothing is changed",
               {.where = "libtorch.load_weights",
                .who = "rank " + std::to_string(failed - all.begin()),
                .got = own.substr(std::min<std::size_t>(1, own.size()))});
    } else {
      const auto other = std::ranges::find_if(all, [&all](std::int64_t digest) { return digest != all.front(); });
      ZR_CHECK(other == all.end(), ErrorCode::kMismatch, "ranks have other weights to load",
               {.where = "libtorch.load_weights",
                .who = "rank " + std::to_string(other - all.begin()),
                .expected = "the names, shapes and dtypes of rank 0"});
    }
  } else {
    own = broadcast_text(std::move(own), 0, communicator);
  }
  ZR_CHECK(!own.starts_with("="), ErrorCode::kModel, "two names of one tied weight have different values",
           {.where = "libtorch.load_weights",
            .which = own.substr(std::min<std::size_t>(1, own.size())),
            .hint = "give one of the names, or the same values for both: the model has one tensor there"});
  ZR_CHECK(own.starts_with("+"), ErrorCode::kModel, "a value for a weight is no dense tensor",
           {.where = "libtorch.load_weights", .which = own.substr(std::min<std::size_t>(1, own.size()))});
  return own.substr(1);
}

/// Whether values of one dtype may become those of another.
bool converts(at::ScalarType from, at::ScalarType to) {
  if (from == to) return true;
  const auto floats = [](at::ScalarType type) {
    return type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  };
  return floats(from) && floats(to);
}

std::string few_names(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 10;
  const std::vector<std::string> first(names.begin(),
                                       names.begin() + static_cast<std::ptrdiff_t>(std::min(kMost, names.size())));
  return join(first, ", ") + (names.size() > kMost ? " and " + std::to_string(names.size() - kMost) + " more" : "");
}

}  // namespace

void Runtime::require_all_ours() const {
  for (std::size_t unit = 0; unit < model_.units.size(); ++unit) slots_.require_ours(static_cast<int>(unit));
}

void Runtime::take_writes() {
  core_->require_same_weights("a save or a read of weights");
  slots_.require_kept();
  slots_.take_writes();
  core_->take_writes();
}

void Runtime::note_writes(ParameterSlots::Digests which) {
  if (core_->world() > 1) core_->set_writes(slots_.digests(which));  // alone a rank has nobody to compare with
}

std::vector<int> Runtime::params_without(const std::vector<std::string>& names) const {
  std::vector<int> params;
  for (std::size_t param = 0; param < model_.params.size(); ++param) {
    if (std::ranges::find(names, model_.params[param].tensor_name()) == names.end())
      params.push_back(static_cast<int>(param));
  }
  return params;
}

void Runtime::take_new_weights() {
  std::vector<int> all;
  for (std::size_t param = 0; param < model_.params.size(); ++param) all.push_back(static_cast<int>(param));
  slots_.refresh(ParameterSlots::Renewed::kAll);
  slots_.bump_versions(all);
}

void Runtime::read_states(const StateQuery& query,
                          const std::function<void(const std::string& name, at::Tensor)>& take) {
  require_own_process();
  settle();
  require_all_ours();
  take_writes();
  note_writes(ParameterSlots::Digests::kWritten);
  std::map<std::string, std::size_t> params;
  for (std::size_t param = 0; param < model_.params.size(); ++param)
    params.emplace(model_.params[param].tensor_name(), param);
  core_->read_states(query, [&](const StateTensor& state) {
    const std::size_t param = params.at(state.name);
    const ParamSpec& spec = model_.params[param];
    const at::Tensor& like = slots_.tensor(static_cast<int>(param));
    const bool own_dtype = query.kind == "param" || (query.kind == "master" && !spec.trainable);
    const at::ScalarType type = own_dtype ? like.scalar_type() : scalar_type_of(state.dtype, like);
    std::vector<std::int64_t> shape = state.shape;
    if (like.is_complex() && spec.trainable) shape.pop_back();
    const at::Tensor tensor = like.sizes() == at::IntArrayRef(shape)
                                  ? at::empty_strided(like.sizes(), like.strides(), on_cpu(type))
                                  : at::empty(shape, on_cpu(type));
    ZR_ASSERT(tensor.nbytes() == state.data.size(), "a state does not fit its tensor");
    if (!state.data.empty()) std::memcpy(tensor.mutable_data_ptr(), state.data.data(), state.data.size());
    take(state.name, tensor);
  });
  slots_.agree();
}

std::vector<LocalState> Runtime::local_states(const std::string& kind) {
  require_own_process();
  settle();
  take_writes();
  std::vector<LocalState> states;
  for (StatePart& part : core_->local_states(kind)) {
    const auto param = std::ranges::find(model_.params, part.name, &ParamSpec::name) - model_.params.begin();
    const at::Tensor& like = slots_.tensor(static_cast<int>(param));
    const bool trainable = model_.params[static_cast<std::size_t>(param)].trainable;
    const bool own_dtype = (kind == "param" || (kind == "master" && !trainable)) && !(like.is_complex() && trainable);
    at::Tensor values =
        at::empty({part.range.size()}, on_cpu(own_dtype ? like.scalar_type() : scalar_type_of(part.dtype)));
    if (!part.data.empty()) std::memcpy(values.mutable_data_ptr(), part.data.data(), part.data.size());
    states.push_back({.name = part.name, .values = std::move(values), .range = std::move(part.range)});
  }
  return states;
}

WeightReport Runtime::load_weights(const std::vector<NamedTensor>& values, const WeightLoad& how) {
  require_own_process();
  settle();
  guards_.clear();
  require_all_ours();
  slots_.take_writes();  // what is not loaded keeps them
  core_->require_own_weights("load_state_dict()");
  core_->require_quiet("load_state_dict()");
  const at::NoGradGuard no_grad;
  return core_->together([&] {
    core_->sync(load_weights_);
    std::map<std::string, std::size_t> param_of;
    for (std::size_t param = 0; param < model_.params.size(); ++param) {
      param_of.emplace(model_.params[param].tensor_name(), param);
      for (const std::string& alias : model_.params[param].aliases) param_of.emplace(alias, param);
    }
    // All ranks judge by the same words, before anything is changed.
    const std::vector<Given> given = given_in(agreed_text(values, param_of, how, core_->communicator()));
    std::map<std::string, std::size_t> buffer_of;
    for (std::size_t buffer = 0; buffer < model_.buffers.size(); ++buffer) {
      const NamedBuffer& one = model_.buffers[buffer];
      if (one.persistent && one.tensor.defined()) buffer_of[one.name] = buffer;
    }
    WeightReport report;
    std::vector<std::string> unfit;
    std::map<std::size_t, std::size_t> of_param;  // index in `given`
    std::map<std::size_t, std::size_t> of_buffer;
    for (std::size_t index = 0; index < given.size(); ++index) {
      const Given& one = given[index];
      const auto param = param_of.find(one.name);
      const auto buffer = buffer_of.find(one.name);
      if (param == param_of.end() && buffer == buffer_of.end()) {
        report.unexpected.push_back(one.name);
        continue;
      }
      const at::Tensor like = param != param_of.end() ? whole_of(model_.params[param->second],
                                                                 slots_.tensor(static_cast<int>(param->second)))
                                                      : model_.buffers[buffer->second].tensor;
      if (like.sizes() != at::IntArrayRef(one.shape) || !converts(one.type, like.scalar_type())) {
        unfit.push_back(one.name + ": " + c10::toString(one.type) + " " + shape_of_text(one.shape) + " for " +
                        c10::toString(like.scalar_type()) + " " + shape_of_text(like.sizes()));
      }
      if (param != param_of.end()) {
        of_param[param->second] = index;
      } else {
        of_buffer[buffer->second] = index;
      }
    }
    for (const auto& [name, param] : param_of) {
      if (!of_param.contains(param) && model_.params[param].tensor_name() == name) report.missing.push_back(name);
    }
    for (const auto& [name, buffer] : buffer_of) {
      if (!of_buffer.contains(buffer)) report.missing.push_back(name);
    }
    ZR_CHECK(unfit.empty(), ErrorCode::kModel, "values have other shapes or dtypes than the model's weights",
             {.where = "libtorch.load_weights", .got = few_names(unfit)});
    ZR_CHECK(!how.strict || (report.missing.empty() && report.unexpected.empty()), ErrorCode::kModel,
             "values are of another model",
             {.where = "libtorch.load_weights",
              .expected = "every name of state_dict(), and no others",
              .got = (report.missing.empty() ? "" : "missing " + few_names(report.missing)) +
                     (report.missing.empty() || report.unexpected.empty() ? "" : "; ") +
                     (report.unexpected.empty() ? "" : "beyond the model " + few_names(report.unexpected)),
              .hint = std::string(words_->not_strict) + " keeps what is missing and leaves out the rest"});

    WeightWrite write;
    std::vector<std::pair<std::size_t, std::size_t>> order(of_param.begin(), of_param.end());
    for (const auto& [param, index] : order) write.names.push_back(model_.params[param].tensor_name());
    at::Tensor keep;
    if (how.everywhere) {
      write.source = -1;
      write.dtype = [&](std::size_t number) {
        const auto& [param, index] = order[number];
        return is_read_in_place(values[index].second,
                                whole_of(model_.params[param], slots_.tensor(static_cast<int>(param))))
                   ? *dtype_of(values[index].second.scalar_type())
                   : value_dtype(model_.params[param]);
      };
    }
    write.values = [&](std::size_t number) {
      const auto& [param, index] = order[number];
      const at::Tensor& value = values[index].second;
      const ParamSpec& spec = model_.params[param];
      const at::Tensor like = whole_of(spec, slots_.tensor(static_cast<int>(param)));
      const at::ScalarType type = spec.trainable ? scalar_type_of(value_dtype(spec), like) : like.scalar_type();
      keep = how.everywhere && is_read_in_place(value, like) ? value : in_order_of(like, value, type);
      return bytes_of_dense(keep);
    };
    core_->write_weights(write);
    ++loads_;
    take_new_weights();
    slots_.agree(params_without(report.missing));
    if (!of_buffer.empty()) {
      if (how.everywhere || core_->rank() == 0) {
        for (const auto& [buffer, index] : of_buffer) model_.buffers[buffer].tensor.copy_(values[index].second);
      }
      if (core_->world() > 1) send_buffers(model_, core_->communicator());
    }
    return report;
  });
}

void Runtime::add_local_updates(const LocalSettings& settings) {
  require_own_process();
  settle();
  guards_.clear();
  require_all_ours();
  take_writes();
  // Before the ranks of all sites meet: this rank alone might call twice.
  std::unique_ptr<SiteLine> across;
  if (core_->follower() == nullptr) across = world_->across_sites(across_traffic_);
  (void)LocalUpdates::attach(*core_, std::move(across), settings);
  across_traffic_->reset();
  take_new_weights();
}

LocalReport Runtime::local_report() const {
  const auto* const local = dynamic_cast<const LocalUpdates*>(core_->follower());
  ZR_CHECK(local != nullptr, ErrorCode::kUsage, "the engine has no local updates",
           {.where = "libtorch.local_updates", .hint = "zeroth.local_updates(engine, steps) begins them"});
  return local->report();
}

void Runtime::add_average(const std::string& name) {
  require_own_process();
  settle();
  take_writes();
  core_->add_average(name);
}

void Runtime::update_average(const std::string& name, double decay) {
  require_own_process();
  take_writes();
  core_->update_average(name, decay);
}

void Runtime::swap_average(const std::string& name) {
  require_own_process();
  settle();
  guards_.clear();
  require_all_ours();
  take_writes();
  core_->swap_average(name);
  take_new_weights();
}

void Runtime::require_writable(Writers writers) {
  require_own_process();
  settle();
  guards_.clear();
  ZR_CHECK(writers.rank < core_->world() && writers.rank >= Writers::kAll, ErrorCode::kUsage,
           "there is no such rank to write parameters",
           {.where = "libtorch.gathered",
            .expected = "0 to " + std::to_string(core_->world() - 1) + ", or all",
            .got = std::to_string(writers.rank)});
  require_all_ours();
  take_writes();
  core_->require_own_weights(words_->edit_call);
  core_->require_quiet(words_->edit_call);
}

std::vector<int> Runtime::params_of(const std::vector<at::Tensor>& parameters) const {
  std::set<int> params;
  for (const at::Tensor& parameter : parameters) {
    const auto same =
        std::ranges::find_if(model_.tensors, [&](const at::Tensor& one) { return one.is_same(parameter); });
    if (same != model_.tensors.end()) params.insert(static_cast<int>(same - model_.tensors.begin()));
  }
  return {params.begin(), params.end()};
}

std::vector<at::Tensor> Runtime::values_of(const std::vector<int>& params) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (const int param : params) values.push_back(slots_.tensor(param).detach().clone());
  return values;
}

std::vector<at::Tensor> Runtime::take_back(const std::vector<int>& params, const std::vector<at::Tensor>& before) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> written(params.size());
  for (std::size_t index = 0; index < params.size(); ++index) {
    const int param = params[index];
    slots_.require_ours(core_->layout().places[static_cast<std::size_t>(param)].unit);
    const at::Tensor& tensor = slots_.tensor(param);
    const at::Tensor now = tensor.detach().to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    const at::Tensor old = before[index].to(at::kCPU);
    if (now.nbytes() == 0 || std::memcmp(now.const_data_ptr(), old.const_data_ptr(), now.nbytes()) == 0) continue;
    tensor.detach().copy_(before[index]);
    written[index] = now;
  }
  slots_.own_versions(params);
  return written;
}

void Runtime::write_edits(const std::vector<int>& params, const std::vector<at::Tensor>& written, Writers writers,
                          const std::exception_ptr& failure) {
  auto others = slots_.digests(ParameterSlots::Digests::kWritten);
  std::erase_if(others, [&params](const auto& one) { return std::ranges::find(params, one.first) != params.end(); });
  core_->set_writes(others);
  core_->together([&] {
    core_->sync(edit_);
    core_->require_same_writes();
    const Communicator& communicator = core_->communicator();
    const auto world = static_cast<std::size_t>(communicator.size());
    const auto wrote = [&written](std::size_t index) { return index < written.size() && written[index].defined(); };
    const bool may_write = writers.rank == Writers::kAll || writers.rank == communicator.rank();
    const auto other = std::ranges::find_if(written, [](const at::Tensor& one) { return one.defined(); });
    // One word a rank for how it went, from 2 the parameter that the rank must not write; and one a parameter: a digest
    // of what was written, or whether something had been written before, which other ranks may not have.
    constexpr std::int64_t kBefore = 2;
    std::vector<std::int64_t> own{failure ? 1 : 0};
    if (!may_write && !failure && other != written.end()) own[0] = 2 + (other - written.begin());
    for (std::size_t index = 0; index < params.size(); ++index) {
      if (!wrote(index)) {
        own.push_back(slots_.is_written(params[index]) ? kBefore : 0);
        continue;
      }
      const auto* data = static_cast<const char*>(written[index].const_data_ptr());
      own.push_back(static_cast<std::int64_t>(digest64({data, written[index].nbytes()}) >> 1U | 1U));
    }
    std::vector<std::int64_t> all(world * own.size());
    communicator.all_gather(std::span<const std::int64_t>(own), std::span(all));
    if (failure) std::rethrow_exception(failure);
    for (std::size_t rank = 0; rank < world; ++rank) {
      const std::int64_t word = all[rank * own.size()];
      ZR_CHECK(word != 1, ErrorCode::kModel,
               "another rank wrote to a parameter that it must not write, so nothing is changed",
               {.where = "libtorch.gathered", .who = "rank " + std::to_string(rank)});
      ZR_CHECK(word == 0, ErrorCode::kModel, "a rank wrote to a parameter that only another one may write",
               {.where = "libtorch.gathered",
                .who = "rank " + std::to_string(rank) + "/" + std::to_string(world),
                .which = model_.params[static_cast<std::size_t>(params[static_cast<std::size_t>(word - 2)])].name,
                .expected = "writes on rank " + std::to_string(writers.rank),
                .hint = std::string(words_->edit_all) + " lets every rank write the same; nothing is changed"});
    }
    const std::size_t source = writers.rank == Writers::kAll ? 0 : static_cast<std::size_t>(writers.rank);
    WeightWrite write{.source = writers.rank, .masters = false};
    std::vector<std::size_t> chosen;
    std::vector<int> later;  // written before by every rank: the next call of all compares them
    for (std::size_t index = 0; index < params.size(); ++index) {
      const std::string& name = model_.params[static_cast<std::size_t>(params[index])].name;
      const std::int64_t wanted = all[source * own.size() + 1 + index];
      for (std::size_t rank = 0; writers.rank == Writers::kAll && rank < world; ++rank) {
        ZR_CHECK(all[rank * own.size() + 1 + index] == wanted, ErrorCode::kMismatch,
                 "ranks wrote different values to a parameter",
                 {.where = "libtorch.gathered",
                  .who = "rank " + std::to_string(rank) + "/" + std::to_string(world),
                  .which = name,
                  .expected = "what rank 0 wrote, to the bit",
                  .hint = std::string(words_->edit_first) +
                          " takes rank 0's values; give random numbers the same seed on all ranks"});
      }
      bool differs = false;
      for (std::size_t rank = 0; writers.rank != Writers::kAll && rank < world; ++rank)
        differs = differs || all[rank * own.size() + 1 + index] == kBefore;
      if (wanted == kBefore && !differs) later.push_back(params[index]);
      if ((wanted == 0 || wanted == kBefore) && !differs) continue;
      ZR_CHECK(model_.params[static_cast<std::size_t>(params[index])].logical_shape.empty(), ErrorCode::kUsage,
               "a parameter that ranks share is not written in parts, so nothing is changed",
               {.where = "libtorch.gathered",
                .which = name,
                .hint = "load_state_dict() takes the whole tensor and gives each rank its part"});
      write.names.push_back(name);
      chosen.push_back(index);
    }
    const auto agree = [&] {
      std::vector<int> known;
      for (int param = 0; param < static_cast<int>(model_.params.size()); ++param) {
        if (std::ranges::find(later, param) == later.end()) known.push_back(param);
      }
      slots_.agree(known);
    };
    if (chosen.empty()) return agree();
    at::Tensor keep;
    write.values = [&](std::size_t number) {
      const std::size_t index = chosen[number];
      const at::Tensor& like = slots_.tensor(params[index]);
      const at::Tensor& values = wrote(index) ? written[index] : like;
      keep = in_order_of(like, values.detach(), like.scalar_type());
      return bytes_of_dense(keep);
    };
    core_->write_weights(write);
    take_new_weights();
    agree();
  });
}

}  // namespace zeroth::libtorch
