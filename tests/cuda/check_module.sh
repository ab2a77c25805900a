#!/usr/bin/env bash
# The CUDA module links completely: it exports its entry points, holds device code, and needs no CUDA library to load.
# usage: check_module.sh MODULE ENTRY_POINT...   (the MODULE "none": nvcc was not found)
set -euo pipefail
module=$1
shift
if [[ $module == none ]]; then
  echo "SKIPPED: no nvcc"
  exit 77
fi
fail() {
  echo "FAILED: $*"
  exit 1
}
exported=$(nm -D --defined-only "$module")
for entry in "$@"; do
  grep -q " T $entry\$" <<<"$exported" || fail "$entry is not exported"
done
# Every undefined symbol has a version of the C or C++ library, or is weak.
unknown=$(nm -D --undefined-only "$module" | grep -Ev ' w |@(GLIBC|GLIBCXX|CXXABI|GCC)_' || true)
[[ -z $unknown ]] || fail "undefined: $unknown"
readelf -SW "$module" | grep -q '\.nv_fatbin' || fail "no device code"
! readelf -d "$module" | grep -E 'NEEDED.*(libcuda|libcudart|libtorch)' || fail "a library is needed at load"
echo "$module exports $* and links"
