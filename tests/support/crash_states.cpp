#include "support/crash_states.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kSector = 512;

/// A file or folder, whatever its names.
struct Node {
  bool folder = false;
  std::vector<const FileOp*> changes{};  ///< of a file: writes, sizes
  /// Of a folder: name to node, null where the name goes; a rename is two at once.
  std::vector<std::vector<std::pair<std::string, std::shared_ptr<Node>>>> names{};
  std::size_t synced = 0;  ///< how many of `changes` or `names` are on the disk
};
using NodePtr = std::shared_ptr<Node>;

class Model {
 public:
  Model(std::string root, std::uint64_t seed) : root_(fs::path(std::move(root)).lexically_normal()), random_(seed) {
    static constexpr double kChances[] = {0.0, 0.1, 0.5, 0.9, 1.0};
    kept_ = kChances[random_() % std::size(kChances)];
    disk_->folder = true;
    now_[root_.string()] = disk_;
  }

  void apply(const FileOp& op) {
    switch (op.kind) {
      case FileOp::Kind::kMakeFile:
      case FileOp::Kind::kMakeFolder: {
        auto made = std::make_shared<Node>();
        made->folder = op.kind == FileOp::Kind::kMakeFolder;
        now_[op.path] = made;
        parent(op.path).names.push_back({{name(op.path), made}});
        return;
      }
      case FileOp::Kind::kWrite:
      case FileOp::Kind::kResize:
        node(op.path).changes.push_back(&op);
        return;
      case FileOp::Kind::kSync: {
        Node& synced = node(op.path);
        synced.synced = synced.folder ? synced.names.size() : synced.changes.size();
        return;
      }
      case FileOp::Kind::kRename: {
        const NodePtr moved = now_.at(op.path);
        parent(op.path).names.push_back({{name(op.path), nullptr}, {name(op.to), moved}});
        move_names(op.path, op.to);
        return;
      }
      case FileOp::Kind::kExchange: {
        const NodePtr one = now_.at(op.path);
        const NodePtr other = now_.at(op.to);
        parent(op.path).names.push_back({{name(op.path), other}, {name(op.to), one}});
        move_names(op.path, op.path + "?");
        move_names(op.to, op.path);
        move_names(op.path + "?", op.to);
        return;
      }
      case FileOp::Kind::kRemove:
        parent(op.path).names.push_back({{name(op.path), nullptr}});
        now_.erase(op.path);
        return;
      case FileOp::Kind::kAcknowledge:
        return;
    }
  }

  void make(const std::string& to) { make_folder(*disk_, to); }

 private:
  static std::string name(const std::string& path) { return fs::path(path).filename().string(); }
  Node& node(const std::string& path) { return *now_.at(path); }
  Node& parent(const std::string& path) { return node(fs::path(path).parent_path().string()); }
  void move_names(const std::string& from, const std::string& to) {
    std::map<std::string, NodePtr> moved;
    for (auto at = now_.begin(); at != now_.end();) {
      const bool inside = at->first == from || at->first.starts_with(from + "/");
      if (inside) moved[to + at->first.substr(from.size())] = at->second;
      at = inside ? now_.erase(at) : std::next(at);
    }
    for (auto& [path, one] : moved) now_[path] = one;
  }
  [[nodiscard]] bool is_kept() { return std::uniform_real_distribution<double>(0, 1)(random_) < kept_; }

  void make_folder(const Node& folder, const std::string& to) {
    std::map<std::string, NodePtr> names;
    for (std::size_t index = 0; index < folder.names.size(); ++index) {
      if (index >= folder.synced && !is_kept()) continue;
      for (const auto& [entry, target] : folder.names[index]) {
        if (target) names[entry] = target;
        if (!target) names.erase(entry);
      }
    }
    fs::create_directories(to);
    for (const auto& [entry, target] : names) {
      const std::string path = to + "/" + entry;
      target->folder ? make_folder(*target, path) : make_file(*target, path);
    }
  }

  void make_file(const Node& file, const std::string& path) {
    std::string content;
    for (std::size_t index = 0; index < file.changes.size(); ++index) {
      const FileOp& op = *file.changes[index];
      const bool synced = index < file.synced;
      if (op.kind == FileOp::Kind::kResize) {
        if (synced || is_kept()) content.resize(op.offset);
        continue;
      }
      const bool whole = synced || is_kept();
      for (std::size_t at = 0; at < op.data.size(); at += kSector) {
        if (!whole && !is_kept()) continue;
        const std::size_t count = std::min(kSector, op.data.size() - at);
        content.resize(std::max(content.size(), op.offset + at + count));
        content.replace(op.offset + at, count, op.data, at, count);
      }
    }
    std::ofstream(path, std::ios::binary) << content;
  }

  fs::path root_;
  std::mt19937_64 random_;
  double kept_ = 0;
  NodePtr disk_ = std::make_shared<Node>();
  std::map<std::string, NodePtr> now_;  ///< as the program sees it
};

}  // namespace

void make_crash_state(std::span<const FileOp> ops, const std::string& root, std::uint64_t seed, const std::string& to) {
  Model model(root, seed);
  for (const FileOp& op : ops) model.apply(op);
  model.make(to);
}

}  // namespace zeroth::test
