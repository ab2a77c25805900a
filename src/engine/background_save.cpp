#include "engine/background_save.h"

#include "base/own_thread.h"
#include "checkpoint/files.h"
#include "engine/save_outcomes.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <new>
#include <utility>

namespace zeroth {
namespace {

constexpr const char* kNotWritten = "a checkpoint could not be written";
constexpr Milliseconds kHurry{5'000};  // for a rank that is still writing when the job falls apart
constexpr Milliseconds kLongestPause{50};

}  // namespace

BackgroundSave::BackgroundSave(Terms terms, std::unique_ptr<PendingCheckpoint> pending)
    : terms_(std::move(terms)),
      pending_(std::move(pending)),
      mark_(std::make_unique<detail::RankMark>(terms_.folder, terms_.rank)) {
  thread_ = detail::start_own_thread([this] { run(); }, "the writer of a checkpoint",
                                     {.where = "engine.save", .who = "rank " + std::to_string(terms_.rank)});
}

BackgroundSave::~BackgroundSave() {
  if (::getpid() != process_) {  // a forked child: thread, folder and lock are its parent's
    thread_.detach();
    (void)pending_.release();
    (void)mark_.release();
    (void)changed_.release();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopped_ = !begun_;
  }
  changed_->notify_all();
  thread_.join();
}

void BackgroundSave::begin(Manifest manifest) {
  {
    const std::lock_guard lock(mutex_);
    manifest_ = std::move(manifest);
    begun_ = true;
  }
  changed_->notify_all();
}

void BackgroundSave::hurry() {
  {
    const std::lock_guard lock(mutex_);
    if (!hurried_) hurried_.emplace(kHurry);
  }
  changed_->notify_all();
}

bool BackgroundSave::wait(Milliseconds time) {
  if (::getpid() != process_) return true;  // a forked child has no part in it
  std::unique_lock lock(mutex_);
  return changed_->wait_for(lock, time, [this] { return has_ended(); });
}

void BackgroundSave::run() noexcept {
  {
    std::unique_lock lock(mutex_);
    changed_->wait(lock, [this] { return begun_ || stopped_; });  // begin() or the destructor: both follow at once
    if (stopped_) return;
  }
  std::optional<Error> error;
  try {
    pending_ ? write_and_commit() : write_and_await_commit();
  } catch (const Error& caught) {
    error = caught;
  } catch (const std::exception& caught) {
    error = error_of(caught);
  }
  pending_.reset();  // what was not committed goes
  mark_.reset();     // rank 0 tells nobody through its own: the descriptor would last as long as the engine
  {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    ended_.store(true, std::memory_order_release);
  }
  changed_->notify_all();
}

void BackgroundSave::write_and_commit() {
  std::vector<std::string> outcomes(static_cast<std::size_t>(terms_.world), outcome_text(nullptr, {}));
  const Deadline deadline(terms_.timeout);
  for (int rank = 0; rank < terms_.world; ++rank) {
    std::string& outcome = outcomes[static_cast<std::size_t>(rank)];
    outcome = rank == terms_.rank ? write_file() : await_mark(rank, deadline);
    throw_if_any_failed(outcomes, kNotWritten, 0, terms_.world);
  }
  for (const std::string& outcome : outcomes) manifest_.files.push_back(files_of(outcome).at(0));
  outcomes[static_cast<std::size_t>(terms_.rank)] = outcome_of_call([this] {
    (void)pending_->commit(manifest_, terms_.retention);
    return Files{};
  });
  throw_if_any_failed(outcomes, "a checkpoint could not be committed", 0, terms_.world);
}

std::string BackgroundSave::write_file() const {
  return outcome_of_call([this] {
    const std::string path = (std::filesystem::path(terms_.folder) / rank_file_name(terms_.rank)).string();
    detail::NewFile file(path, terms_.file.size());
    file.write_kept(terms_.file);
    return Files{file.finish()};
  });
}

void BackgroundSave::pause(Milliseconds& next, const Deadline& deadline, const std::string& what) {
  std::unique_lock lock(mutex_);
  ZR_CHECK(!deadline.passed() && !(hurried_ && hurried_->passed()), ErrorCode::kTimeout,
           "a save that runs behind has waited too long for another rank",
           {.where = "engine.save",
            .who = "rank " + std::to_string(terms_.rank),
            .which = terms_.folder,
            .expected = what,
            .got = hurried_ ? "the job has ended meanwhile"
                            : "nothing, for " + std::to_string(terms_.timeout.count()) + " ms"});
  changed_->wait_for(lock, next);
  next = std::min(2 * next, kLongestPause);
}

std::string BackgroundSave::await_mark(int rank, const Deadline& deadline) {
  Milliseconds next{1};
  while (true) {
    const detail::SeenMark seen = detail::look_at_mark(terms_.folder, rank);
    if (!seen.text.empty()) return seen.text;
    if (!seen.locked) {
      const Error ended(ErrorCode::kPeerLost, "a rank has ended before its file was written",
                        {.where = "engine.save", .which = terms_.folder});
      return outcome_text(&ended, {});
    }
    pause(next, deadline, "the file of rank " + std::to_string(rank));
  }
}

void BackgroundSave::write_and_await_commit() {
  const std::string outcome = write_file();
  if (!mark_->tell(outcome)) {
    const Error full(ErrorCode::kIo, "a mark of the checkpoint could not be written",
                     {.where = "engine.save", .which = terms_.folder});
    (void)mark_->tell(outcome_text(&full, {}));
  }
  throw_if_any_failed({outcome}, kNotWritten, terms_.rank, terms_.world);
  const Deadline deadline(terms_.timeout);
  Milliseconds next{1};
  while (true) {
    switch (detail::look_at_committer(terms_.folder)) {
      case detail::Committer::kWorks:
        pause(next, deadline, "the commit of rank 0");
        continue;
      case detail::Committer::kDied:
        throw Error(ErrorCode::kPeerLost, "the rank that commits has ended before it did",
                    {.where = "engine.save", .who = "rank 0", .which = terms_.folder});
      case detail::Committer::kEnded:
        break;
    }
    bool there = false;
    try {
      const Manifest manifest = read_manifest(terms_.final_path);
      // Of an earlier save, if that has the same state: [Note: The same step again].
      const auto rank = static_cast<std::size_t>(terms_.rank);
      there = manifest.run == terms_.run ||
              (rank < manifest.files.size() && manifest.files[rank] == files_of(outcome).at(0));
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): there is none
    }
    ZR_CHECK(there, ErrorCode::kIo, "a checkpoint was given up by the rank that commits",
             {.where = "engine.save", .who = "rank 0", .which = terms_.final_path});
    return;
  }
}

}  // namespace zeroth
