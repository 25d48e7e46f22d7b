#!/usr/bin/env bash
# Packs a kernel cache for a container image; needs no GPU.
#   jit_cache/pack.sh kernels.tar.gz sm_90a "1 8" deepseek-v3 deepseek-v4-flash
# In the image: unpack it to, say, /opt/deep_moe and set DEEP_MOE_CACHE_DIR=/var/cache/deep_moe:/opt/deep_moe
# (a writable root first), or DEEP_MOE_CACHE_DIR=/opt/deep_moe with DEEP_MOE_JIT=forbid to allow no compilation at all.
# The image must hold the same versions of deep_moe and of the compiler: both are part of every key.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 2; }
output=$1 arch=$2 ranks=$3
shift 3
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
for count in $ranks; do
    DEEP_MOE_CACHE_DIR=$cache python -m deep_moe warmup --model "$@" --ranks "$count" --arch "$arch"
done
tar -C "$cache" --exclude='./.*' -czf "$output" .
echo "$output: $(find "$cache" -name meta.json | wc -l) kernels"
