#!/usr/bin/env bash
# Installs a build into a folder of its own and builds a project outside the tree against it with find_package(Zeroth).
# usage: package_test.sh BUILD WORK CXX PYTHON|none
# The project trains one step with the engine of the core; with a PYTHON that has torch, the code of README.md and
# docs/cpp-api.md too, on one rank and on two, and another torch version must be refused.
set -euo pipefail
build=$1 work=$2 compiler=$3 python=$4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

rm -rf "$work"
mkdir -p "$work"
cmake --install "$build" --prefix "$work/prefix" >"$work/install.log"

configure() { # FOLDER OPTIONS...
  local folder=$1
  shift
  cmake -G Ninja -S "$here/consumer" -B "$work/$folder" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_PREFIX_PATH="$work/prefix" "$@"
}
build() { # FOLDER
  cmake --build "$work/$1"
  cd "$work/$1"
}

# Headers and libraries must be found in the prefix alone.
! grep -rn "$here/../../\|$build/" "$work/prefix/lib" --include='*.cmake' ||
  { echo "FAILED: an installed CMake file names the source or build tree"; exit 1; }

configure core
build core
./consumer | grep -x "consumer works"

if [[ $python != none ]]; then
  blocks=$work/blocks
  python3 -B "$here/../docs/blocks.py" "$here/../.." "$blocks"
  configure libtorch -DWITH_LIBTORCH=ON -DPython_EXECUTABLE="$python" -DBLOCKS="$blocks"
  build libtorch
  cp "$blocks/README-1.json" zero3.json
  for launched in "./trainer" "torchrun --nproc-per-node 2 --no-python ./trainer"; do
    rm -f ./*.safetensors
    PATH="$(dirname "$python"):$PATH" OMP_NUM_THREADS=1 timeout 120 $launched >log 2>&1 || { cat log; exit 1; }
    grep -x "consumer works" log && grep -q "^100 [0-9]" log && ls model.safetensors net.safetensors ||
      { cat log; exit 1; }
  done
  rm -rf "${TMPDIR:-/tmp}"/torchelastic_*  # torchrun leaves its folder of logs

  printf '#!/bin/sh\nprintf "/nowhere;9.9.9"\n' >"$work/other-python"
  chmod +x "$work/other-python"
  if configure refused -DWITH_LIBTORCH=ON -DPython_EXECUTABLE="$work/other-python" -DBLOCKS="$blocks" \
    >"$work/refused.log" 2>&1; then
    echo "FAILED: another torch version was accepted"
    exit 1
  fi
  tr -s ' \n' '  ' <"$work/refused.log" |
    grep -o "Zeroth was built against torch [^ ]*, the torch found here is 9.9.9" ||
    { cat "$work/refused.log"; exit 1; }
fi
