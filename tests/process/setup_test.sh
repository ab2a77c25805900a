#!/usr/bin/env bash
# tools/setup against stand-ins for dpkg-query, apt-get, g++ and python3: what it installs, when it does nothing, and
# the text and exit code of every refusal. Nothing is installed and nothing outside a temporary folder is written.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bin=$work/bin
log=$work/log
mkdir "$bin"
failures=0

stand_in() {
  cat >"$bin/$1"
  chmod +x "$bin/$1"
}

# A machine on which everything is there, but for the packages and headers that $work/missing names. apt does not have
# those of $work/unknown.
reset() {
  rm -rf "$work/venv" "$work/missing" "$work/unknown" "$log"
  touch "$work/missing" "$work/unknown" "$log"
  printf 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_ID="12"\nID=debian\n' >"$work/debian"
  printf 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nVERSION_ID="13"\nID=debian\n' >"$work/debian13"
  printf 'PRETTY_NAME="Ubuntu 22.04.5 LTS"\nVERSION_ID="22.04"\nID=ubuntu\nID_LIKE=debian\n' >"$work/ubuntu22"
  printf 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nVERSION_ID="24.04"\nID=ubuntu\nID_LIKE=debian\n' >"$work/ubuntu24"
  printf 'PRETTY_NAME="Fedora Linux 41"\nVERSION_ID=41\nID=fedora\n' >"$work/fedora"
  export ZEROTH_SETUP_OS_RELEASE=$work/debian ZEROTH_SETUP_UID=0 ZEROTH_SETUP_VENV=$work/venv ZEROTH_SETUP_CORE=
  export WORK=$work keep_missing=
  unset PYTHON CXX
  # shellcheck disable=SC2016
  stand_in dpkg-query <<'END'
#!/bin/bash
shift 3
missing=$'\n'$(<"$WORK/missing")$'\n'
for name; do [[ $missing == *$'\n'"$name"$'\n'* ]] || echo "$name installed"; done
END
  stand_in apt-cache <<'END'
#!/bin/bash
! grep -qx "${!#}" "$WORK/unknown"
END
  stand_in cmake <<'END'
#!/bin/bash
echo "cmake version ${CMAKE_IS:-3.25.1}"
END
  stand_in apt-get <<'END'
#!/bin/bash
echo "apt-get $*" >>"$WORK/log"
[[ ! -e $WORK/apt-fails ]] || exit 100
[[ $1 == update || -n $keep_missing ]] || : >"$WORK/missing"
END
  stand_in python3 <<'END'
#!/bin/bash
if [[ $1 == -m && $2 == venv ]]; then
  echo "venv" >>"$WORK/log"
  mkdir -p "$3/bin"
  printf '#!/bin/bash\n%s\n%s\n' '[[ $3 != install ]] || echo "pip $*" >>"$WORK/log"' \
    '[[ $3 != install || ! -e $WORK/pip-fails ]]' >"$3/bin/python"
  chmod +x "$3/bin/python"
elif [[ $1 == --version ]]; then
  echo "Python 3.11.2"
fi
END
  stand_in g++ <<'END'
#!/bin/bash
[[ $1 != -dumpfullversion ]] || { echo "${GXX_IS:-12.2.0}"; exit; }
! grep -qF "$(sed 's/.*<\(.*\)>.*/\1/')" "$WORK/missing"
END
}

setup() {
  status=0
  PATH=$bin:$PATH "$root/tools/setup" >"$work/out" 2>&1 || status=$?
}

check() { # NAME CONDITION...
  local name=$1
  shift
  if "$@"; then
    echo "ok      $name"
  else
    failures=$((failures + 1))
    echo "FAILED  $name (status $status)"
    sed 's/^/        output: /' "$work/out"
    sed 's/^/        log:    /' "$log"
  fi
}
says() { grep -qF -- "$1" "$work/out"; }
did() { grep -qF -- "$1" "$log"; }
refused() { [[ $status == 1 ]]; }
done_well() { [[ $status == 0 ]]; }
did_nothing() { [[ ! -s $log && ! -s $work/out ]]; }

reset
setup
check "a fresh environment is made" done_well
check "with the pinned packages" did "pip -m pip install --disable-pip-version-check --quiet -r tools/requirements.txt"
: >"$log"
setup
check "the second run succeeds" done_well
check "and does nothing" did_nothing
echo "an older list" >"$work/venv/.zeroth-requirements"
setup
check "changed requirements are installed" did "pip"

reset
ZEROTH_SETUP_CORE=1
setup
check "the core needs no environment" did_nothing

reset
printf 'ninja-build\nlibcli11-dev\n' >"$work/missing"
setup
check "root installs" done_well
check "exactly what is missing" grep -qx "apt-get install -q -y --no-install-recommends ninja-build libcli11-dev" "$log"

reset
printf 'clang\nlibclang-rt-14-dev\n' >"$work/missing"
ZEROTH_SETUP_CORE=1
setup
check "tests need no clang" did_nothing
ZEROTH_SETUP_CORE=1 ZEROTH_SETUP_FUZZ=1 setup
check "fuzzing does" grep -qx "apt-get install -q -y --no-install-recommends clang libclang-rt-14-dev" "$log"
reset
printf 'clang\n' >"$work/missing"
ZEROTH_SETUP_UID=1000
ZEROTH_SETUP_CORE=1 ZEROTH_SETUP_FUZZ=1 setup
check "and without root says so" says "apt-get install clang"

reset
echo ninja-build >"$work/missing"
touch "$work/apt-fails"
setup
check "a failing apt-get is an error" refused
check "after the list was refreshed" did "apt-get update"
rm "$work/apt-fails"

reset
echo ninja-build >"$work/missing"
ZEROTH_SETUP_UID=1000
setup
check "without root it stops" refused
check "with the packages" says "apt-get install ninja-build"
check "with the pip line" says "venv/bin/python -m pip install -r tools/requirements.txt"
check "and installs nothing" [ ! -s "$log" ]

reset
ZEROTH_SETUP_UID=1000
setup
check "without root, nothing missing, it goes on" done_well

reset
ZEROTH_SETUP_OS_RELEASE=$work/fedora
echo "CLI/CLI.hpp" >"$work/missing"
setup
check "another distribution is refused" refused
check "by its name" says "this is Fedora Linux 41"
check "with what is missing" says "the header <CLI/CLI.hpp>"
check "with Debian's line" says "apt-get install make g++ cmake ninja-build"
check "and apt-get is not called" [ ! -s "$log" ]

reset
ZEROTH_SETUP_OS_RELEASE=$work/fedora
setup
check "another distribution with everything there goes on" done_well

for release in debian13 ubuntu22 ubuntu24; do
  reset
  ZEROTH_SETUP_OS_RELEASE=$work/$release ZEROTH_SETUP_CORE=1
  printf 'ninja-build\nlibcli11-dev\n' >"$work/missing"
  setup
  check "$release: the same names are installed" done_well
  check "$release: by apt" grep -qx "apt-get install -q -y --no-install-recommends ninja-build libcli11-dev" "$log"

  reset
  ZEROTH_SETUP_OS_RELEASE=$work/$release ZEROTH_SETUP_CORE=1
  printf 'ninja-build\nlibrapidcheck-dev\nlibxxhash-dev\nrapidcheck.h\n' >"$work/missing"
  printf 'librapidcheck-dev\nlibxxhash-dev\n' >"$work/unknown"
  keep_missing=1
  setup
  check "$release: what apt lacks is refused" refused
  check "$release: by name, with what it is for" says "librapidcheck-dev, for the tests"
  check "$release: unless it is there in another way" bash -c "! grep -qF libxxhash-dev '$work/out'"
  check "$release: after the list was refreshed" did "apt-get update"
  check "$release: and the rest was installed" did "--no-install-recommends ninja-build"
done

reset
ZEROTH_SETUP_OS_RELEASE=$work/ubuntu24 ZEROTH_SETUP_UID=1000
printf 'ninja-build\nlibrapidcheck-dev\n' >"$work/missing"
echo librapidcheck-dev >"$work/unknown"
setup
check "without root it says what apt can install" says "  apt-get install ninja-build"
check "and calls nothing" [ ! -s "$log" ]

reset
ZEROTH_SETUP_OS_RELEASE=$work/debian13 ZEROTH_SETUP_CORE=1
echo libopenmpi-dev | tee "$work/missing" >"$work/unknown"
setup
check "what is not needed stops nothing" done_well
check "and is named" says "goes on without libopenmpi-dev (for ranks over MPI)"

reset
ZEROTH_SETUP_OS_RELEASE=$work/ubuntu22
CMAKE_IS=3.22.1 GXX_IS=11.4.0 setup
check "packages that are too old are refused" refused
check "with CMake's version" says "CMake 3.22.1; 3.25 is needed"
check "with the compiler's" says "g++ 11.4.0; 12 is needed: apt-get install g++-12"

reset
printf 'PRETTY_NAME="Debian GNU/Linux 11"\nVERSION_ID="11"\nID=debian\n' >"$work/debian"
echo "rapidcheck.h" >"$work/missing"
setup
check "another Debian is refused" says "this is Debian GNU/Linux 11"

reset
stand_in old-python <<'END'
#!/bin/bash
[[ $1 == --version ]] && echo "Python 3.9.2"
exit 1
END
export PYTHON=$bin/old-python
setup
check "an old Python is refused" refused
check "by its version" says "Python 3.11 or newer is needed; found Python 3.9.2"

reset
touch "$work/pip-fails"
setup
check "a failing pip is an error" refused
check "with a reason" says "pip could not install"
check "and is tried again next time" [ ! -e "$work/venv/.zeroth-requirements" ]
rm "$work/pip-fails"

if ((failures)); then
  echo "$failures checks failed"
  exit 1
fi
