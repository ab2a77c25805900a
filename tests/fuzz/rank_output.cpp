// What a rank writes, as zeroth-run reads it: lines are the same however the bytes come in, no byte is lost, and what
// is remembered for the last word may be printed. The first byte says how long the pieces are.
#include "fuzz/fuzz_target.h"
#include "launcher/error_line.h"
#include "launcher/line_splitter.h"

#include <algorithm>
#include <exception>
#include <string>

using zeroth::fuzz::expect;
using zeroth::launcher::LineSplitter;

namespace {

struct Outcome {
  std::string out{};
  std::string error_line{};
};

Outcome split(std::string_view text, std::size_t piece, std::string prefix) {
  LineSplitter splitter({.prefix = std::move(prefix), .pass_through = false, .taker = {}});
  Outcome outcome;
  for (std::size_t at = 0; at < text.size(); at += piece) splitter.feed(text.substr(at, piece), outcome.out);
  splitter.finish(outcome.out);
  outcome.error_line = splitter.last_error_line();
  return outcome;
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view text = zeroth::fuzz::text_of(data, size).substr(1);
  try {
    const Outcome whole = split(text, std::max<std::size_t>(1, text.size()), "[7] ");
    const Outcome pieces = split(text, data[0] % 16U + 1U, "[7] ");
    expect(whole.out == pieces.out && whole.error_line == pieces.error_line, "other lines from other pieces",
           whole.out);
    std::string bare = split(text, 3, "").out;
    if (!text.empty() && bare.size() == text.size() + 1) bare.pop_back();  // the end of a last line that had none
    if (text.size() < zeroth::launcher::kMaxLineBytes)
      expect(bare == text, "bytes that are lost, added or changed", bare);
    expect(whole.error_line.size() <= 1'000 && zeroth::fuzz::is_printable(whole.error_line),
           "a last word that cannot be printed", whole.error_line);
    if (const auto mark = zeroth::launcher::find_error_mark(text)) {
      expect(mark->begin < text.size(), "an error that begins behind its line", text);
      const bool inside =
          mark->code.data() >= text.data() && mark->code.data() + mark->code.size() <= text.data() + text.size();
      expect(mark->code.empty() || inside, "a code outside its line", text);  // empty: a bracket that is not closed
    }
  } catch (const std::exception& error) {
    expect(false, "the output of a rank throws", error.what());
  }
  return 0;
}
