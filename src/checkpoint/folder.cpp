#include "checkpoint/files.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/checkpoint/folder.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

namespace zeroth {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kTemporary = ".tmp-";
constexpr std::string_view kTrash = ".trash-";
constexpr std::string_view kMark = ".mark";
constexpr const char* kLatest = "LATEST";
constexpr const char* kBaseMark = "base";
constexpr std::size_t kStepDigits = 8;
constexpr std::uint64_t kMostManifestBytes = std::uint64_t{1} << 31U;

/// When a checkpoint was, by its name.
struct Moment {
  std::int64_t step = -1;  ///< -1: the name is no checkpoint's
  std::int64_t micro_step = 0;
};

/// A whole number of digits; -1 for anything else.
std::int64_t number_of(std::string_view digits) {
  std::int64_t number = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return error == std::errc{} && end == digits.data() + digits.size() && number >= 0 ? number : -1;
}

/// "step-00000300", "step-00000300-2".
Moment moment_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return {};
  name.remove_prefix(kPrefix.size());
  const std::size_t dash = std::min(name.find('-'), name.size());
  if (dash < kStepDigits) return {};
  Moment moment{.step = number_of(name.substr(0, dash))};
  if (dash < name.size()) moment.micro_step = number_of(name.substr(dash + 1));
  return moment.micro_step < 0 ? Moment{} : moment;
}

/// Names of one folder. Throws kIo; none where there is no such folder.
std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator at(folder, error);
  if (error == std::errc::no_such_file_or_directory) return names;
  for (; !error && at != fs::directory_iterator(); at.increment(error)) names.push_back(at->path().filename().string());
  if (error) {
    errno = error.value();
    detail::fail_io("a folder of checkpoints cannot be read", folder);
  }
  return names;
}

bool is_own_file(std::string_view name) {
  return name == kManifestFile || name == detail::kLockFile || name == kBaseMark ||
         (name.starts_with("rank-") && (name.ends_with(".safetensors") || name.ends_with(kMark)));
}

/// Removes a folder of ours, if it has nothing but files of ours.
void remove_own(const std::string& folder) noexcept {
  std::error_code error;
  std::vector<fs::path> files;
  for (fs::directory_iterator at(folder, error); !error && at != fs::directory_iterator(); at.increment(error)) {
    if (!is_own_file(at->path().filename().string())) return;
    files.push_back(at->path());
  }
  for (const fs::path& file : files) fs::remove(file, error);
  fs::remove(folder, error);
}

/// Temporary folders whose save has ended: nobody holds the lock.
void remove_leftovers(const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    // Of a job that was killed. One of a living job would only leave LATEST, a hint, as it was.
    if (name.starts_with(std::string(kLatest) + std::string(kTemporary))) ::unlink((fs::path(folder) / name).c_str());
    const std::size_t mark = std::min(name.find(kTemporary), name.find(kTrash));
    if (mark == std::string::npos || moment_of(std::string_view(name).substr(0, mark)).step < 0) continue;
    const std::string path = (fs::path(folder) / name).string();
    const int lock = ::open((fs::path(path) / detail::kLockFile).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (lock >= 0 && ::flock(lock, LOCK_EX | LOCK_NB) != 0) {
      ::close(lock);
      continue;  // somebody saves there
    }
    // Without a lock file it is one that was just begun, or nearly removed: only an old one is a leftover.
    struct stat about{};
    const bool seen = ::stat(path.c_str(), &about) == 0;
    constexpr time_t kYoung = 60;
    const bool old =
        lock >= 0 || (seen && ::time(nullptr) - about.st_mtime > kYoung) || name.find(kTrash) != std::string::npos;
    if (old) remove_own(path);
    if (lock >= 0) ::close(lock);
  }
}

/// With its parents. Those that are new are on the disk when it returns: a checkpoint in them would go with them.
void make_folders(const std::string& folder) {
  std::error_code error;
  std::vector<fs::path> missing;
  for (fs::path path = fs::absolute(folder); !fs::exists(path, error) && path.has_relative_path();
       path = path.parent_path())
    missing.push_back(path);
  fs::create_directories(folder, error);
  if (error) {
    errno = error.value();
    detail::fail_io("the folder of checkpoints cannot be made", folder);
  }
  for (const fs::path& path : missing) detail::sync_folder(path.parent_path().string());
}

/// In which of its own files a checkpoint is torn; "" if in none.
std::string torn_file(const std::string& checkpoint, const Manifest& manifest) {
  for (const CheckpointFile& file : manifest.files) {
    const std::string path = (fs::path(checkpoint) / file.name).string();
    struct stat about{};
    if (::lstat(path.c_str(), &about) != 0)
      return file.name + " " + (errno == ENOENT ? "is missing" : errno_text(errno));
    if (!S_ISREG(about.st_mode)) return file.name + " is no regular file";
    if (static_cast<std::uint64_t>(about.st_size) != file.bytes)
      return file.name + " has " + std::to_string(about.st_size) + " bytes instead of " + std::to_string(file.bytes);
  }
  return "";
}

/// One that is not whole, which no save has left, makes room. The manifest of a whole one, which stays.
std::optional<Manifest> make_room(const std::string& checkpoint, const std::string& run) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(checkpoint, error))) return {};
  try {
    Manifest manifest = read_manifest(checkpoint);
    const std::string torn = torn_file(checkpoint, manifest);
    ZR_CHECK(torn.empty(), ErrorCode::kCheckpoint, "a checkpoint is torn", {.where = "checkpoint", .got = torn});
    return manifest;
  } catch (const Error&) {
    const std::string trash = checkpoint + std::string(kTrash) + run;
    if (::rename(checkpoint.c_str(), trash.c_str()) != 0)
      detail::fail_io("a folder that is no checkpoint has the name of one", checkpoint);
    remove_own(trash);
    return {};
  }
}

/// In what two checkpoints of one step differ, but for the random generators of ranks; "" if in nothing. What wrote
/// them, and how it was configured, is no state.
std::string difference(const Manifest& a, const Manifest& b) {
  const auto names = [](const Manifest& manifest) {
    std::vector<std::pair<std::string, std::vector<std::int64_t>>> all;
    for (const CheckpointParam& param : manifest.params) all.emplace_back(param.name, param.shape);
    return all;
  };
  if (names(a) != names(b)) return "a checkpoint of another model";
  if (a.optimizer != b.optimizer) return "a checkpoint of another optimizer";
  if (a.world != b.world) return "a checkpoint of another number of ranks";
  if (a.params != b.params || a.files != b.files || a.base != b.base) return "other weights, states or buffers";
  if (a.groups != b.groups || a.loss_scaler != b.loss_scaler || a.update != b.update) return "other hyper-parameters";
  if (a.extras != b.extras || a.accumulation != b.accumulation) return "other buffers or gradients";
  return a.user == b.user ? "" : "another client_state, or scheduler";
}

[[noreturn]] void refuse_second(const std::string& checkpoint, const std::string& got, const char* hint) {
  throw Error(ErrorCode::kUsage, "this step has been saved there before",
              {.where = "checkpoint", .which = checkpoint, .got = got, .hint = hint});
}

void write_small_file(const std::string& path, const std::string& text, bool synced = true) {
  detail::NewFile file(path, text.size());
  file.write({reinterpret_cast<const std::byte*>(text.data()), text.size()});
  (void)file.finish(synced);
}

/// A hint for people and scripts; nothing depends on it.
void write_latest(const std::string& folder, const std::string& name, const std::string& run) noexcept {
  try {
    const std::string path = (fs::path(folder) / kLatest).string();
    const std::string temporary = path + std::string(kTemporary) + run;
    write_small_file(temporary, name + "\n", /*synced=*/false);
    if (::rename(temporary.c_str(), path.c_str()) != 0) ::unlink(temporary.c_str());
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the checkpoint is there all the same
  }
}

/// Bases of the checkpoints of a folder, but for those at `removed`.
std::set<std::string> bases_of(const std::vector<CheckpointEntry>& entries, const std::set<std::string>& removed) {
  std::set<std::string> bases;
  for (const CheckpointEntry& entry : entries) {
    if (removed.contains(entry.path)) continue;
    try {
      bases.insert(read_manifest(entry.path).base.name);
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): one that is not whole has no base
    }
  }
  return bases;
}

/// `exchange`: what has the name gets the other one. False, with errno, if that could not be.
bool take_name(const std::string& from, const std::string& name, bool exchange) {
  const unsigned flags = exchange ? RENAME_EXCHANGE : RENAME_NOREPLACE;
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, name.c_str(), flags) == 0) return true;
  // A file system without these, as NFS is. A plain rename fails over a folder that has something in it.
  return errno == EINVAL && !exchange && ::rename(from.c_str(), name.c_str()) == 0;
}

/// Others of the folder refer to the checkpoint for their frozen weights.
bool is_referred_to(const std::string& folder, const std::string& checkpoint) {
  std::error_code error;
  return fs::exists(fs::path(checkpoint) / kBaseMark, error) &&
         bases_of(list_checkpoints(folder), {checkpoint}).contains(fs::path(checkpoint).filename().string());
}

std::pair<std::int64_t, std::int64_t> moment_of(const CheckpointEntry& entry) {
  return {entry.step, entry.micro_step};
}

}  // namespace

std::string checkpoint_name(std::int64_t step, std::int64_t micro_step) {
  const std::string number = std::to_string(step);
  return std::string(kPrefix) + std::string(kStepDigits - std::min(kStepDigits, number.size()), '0') + number +
         (micro_step > 0 ? "-" + std::to_string(micro_step) : "");
}

std::string rank_file_name(int rank) {
  char text[40];
  std::snprintf(text, sizeof text, "rank-%05d.safetensors", rank);
  return text;
}

std::vector<CheckpointEntry> list_checkpoints(const std::string& folder) {
  std::vector<CheckpointEntry> entries;
  for (const std::string& name : names_in(folder)) {
    if (const Moment moment = moment_of(name); moment.step >= 0) {
      const fs::path path = fs::path(folder) / name;
      entries.push_back({.step = moment.step,
                         .micro_step = moment.micro_step,
                         .commit = commit_in(detail::read_tail((path / kManifestFile).string(), kManifestTail)),
                         .path = path.string()});
    }
  }
  const auto torn = std::ranges::partition(entries, [](const auto& entry) { return entry.commit >= 0; });
  const std::vector<CheckpointEntry> others(torn.begin(), torn.end());
  entries.erase(torn.begin(), torn.end());
  std::ranges::sort(entries, [](const auto& a, const auto& b) {
    return std::pair(a.commit, moment_of(a)) > std::pair(b.commit, moment_of(b));
  });
  for (const CheckpointEntry& one : others) {
    entries.insert(std::ranges::find_if(entries, [&](const auto& a) { return moment_of(a) < moment_of(one); }), one);
  }
  return entries;
}

Manifest read_manifest(const std::string& checkpoint) {
  const std::string path = (fs::path(checkpoint) / kManifestFile).string();
  return manifest_of(detail::read_small_file(path, kMostManifestBytes), path);
}

std::string base_path(const std::string& checkpoint, const Manifest& manifest) {
  const fs::path path = fs::absolute(checkpoint).lexically_normal();
  const bool slash = path.filename().empty();  // "runs/a/step-00000010/"
  return ((slash ? path.parent_path() : path).parent_path() / manifest.base.name).string();
}

std::pair<std::string, Manifest> base_of(const std::string& checkpoint, const Manifest& manifest) {
  const std::string path = base_path(checkpoint, manifest);
  std::error_code error;
  ZR_CHECK(fs::exists(fs::path(path) / kManifestFile, error), ErrorCode::kCheckpoint,
           "a checkpoint refers to another one for its frozen weights, which is not there",
           {.where = "checkpoint",
            .which = checkpoint,
            .expected = path,
            .hint = "keep a checkpoint beside the one that it refers to, or save with frozen = copy"});
  Manifest base = read_manifest(path);
  ZR_CHECK(base.run == manifest.base.run, ErrorCode::kCheckpoint,
           "the checkpoint that should have the frozen weights is another one",
           {.where = "checkpoint",
            .which = path,
            .expected = "the save " + manifest.base.run,
            .got = base.run,
            .hint = "keep a checkpoint beside the one that it refers to, or save with frozen = copy"});
  return {path, std::move(base)};
}

std::string why_torn(const std::string& checkpoint) {
  try {
    const Manifest manifest = read_manifest(checkpoint);
    const std::string torn = torn_file(checkpoint, manifest);
    if (!torn.empty() || manifest.base.name.empty()) return torn;
    std::error_code error;
    if (!fs::exists(base_path(checkpoint, manifest), error))
      return manifest.base.name + ", which has its frozen weights, is missing";
    const auto [path, base] = base_of(checkpoint, manifest);
    const std::string of_base = torn_file(path, base);
    return of_base.empty() ? "" : manifest.base.name + "/" + of_base;
  } catch (const Error& error) {
    return error.what();
  }
}

void mark_as_base(const std::string& checkpoint) {
  const std::string path = (fs::path(checkpoint) / kBaseMark).string();
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd < 0) detail::fail_io("a checkpoint cannot be marked as a base", path);
  ::close(fd);
  detail::sync_folder(checkpoint);
}

namespace {

/// The one at `spared` stays.
std::vector<std::string> prune(const std::string& folder, const Retention& retention, bool dry_run,
                               const std::string& spared) {
  std::vector<std::string> removed;
  if (retention.keep_last <= 0) return removed;
  const std::vector<CheckpointEntry> entries = list_checkpoints(folder);
  std::vector<std::string> old;
  int newer = 0;  // that are whole
  for (const CheckpointEntry& entry : entries) {
    // Torn: it does not count, and it stays, for it is not ours, or somebody may want to look at it.
    if (entry.commit < 0 || !why_torn(entry.path).empty()) continue;
    if (newer++ < retention.keep_last || entry.path == spared) continue;
    if (retention.keep_every > 0 && entry.micro_step == 0 && entry.step % retention.keep_every == 0) continue;
    old.push_back(entry.path);
  }
  const std::string run = detail::random_run();
  std::optional<std::set<std::string>> bases;
  std::vector<std::string> trashes;
  for (const std::string& path : old) {
    std::error_code error;
    if (fs::exists(fs::path(path) / kBaseMark, error)) {
      if (!bases) bases = bases_of(entries, {old.begin(), old.end()});
      if (bases->contains(fs::path(path).filename().string())) continue;
    }
    if (!dry_run) {
      const std::string trash = path + std::string(kTrash) + run;
      if (::rename(path.c_str(), trash.c_str()) != 0) continue;
      trashes.push_back(trash);
    }
    removed.push_back(path);
  }
  if (!trashes.empty()) detail::sync_folder(folder);  // or one could come back with half of its files
  for (const std::string& trash : trashes) remove_own(trash);
  return removed;
}

}  // namespace

std::vector<std::string> prune_checkpoints(const std::string& folder, const Retention& retention, bool dry_run) {
  return prune(folder, retention, dry_run, "");
}

PendingCheckpoint::PendingCheckpoint(const std::string& folder, std::int64_t step, std::string run,
                                     std::int64_t micro_step, Existing existing)
    : folder_(folder),
      run_(std::move(run)),
      temporary_((fs::path(folder) / (checkpoint_name(step, micro_step) + std::string(kTemporary) + run_)).string()),
      final_((fs::path(folder) / checkpoint_name(step, micro_step)).string()),
      existing_(existing) {
  make_folders(folder);
  if (make_room(final_, run_) && existing == Existing::kRefuse)
    refuse_second(final_, "a checkpoint", "choose another folder, or another step, or remove that checkpoint");
  remove_leftovers(folder);
  for (const CheckpointEntry& entry : list_checkpoints(folder)) {
    if (entry.commit >= 0 && moment_of(entry) > std::pair(step, micro_step))
      later_.push_back(fs::path(entry.path).filename().string());
  }
  if (ZR_FAILPOINT_ERRNO("checkpoint.mkdir") || ::mkdir(temporary_.c_str(), 0755) != 0)
    detail::fail_io("a folder for the checkpoint cannot be made", temporary_);
  const std::string lock = (fs::path(temporary_) / detail::kLockFile).string();
  lock_ = ::open(lock.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (lock_ < 0 || ::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    const int saved = errno;
    if (lock_ >= 0) ::close(std::exchange(lock_, -1));
    remove_own(temporary_);
    errno = saved;
    detail::fail_io("the folder of the checkpoint cannot be locked", lock);
  }
}

PendingCheckpoint::~PendingCheckpoint() {
  if (!committed_) {
    // First its name, at once: other ranks may still write there, and see that it is given up.
    const std::string trash = final_ + std::string(kTrash) + run_;
    remove_own(::rename(temporary_.c_str(), trash.c_str()) == 0 ? trash : temporary_);
  }
  if (lock_ >= 0) ::close(lock_);
}

std::string PendingCheckpoint::commit(Manifest manifest, const Retention& retention) {
  const std::optional<Manifest> there = make_room(final_, run_);
  const std::vector<CheckpointEntry> entries = list_checkpoints(folder_);
  bool is_base = false;
  if (there) {
    const std::string other = existing_ == Existing::kRefuse ? "a checkpoint" : difference(*there, manifest);
    if (existing_ != Existing::kReplace && !other.empty()) {
      refuse_second(final_, other,
                    "overwrite = true replaces it; engines that save in one folder need a name each: save(name=)");
    }
    const bool is_newest = !entries.empty() && entries.front().path == final_;
    if (other.empty() && is_newest && there->user_of_rank == manifest.user_of_rank) {
      (void)prune(folder_, retention, /*dry_run=*/false, final_);
      return there->run;
    }
    is_base = is_referred_to(folder_, final_);
    if (is_base && !other.empty())
      refuse_second(final_, other, "later checkpoints refer to it for their frozen weights, so it stays");
    if (is_base) manifest.run = there->run;  // which they know it by
  }
  manifest.commit = 1;
  for (const CheckpointEntry& entry : entries) manifest.commit = std::max(manifest.commit, entry.commit + 1);
  if (is_base) mark_as_base(temporary_);
  write_small_file((fs::path(temporary_) / kManifestFile).string(), to_text(manifest));
  for (const std::string& name : names_in(temporary_)) {
    if (name.ends_with(kMark)) ::unlink((fs::path(temporary_) / name).c_str());
  }
  ::unlink((fs::path(temporary_) / detail::kLockFile).c_str());
  detail::sync_folder(temporary_);
  if (ZR_FAILPOINT_ERRNO("checkpoint.rename") || !take_name(temporary_, final_, there.has_value()))
    detail::fail_io("the checkpoint cannot be given its name", final_);
  committed_ = true;
  detail::sync_folder(folder_);
  if (there) {
    const std::string trash = final_ + std::string(kTrash) + run_;
    if (::rename(temporary_.c_str(), trash.c_str()) == 0) remove_own(trash);
  }
  write_latest(folder_, fs::path(final_).filename().string(), run_);
  (void)prune(folder_, retention, /*dry_run=*/false, final_);
  return manifest.run;
}

}  // namespace zeroth
