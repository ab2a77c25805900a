#include "libtorch/safetensors_export.h"

#include <zeroth/base/error.h>
#include <zeroth/engine/safetensors.h>
#include <zeroth/zero/sync_point.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <optional>

namespace zeroth::libtorch {
namespace {

std::string dtype_name(const at::Tensor& tensor, const std::string& name) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return "F64";
    case at::kFloat:
      return "F32";
    case at::kHalf:
      return "F16";
    case at::kBFloat16:
      return "BF16";
    case at::kLong:
      return "I64";
    case at::kInt:
      return "I32";
    case at::kShort:
      return "I16";
    case at::kChar:
      return "I8";
    case at::kByte:
      return "U8";
    case at::kBool:
      return "BOOL";
    default:
      break;
  }
  throw Error(ErrorCode::kModel, "a buffer has a dtype that safetensors cannot hold",
              {.where = "libtorch.export", .which = name, .got = c10::toString(tensor.scalar_type())});
}

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
      entries.push_back({spec.name, safetensors_dtype(spec.dtype), spec.shape,
                         static_cast<std::uint64_t>(segment.numel) * size_of(spec.dtype)});
      for (const std::string& alias : spec.aliases) metadata[alias] = spec.name;
    }
  }
  std::vector<NamedBuffer> buffers;
  std::ranges::copy_if(model.buffers, std::back_inserter(buffers),
                       [](const NamedBuffer& one) { return one.persistent && one.tensor.defined(); });
  for (const auto& [name, buffer, _] : buffers) {
    entries.push_back({name, dtype_name(buffer, name), buffer.sizes().vec(), buffer.nbytes()});
  }
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
  for (const auto& [name, buffer, _] : buffers) writer.write(bytes_of(buffer.to(at::kCPU).contiguous()));
  writer.commit();
}

}  // namespace

void export_safetensors(const std::string& path, zeroth::Engine& engine, const ModelDescription& model) {
  // [Note: Export] One word from rank 0 before each flat, which all ranks then read together, so that a long export is
  // no silence and no rank reads alone; then how it ended: kWritten, or the length of the error's text.
  constexpr std::int64_t kAtWork = -1;
  constexpr std::int64_t kWritten = 0;
  engine.sync(SyncPoint::kExport);
  const Communicator& communicator = engine.communicator();
  const auto tell = [&communicator](std::int64_t word) {
    communicator.broadcast(std::span(&word, 1), 0);
    return word;
  };
  const auto failed = [&path](const char* what) {
    return Error(ErrorCode::kIo, what, {.where = "libtorch.export", .which = path});
  };
  std::optional<Error> error;
  if (engine.rank() == 0) {
    try {
      write_file(path, engine, model, [&tell] { tell(kAtWork); });
    } catch (const Error& caught) {
      error = caught;
    } catch (const c10::Error& caught) {
      error = failed(caught.what());
    } catch (const std::bad_alloc& caught) {
      error = failed(caught.what());
    } catch (const std::runtime_error& caught) {  // of files and the system; not the interrupt of a wait
      error = failed(caught.what());
    }
  }
  std::int64_t length = error ? static_cast<std::int64_t>(std::string(error->what()).size()) + 1 : kWritten;
  for (int flat = 0;; ++flat) {
    length = tell(engine.rank() == 0 ? length : kAtWork);
    if (length != kAtWork) break;
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
