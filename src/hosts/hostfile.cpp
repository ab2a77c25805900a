#include "hosts/hostfile.h"

#include "base/unique_fd.h"
#include "hosts/text_cursor.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <system_error>
#include <unordered_map>

namespace zeroth {
namespace {

constexpr const char* kRightFile = "is it the right file?";

/// Names of hosts are the same in capitals.
std::string folded(std::string name) {
  for (char& c : name) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return name;
}

/// The hosts that have been read, and where each was.
class HostTable {
 public:
  void add(HostEntry host, const TextCursor& cursor, std::size_t column, const std::string& place) {
    const auto [before, is_new] = places_.try_emplace(folded(host.name), place);
    if (!is_new) {
      cursor.refuse("a host twice", "each host once, with all its slots", host.name,
                    "the first is at " + before->second, column);
    }
    if (hosts_.size() == kMaxHosts) {
      cursor.refuse("too many hosts", fmt::format("at most {}", kMaxHosts), host.name, "start several jobs", column);
    }
    hosts_.push_back(std::move(host));
  }

  std::vector<HostEntry> take() { return std::move(hosts_); }
  [[nodiscard]] bool empty() const { return hosts_.empty(); }

 private:
  std::vector<HostEntry> hosts_;
  std::unordered_map<std::string, std::string> places_;
};

void parse_line(std::string_view line, const std::string& name, std::size_t number, HostTable& table) {
  TextCursor cursor(line.substr(0, line.find('#')), name, number, ErrorCode::kConfig);
  cursor.skip_blanks();
  if (cursor.at_end()) {
    return;
  }
  const std::size_t column = cursor.column();
  HostEntry host{.name = cursor.host(" \t")};
  cursor.skip_blanks();
  if (!cursor.take("slots=")) {
    cursor.refuse("the number of slots is missing", "HOST slots=N", cursor.rest(), "add slots=<ranks for this host>");
  }
  host.num_slots =
      cursor.number(1, kMaxSlots, " \t", "the number of slots", "slots=<ranks for this host>, a plain number");
  cursor.skip_blanks();
  if (!cursor.at_end()) {
    cursor.refuse("more on the line than a host and its slots", "HOST slots=N", cursor.rest(),
                  "one host a line; a comment begins with '#'");
  }
  table.add(std::move(host), cursor, column, fmt::format("line {}", number));
}

struct Node {
  std::string host;
  std::vector<int> slots{};  ///< empty: the whole host
};

/// Index into `hosts` -> what the filter names of it.
std::map<std::size_t, Node> parse_filter(std::string_view text, const std::vector<HostEntry>& hosts,
                                         const std::string& option) {
  std::unordered_map<std::string, std::size_t> index;
  std::vector<std::string> names;
  for (const HostEntry& host : hosts) {
    index.emplace(folded(host.name), names.size());
    names.push_back(host.name);
  }
  std::map<std::size_t, Node> nodes;
  TextCursor cursor(text, option, 1, ErrorCode::kUsage);
  do {
    const std::size_t column = cursor.column();
    Node node{.host = cursor.host(":@,")};
    const auto found = index.find(folded(node.host));
    if (found == index.end()) {
      const std::string near = names.size() <= 1000 ? nearest_name(node.host, names) : "";
      cursor.refuse("this host is not among the job's", "a host of the hostfile or of --hosts", node.host,
                    near.empty() ? option + " chooses from the hosts that are there" : "did you mean " + near + "?",
                    column);
    }
    if (cursor.take(':')) {
      do {
        const std::size_t slot_column = cursor.column();
        const int slot = cursor.number(0, hosts[found->second].num_slots - 1, ",@", "the slot of " + node.host,
                                       "slots are counted from 0");
        if (std::ranges::find(node.slots, slot) != node.slots.end()) {
          cursor.refuse("a slot twice", "each slot once", std::to_string(slot), "leave one of them out", slot_column);
        }
        node.slots.push_back(slot);
      } while (cursor.take(','));
    }
    std::ranges::sort(node.slots);
    if (!nodes.emplace(found->second, node).second) {
      cursor.refuse("a host twice", "each host once: HOST:SLOT,SLOT", node.host, "name all its slots at one place",
                    column);
    }
  } while (cursor.take('@'));
  if (!cursor.at_end()) {
    cursor.refuse("not a filter of hosts", "NODE[@NODE...], NODE is HOST or HOST:SLOT[,SLOT...]", cursor.rest(),
                  "hosts are parted by '@', slots by ','");
  }
  return nodes;
}

}  // namespace

std::vector<HostEntry> parse_hostfile(std::string_view text, const std::string& name) {
  const TextCursor whole(text, name, 1, ErrorCode::kConfig);
  if (text.size() > kMaxHostfileBytes) {
    whole.refuse("the hostfile is too large", fmt::format("at most {} bytes", kMaxHostfileBytes), text.substr(0, 8),
                 kRightFile);
  }
  if (text.starts_with("\xef\xbb\xbf")) {
    whole.refuse("the hostfile begins with a byte-order mark", "plain text", text.substr(0, 3),
                 "save it as UTF-8 without BOM");
  }
  HostTable table;
  std::size_t number = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    ++number;
    const std::size_t control = std::min(line.find('\0'), line.find('\r'));
    if (control != std::string_view::npos) {
      const bool carriage = line[control] == '\r';
      const TextCursor cursor(line, name, number, ErrorCode::kConfig);
      cursor.refuse(carriage ? "a carriage return" : "a NUL byte", "lines that end with LF", line.substr(control, 1),
                    carriage ? "the file has Windows line ends: sed -i 's/\\r$//'" : "this is no text file",
                    control + 1);
    }
    parse_line(line, name, number, table);
  }
  if (table.empty()) {
    whole.refuse("no host in the hostfile", "lines HOST slots=N", text.substr(0, 0),
                 "an empty list is never this host alone: for that use -n without --hostfile");
  }
  return table.take();
}

std::vector<HostEntry> parse_host_list(std::string_view text) {
  TextCursor cursor(text, "--hosts", 1, ErrorCode::kUsage);
  HostTable table;
  do {
    const std::size_t column = cursor.column();
    HostEntry host{.name = cursor.host(":,"), .num_slots = 1};
    if (cursor.take(':')) {
      host.num_slots = cursor.number(1, kMaxSlots, ",", "the number of slots",
                                     "HOST:<ranks for this host>, a plain number; an IPv6 address goes in brackets");
    }
    table.add(std::move(host), cursor, column, fmt::format("column {}", column));
  } while (cursor.take(','));
  if (!cursor.at_end()) {
    cursor.refuse("not a list of hosts", "HOST[:SLOTS][,HOST[:SLOTS]...]", cursor.rest(), "hosts are parted by ','");
  }
  return table.take();
}

std::string format_hostfile(const std::vector<HostEntry>& hosts) {
  std::string text;
  for (const HostEntry& host : hosts) {
    text += fmt::format("{} slots={}\n", host.name, host.num_slots);
  }
  return text;
}

std::string read_hostfile(const std::string& path) {
  const auto refuse = [&path](ErrorCode code, const std::string& message, const std::string& hint) {
    throw Error(code, message, {.where = "--hostfile", .which = path, .hint = hint});
  };
  // O_NONBLOCK: a FIFO without a writer must not stop us before fstat has told what it is.
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file.valid()) {
    const int error = errno;
    std::error_code unknown;
    const std::string here = std::filesystem::current_path(unknown).string();
    refuse(ErrorCode::kIo, "cannot read the hostfile: " + errno_text(error),
           fmt::format("{}; this host alone is never taken instead",
                       path.starts_with('/') ? "check the path" : "the working directory is " + here));
  }
  struct stat info{};
  if (::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    refuse(ErrorCode::kConfig, "the hostfile is not a regular file",
           "give the path of a file, no folder, pipe or device");
  }
  const std::string too_large = fmt::format("the hostfile is larger than {} bytes", kMaxHostfileBytes);
  if (info.st_size > static_cast<off_t>(kMaxHostfileBytes)) {
    refuse(ErrorCode::kConfig, too_large, kRightFile);
  }
  std::string text;
  std::string block(std::size_t{64} << 10, '\0');
  for (;;) {
    const ssize_t bytes = ::read(file.get(), block.data(), block.size());
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0)
      refuse(ErrorCode::kIo, "cannot read the hostfile: " + errno_text(errno), "copy it to a disk of this machine");
    if (bytes == 0) return text;
    text.append(block.data(), static_cast<std::size_t>(bytes));
    if (text.size() > kMaxHostfileBytes) refuse(ErrorCode::kConfig, too_large, kRightFile);  // it has grown meanwhile
  }
}

std::vector<HostSelection> select_hosts(const std::vector<HostEntry>& hosts, std::string_view include,
                                        std::string_view exclude) {
  if (!include.empty() && !exclude.empty()) {
    throw Error(ErrorCode::kUsage, "--include and --exclude together", {.hint = "give one of the two"});
  }
  const bool including = !include.empty();
  const auto nodes = including || !exclude.empty()
                         ? parse_filter(including ? include : exclude, hosts, including ? "--include" : "--exclude")
                         : std::map<std::size_t, Node>{};
  std::vector<HostSelection> selected;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const auto named = nodes.find(i);
    const bool is_named = named != nodes.end();
    const bool whole = is_named ? named->second.slots.empty() : !including;
    if (including ? !is_named : is_named && whole) {
      continue;
    }
    HostSelection host{.name = hosts[i].name, .slots_named = is_named && !named->second.slots.empty()};
    for (int slot = 0; slot < hosts[i].num_slots; ++slot) {
      const bool listed = is_named && std::ranges::binary_search(named->second.slots, slot);
      if (!host.slots_named || listed == including) host.slots.push_back(slot);
    }
    if (!host.slots.empty()) selected.push_back(std::move(host));
  }
  if (selected.empty()) {
    throw Error(ErrorCode::kUsage, "no host is left",
                {.which = "--exclude",
                 .expected = "a host that it does not name",
                 .got = in_quotes(exclude),
                 .hint = "exclude fewer"});
  }
  return selected;
}

}  // namespace zeroth
