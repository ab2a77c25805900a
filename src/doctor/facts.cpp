#include "doctor/facts.h"

#include "base/unique_fd.h"
#include "hosts/processors.h"

#include <zeroth/base/surroundings.h>
#include <zeroth/base/version.h>
#include <zeroth/device/memory.h>

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gnu/libc-version.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth::doctor {
namespace {

namespace fs = std::filesystem;

/// Of each of four questions; together less than ranks have to come to the meeting.
constexpr Milliseconds kLibraryPatience{3000};

/// The first of these libraries that is there.
void* open_library(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (void* library = ::dlopen(name, RTLD_LAZY | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

template <typename Function>
Function* function_of(void* library, const char* name) {
  return library != nullptr ? reinterpret_cast<Function*>(::dlsym(library, name)) : nullptr;
}

std::string first_line(std::string text) {
  return text.substr(0, text.find_first_of(std::string_view("\n\r\0", 3)));
}

/// The one library of MPI that says its version before MPI is initialised.
std::string mpi_version() {
  const auto ask = function_of<int(char*, int*)>(open_library({"libmpi.so.40", "libmpi.so.12", "libmpi.so"}),
                                                 "MPI_Get_library_version");
  if (ask == nullptr) return "";
  std::string text(8192, '\0');  // MPI_MAX_LIBRARY_VERSION_STRING of all MPIs that we know
  int length = 0;
  if (ask(text.data(), &length) != 0) return "an MPI";
  const std::string line = first_line(text.c_str());
  return line.substr(0, line.find(','));
}

std::string nccl_version() {
  const auto ask = function_of<int(int*)>(open_library({"libnccl.so.2", "libnccl.so"}), "ncclGetVersion");
  int version = 0;
  if (ask == nullptr || ask(&version) != 0) return "";
  return version >= 10'000 ? fmt::format("{}.{}.{}", version / 10'000, version / 100 % 100, version % 100)
                           : fmt::format("{}.{}.{}", version / 1000, version / 100 % 10, version % 100);
}

std::string cuda_version() {
  const auto ask = function_of<int(int*)>(open_library({"libcuda.so.1"}), "cuDriverGetVersion");
  int version = 0;
  if (ask == nullptr || ask(&version) != 0) return "";
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

/// Names of the GPUs, from the driver's files: no CUDA context is made.
std::vector<std::string> devices() {
  constexpr std::string_view kModel = "Model:";
  std::vector<std::string> found;
  std::error_code unreadable;
  for (const fs::directory_entry& gpu : fs::directory_iterator("/proc/driver/nvidia/gpus", unreadable)) {
    std::ifstream info(gpu.path() / "information");
    std::string line;
    while (std::getline(info, line)) {
      if (!line.starts_with(kModel)) continue;
      const std::size_t begin = line.find_first_not_of(" \t", kModel.size());
      found.push_back(begin == std::string::npos ? "a GPU" : line.substr(begin));
    }
  }
  return found;
}

std::uint64_t memory_of_machine() {
  std::ifstream info("/proc/meminfo");
  std::string name;
  std::uint64_t kib = 0;
  return info >> name >> kib && name == "MemTotal:" ? kib * 1024 : 0;
}

/// The least of the limits along the process's cgroup (v2), 0 for none.
std::uint64_t cgroup_limit() {
  std::ifstream groups("/proc/self/cgroup");
  std::string line;
  std::uint64_t least = 0;
  while (std::getline(groups, line)) {
    const bool legacy = line.find(":memory:") != std::string::npos;
    if (!line.starts_with("0::") && !legacy) continue;
    const fs::path root = legacy ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup";
    fs::path folder = line.substr(line.rfind(':') + 1);
    while (true) {
      std::ifstream file(root / folder.relative_path() / (legacy ? "memory.limit_in_bytes" : "memory.max"));
      std::uint64_t limit = 0;
      // v1 has a huge number where there is no limit.
      if (file >> limit && limit < std::uint64_t{1} << 60U && (least == 0 || limit < least)) least = limit;
      if (!folder.has_relative_path()) break;
      folder = folder.parent_path();
    }
  }
  return least;
}

std::string refusal_of_memfd() {
  const UniqueFd memory(::memfd_create("zeroth-doctor", MFD_CLOEXEC));
  return memory.valid() ? "" : errno_text(errno);
}

std::string refusal_of_pidfd() {
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  return process.valid() ? "" : errno_text(errno);
}

std::int64_t soft_limit(__rlimit_resource resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
  return static_cast<std::int64_t>(std::min<rlim_t>(limit.rlim_cur, INT64_MAX));
}

bool is_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24U == 127;
  }
  if (address.sa_family != AF_INET6) return false;
  const in6_addr& six = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&six) || (IN6_IS_ADDR_V4MAPPED(&six) && six.s6_addr[12] == 127);
}

/// A file that goes with the object.
class ScratchFile {
 public:
  explicit ScratchFile(const std::string& folder) : path_(folder + "/.zeroth-doctor-XXXXXX") {
    fd_ = UniqueFd(::mkostemp(path_.data(), O_CLOEXEC));
    if (fd_.valid()) ::unlink(path_.c_str());  // no name: nothing is left, however this ends
  }
  [[nodiscard]] int fd() const { return fd_.get(); }

 private:
  std::string path_;
  UniqueFd fd_;
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

double seconds_since(SteadyClock::time_point begin) {
  return std::chrono::duration<double>(SteadyClock::now() - begin).count();
}

/// Writes or reads blocks until the file is `bytes` long, or the time is over. Returns an error, and the bytes in
/// `done`.
template <typename Transfer>
std::string move_blocks(std::size_t bytes, std::size_t block, const Deadline& deadline, std::size_t& done,
                        const Transfer& transfer) {
  for (done = 0; done < bytes && !deadline.passed();) {
    const ssize_t moved = transfer(std::min(block, bytes - done), done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno_text(errno);
    if (moved == 0) return "the file is shorter than what was written";
    done += static_cast<std::size_t>(moved);
  }
  return "";
}

}  // namespace

std::string loopback_of(const std::string& name) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (name.empty() || ::getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, ::freeaddrinfo);
  std::string first;
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    if (!is_loopback(*entry->ai_addr)) return "";
    std::array<char, NI_MAXHOST> text{};
    if (first.empty() &&
        ::getnameinfo(entry->ai_addr, entry->ai_addrlen, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0) {
      first = text.data();
    }
  }
  return first;
}

std::string ask_in_child(const std::function<std::string()>& task, Milliseconds patience) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return "";
  const UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  const pid_t child = ::fork();
  if (child < 0) return "";
  if (child == 0) {
    const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) ::dup2(nothing, fd);  // libraries that complain
    std::string answer = task();
    answer.resize(std::min(answer.size(), std::size_t{4096}));  // fits the pipe
    std::ignore = ::write(write_end.get(), answer.data(), answer.size());
    ::_exit(0);
  }
  write_end.reset();
  const Deadline deadline(patience);
  std::string answer;
  while (!deadline.passed()) {
    pollfd polled{.fd = read_end.get(), .events = POLLIN, .revents = 0};
    if (::poll(&polled, 1, static_cast<int>(deadline.slice().count())) <= 0) continue;
    std::array<char, 4096> bytes{};
    const ssize_t got = ::read(read_end.get(), bytes.data(), bytes.size());
    if (got <= 0) break;
    answer.append(bytes.data(), static_cast<std::size_t>(got));
  }
  ::kill(child, SIGKILL);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return answer;
}

RankFacts facts_of_this_process() {
  RankFacts facts;
  facts.host_name = host_name();
  facts.zeroth = version_text();
  utsname system{};
  if (::uname(&system) == 0) facts.kernel = system.release;
  facts.glibc = ::gnu_get_libc_version();
  facts.mpi = ask_in_child(mpi_version, kLibraryPatience);
  facts.nccl = ask_in_child(nccl_version, kLibraryPatience);
  facts.cuda = ask_in_child(cuda_version, kLibraryPatience);
  facts.devices = devices();
  std::set<std::pair<int, int>> cores;
  std::set<int> nodes;
  // A rank that zeroth-run has bound to some cores is still one of a host with all of them.
  const bool is_bound = !variable_or_empty("ZEROTH_BOUND_CORES").empty();
  const std::vector<Processor> processors = is_bound ? processors_of(::getppid()) : processors_here();
  for (const Processor& processor : processors) {
    cores.insert({processor.package, processor.core});
    nodes.insert(processor.node);
  }
  facts.processors = static_cast<int>(processors.size());
  facts.cores = static_cast<int>(cores.size());
  facts.numa_nodes = static_cast<int>(nodes.size());
  facts.memory = memory_of_machine();
  facts.memory_available = available_memory_bytes();
  facts.memory_limit = cgroup_limit();
  struct statvfs shm{};
  if (::statvfs("/dev/shm", &shm) == 0) {
    facts.shm_bytes = std::uint64_t{shm.f_blocks} * shm.f_frsize;
    facts.shm_free = std::uint64_t{shm.f_bavail} * shm.f_frsize;
  }
  facts.memfd = refusal_of_memfd();
  facts.pidfd = refusal_of_pidfd();
  facts.memlock = soft_limit(RLIMIT_MEMLOCK);
  facts.open_files = soft_limit(RLIMIT_NOFILE);
  facts.name_leads_to = ask_in_child([name = facts.host_name] { return loopback_of(name); }, kLibraryPatience);
  facts.interface_chosen = !variable_or_empty("GLOO_SOCKET_IFNAME").empty();
  return facts;
}

DiskFacts measure_disk(const std::string& folder, std::size_t bytes, Milliseconds patience) {
  constexpr std::size_t kBlock = std::size_t{4} << 20U;
  constexpr std::size_t kAlign = 4096;
  DiskFacts disk{.folder = folder};
  struct statvfs info{};
  if (::statvfs(folder.c_str(), &info) != 0) {
    disk.error = errno_text(errno);
    return disk;
  }
  disk.free = std::uint64_t{info.f_bavail} * info.f_frsize;
  const ScratchFile file(folder);
  if (file.fd() < 0) {
    disk.error = "cannot make a file: " + errno_text(errno);
    return disk;
  }
  const std::unique_ptr<void, Free> memory(std::aligned_alloc(kAlign, kBlock));
  if (!memory) {
    disk.error = "no memory for a block";
    return disk;
  }
  std::memset(memory.get(), 0x5A, kBlock);
  std::size_t written = 0;
  SteadyClock::time_point begin = SteadyClock::now();
  const std::string write_error =
      move_blocks(bytes, kBlock, Deadline(patience), written, [&](std::size_t size, std::size_t at) {
        return ::pwrite(file.fd(), memory.get(), size, static_cast<off_t>(at));
      });
  if (!write_error.empty() || ::fdatasync(file.fd()) != 0) {
    disk.error = "cannot write: " + (write_error.empty() ? errno_text(errno) : write_error);
    return disk;
  }
  disk.write_bytes_per_s = static_cast<double>(written) / seconds_since(begin);
  // What was written would come from memory: past the page cache if the file system can, else as far as it lets go of
  // it.
  const std::string again = fmt::format("/proc/self/fd/{}", file.fd());
  const UniqueFd direct(::open(again.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  disk.direct = direct.valid() && ::pread(direct.get(), memory.get(), kAlign, 0) == static_cast<ssize_t>(kAlign);
  if (!disk.direct) ::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  const int source = disk.direct ? direct.get() : file.fd();
  const std::size_t whole = disk.direct ? written / kAlign * kAlign : written;
  std::size_t read = 0;
  begin = SteadyClock::now();
  const std::string read_error = move_blocks(
      whole, kBlock, Deadline(patience), read,
      [&](std::size_t size, std::size_t at) { return ::pread(source, memory.get(), size, static_cast<off_t>(at)); });
  if (!read_error.empty()) {
    disk.error = "cannot read: " + read_error;
    return disk;
  }
  disk.read_bytes_per_s = static_cast<double>(read) / seconds_since(begin);
  return disk;
}

}  // namespace zeroth::doctor
