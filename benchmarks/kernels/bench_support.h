// What the kernel benchmarks share: memory like the runtime's, a team of threads, paired blocks.
#pragma once

#include <nlohmann/json.hpp>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::benchmarks {

enum class Pages { kHuge, kSmall, kShared };

inline std::string_view name_of(Pages pages) {
  switch (pages) {
    case Pages::kHuge:
      return "private huge";
    case Pages::kSmall:
      return "private small";
    case Pages::kShared:
      return "shared memfd";
  }
  return "";
}

/// A mapping of its own: private with huge pages (as optimizer state), private with small pages, or a memfd
/// (as shared shards).
class Arena {
 public:
  Arena(std::size_t bytes, Pages pages) : bytes_(round_up(bytes)) {
    if (pages == Pages::kShared) {
      const int fd = ::memfd_create("zeroth-bench", MFD_CLOEXEC);
      if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes_)) != 0) {
        throw std::runtime_error("memfd refused");
      }
      data_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      ::close(fd);
    } else {
      mapped_ = bytes_ + kHuge;
      base_ = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      data_ = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(base_) + kHuge - 1) / kHuge * kHuge);
    }
    if (data_ == MAP_FAILED || base_ == MAP_FAILED) {
      throw std::runtime_error("mmap refused");
    }
    if (pages != Pages::kShared) {
      ::madvise(data_, bytes_, pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    }
  }
  ~Arena() {
    if (base_ != nullptr) {
      ::munmap(base_, mapped_);
    } else {
      ::munmap(data_, bytes_);
    }
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <class T>
  T* as(std::size_t byte_offset = 0) {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data_) + byte_offset);
  }

 private:
  static constexpr std::size_t kHuge = std::size_t{2} << 20;
  static std::size_t round_up(std::size_t bytes) { return (bytes + kHuge - 1) / kHuge * kHuge; }

  std::size_t bytes_;
  std::size_t mapped_ = 0;
  void* base_ = nullptr;
  void* data_ = nullptr;
};

/// Runs work(0) .. work(n - 1) at the same time on n threads that exist all the while; work(0) runs on the
/// caller.
class Team {
 public:
  explicit Team(int num_threads) {
    for (int rank = 1; rank < num_threads; ++rank) {
      threads_.emplace_back([this, rank] { serve(rank); });
    }
  }
  ~Team() {
    stop_.store(true);
    generation_.fetch_add(1);
    for (auto& thread : threads_) {
      thread.join();
    }
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  [[nodiscard]] int size() const { return static_cast<int>(threads_.size()) + 1; }

  /// Milliseconds from the start until the last one is done.
  double time(const std::function<void(int)>& work) {
    work_ = &work;
    done_.store(0);
    const auto start = std::chrono::steady_clock::now();
    generation_.fetch_add(1);
    work(0);
    while (done_.load() < static_cast<int>(threads_.size())) {
    }
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  void serve(int rank) {
    std::uint64_t seen = 0;
    while (true) {
      while (generation_.load() == seen) {
      }
      ++seen;
      if (stop_.load()) {
        return;
      }
      (*work_)(rank);
      done_.fetch_add(1);
    }
  }

  std::atomic<std::uint64_t> generation_{0};
  std::atomic<int> done_{0};
  std::atomic<bool> stop_{false};
  const std::function<void(int)>* work_ = nullptr;
  std::vector<std::thread> threads_;
};

/// Two things timed in blocks A B B A: drifts of the machine hit both alike. Milliseconds, and one quotient a
/// block.
struct Paired {
  std::vector<double> a, b, ratio;
};

template <class TimeA, class TimeB>
Paired run_paired(int rounds, const TimeA& time_a, const TimeB& time_b) {
  time_a();
  time_b();
  Paired result;
  for (int round = 0; round < rounds; ++round) {
    const double a1 = time_a();
    const double b1 = time_b();
    const double b2 = time_b();
    const double a2 = time_a();
    result.a.insert(result.a.end(), {a1, a2});
    result.b.insert(result.b.end(), {b1, b2});
    result.ratio.push_back((a1 + a2) / (b1 + b2));
  }
  return result;
}

}  // namespace zeroth::benchmarks
