// Which hosts a job runs on: the first line is a list of hosts and a filter, the rest a hostfile. What is accepted
// keeps the grammar and reads back as itself, a filter's two meanings share out every slot, and what is refused says
// line and column.
#include "hosts/hostfile.h"

#include "fuzz/fuzz_target.h"

#include <zeroth/base/error.h>

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <exception>
#include <iterator>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

using zeroth::Error;
using zeroth::ErrorCode;
using zeroth::HostEntry;
using zeroth::HostSelection;
using zeroth::fuzz::expect;

namespace {

constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  for (std::size_t at = 0; at <= text.size(); at += lines.back().size() + 1)
    lines.push_back(text.substr(at, text.find('\n', at) - at));
  return lines;
}

bool is_address(const std::string& name) {
  std::array<unsigned char, 16> address{};
  std::array<char, INET6_ADDRSTRLEN> shortest{};
  return ::inet_pton(AF_INET6, name.c_str(), address.data()) == 1 &&
         name == ::inet_ntop(AF_INET6, address.data(), shortest.data(), shortest.size());
}

bool is_name(const std::string& name) {
  return !name.empty() && name.size() <= 253 && kLetters.find(name.front()) != std::string_view::npos &&
         name.back() != '.' && name.find("..") == std::string::npos &&
         name.find_first_not_of(std::string(kLetters) + ".-_") == std::string::npos;
}

void check_hosts(const std::vector<HostEntry>& hosts) {
  std::set<std::string> seen;
  for (const HostEntry& host : hosts) {
    expect(is_name(host.name) || is_address(host.name), "a host that is neither a name nor an address", host.name);
    expect(host.num_slots >= 1 && host.num_slots <= zeroth::kMaxSlots, "a number of slots out of its limits",
           host.name);
    std::string folded = host.name;
    for (char& c : folded) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    expect(seen.insert(folded).second, "a host twice", host.name);
  }
  const std::string text = zeroth::format_hostfile(hosts);
  expect(zeroth::parse_hostfile(text, "again") == hosts, "hosts that do not read back as themselves", text);
}

std::string list_of(const std::vector<HostEntry>& hosts) {
  std::string text;
  for (const HostEntry& host : hosts) {
    if (!text.empty()) text += ',';
    text += is_address(host.name) ? "[" + host.name + "]" : host.name;
    text += ":" + std::to_string(host.num_slots);
  }
  return text;
}

/// The place is "name:line:column" and in the text.
void check_refusal(const Error& error, ErrorCode code, const std::string& name, std::string_view text) {
  expect(error.code() == code, "refused with another code", error.what());
  expect(zeroth::fuzz::is_printable(error.what()), "a refusal with control characters", error.what());
  expect(!error.context().expected.empty() && !error.context().got.empty(), "refused without what is expected and came",
         error.what());
  expect(!error.context().hint.empty(), "refused without a hint", error.what());
  const std::string& place = error.context().where;
  expect(place.starts_with(name + ":"), "refused without a place", error.what());
  const char* const end = place.data() + place.size();
  std::size_t line = 0;
  std::size_t column = 0;
  const auto [colon, status] = std::from_chars(place.data() + name.size() + 1, end, line);
  expect(status == std::errc{} && colon != end && *colon == ':', "refused without a line", error.what());
  expect(std::from_chars(colon + 1, end, column).ptr == end, "refused without a column", error.what());
  const auto lines = lines_of(text);
  expect(line >= 1 && line <= lines.size(), "a line that is not in the text", error.what());
  expect(column >= 1 && column <= lines[line - 1].size() + 1, "a column that is not in its line", error.what());
}

/// Every line that is more than a comment is one host, and ends with its slots.
void check_lines(const std::vector<HostEntry>& hosts, std::string_view text) {
  expect(text.find_first_of(std::string_view("\r\0", 2)) == std::string_view::npos,
         "a carriage return or NUL byte is accepted", text);
  std::size_t num_hosts = 0;
  for (std::string_view line : lines_of(text)) {
    line = line.substr(0, line.find('#'));
    line = line.substr(0, line.find_last_not_of(" \t") + 1);
    if (line.empty()) continue;
    expect(num_hosts < hosts.size(), "a line without its host", line);
    expect(line.ends_with("slots=" + std::to_string(hosts[num_hosts].num_slots)),
           "a line that does not end with its slots", line);
    ++num_hosts;
  }
  expect(num_hosts == hosts.size(), "a host without its line", text);
}

/// No host where it is refused.
std::vector<HostEntry> try_hostfile(std::string_view text) {
  try {
    std::vector<HostEntry> hosts = zeroth::parse_hostfile(text, "hosts");
    check_lines(hosts, text);
    check_hosts(hosts);
    return hosts;
  } catch (const Error& error) {
    check_refusal(error, ErrorCode::kConfig, "hosts", text);
    return {};
  }
}

void try_host_list(std::string_view text) {
  try {
    const std::vector<HostEntry> hosts = zeroth::parse_host_list(text);
    expect(std::ranges::count(text, ',') + 1 == std::ssize(hosts), "not one host between two commas", text);
    check_hosts(hosts);
    expect(zeroth::parse_host_list(list_of(hosts)) == hosts, "a list that does not read back as itself", text);
  } catch (const Error& error) {
    check_refusal(error, ErrorCode::kUsage, "--hosts", text);
  }
}

/// None where the filter is refused; no host where none is left.
std::optional<std::vector<HostSelection>> try_filter(const std::vector<HostEntry>& hosts, std::string_view filter,
                                                     bool include) {
  try {
    return zeroth::select_hosts(hosts, include ? filter : "", include ? "" : filter);
  } catch (const Error& error) {
    if (!include && error.context().where.empty()) {
      expect(error.message() == "no host is left" && error.code() == ErrorCode::kUsage, "refused without a place",
             error.what());
      expect(!error.context().hint.empty(), "refused without a hint", error.what());
      return std::vector<HostSelection>{};
    }
    check_refusal(error, ErrorCode::kUsage, include ? "--include" : "--exclude", filter);
    return std::nullopt;
  }
}

/// The slots of `host` that were selected; the selections are in the order of the hosts.
std::vector<int> take_slots(const HostEntry& host, const std::vector<HostSelection>& selected, std::size_t& at) {
  if (at == selected.size() || selected[at].name != host.name) return {};
  const HostSelection& selection = selected[at++];
  expect(!selection.slots.empty(), "a host without slots is selected", host.name);
  expect(selection.slots_named || std::ssize(selection.slots) == host.num_slots, "a part of a host without named slots",
         host.name);
  return selection.slots;
}

void try_filters(const std::vector<HostEntry>& hosts, std::string_view filter) {
  const auto included = try_filter(hosts, filter, true);
  const auto excluded = try_filter(hosts, filter, false);
  expect(included.has_value() == excluded.has_value(), "a filter that --include and --exclude read differently",
         filter);
  if (!included) return;
  std::size_t included_at = 0;
  std::size_t excluded_at = 0;
  for (const HostEntry& host : hosts) {
    std::vector<int> all(static_cast<std::size_t>(host.num_slots));
    std::iota(all.begin(), all.end(), 0);
    const std::vector<int> in = take_slots(host, *included, included_at);
    const std::vector<int> out = take_slots(host, *excluded, excluded_at);
    std::vector<int> both;
    std::ranges::merge(in, out, std::back_inserter(both));
    expect(filter.empty() ? in == all && out == all : both == all, "a slot that is selected twice or not at all",
           filter);
  }
  expect(included_at == included->size() && excluded_at == excluded->size(),
         "a selection that is no host, or in another order", filter);
  if (filter.empty()) return;
  std::ptrdiff_t num_commas = 0;
  for (const HostSelection& host : *included) num_commas += host.slots_named ? std::ssize(host.slots) - 1 : 0;
  expect(std::ranges::count(filter, '@') + 1 == std::ssize(*included), "not one host between two '@'", filter);
  expect(std::ranges::count(filter, ',') == num_commas, "not one slot between two commas", filter);
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = zeroth::fuzz::text_of(data, size);
  const std::string_view line = text.substr(0, text.find('\n'));
  try {
    const std::vector<HostEntry> hosts = try_hostfile(text.substr(std::min(text.size(), line.size() + 1)));
    try_host_list(line);
    try_filters(hosts.empty() ? std::vector<HostEntry>{{"a", 4}, {"b", 1}, {"fd00::1", 2}} : hosts, line);
  } catch (const std::exception& error) {
    expect(false, "refused with something that is no Error, or not read back", error.what());
  }
  return 0;
}
