#!/usr/bin/env bash
# Builds the Horovod wheel from its sdist against the torch of the given Python, once; keeps it in the user's cache.
# usage: build_horovod.sh PYTHON        prints the wheel's path on the last line
# Horovod 0.28.1 (2023) predates torch's C++20 headers and CMake 4; the three settings below are all it needs.
# HOROVOD_GPU_OPERATIONS=NCCL in the environment builds it for CUDA.
set -euo pipefail
python=$1
version=0.28.1
torch=$("$python" -c 'import torch; print(torch.__version__)')
tag=$("$python" -c 'import sys, platform; print(f"cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}")')
cache="${XDG_CACHE_HOME:-$HOME/.cache}/sparkring/horovod-$version-torch-$torch-$tag-${HOROVOD_GPU_OPERATIONS:-cpu}"
if ! compgen -G "$cache/*.whl" >/dev/null; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    echo "horovod $version: building against torch $torch (about 4 minutes on 2 cores, once)" >&2
    # With --require-hashes pip checks the file before it runs its setup.py, which it does to learn its metadata.
    "$python" -m pip download -q --no-deps --no-binary=:all: --no-build-isolation --require-hashes \
        -d "$work" -r "$(dirname "$0")/horovod.txt" >&2
    tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
    source="$work/horovod-$version"
    sed -i -E 's/set\(CMAKE_CXX_STANDARD [0-9]+\)/set(CMAKE_CXX_STANDARD 20)/' \
        "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"
    PATH="$(dirname "$python"):$PATH" CMAKE_POLICY_VERSION_MINIMUM=3.5 CXXFLAGS="-include cstdint" \
        HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_PYTORCH=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        "$python" -m pip wheel --no-build-isolation --no-deps -w "$work/wheel" "$source" >"$work/build.log" 2>&1 ||
        { tail -40 "$work/build.log" >&2; exit 1; }
    mkdir -p "$cache"
    mv "$work"/wheel/*.whl "$cache/"
fi
compgen -G "$cache/*.whl"
