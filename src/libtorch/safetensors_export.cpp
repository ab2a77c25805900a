#include "libtorch/safetensors_export.h"

#include <zeroth/base/error.h>
#include <zeroth/engine/safetensors.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace zeroth::libtorch {
namespace {

/// None: the format has no such type.
std::optional<std::string_view> dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kComplexFloat:
      return "C64";
    case at::kDouble:
      return "F64";
    case at::kFloat:
      return "F32";
    case at::kHalf:
      return "F16";
    case at::kBFloat16:
      return "BF16";
    case at::kFloat8_e4m3fn:
      return "F8_E4M3";
    case at::kFloat8_e5m2:
      return "F8_E5M2";
    case at::kFloat8_e4m3fnuz:
      return "F8_E4M3FNUZ";
    case at::kFloat8_e5m2fnuz:
      return "F8_E5M2FNUZ";
    case at::kFloat8_e8m0fnu:
      return "F8_E8M0";
    case at::kLong:
      return "I64";
    case at::kInt:
      return "I32";
    case at::kShort:
      return "I16";
    case at::kChar:
      return "I8";
    case at::kUInt64:
      return "U64";
    case at::kUInt32:
      return "U32";
    case at::kUInt16:
      return "U16";
    case at::kByte:
      return "U8";
    case at::kBool:
      return "BOOL";
    default:
      return std::nullopt;
  }
}

}  // namespace

SafetensorsEntry safetensors_entry(const std::string& name, const at::Tensor& tensor) {
  const auto refuse = [&name](const std::string& got, const char* hint) {
    throw Error(ErrorCode::kModel, "a tensor has no place in a safetensors file",
                {.where = "libtorch.export",
                 .which = name,
                 .expected = "a dense tensor of a dtype that safetensors has",
                 .got = got,
                 .hint = hint});
  };
  if (tensor.is_nested()) refuse("a nested tensor", "register the buffer with persistent=False");
  if (tensor.layout() != at::kStrided) refuse(tensor.toString(), "register the buffer with persistent=False");
  const std::optional<std::string_view> dtype = dtype_name(tensor.scalar_type());
  if (!dtype) refuse(c10::toString(tensor.scalar_type()), "convert it, or register the buffer with persistent=False");
  return {name, std::string(dtype.value_or("")), tensor.sizes().vec(), tensor.nbytes()};
}

at::Tensor row_major(const at::Tensor& tensor) {
  return tensor.to(at::kCPU).resolve_conj().resolve_neg().contiguous();
}

namespace {

std::span<const std::byte> bytes_of(const at::Tensor& contiguous) {
  return {static_cast<const std::byte*>(contiguous.const_data_ptr()), contiguous.nbytes()};
}

/// `announce` tells the other ranks that this one is going to read a flat; called before each.
void write_file(const std::string& path, zeroth::Engine& engine, const ModelDescription& model,
                const std::function<void()>& announce) {
  const at::NoGradGuard no_grad;
  const ModelLayout& layout = engine.layout();
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata{{"format", "pt"}};
  for (const FlatLayout& flat : layout.flats) {
    for (const Segment& segment : flat.segments) {
      const ParamSpec& spec = layout.params[static_cast<std::size_t>(segment.param)];
      entries.push_back(safetensors_entry(spec.name, model.tensors[static_cast<std::size_t>(segment.param)]));
      for (const std::string& alias : spec.aliases) metadata[alias] = spec.name;
    }
  }
  std::vector<NamedBuffer> buffers;
  std::ranges::copy_if(model.buffers, std::back_inserter(buffers),
                       [](const NamedBuffer& one) { return one.persistent && one.tensor.defined(); });
  for (const auto& [name, buffer, _] : buffers) entries.push_back(safetensors_entry(name, buffer));
  SafetensorsWriter writer(path, std::move(entries), metadata);
  std::vector<std::byte> staging;
  for (std::size_t index = 0; index < layout.flats.size(); ++index) {
    const FlatLayout& flat = layout.flats[index];
    staging.resize(flat.bytes());
    announce();
    engine.read_flat(static_cast<int>(index), staging.data());
    for (const Segment& segment : flat.segments) {
      if (segment.numel == 0) continue;
      // In the user's memory order; safetensors wants row-major.
      const at::Tensor& like = model.tensors[static_cast<std::size_t>(segment.param)];
      const at::Tensor value =
          at::from_blob(staging.data() + static_cast<std::size_t>(segment.offset) * size_of(flat.dtype), like.sizes(),
                        like.strides(), at::TensorOptions().dtype(like.scalar_type()));
      writer.write(bytes_of(value.contiguous()));
    }
    writer.flush();
  }
  for (const auto& [name, buffer, _] : buffers) writer.write(bytes_of(row_major(buffer)));
  writer.commit();
}

/// Of a model whose parameters ranks share: rank 0 writes each whole tensor as all ranks bring it. Returns what went
/// wrong on rank 0.
std::optional<Error> write_shared(const std::string& path, zeroth::Engine& engine, const ModelDescription& model,
                                  const std::function<std::optional<Error>(const std::function<void()>&)>& attempt) {
  const at::NoGradGuard no_grad;
  const ModelLayout& layout = engine.layout();
  std::unique_ptr<SafetensorsWriter> writer;
  std::optional<Error> error;
  const auto on_first = [&](const std::function<void()>& part) {
    if (engine.rank() == 0 && !error) error = attempt(part);
  };
  std::vector<NamedBuffer> buffers;
  std::ranges::copy_if(model.buffers, std::back_inserter(buffers),
                       [](const NamedBuffer& one) { return one.persistent && one.tensor.defined(); });
  std::map<std::string, at::Tensor> like;
  on_first([&] {
    std::vector<SafetensorsEntry> entries;
    std::set<std::string> known;
    std::map<std::string, std::string> metadata{{"format", "pt"}};
    for (const UnitSpec& unit : layout.units) {
      for (const int param : unit.params) {
        const ParamSpec& spec = layout.params[static_cast<std::size_t>(param)];
        const at::Tensor& tensor = model.tensors[static_cast<std::size_t>(param)];
        if (!known.insert(spec.tensor_name()).second) continue;  // another box of it
        SafetensorsEntry entry = safetensors_entry(spec.tensor_name(), tensor);
        if (!spec.logical_shape.empty()) {
          entry.bytes = tensor.element_size();
          for (const std::int64_t extent : spec.logical_shape) entry.bytes *= static_cast<std::uint64_t>(extent);
          entry.shape = spec.logical_shape;
        } else {
          like[spec.name] = tensor;
        }
        entries.push_back(std::move(entry));
        for (const std::string& alias : spec.aliases) metadata[alias] = spec.tensor_name();
      }
    }
    for (const auto& [name, buffer, _] : buffers) entries.push_back(safetensors_entry(name, buffer));
    writer = std::make_unique<SafetensorsWriter>(path, std::move(entries), metadata);
  });
  engine.read_states({.kind = "param", .ranks = {0}}, [&](StateTensor state) {
    on_first([&] {
      if (state.data.empty()) return;
      const auto plain = like.find(state.name);
      if (plain == like.end() || plain->second.is_contiguous())
        return writer->write(std::span<const std::byte>(state.data));
      // In the user's memory order; safetensors wants row-major.
      const at::Tensor value = at::from_blob(state.data.data(), plain->second.sizes(), plain->second.strides(),
                                             at::TensorOptions().dtype(plain->second.scalar_type()));
      writer->write(bytes_of(value.contiguous()));
    });
  });
  on_first([&] {
    writer->flush();
    for (const auto& [name, buffer, _] : buffers) writer->write(bytes_of(row_major(buffer)));
    writer->commit();
  });
  return error;
}

}  // namespace

void export_safetensors(const std::string& path, zeroth::Engine& engine, const ModelDescription& model) {
  // [Note: Export] One word from rank 0 before each flat, which all ranks then read together, so that a long export is
  // no silence and no rank reads alone; then how it ended: kWritten, or the length of the error's text.
  constexpr std::int64_t kAtWork = -1;
  constexpr std::int64_t kWritten = 0;
  const Communicator& communicator = engine.communicator();
  const auto tell = [&communicator](std::int64_t word) {
    communicator.broadcast(std::span(&word, 1), 0);
    return word;
  };
  const auto failed = [&path](const char* what) {
    return Error(ErrorCode::kIo, what, {.where = "libtorch.export", .which = path});
  };
  const auto attempt = [&failed](const std::function<void()>& part) -> std::optional<Error> {
    try {
      part();
    } catch (const Error& caught) {
      return caught;
    } catch (const c10::Error& caught) {
      return failed(caught.what());
    } catch (const std::bad_alloc& caught) {
      return failed(caught.what());
    } catch (const std::runtime_error& caught) {  // of files and the system; not the interrupt of a wait
      return failed(caught.what());
    }
    return std::nullopt;
  };
  const bool shared = std::ranges::any_of(model.axes, [](const ParamAxes& axes) { return !(axes == ParamAxes{}); });
  std::optional<Error> error;
  if (shared) {
    error = write_shared(path, engine, model, attempt);
  } else if (engine.rank() == 0) {
    error = attempt([&] { write_file(path, engine, model, [&tell] { tell(kAtWork); }); });
  }
  std::int64_t length = error ? static_cast<std::int64_t>(std::string(error->what()).size()) + 1 : kWritten;
  for (int flat = 0;; ++flat) {
    length = tell(engine.rank() == 0 ? length : kAtWork);
    if (length != kAtWork || shared) break;
    engine.read_flat(flat, nullptr);
  }
  if (length == kWritten) return;
  std::vector<std::uint8_t> text(static_cast<std::size_t>(length), 0);
  if (error) std::copy_n(error->what(), static_cast<std::size_t>(length) - 1, text.begin());
  communicator.broadcast(std::span(text), 0);
  if (error) throw Error(*error);
  throw Error(ErrorCode::kIo, "rank 0 could not write the weights",
              {.where = "libtorch.export", .which = path, .got = reinterpret_cast<const char*>(text.data())});
}

}  // namespace zeroth::libtorch
