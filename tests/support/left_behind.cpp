#include "support/left_behind.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

namespace fs = std::filesystem;
using Lines = std::set<std::string>;

constexpr std::string_view kSharedMemory = "/memfd:zeroth";
const std::string kProcess = "process ";
constexpr std::chrono::milliseconds kFirstPause{10};
constexpr std::chrono::milliseconds kLongestPause{100};
/// At least: a machine that stands still for seconds must not make one look of many.
constexpr int kLooks = 10;

std::string read_text(const fs::path& path) {
  std::ifstream file(path);
  std::string text;
  std::getline(file, text, '\0');  // whole, and without the exceptions of iterators when a process goes away meanwhile
  return text;
}

/// Entries of a folder of /proc, which may go away while they are read.
std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> result;
  std::error_code problem;
  for (fs::directory_iterator entry(folder, problem), end; !problem && entry != end; entry.increment(problem)) {
    result.push_back(entry->path());
  }
  return result;
}

/// What `look` finds in the folder of a process. Where the main thread has ended, that shows nothing, and the folder of
/// another thread shows what they share.
template <class Look>
auto found_in(const fs::path& process, const Look& look) {
  auto found = look(process);
  for (const fs::path& thread : found.empty() ? entries(process / "task") : std::vector<fs::path>()) {
    found = look(thread);
    if (!found.empty()) break;
  }
  return found;
}

/// What the descriptors of a process lead to: descriptor number and target.
std::vector<std::pair<std::string, std::string>> descriptors(const fs::path& process) {
  return found_in(process, [](const fs::path& holder) {
    std::vector<std::pair<std::string, std::string>> result;
    for (const fs::path& link : entries(holder / "fd")) {
      std::error_code problem;
      const std::string target = fs::read_symlink(link, problem).string();
      if (problem || target.ends_with("/fd")) continue;  // the second: the descriptor that this loop itself reads
      result.emplace_back(link.filename().string(), target);
    }
    return result;
  });
}

/// Shared memory of Zeroth in a process: mapped, or held by a descriptor.
Lines shared_memory(const fs::path& process) {
  Lines lines;
  std::istringstream maps(found_in(process, [](const fs::path& holder) { return read_text(holder / "maps"); }));
  for (std::string line; std::getline(maps, line);) {
    const std::size_t name = line.find(kSharedMemory);
    if (name == std::string::npos) continue;
    std::istringstream fields(line);
    std::string range, rights, offset, device, inode;
    fields >> range >> rights >> offset >> device >> inode;
    lines.insert("mapping of " + line.substr(name) + " inode " + inode);
  }
  for (const auto& [number, target] : descriptors(process)) {
    if (target.starts_with(kSharedMemory)) lines.insert("descriptor " + number + " of " + target);
  }
  return lines;
}

/// Letter of proc(5) for a folder of /proc, X if it has gone.
char state_of(const fs::path& process) {
  const std::string text = read_text(process / "stat");
  const std::size_t name_end = text.rfind(')');
  return name_end == std::string::npos || name_end + 2 >= text.size() ? 'X' : text[name_end + 2];
}

fs::path folder_of(pid_t pid) {
  return "/proc/" + std::to_string(pid);
}

/// Whether all its threads have: a process whose main thread has ended is a zombie that holds what it held.
bool all_threads_ended(pid_t pid) {
  return std::ranges::all_of(entries(folder_of(pid) / "task"), [](const fs::path& thread) {
    const char state = state_of(thread);
    return state == 'Z' || state == 'X';
  });
}

std::vector<pid_t> children_of(pid_t pid) {
  std::vector<pid_t> children;
  for (const fs::path& thread : entries(folder_of(pid) / "task")) {
    std::istringstream file(read_text(thread / "children"));
    for (pid_t child = 0; file >> child;) children.push_back(child);
  }
  return children;
}

/// All below this process that live. Orphans that have ended are ours to collect.
std::set<pid_t> living_descendants() {
  std::set<pid_t> living;
  const std::function<void(pid_t)> visit = [&](pid_t parent) {
    for (const pid_t child : children_of(parent)) {
      if (all_threads_ended(child)) {
        if (parent == ::getpid()) ::waitpid(child, nullptr, WNOHANG);
      } else if (living.insert(child).second) {
        visit(child);
      }
    }
  };
  visit(::getpid());
  return living;
}

struct NamedSocket {
  std::string name;
  std::string inode;
  [[nodiscard]] std::string text() const { return "socket " + name + " inode " + inode; }
};

/// Abstract sockets of Zeroth and this user, in this network namespace; also connections that were accepted under such
/// a name.
std::vector<NamedSocket> named_sockets() {
  const std::string prefix = "@zeroth-";
  const std::string of_this_user = "-" + std::to_string(::getuid()) + "-";
  std::vector<NamedSocket> result;
  std::ifstream file("/proc/net/unix");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    const std::vector<std::string> fields{std::istream_iterator<std::string>(words), {}};
    if (fields.size() < 8 || !fields[7].starts_with(prefix) || fields[7].find(of_this_user) == std::string::npos)
      continue;
    result.push_back({.name = fields[7], .inode = fields[6]});
  }
  return result;
}

/// Targets of all descriptors of processes that are neither this one nor one of `family`.
Lines held_by_strangers(const std::set<pid_t>& family) {
  Lines held;
  for (const fs::path& process : entries("/proc")) {
    const std::string name = process.filename().string();
    pid_t pid = 0;
    const auto parsed = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (parsed.ptr != name.data() + name.size() || pid == ::getpid() || family.contains(pid)) continue;
    for (auto& [number, target] : descriptors(process)) held.insert(std::move(target));
  }
  return held;
}

Lines memory_files() {
  Lines lines;
  for (const fs::path& file : entries("/dev/shm")) {
    if (file.filename().string().find("zeroth") != std::string::npos) lines.insert("file " + file.string());
  }
  return lines;
}

Lines without(const Lines& all, const Lines& these) {
  Lines rest;
  std::ranges::set_difference(all, these, std::inserter(rest, rest.end()));
  return rest;
}

/// " (its program)" for the line of a process. Not in the line itself: a process that stays may have become another
/// program.
std::string name_of(const std::string& line) {
  if (!line.starts_with(kProcess)) return "";
  std::string name = read_text("/proc/" + line.substr(kProcess.size(), line.find(':') - kProcess.size()) + "/comm");
  std::erase(name, '\n');
  return " (" + name + ")";
}

/// What `look` sees time and again until the end of the patience. What is seen once was on its way out, or in.
std::string what_stays(const std::function<Lines()>& look, std::chrono::milliseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  Lines staying = look();
  std::chrono::milliseconds pause = kFirstPause;
  for (int looks = 1; !staying.empty() && (std::chrono::steady_clock::now() < end || looks < kLooks); ++looks) {
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 6 / 5, kLongestPause);
    const Lines now = look();
    Lines both;
    std::ranges::set_intersection(staying, now, std::inserter(both, both.end()));
    staying = std::move(both);
  }
  std::string text;
  for (const std::string& line : staying) text += line + name_of(line) + "\n";
  return text;
}

}  // namespace

std::set<std::string> holdings() {
  Lines lines = shared_memory("/proc/self");
  for (const auto& [number, target] : descriptors("/proc/self")) lines.insert("descriptor " + number + " of " + target);
  for (const fs::path& thread : entries("/proc/self/task")) lines.insert("thread " + thread.filename().string());
  return lines;
}

std::string still_held(const std::set<std::string>& before, std::chrono::milliseconds patience) {
  return what_stays([&before] { return without(holdings(), before); }, patience);
}

LeftBehind::LeftBehind() : files_before_(memory_files()) {
  if (const char* before = std::getenv("TMPDIR"); before != nullptr) {
    had_tmpdir_ = true;
    tmpdir_before_ = before;
  }
  std::string pattern = (fs::temp_directory_path() / "zeroth-left-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp " + pattern);
  folder_ = pattern;
  ::setenv("TMPDIR", folder_.c_str(), 1);
  ::prctl(PR_GET_CHILD_SUBREAPER, &adopted_before_);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  for (const NamedSocket& socket : named_sockets()) sockets_before_.insert(socket.text());
  held_before_ = holdings();
}

LeftBehind::~LeftBehind() {
  if (had_tmpdir_) {
    ::setenv("TMPDIR", tmpdir_before_.c_str(), 1);
  } else {
    ::unsetenv("TMPDIR");
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, adopted_before_);
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

std::set<std::string> LeftBehind::look() const {
  Lines lines = without(holdings(), held_before_);
  const std::set<pid_t> family = living_descendants();
  for (const pid_t pid : family) {
    const std::string who = kProcess + std::to_string(pid);
    lines.insert(who);
    for (const std::string& memory : shared_memory("/proc/" + std::to_string(pid))) lines.insert(who + ": " + memory);
  }
  const std::vector<NamedSocket> sockets = named_sockets();
  if (!sockets.empty()) {
    const Lines strange = held_by_strangers(family);
    for (const NamedSocket& socket : sockets) {
      if (sockets_before_.contains(socket.text()) || strange.contains("socket:[" + socket.inode + "]")) continue;
      lines.insert(socket.text());
    }
  }
  for (const fs::path& file : entries(folder_)) lines.insert("file " + file.string());
  lines.merge(without(memory_files(), files_before_));
  return lines;
}

std::string LeftBehind::text(std::chrono::milliseconds patience) const {
  return what_stays([this] { return look(); }, patience);
}

}  // namespace zeroth::test
