#!/usr/bin/env bash
# Installs a build into a folder of its own and builds a project outside the tree against it with find_package(Zeroth).
# usage: package_test.sh BUILD WORK CXX PYTHON|none
# The project trains one step with the engine of the core; with a PYTHON that has torch, the code of README.md and
# docs/cpp-api.md too, on one rank and on two, and another torch version must be refused. A build without programs is
# installed too; one that lacks a library is not.
set -euo pipefail
build=$1 work=$2 compiler=$3 python=$4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

rm -rf "$work"
mkdir -p "$work"
cmake --install "$build" --prefix "$work/prefix" >"$work/install.log"

# As after `make train`, without programs: the libraries are those of BUILD.
partial=$work/partial
cmake -G Ninja -S "$here/../.." -B "$partial" -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_BUILD_TYPE=Release \
  -DZEROTH_TORCH=OFF -DZEROTH_TESTS=OFF -DZEROTH_BENCHMARKS=OFF >"$work/partial.log"
if cmake --install "$partial" --prefix "$work/none" >"$work/none.log" 2>&1 || [[ -e $work/none ]]; then
  echo "FAILED: a build without libraries was installed"
  exit 1
fi
grep -o "cmake --build $partial --target zeroth_package" "$work/none.log"
while IFS= read -r library; do
  ln -s "$build/${library#"$partial"/}" "$library"
done < <(grep -o "$partial/[^;\")]*" "$partial/require_rooms.cmake" | sort -u)
cmake --install "$partial" --prefix "$work/partial-prefix" >"$work/partial.log"
ls "$work/partial-prefix/include/zeroth/engine/run.h" "$work/partial-prefix/lib/cmake/Zeroth/ZerothConfig.cmake"
[[ -z $(ls "$work/partial-prefix/bin") ]] || { echo "FAILED: programs that were not built are installed"; exit 1; }

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

  # What a rank has said comes out before its cause, and the last line names that.
  if OMP_NUM_THREADS=1 "$work/prefix/bin/zeroth-run" -n 2 ./trainer "no data for May" >log 2>&1; then
    echo "FAILED: an exception ended no job"
    exit 1
  fi
  grep "what was said before" log &&
    grep -E "rank 1 \(pid [0-9]+\) exited with code 1: ZEROTH ERROR \[USER\] rank=1/2: no data for May; " log ||
    { cat log; exit 1; }

  if configure without -DWITH_LIBTORCH=ON -DPython_EXECUTABLE=/bin/false -DBLOCKS="$blocks" \
    >"$work/without.log" 2>&1; then
    echo "FAILED: a Python without torch was accepted"
    exit 1
  fi
  tr -s ' \n' '  ' <"$work/without.log" | grep -o "/bin/false has no torch; give the Python that has torch [^ ]* by" ||
    { cat "$work/without.log"; exit 1; }
  ! grep "the core is built without" "$work/without.log"

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
