#include "zero/blocked_states.h"

#include <zeroth/base/error.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace zeroth {
namespace {

std::size_t row_bytes(std::int64_t entries, DType dtype) {
  return align_up(array_bytes(entries, dtype), kSegmentAlignBytes);
}

FileStoreOptions file_store_options(BlockSet set, int slots, const StateFiles& files, int rank) {
  const bool own = set == BlockSet::kParameters && !files.parameter_folders.empty();
  return {.folders = own ? files.parameter_folders : files.folders,
          .stripe_bytes = files.stripe_bytes,
          .first_folder = static_cast<std::size_t>(rank),
          .access = files.access,
          .slots = slots,
          .clock = files.clock};
}

/// Of the parameters that have elements of the range: the first few, and how many more.
std::string params_in(const ModelLayout& model, int flat, const Range& range) {
  constexpr int kMost = 3;
  std::string names;
  int count = 0;
  for (const Segment& segment : model.flat(flat).segments) {
    if (intersect(segment.range(), range).size() == 0) continue;
    if (++count <= kMost)
      names += (count == 1 ? "" : ", ") + model.params[static_cast<std::size_t>(segment.param)].name;
  }
  return names + (count > kMost ? " and " + std::to_string(count - kMost) + " more" : "");
}

}  // namespace

std::byte* BlockLease::at(int row, std::int64_t element) const {
  std::size_t offset = 0;
  for (int before = 0; before < row; ++before)
    offset += row_bytes(range_.size(), rows_[static_cast<std::size_t>(before)].dtype);
  return lease_.bytes().data() + offset +
         array_bytes(element - range_.begin, rows_[static_cast<std::size_t>(row)].dtype);
}

BlockedStates::BlockedStates(const ModelLayout& model, std::span<const StateRow> rows, BlockSet set,
                             const ResidencyPlan& residency, const StateFiles& files, int rank, Device& device,
                             Kernels& kernels)
    : kernels_(kernels),
      block_elements_(residency.block_elements),
      slots_(block_slots(model, residency, rows, set)),
      flats_(model.flats.size()),
      blocks_(state_blocks(rows, residency, set)) {
  for (const StateRow& row : rows) {
    if (row.in_blocks && block_set_of(row.kind) == set) flats_[static_cast<std::size_t>(row.flat)].rows.push_back(row);
  }
  StateBlocks in_memory;
  StateBlocks in_files;
  std::vector<bool> tiers;
  std::vector<int> of_memory;
  std::vector<int> of_files;
  for (int number = 0; number < static_cast<int>(blocks_.size()); ++number) {
    const StateBlock& block = blocks_[static_cast<std::size_t>(number)];
    OfFlat& flat = flats_[static_cast<std::size_t>(block.flat)];
    if (block.range.begin == flat.rows.front().range.begin) flat.first = number;
    tiers.push_back(block.in_files);
    has_files_ = has_files_ || block.in_files;
    (block.in_files ? in_files : in_memory).bytes.push_back(block.bytes);
    (block.in_files ? of_files : of_memory).push_back(number);
  }
  const auto describe = [this, set, &model](StateBlocks& blocks, std::vector<int> numbers) {
    blocks.name = [this, set, &model, numbers](int block) {
      return name_of(model, set, blocks_[static_cast<std::size_t>(numbers[static_cast<std::size_t>(block)])]);
    };
    blocks.initial = [this, numbers](int block, std::span<std::byte> bytes) {
      fill(blocks_[static_cast<std::size_t>(numbers[static_cast<std::size_t>(block)])], bytes);
    };
  };
  const std::size_t resting = memory_store_memory(in_memory.bytes);
  const FileStoreOptions options = file_store_options(set, slots_, files, rank);
  const std::size_t slots = in_files.bytes.empty() ? 0 : file_store_memory(in_files.bytes, options);
  const bool caches = set == BlockSet::kUpdates && residency.cache_blocks > 0 && slots > 0;
  CacheOptions cache{.places = residency.cache_blocks};
  const std::size_t cached = caches ? cached_store_memory(in_files.bytes, cache) : 0;
  memory_ = device.make_arena(ArenaKind::kPrivate, resting + slots + cached, "blocks");
  holds_.push_back(device.ledger().hold({-1, memory_of_blocks(set)}, resting));
  holds_.push_back(device.ledger().hold({-1, MemoryState::kStaging}, slots + cached));
  const std::span<std::byte> for_slots = memory_.reserve(slots, kIoAlignment);
  const std::span<std::byte> for_cache = memory_.reserve(cached, kSegmentAlignBytes);
  const std::span<std::byte> for_rest = memory_.reserve(resting, kSegmentAlignBytes);
  describe(in_memory, of_memory);
  describe(in_files, of_files);
  std::unique_ptr<StateStore> rest = make_memory_store(std::move(in_memory), for_rest);
  if (slots == 0) {
    store_ = std::move(rest);
    return;
  }
  ZR_CHECK(files.queue != nullptr, ErrorCode::kInternal, "states in files have no queue", {.where = "zero.blocks"});
  StateBlocks in_cache{.bytes = in_files.bytes, .name = in_files.name};
  std::unique_ptr<StateStore> filed = make_file_store(std::move(in_files), options, files.queue, for_slots);
  if (caches) {
    for (int block = 0; block < filed->num_blocks(); ++block) cache.order.push_back(block);  // as updates go
    filed = make_cached_store(std::move(filed), std::move(in_cache), std::move(cache), for_cache);
  }
  store_ = of_memory.empty() ? std::move(filed) : make_split_store(std::move(rest), std::move(filed), tiers);
}

std::string BlockedStates::name_of(const ModelLayout& model, BlockSet set, const StateBlock& block) const {
  return std::string(set == BlockSet::kParameters ? "parameters" : "states") + " of unit " +
         model.units[static_cast<std::size_t>(model.flat(block.flat).unit)].name + " (" +
         params_in(model, block.flat, block.range) + "), elements [" + std::to_string(block.range.begin) + ", " +
         std::to_string(block.range.end) + ")";
}

void BlockedStates::fill(const StateBlock& block, std::span<std::byte> bytes) const {
  std::byte* at = bytes.data();
  for (const StateRow& row : flats_[static_cast<std::size_t>(block.flat)].rows) {
    if (row.initial != 0) kernels_.fill(at, block.range.size(), row.dtype, row.initial);
    at += row_bytes(block.range.size(), row.dtype);
  }
}

int BlockedStates::row_of(int flat, StateKind kind, int which) const {
  const std::vector<StateRow>& rows = flats_[static_cast<std::size_t>(flat)].rows;
  const auto row = std::ranges::find_if(rows, [&](const StateRow& one) {
    return one.kind == kind && (kind != StateKind::kOptimizer || one.which == which);
  });
  return row == rows.end() ? -1 : static_cast<int>(row - rows.begin());
}

int BlockedStates::number_of(int flat, std::int64_t element) const {
  const OfFlat& of = flats_[static_cast<std::size_t>(flat)];
  const Range& range = of.rows.front().range;
  ZR_ASSERT(element >= range.begin && element < range.end, "an element without states in blocks");
  return of.first + static_cast<int>((element - range.begin) / block_elements_);
}

Range BlockedStates::block_of(int flat, std::int64_t element) const {
  return blocks_[static_cast<std::size_t>(number_of(flat, element))].range;
}

bool BlockedStates::in_files(int flat, std::int64_t element) const {
  return blocks_[static_cast<std::size_t>(number_of(flat, element))].in_files;
}

int BlockedStates::num_blocks(int flat) const {
  const std::vector<StateRow>& rows = flats_[static_cast<std::size_t>(flat)].rows;
  const std::int64_t elements = rows.empty() ? 0 : rows.front().range.size();
  return static_cast<int>((elements + block_elements_ - 1) / block_elements_);
}

bool BlockedStates::prefetch(int flat, std::int64_t element) {
  return store_->prefetch(number_of(flat, element));
}

BlockLease BlockedStates::lease(int flat, std::int64_t element, Access access) {
  BlockLease lease;
  const int number = number_of(flat, element);
  lease.lease_ = store_->acquire(number, access);
  lease.range_ = blocks_[static_cast<std::size_t>(number)].range;
  lease.rows_ = flats_[static_cast<std::size_t>(flat)].rows;
  return lease;
}

void BlockedStates::reset() {
  for (int number = 0; number < store_->num_blocks(); ++number) {
    StateLease lease;
    try {
      lease = store_->acquire(number, Access::kOverwrite);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kIo) throw;
      lease = store_->acquire(number, Access::kOverwrite);  // the error was of what had been on its way
    }
    std::ranges::fill(lease.bytes(), std::byte{0});
    fill(blocks_[static_cast<std::size_t>(number)], lease.bytes());
  }
}

StateBytes StateBytes::after(std::int64_t entries, DType dtype) const {
  StateBytes next = *this;
  if (data_ != nullptr)
    next.data_ += static_cast<std::ptrdiff_t>(entries) * static_cast<std::ptrdiff_t>(size_of(dtype));
  next.element_ += entries;
  return next;
}

namespace {

/// Calls body(address, bytes, position) for the parts of an array that begins at `element`, block by block. What is
/// written whole is not read first.
template <class Body>
void for_parts(BlockedStates& blocks, int flat, int row, std::int64_t element, std::size_t bytes, Access access,
               const Body& body) {
  const std::size_t size = size_of(blocks.dtype_of(flat, row));
  for (std::size_t done = 0; done < bytes;) {
    const Range block = blocks.block_of(flat, element);
    const std::size_t n = std::min(bytes - done, static_cast<std::size_t>(block.end - element) * size);
    const bool whole = element == block.begin && n == static_cast<std::size_t>(block.size()) * size;
    const bool overwrites = access == Access::kUpdate && whole && blocks.num_rows(flat) == 1;
    const BlockLease lease = blocks.lease(flat, element, overwrites ? Access::kOverwrite : access);
    body(lease.at(row, element), n, done);
    done += n;
    element += static_cast<std::int64_t>(n / size);
  }
}

}  // namespace

void StateBytes::read(std::span<std::byte> out) const {
  if (out.empty()) return;
  if (data_ != nullptr) {
    std::memcpy(out.data(), data_, out.size());
    return;
  }
  for_parts(*blocks_, flat_, row_, element_, out.size(), Access::kRead,
            [&](const std::byte* at, std::size_t n, std::size_t done) { std::memcpy(out.data() + done, at, n); });
}

void StateBytes::write(std::span<const std::byte> in) const {
  if (in.empty()) return;
  if (data_ != nullptr) {
    std::memcpy(data_, in.data(), in.size());
    return;
  }
  for_parts(*blocks_, flat_, row_, element_, in.size(), Access::kUpdate,
            [&](std::byte* at, std::size_t n, std::size_t done) { std::memcpy(at, in.data() + done, n); });
}

}  // namespace zeroth
