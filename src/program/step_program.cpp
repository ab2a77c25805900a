#include <zeroth/base/error.h>
#include <zeroth/program/step_program.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <utility>

namespace zeroth {
namespace {

constexpr std::string_view kMagic = "zeroth-program";
constexpr std::string_view kInexact = "inexact";
constexpr std::string_view kLate = "late=";
constexpr int kVersion = 1;
constexpr int kMostRanks = 1 << 16;

std::string printable(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return result;
}

/// A text, read word by word; remembers the place for messages.
class Words {
 public:
  explicit Words(std::string_view text) : rest_(text) {}

  /// Goes to the next line that has a word and is no comment; false at the end.
  bool next_line() {
    while (!rest_.empty()) {
      const std::size_t end = rest_.find('\n');
      line_ = rest_.substr(0, end);
      rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + 1);
      ++line_number_;
      word_number_ = 0;
      const std::size_t first = line_.find_first_not_of(kBlanks);
      if (first != std::string_view::npos && line_[first] != '#') return true;
    }
    line_ = {};
    word_ = {};
    return false;
  }
  /// The next word of the line; "" at its end.
  std::string_view next() {
    line_.remove_prefix(std::min(line_.find_first_not_of(kBlanks), line_.size()));
    word_ = line_.substr(0, line_.find_first_of(kBlanks));
    line_.remove_prefix(word_.size());
    ++word_number_;
    return word_;
  }
  [[noreturn]] void refuse(const std::string& what, const std::string& expected) const {
    throw Error(ErrorCode::kUsage, what,
                {.where = "program.text",
                 .which = "line " + std::to_string(line_number_) + ", word " + std::to_string(word_number_),
                 .expected = expected,
                 .got = word_.empty() ? "the end of the line" : "\"" + printable(word_.substr(0, 40)) + "\""});
  }

 private:
  static constexpr std::string_view kBlanks = " \t\r";
  std::string_view rest_;
  std::string_view line_{};
  std::string_view word_{};
  int line_number_ = 0;
  int word_number_ = 0;
};

int number_of(const Words& words, std::string_view text, int low, int high) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    words.refuse("a number of the program is not usable",
                 "an integer from " + std::to_string(low) + " to " + std::to_string(high));
  }
  return value;
}

/// What follows `key`= in the next word.
std::string_view value_of(Words& words, std::string_view key) {
  const std::string_view word = words.next();
  if (!word.starts_with(key) || !word.substr(key.size()).starts_with('='))
    words.refuse("the first line of the program has another form", std::string(key) + "=...");
  return word.substr(key.size() + 1);
}

std::vector<int> numbers_of(const Words& words, std::string_view text, int high) {
  std::vector<int> numbers;
  while (true) {
    const std::size_t comma = text.find(',');
    numbers.push_back(number_of(words, text.substr(0, comma), 0, high));
    if (comma == std::string_view::npos) return numbers;
    text.remove_prefix(comma + 1);
  }
}

int parse_header(Words& words, StepProgram& program) {
  if (!words.next_line() || words.next() != kMagic) words.refuse("this is no program", std::string(kMagic));
  if (words.next() != std::to_string(kVersion))
    words.refuse("this version of the form is not known", std::to_string(kVersion));
  program.schedule = std::string(value_of(words, "schedule"));
  if (printable(program.schedule) != program.schedule)
    words.refuse("the name of the schedule has control characters", "a word");
  const int ranks = number_of(words, value_of(words, "ranks"), 1, kMostRanks);
  program.micro_batches = number_of(words, value_of(words, "micro_batches"), 1, 1 << 30);
  program.rank_of_chunk = numbers_of(words, value_of(words, "chunks"), ranks - 1);
  std::string_view last = words.next();
  if (last.starts_with(kLate)) {
    program.late = numbers_of(words, last.substr(kLate.size()), kMostRanks);
    if (program.late.size() != program.rank_of_chunk.size())
      words.refuse("the steps by which chunks are late are not one a chunk",
                   std::to_string(program.chunks()) + " numbers");
    last = words.next();
    if (last != kInexact) words.refuse("a program with late gradients does not say so", std::string(kInexact));
  }
  program.inexact = last == kInexact;
  if (!last.empty() && (!program.inexact || !words.next().empty()))
    words.refuse("the first line of the program goes on",
                 program.inexact ? "its end" : "its end, or " + std::string(kInexact));
  return ranks;
}

}  // namespace

bool StepProgram::shares_head() const {
  return std::ranges::any_of(actions, [](const std::vector<Action>& of_rank) {
    return std::ranges::any_of(of_rank, [](const Action& action) { return is_vocabulary(action.kind); });
  });
}

int StepProgram::most_late() const {
  return late.empty() ? 0 : std::ranges::max(late);
}

int StepProgram::lateness(const Action& action) const {
  if (late.empty() || action.chunk < 0 || action.micro_batch < 0) return 0;
  const auto of = [this](int chunk) { return late.at(static_cast<std::size_t>(chunk)); };
  switch (action.kind) {
    case ActionKind::kRecvBackward:
      return action.chunk + 1 < chunks() ? of(action.chunk + 1) : 0;
    case ActionKind::kSendBackward:
    case ActionKind::kBackward:
    case ActionKind::kBackwardInput:
    case ActionKind::kBackwardWeight:
    case ActionKind::kRecompute:
    case ActionKind::kFetch:
      return of(action.chunk);
    default:
      return 0;
  }
}

std::vector<int> StepProgram::chunks_of(int rank) const {
  std::vector<int> own;
  for (int chunk = 0; chunk < chunks(); ++chunk) {
    if (rank_of_chunk[static_cast<std::size_t>(chunk)] == rank) own.push_back(chunk);
  }
  return own;
}

std::string to_text(const StepProgram& program) {
  std::string text = std::string(kMagic) + " " + std::to_string(kVersion) + " schedule=" + program.schedule +
                     " ranks=" + std::to_string(program.ranks()) +
                     " micro_batches=" + std::to_string(program.micro_batches) + " chunks=";
  for (std::size_t chunk = 0; chunk < program.rank_of_chunk.size(); ++chunk)
    text += (chunk == 0 ? "" : ",") + std::to_string(program.rank_of_chunk[chunk]);
  for (std::size_t chunk = 0; chunk < program.late.size(); ++chunk)
    text += (chunk == 0 ? " " + std::string(kLate) : ",") + std::to_string(program.late[chunk]);
  text += program.inexact ? " inexact\n" : "\n";
  for (std::size_t rank = 0; rank < program.actions.size(); ++rank) {
    text += std::to_string(rank) + ":";
    for (const Action& action : program.actions[rank]) text += " " + to_text(action);
    text += "\n";
  }
  return text;
}

StepProgram parse_program(std::string_view text) {
  Words words(text);
  StepProgram program;
  const int ranks = parse_header(words, program);
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string begin = std::to_string(rank) + ":";
    if (!words.next_line() || words.next() != begin) words.refuse("a rank of the program is missing", begin);
    std::vector<Action> actions;
    for (std::string_view word = words.next(); !word.empty(); word = words.next()) {
      try {
        actions.push_back(parse_action(word));
      } catch (const Error& error) {
        words.refuse(error.message(), error.context().expected);
      }
    }
    program.actions.push_back(std::move(actions));
  }
  if (words.next_line()) {
    words.next();
    words.refuse("the program goes on after its last rank", "the end");
  }
  return program;
}

}  // namespace zeroth
