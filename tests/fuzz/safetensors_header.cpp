// A safetensors file: tensors that lie in it, and read back as themselves when they are written again; or which rule is
// broken.
#include "fuzz/fuzz_target.h"
#include "gpt_cpp/safetensors_file.h"

#include <zeroth/base/error.h>
#include <zeroth/engine/safetensors.h>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

using zeroth::fuzz::expect;

namespace {

using Tensors = std::map<std::string, gpt::StoredTensor>;

/// A name that this process alone uses, in memory where there is some.
std::filesystem::path scratch() {
  const std::filesystem::path memory = "/dev/shm";
  std::error_code ignored;
  const auto folder = std::filesystem::is_directory(memory, ignored) ? memory : std::filesystem::temp_directory_path();
  return folder / ("fuzz-safetensors-" + std::to_string(::getpid()));
}

void check_written_again(const Tensors& tensors) {
  std::vector<zeroth::SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors) {
    entries.push_back({.name = name, .dtype = tensor.dtype, .shape = tensor.shape, .bytes = tensor.data.size()});
  }
  const std::filesystem::path path = scratch();
  {
    zeroth::SafetensorsWriter writer(path, entries, {});
    for (const auto& [name, tensor] : tensors) writer.write(tensor.data);
    writer.commit();
  }
  const gpt::SafetensorsFile again(path);
  std::filesystem::remove(path);
  expect(again.tensors().size() == tensors.size(), "another number of tensors the second time");
  for (const auto& [name, tensor] : tensors) {
    const auto found = again.tensors().find(name);
    expect(found != again.tensors().end(), "a tensor that is not there the second time", name);
    expect(found->second.dtype == tensor.dtype && found->second.shape == tensor.shape, "another dtype or shape", name);
    expect(std::ranges::equal(found->second.data, tensor.data), "other data", name);
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> file = zeroth::fuzz::bytes_of(data, size);
  try {
    const Tensors tensors = gpt::parse_safetensors(file, "fuzz");
    std::size_t total = 0;
    for (const auto& [name, tensor] : tensors) {
      const bool inside = tensor.data.empty() || (tensor.data.data() >= file.data() &&
                                                  tensor.data.data() + tensor.data.size() <= file.data() + size);
      expect(inside, "a tensor outside the file", name);
      total += tensor.data.size();
    }
    expect(total <= size, "tensors that lie on each other");
    if (size <= 4096) check_written_again(tensors);
  } catch (const zeroth::Error& error) {
    expect(error.code() == zeroth::ErrorCode::kIo, "refused with another code", error.what());
    expect(error.context().which == "fuzz" && !error.context().got.empty(), "refused without file and rule",
           error.what());
  } catch (const std::exception& error) {
    expect(false, "refused with something that is no Error", error.what());
  }
  return 0;
}
