#include "data.h"

#include "random.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <string_view>
#include <system_error>

namespace gpt {
namespace {

namespace fs = std::filesystem;
using zeroth::Error;
using zeroth::ErrorCode;
using zeroth::ErrorContext;

constexpr std::size_t kTextProbeBytes = 8192;

[[noreturn]] void io_error(const std::string& message, const fs::path& path, const std::string& reason,
                           const std::string& hint = {}) {
  throw Error(ErrorCode::kIo, message,
              ErrorContext{.where = "gpt data", .which = path.string(), .got = reason, .hint = hint});
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool wanted(const fs::path& path, const std::vector<std::string>& suffixes) {
  const std::string name = path.filename().string();
  return suffixes.empty() || std::any_of(suffixes.begin(), suffixes.end(),
                                         [&](const std::string& suffix) { return name.ends_with(suffix); });
}

// Names below the folder in byte order: directory order differs between machines and file systems.
std::vector<std::string> list_files(const CorpusOptions& options) {
  std::error_code ec;
  const fs::file_status status = fs::status(options.folder, ec);
  if (!fs::exists(status)) {
    io_error("the data folder does not exist", options.folder, "no such folder",
             "give --data a folder with text files");
  }
  if (!fs::is_directory(status)) {
    io_error("the data folder is not a folder", options.folder, "a file", "give --data the folder that holds it");
  }
  std::vector<std::string> names;
  fs::recursive_directory_iterator it(options.folder, ec);
  for (; !ec && it != fs::recursive_directory_iterator(); it.increment(ec)) {
    if (contains(options.exclude, it->path().filename().string())) {
      it.disable_recursion_pending();
      continue;
    }
    std::error_code entry_error;  // a link to nothing is no file
    if (it->is_regular_file(entry_error) && !entry_error && wanted(it->path(), options.suffixes)) {
      names.push_back(it->path().lexically_relative(options.folder).generic_string());
    }
  }
  if (ec) {
    io_error("cannot read the data folder", options.folder, ec.message());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Appends the file to `bytes`, or returns false and appends nothing where it holds a zero byte near its
// beginning.
bool append_text(const fs::path& path, std::vector<std::uint8_t>& bytes) {
  errno = 0;
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) {
    io_error("cannot open a file of the data folder", path, zeroth::errno_text(errno));
  }
  const std::streamoff size = file.tellg();
  file.seekg(0);
  const std::size_t before = bytes.size();
  bytes.resize(before + static_cast<std::size_t>(std::max<std::streamoff>(size, 0)));
  file.read(reinterpret_cast<char*>(bytes.data() + before), size);
  if (!file || size < 0) {
    io_error("cannot read a file of the data folder", path, zeroth::errno_text(errno));
  }
  const std::size_t probe = std::min(bytes.size() - before, kTextProbeBytes);
  if (probe > 0 && std::memchr(bytes.data() + before, 0, probe) != nullptr) {
    bytes.resize(before);
    return false;
  }
  return true;
}

std::string absence(const CorpusOptions& options) {
  if (options.suffixes.empty()) {
    return "no text file";
  }
  return "no text file that ends in " + zeroth::join(options.suffixes, " or ");
}

}  // namespace

Corpus load_corpus(const CorpusOptions& options, std::size_t seq) {
  Corpus corpus;
  std::string table;  // what the digest covers
  for (std::string& name : list_files(options)) {
    const std::size_t before = corpus.bytes.size();
    if (!append_text(options.folder / name, corpus.bytes)) {
      ++corpus.num_binary;
      continue;
    }
    const std::size_t length = corpus.bytes.size() - before;
    if (length == 0) {
      continue;
    }
    const std::string_view content(reinterpret_cast<const char*>(corpus.bytes.data() + before), length);
    CorpusFile file{.name = std::move(name), .bytes = length, .digest = zeroth::digest64(content)};
    table += fmt::format("{} {} {:016x}\n", file.name, file.bytes, file.digest);
    corpus.files.push_back(std::move(file));
  }
  corpus.digest = zeroth::digest64(table);

  const std::size_t window = seq + 1;
  const std::size_t needed = (2 + kMinHeldOutWindows) * window;
  if (corpus.files.empty()) {
    throw Error(ErrorCode::kUsage, "the data folder holds nothing to train on",
                ErrorContext{.where = "gpt data",
                             .which = options.folder.string(),
                             .got = absence(options) + fmt::format(" ({} binary files)", corpus.num_binary),
                             .hint = "give --data a folder with text files; --suffix and --exclude narrow the choice"});
  }
  if (corpus.bytes.size() < needed) {
    throw Error(ErrorCode::kUsage, "too little text for this sequence length",
                ErrorContext{.where = "gpt data",
                             .which = options.folder.string(),
                             .expected = fmt::format("at least {} bytes for --seq {}", needed, seq),
                             .got = fmt::format("{} bytes", corpus.bytes.size()),
                             .hint = "give --data more text or a smaller --seq"});
  }
  const std::size_t held_out = std::max(corpus.bytes.size() / 10, kMinHeldOutWindows * window);
  corpus.train_bytes = corpus.bytes.size() - held_out;
  return corpus;
}

std::string describe(const Corpus& corpus) {
  const std::string binary =
      corpus.num_binary > 0 ? fmt::format(", {} binary files left out", corpus.num_binary) : std::string();
  return fmt::format("{} files, {} of text (xxHash3 {:016x}), {} to train on, {} held out{}", corpus.files.size(),
                     zeroth::format_bytes(corpus.bytes.size()), corpus.digest, zeroth::format_bytes(corpus.train_bytes),
                     zeroth::format_bytes(corpus.bytes.size() - corpus.train_bytes), binary);
}

std::string describe(const CorpusFile& file) {
  return fmt::format("{:016x} {:>12} {}", file.digest, file.bytes, file.name);
}

std::vector<std::size_t> train_windows(std::size_t text_bytes, std::size_t seq, std::size_t batch,
                                       const BatchKey& key) {
  ZR_ASSERT(text_bytes > seq, "the text is shorter than a window");
  const std::uint64_t batch_key = key_of(key.seed, key.step, key.micro_step, key.rank);
  const std::size_t num_starts = text_bytes - seq;
  std::vector<std::size_t> starts(batch);
  for (std::size_t i = 0; i < batch; ++i) {
    starts[i] = mix64(batch_key + i) % num_starts;  // the bias of % is below 2^-40 for texts of this century
  }
  return starts;
}

std::vector<std::size_t> held_out_windows(std::size_t text_bytes, std::size_t seq, std::size_t count) {
  const std::size_t available = text_bytes / (seq + 1);
  std::vector<std::size_t> starts(std::min(count, available));
  for (std::size_t i = 0; i < starts.size(); ++i) {
    starts[i] = i * available / starts.size() * (seq + 1);
  }
  return starts;
}

double bigram_entropy(std::span<const std::uint8_t> text) {
  if (text.size() < 2) {
    return 0.0;
  }
  std::vector<std::array<std::uint64_t, 256>> counts(256);
  for (std::size_t i = 0; i + 1 < text.size(); ++i) {
    ++counts[text[i]][text[i + 1]];
  }
  double sum = 0.0;  // of count(prev, next) * ln(count(prev) / count(prev, next))
  for (const auto& row : counts) {
    const double row_total = static_cast<double>(std::accumulate(row.begin(), row.end(), std::uint64_t{0}));
    for (const std::uint64_t count : row) {
      if (count > 0) {
        sum += static_cast<double>(count) * std::log(row_total / static_cast<double>(count));
      }
    }
  }
  return sum / static_cast<double>(text.size() - 1);
}

}  // namespace gpt
