#!/usr/bin/env bash
# Builds the Horovod wheel from its sdist against the torch of the given Python, once; keeps it in the user's cache, by
# what it is made from: the sdist's hash, this file, torch, Python, the machine.
# usage: build_horovod.sh PYTHON        prints the wheel's path on the last line
# Horovod 0.28.1 (2023) predates torch's C++20 headers and CMake 4; the settings below are all it needs. Compiled
# in groups of eight files and without debug information it takes 164 s of processor time, and 393 s as it comes.
# HOROVOD_GPU_OPERATIONS=NCCL in the environment builds it for CUDA.
set -euo pipefail
python=$1
version=0.28.1
torch=$("$python" -c 'import torch; print(torch.__version__)')
tag=$("$python" -c 'import sys, platform; print(f"cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}")')
made_from=$(cat "$0" "$(dirname "$0")/horovod.txt" | sha256sum | cut -c1-12)
cache="${XDG_CACHE_HOME:-$HOME/.cache}/sparkring/horovod-$version-torch-$torch-$tag-${HOROVOD_GPU_OPERATIONS:-cpu}-$made_from"
if ! compgen -G "$cache/*.whl" >/dev/null; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    echo "horovod $version: building against torch $torch (about 2 minutes on 2 cores, once)" >&2
    # With --require-hashes pip checks the file before it runs its setup.py, which it does to learn its metadata.
    "$python" -m pip download -q --no-deps --no-binary=:all: --no-build-isolation --require-hashes \
        -d "$work" -r "$(dirname "$0")/horovod.txt" >&2
    tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
    source="$work/horovod-$version"
    sed -i -E 's/set\(CMAKE_CXX_STANDARD [0-9]+\)/set(CMAKE_CXX_STANDARD 20)/' \
        "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"
    # Before the first target, so that it is every target's; two files of gloo define one name for two things.
    sed -i -E 's/^set\(CMAKE_CXX_STANDARD_REQUIRED ON\)/&\nset(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")\nset(CMAKE_UNITY_BUILD ON)/' \
        "$source/CMakeLists.txt"
    sed -i -E 's/^( *)target_compile_definitions\(gloo .*/&\n\1set_source_files_properties("${PROJECT_SOURCE_DIR}\/third_party\/gloo\/gloo\/allreduce.cc" TARGET_DIRECTORY gloo PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)/' \
        "$source/CMakeLists.txt"
    # Nothing of CUDA for the CPU: torch from the package index is a CUDA build, and half a toolkit may be installed.
    [ -n "${HOROVOD_GPU_OPERATIONS:-}" ] ||
        sed -i 's/print(True if ((torch\.version\.cuda is not None) .* else False)/print(False)/' \
            "$source/cmake/Modules/FindPytorch.cmake"
    PATH="$(dirname "$python"):$PATH" CMAKE_POLICY_VERSION_MINIMUM=3.5 CXXFLAGS="-include cstdint" \
        HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_PYTORCH=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        "$python" -m pip wheel --no-build-isolation --no-deps -w "$work/wheel" "$source" >"$work/build.log" 2>&1 ||
        { tail -40 "$work/build.log" >&2; exit 1; }
    mkdir -p "$cache"
    mv "$work"/wheel/*.whl "$cache/"
fi
compgen -G "$cache/*.whl"
