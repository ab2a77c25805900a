#!/bin/sh
# Holds [Note: One definition per instruction set] of csrc/kernels/common/arch.h: an object built for a wide instruction
# set defines no weak symbol that the linker could keep for the whole program, and the scalar ones hold no wide
# registers.
# usage: check_linkage.sh NM ARCHIVE
set -eu
nm=$1
archive=$2
table=$("$nm" -A -C "$archive" | grep -E '(_scalar|_avx2|_avx512)\.cpp\.o:')
count=$(printf '%s\n' "$table" | cut -d: -f2 | sort -u | wc -l)
if [ "$count" -lt 20 ]; then
  echo "only $count variant objects found in $archive: the check sees nothing"
  exit 1
fi
if weak=$(printf '%s\n' "$table" | grep -E ' [WVuw] '); then
  echo "weak symbols in objects of one instruction set:"
  printf '%s\n' "$weak"
  exit 1
fi
echo "$count objects, no shared inline function"
