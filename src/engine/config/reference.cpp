#include "engine/config/reference.h"

#include "engine/config/schema.h"

namespace zeroth::config {
namespace {

constexpr const char* kIntroduction = R"(# Configuration

This page is written by `zeroth-config-reference` from the schema in `src/engine/config/schema_*.cpp`; a test compares
the two.

A configuration is one JSON object in UTF-8 of at most 16 MiB: no comments, no duplicate keys, nothing after the closing
brace. `Infinity` and `NaN`, which Python's `json` writes, are read, and taken by hints only. Where a thing exists in
DeepSpeed, the key has DeepSpeed's name; what is Zeroth's own is under `zeroth`. Every key is of one of three classes:

- **honoured**: does what it says;
- **hint**: tunes or prints something in DeepSpeed. It takes any value, is reported once at the start with what Zeroth
  does instead, and never changes a number;
- **refused**: would change what is trained, where memory lies or which files appear, and is not built. It is an error,
  unless its value asks for nothing.

Any other key is an error with the nearest name. All problems are reported together, each with its line and JSON
pointer; exit code 78.

- `null` is the same as leaving the key out, for every key and section.
- Integers may be written as `5e8`. Names of optimizers and schedulers are compared without case.
- `"auto"` is an error where it is left over: the program that writes it has to fill it in, in the document or by an
  override (`ConfigOverride`), before the engine is made. Of a hint it may stay. Zeroth's own programs override keys by
  command line arguments.
- `train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks`. Two of the three give
  the third, once the world is known; one alone means one micro-step. A contradiction is an error that offers the
  nearest sizes.
- Ranks compare a digest of the keys that say "same on all ranks"; a difference is an error that names the key and both
  values.

A small document:

```json
{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 3},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 100, "total_num_steps": 2000}}
}
```
)";

// "/optimizer/params/lr" -> "optimizer.params.lr", as people say it.
std::string dotted(std::string_view pointer) {
  std::string name(pointer.substr(1));
  for (char& c : name) {
    if (c == '/') c = '.';
  }
  return name;
}

// Inside a table a bar would end the cell.
std::string cell(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    out += c;
  }
  return out;
}

std::string row(std::initializer_list<std::string> cells) {
  std::string line = "|";
  for (const std::string& text : cells) line += " " + cell(text) + " |";
  return line + "\n";
}

std::string default_of(const KeySpec& key) {
  if (!key.default_text.empty()) return std::string(key.default_text);
  const Json value = key.write == nullptr ? Json() : key.write(Config{});
  return value.is_null() ? "absent" : "`" + value.dump() + "`";
}

std::string capitalised(std::string_view text) {
  std::string out(text);
  if (!out.empty() && out.front() >= 'a' && out.front() <= 'z')
    out.front() = static_cast<char>(out.front() - 'a' + 'A');
  return out;
}

}  // namespace

std::string reference_markdown() {
  std::string page = kIntroduction;
  page += "\n## Honoured\n\n";
  page += row({"key", "takes", "default", "same on all ranks", "meaning"}) + "|---|---|---|---|---|\n";
  for (const KeySpec& key : honoured_keys()) {
    std::string meaning(key.text);
    if (!key.applies_text.empty()) meaning += " Only for " + std::string(key.applies_text) + ".";
    page +=
        row({"`" + dotted(key.pointer) + "`", expected_text(key), default_of(key), key.shared ? "yes" : "no", meaning});
  }
  page += "\n## Hints\n\n";
  page += row({"key", "DeepSpeed's default", "what Zeroth does instead"}) + "|---|---|---|\n";
  for (const KeySpec& key : hint_keys()) {
    page +=
        row({"`" + dotted(key.pointer) + "`", "`" + std::string(key.default_text) + "`", capitalised(key.text) + "."});
  }
  page += "\n## Refused\n\n";
  page += row({"key", "accepted", "why it is refused"}) + "|---|---|---|\n";
  for (const KeySpec& key : refused_keys()) {
    page += row({"`" + dotted(key.pointer) + "`", expected_text(key), capitalised(key.text) + "."});
  }
  page += "\n## Other names\n\n";
  page += row({"name", "is read as"}) + "|---|---|\n";
  for (const KeyAlias& alias : key_aliases()) {
    page += row({"`" + dotted(alias.alias) + "`", "`" + dotted(alias.pointer) + "`"});
  }
  for (const KeySpec& key : honoured_keys()) {
    for (const std::string& alias : split_list(key.choice_aliases)) {
      const std::size_t equals = alias.find('=');
      const std::string name = "`" + dotted(key.pointer) + "` ";
      page += row({name + "\"" + alias.substr(0, equals) + "\"", name + "\"" + alias.substr(equals + 1) + "\""});
    }
  }
  return page;
}

}  // namespace zeroth::config
