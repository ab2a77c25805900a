#!/usr/bin/env bash
# What the compiler made of the kernels: every operation rounds once, to nearest, with denormals; nothing was fused that
# the source does not fuse, and no division, root, minimum or maximum is another one than that of the CPU. Read from the
# PTX in the module, which says for each instruction how it rounds; ptxas fuses none that does.
# usage: check_ptx.sh MODULE   (the MODULE "none": nvcc was not found)
set -euo pipefail
module=$1
if [[ $module == none ]]; then
  echo "SKIPPED: no nvcc"
  exit 77
fi
code=$(mktemp)
trap 'rm -f "$code"' EXIT
# One line an instruction, with the kernel that it belongs to in front.
strings -n 3 "$module" | awk '/\.entry / { kernel = $0 } kernel && /;$/ { print kernel, $0 }' >"$code"
if [[ ! -s $code ]]; then
  echo "SKIPPED: no PTX: the module was built for named processors alone"
  exit 77
fi
failed=0
refuse() {  # what it is, regular expression of instructions, regular expression of kernels
  local found
  found=$(grep -E "$3" "$code" | grep -oE "(^|[[:space:]])($2)[a-z0-9.]*" | sort | uniq -c || true)
  if [[ -n $found ]]; then
    printf 'FAILED: %s in %s:\n%s\n' "$1" "$3" "$found"
    failed=1
  fi
}
for grid in AdamWGrid SgdGrid CastGrid BucketGrid SumGrid ExtremeGrid NormGrid TopkAddGrid LowRankProductGrid \
  OrthonormalizeGrid GateGrid PermuteGrid; do
  kernels=$(grep -oE "entry _ZN[^ (]*$grid[^ (]*" "$code" | sort -u | wc -l)
  echo "$grid: $kernels kernels, $(grep -E "$grid" "$code" | grep -cE '[[:space:]]fma\.rn\.f' || true) fma"
  if [[ $kernels == 0 ]]; then
    echo "FAILED: no kernel of $grid: the check sees nothing"
    failed=1
  fi
done
any=Grid
refuse "rounding left to the compiler" '(add|sub|mul|fma|mad|div|sqrt|rcp)\.(ftz\.|sat\.)*f(32|64)' $any
refuse "rounding other than to nearest" '[a-z]+\.r[zmp]i?\.' $any
refuse "denormals flushed to zero" '[a-z.]+\.ftz' $any
refuse "approximations" '[a-z0-9]+\.(approx|full)' $any
refuse "minima and maxima of floats, which know no NaN and no -0" '(min|max)\.(NaN\.)?f' $any
refuse "fused multiply-adds" '(fma|mad)\.rn\.f' 'CastGrid|BucketGrid|SumGrid|ExtremeGrid|TopkAddGrid'
exit $failed
