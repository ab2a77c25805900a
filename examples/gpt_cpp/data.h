// Real text as bytes: which files, which part is held out, which windows a rank sees in which step. Knows no
// torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace gpt {

struct CorpusOptions {
  std::filesystem::path folder;
  std::vector<std::string> suffixes{};  ///< ".py", ...; empty takes every file that looks like text
  std::vector<std::string> exclude{};   ///< names of files or folders, at any depth, that are left out
};

struct CorpusFile {
  std::string name;  ///< path below the folder, with "/"
  std::uint64_t bytes = 0;
  std::uint64_t digest = 0;  ///< xxHash3 of the content
};

/// The text in memory: all files one after the other, in the byte order of their names.
struct Corpus {
  std::vector<CorpusFile> files{};
  std::size_t num_binary = 0;  ///< files left out because they hold zero bytes
  std::vector<std::uint8_t> bytes{};
  std::size_t train_bytes = 0;  ///< the first 90 %; what follows is held out
  std::uint64_t digest = 0;     ///< of all names, sizes and contents

  [[nodiscard]] std::span<const std::uint8_t> train() const { return std::span(bytes).first(train_bytes); }
  [[nodiscard]] std::span<const std::uint8_t> held_out() const { return std::span(bytes).subspan(train_bytes); }
};

/// Fewest windows of held-out text that give a validation loss worth reading.
inline constexpr std::size_t kMinHeldOutWindows = 4;

/// Reads the text files below `options.folder` (links to folders are not followed) and splits off the last
/// tenth, but at least `kMinHeldOutWindows` windows of `seq` + 1 bytes.
/// @throws zeroth::Error kIo: the folder is missing, no folder, not readable, or one of its files is not
/// readable;
///         kUsage: nothing in it is text, or less text than two windows to train on beside the held-out ones.
[[nodiscard]] Corpus load_corpus(const CorpusOptions& options, std::size_t seq);

/// "796 files, 12.0 MiB of text (xxHash3 0123456789abcdef), 10.8 MiB to train on, 1.2 MiB held out".
[[nodiscard]] std::string describe(const Corpus& corpus);
/// "0123456789abcdef     1234 name".
[[nodiscard]] std::string describe(const CorpusFile& file);

/// What a batch is a function of, besides the text.
struct BatchKey {
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  std::int64_t micro_step = 0;
  int rank = 0;
};

/// Starts of `batch` windows of `seq` + 1 bytes in a text of `text_bytes` (at least `seq` + 1), uniform and
/// independent.
[[nodiscard]] std::vector<std::size_t> train_windows(std::size_t text_bytes, std::size_t seq, std::size_t batch,
                                                     const BatchKey& key);

/// Starts of at most `count` windows of `seq` + 1 bytes, evenly spread, not overlapping; the same on all
/// ranks and for any world size.
[[nodiscard]] std::vector<std::size_t> held_out_windows(std::size_t text_bytes, std::size_t seq, std::size_t count);

/// Entropy of a byte when the byte before it is known, in nats, from the pair counts of the text itself: what
/// a table of byte pairs could reach at best. 0 for fewer than two bytes. Ref: Shannon, "A Mathematical
/// Theory of Communication", 1948, section 6 (conditional entropy).
[[nodiscard]] double bigram_entropy(std::span<const std::uint8_t> text);

}  // namespace gpt
