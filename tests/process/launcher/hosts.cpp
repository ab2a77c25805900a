#include "process/launcher/hosts.h"

#include <fstream>
#include <iterator>
#include <sstream>

namespace zeroth::test {
namespace {

constexpr const char* kSsh = R"(#!/bin/bash
printf '%s\n' "$*" >> "${0%/*}/calls"
while [[ $1 != -- ]]; do shift; done
host=$2
shift 2
case $host in
  refused) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255;;
  silent) exec sleep 60;;
  garbage) exec cat /dev/zero;;
  other) printf 'ZEROTHAG\001\0\0\0'; printf '\062\0\0\0\001\005\0\0\0other\001\0\0\0h'; head -c 32 /dev/zero; printf '\0\0\0\0'; exec sleep 60;;
  liar) printf 'ZEROTHAG\001\0\0\0\377\377\377\377\002'; exec sleep 60;;
  chatty) seq 1 100000 >&2;;
  banner) printf 'Welcome to this host\r\nhave fun ';;
esac
cd /
clean=(env -i PATH=/usr/bin:/bin HOME=/ HOSTNAME=name-of-$host SSH_CONNECTION="192.0.2.7 1 192.0.2.8 22" ASAN_OPTIONS="$ASAN_OPTIONS")
if [[ $host == child* ]]; then
  exec 3<&0
  "${clean[@]}" sh -c "$*" <&3 3<&- &
  exec 3<&-
  wait $!
  exit
fi
exec "${clean[@]}" sh -c "$*"
)";

}  // namespace

FakeHosts::FakeHosts() {
  scratch.file("ssh", kSsh, 0755);
}

std::vector<std::string> FakeHosts::arguments(const std::vector<std::string>& options,
                                              const std::vector<std::string>& program) const {
  std::vector<std::string> result{"-q", "--remote-program", ZEROTH_RUN_PATH};
  result.insert(result.end(), options.begin(), options.end());
  result.insert(result.end(), program.begin(), program.end());
  return result;
}

std::vector<std::string> FakeHosts::probe(const std::vector<std::string>& options,
                                          const std::vector<std::string>& arguments_) const {
  std::vector<std::string> program{RANK_PROBE_PATH};
  program.insert(program.end(), arguments_.begin(), arguments_.end());
  return arguments(options, program);
}

pid_t parent_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const std::size_t name_end = text.rfind(')');
  std::istringstream rest(name_end == std::string::npos ? "" : text.substr(name_end + 1));
  char state = ' ';
  pid_t parent = 0;
  rest >> state >> parent;
  return parent;
}

}  // namespace zeroth::test
