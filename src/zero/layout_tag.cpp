#include "zero/layout_tag.h"

#include "base/planted.h"
#include "zero/signals.h"

#include <zeroth/base/text.h>

#include <bit>
#include <cstdio>
#include <vector>

namespace zeroth {
namespace {

std::string layout_text(std::uint64_t tag, int rank) {
  char text[64];
  std::snprintf(text, sizeof text, "layout %016llx on rank %d", static_cast<unsigned long long>(tag), rank);
  return text;
}

}  // namespace

std::uint64_t layout_tag(const ModelLayout& model, const FlatLayout& flat) {
  std::vector<std::int64_t> words{flat.unit,
                                  static_cast<std::int64_t>(flat.dtype),
                                  flat.vectors ? 1 : 0,
                                  flat.trainable ? 1 : 0,
                                  std::bit_cast<std::int64_t>(flat.grad_factor),
                                  flat.length,
                                  static_cast<std::int64_t>(flat.segments.size())};
  for (const Segment& segment : flat.segments) {
    words.insert(words.end(), {segment.param, segment.offset, segment.numel});
  }
  words.insert(words.end(), flat.boundaries.begin(), flat.boundaries.end());
  words.insert(words.end(), flat.pieces.begin(), flat.pieces.end());
  const std::uint64_t digest =
      digest64({reinterpret_cast<const char*>(words.data()), words.size() * sizeof(std::int64_t)},
               digest64(model.units[static_cast<std::size_t>(flat.unit)].name));
  return digest != 0 ? digest : 1;
}

ErrorContext pull_context(const ModelLayout& model, const ModelMemory& memory, int flat, int source,
                          std::string_view where, std::string_view part) {
  return {.where = std::string(where),
          .who = "rank " + std::to_string(memory.rank()) + "/" + std::to_string(model.world),
          .which = "unit " + model.units[static_cast<std::size_t>(model.flat(flat).unit)].name + ", " +
                   std::string(part) + " of rank " + std::to_string(source)};
}

void require_same_layout(const ModelLayout& model, const ModelMemory& memory, int flat, int source,
                         std::string_view where, std::string_view what, std::string_view part) {
  const std::uint64_t own = memory.signals(memory.rank()).tag(flat).load();
  const std::uint64_t theirs = memory.signals(source).tag(flat).load();
  if (own == theirs || planted("tag_compare")) [[likely]]
    return;
  ErrorContext context = pull_context(model, memory, flat, source, where, part);
  context.expected = layout_text(own, memory.rank());
  context.got = layout_text(theirs, source);
  context.hint = "all ranks must build the same model: the same units, names, shapes and dtypes in the same order";
  throw Error(ErrorCode::kMismatch, "ranks lay out the " + std::string(what) + " of a unit in different ways",
              std::move(context));
}

}  // namespace zeroth
