// A folder for checkpoints, gone with the test.
#pragma once

#include <zeroth/checkpoint/folder.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

namespace zeroth::test {

class CheckpointFolder {
 public:
  CheckpointFolder() {
    std::random_device random;
    path_ = std::filesystem::temp_directory_path() / ("zeroth-checkpoint-" + std::to_string(random()));
  }
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;
  ~CheckpointFolder() { std::filesystem::remove_all(path_); }
  [[nodiscard]] std::string text() const { return path_.string(); }
  [[nodiscard]] std::string step(std::int64_t number) const { return (path_ / checkpoint_name(number)).string(); }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      names.push_back(entry.path().filename().string());
    std::ranges::sort(names);
    return names;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace zeroth::test
