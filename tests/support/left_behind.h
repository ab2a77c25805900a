// What processes of a test may leave: processes, shared memory, sockets, descriptors, threads, files. Whoever looks
// sees what belongs to its own test only, so that tests beside each other do not disturb one another.
#pragma once

#include <chrono>
#include <filesystem>
#include <set>
#include <string>

namespace zeroth::test {

/// One line for each descriptor, shared mapping ("/memfd:zeroth...") and thread of this process.
[[nodiscard]] std::set<std::string> holdings();

/// Lines of holdings() that are not in `before`, and do not go away by themselves within `patience`; "" if there are
/// none.
[[nodiscard]] std::string still_held(const std::set<std::string>& before,
                                     std::chrono::milliseconds patience = std::chrono::milliseconds{5'000});

/// From its construction on this process adopts the orphans of its descendants, and it and they have a TMPDIR of their
/// own. Looks for processes, memory, sockets and files that are still there when a job has ended.
class LeftBehind {
 public:
  LeftBehind();
  LeftBehind(const LeftBehind&) = delete;
  LeftBehind& operator=(const LeftBehind&) = delete;
  ~LeftBehind();

  /// The TMPDIR: what is in it when the test looks was left there.
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }

  /// One line for each thing that is left, "" if nothing is. To be called when the test has collected all its children;
  /// what is going away gets `patience` for that.
  ///   process   any living descendant; with the shared memory and the sockets that it holds
  ///   memory, descriptor, thread   of this process, new since the construction
  ///   socket    abstract, named by Zeroth for this user, new since the construction, and held by no process outside
  ///   this test file      in folder(), and with "zeroth" in its name in /dev/shm
  [[nodiscard]] std::string text(std::chrono::milliseconds patience = std::chrono::milliseconds{5'000}) const;

 private:
  [[nodiscard]] std::set<std::string> look() const;

  std::filesystem::path folder_;
  std::string tmpdir_before_;
  bool had_tmpdir_ = false;
  int adopted_before_ = 0;
  std::set<std::string> held_before_;
  std::set<std::string> sockets_before_;
  std::set<std::string> files_before_;
};

}  // namespace zeroth::test
