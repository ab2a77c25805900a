#include "checkpoint/rank_file.h"

#include <zeroth/base/error.h>
#include <zeroth/checkpoint/writer.h>

#include <filesystem>
#include <optional>
#include <utility>

namespace zeroth {
namespace {

using detail::NewFile;
using detail::RankEntry;

RankEntry entry_of(std::string key, const CheckpointState& state) {
  const std::int64_t elements = BoxRange::of_whole(state.shape, 0, 0).logical_elements();
  ZR_CHECK(detail::bytes_of_dtype(state.dtype) > 0 && elements >= 0, ErrorCode::kUsage,
           "a tensor for a checkpoint has a dtype or a shape that none can have",
           {.where = "checkpoint.write", .which = key, .got = state.dtype});
  return {.key = std::move(key), .dtype = state.dtype, .range = BoxRange::of_whole(state.shape, 0, elements)};
}

}  // namespace

struct CheckpointWriter::State {
  Manifest manifest;
  std::vector<std::string> keys;
  std::uint64_t missing = 0;
  PendingCheckpoint pending;
  std::optional<NewFile> file{};

  State(const std::string& folder, Manifest about)
      : manifest(std::move(about)), pending(folder, manifest.step, manifest.run) {}
};

CheckpointWriter::CheckpointWriter(const std::string& folder, Manifest manifest) {
  manifest.run = detail::random_run();
  manifest.world = 1;
  manifest.user_of_rank.resize(1);
  std::vector<RankEntry> entries;
  for (const CheckpointParam& param : manifest.params) {
    for (const CheckpointState& state : param.states)
      entries.push_back(entry_of(detail::state_key(param.name, state.name), state));
  }
  for (const CheckpointState& extra : manifest.extras)
    entries.push_back(entry_of(detail::kExtraKey + extra.name, extra));
  const std::string header = detail::make_header(entries);
  state_ = std::make_unique<State>(folder, std::move(manifest));
  for (RankEntry& entry : entries) {
    state_->missing += entry.bytes;
    state_->keys.push_back(std::move(entry.key));
  }
  const std::string path = (std::filesystem::path(state_->pending.path()) / rank_file_name(0)).string();
  state_->file.emplace(path, header.size() + state_->missing);
  state_->file->write(std::as_bytes(std::span(header)));
}

CheckpointWriter::CheckpointWriter(CheckpointWriter&&) noexcept = default;
CheckpointWriter& CheckpointWriter::operator=(CheckpointWriter&&) noexcept = default;
CheckpointWriter::~CheckpointWriter() = default;

const std::vector<std::string>& CheckpointWriter::keys() const {
  return state_->keys;
}

void CheckpointWriter::write(std::span<const std::byte> data) {
  ZR_CHECK(data.size() <= state_->missing, ErrorCode::kUsage, "more bytes than the tensors of a checkpoint have",
           {.where = "checkpoint.write",
            .expected = "at most " + std::to_string(state_->missing) + " bytes more",
            .got = std::to_string(data.size())});
  state_->file->write(data);
  state_->missing -= data.size();
}

std::string CheckpointWriter::commit(const Retention& retention) {
  ZR_CHECK(state_->missing == 0 && state_->file, ErrorCode::kUsage,
           "tensors of a checkpoint have not been written, or it is committed",
           {.where = "checkpoint.write", .got = std::to_string(state_->missing) + " bytes are missing"});
  state_->manifest.files = {state_->file->finish()};
  state_->file.reset();
  (void)state_->pending.commit(state_->manifest, retention);
  return state_->pending.final_path();
}

}  // namespace zeroth
