#!/usr/bin/env bash
# Everything `make demo` and `make test` need, from a bare Python: the locked environment in .venv, Java, Horovod.
# Idempotent: each step looks first. Variables:
#   PYTHON=python3.11      the interpreter the environment is made with
#   TESTS=0                leaves out what only tests need from apt (as root: a PostgreSQL server and its driver)
#   GPU=1                  builds Horovod with NCCL; torch from the package index is a CUDA build on Linux already
#   TORCH_INDEX=URL        another package index for torch alone (PyTorch publishes small CPU-only wheels on its own)
#   TORCH_HASH=sha256:...  a wheel of torch that .ci/torch.txt does not list, and that you vouch for
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
die() { printf '[setup] %s\n' "$*" >&2; exit 1; }

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || die "no $python on the PATH; install Python 3.11 or say PYTHON=/path/to/python3.11"
read -r oldest beyond < <(sed -nE 's/^requires-python = ">=3\.([0-9]+),<3\.([0-9]+)"$/\1 \2/p' pyproject.toml)
"$python" -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info[:2] < (3, $beyond))" ||
    die "$("$python" --version) cannot be used: sparkring needs Python 3.$oldest to 3.$((beyond - 1)); say PYTHON=/path/to/python3.11"

java_major() {
    local java=${JAVA_HOME:+$JAVA_HOME/bin/}java
    command -v "$java" >/dev/null && "$java" -version 2>&1 | sed -nE '1s/.*version "([0-9]+).*/\1/p'
}
major=$(java_major || true)
if [ "${major:-0}" -lt 17 ]; then
    install="apt-get install -y openjdk-17-jre-headless"
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        say "no Java 17 or newer (found: ${major:-none}): $install"
        apt-get update -qq && $install -qq >/dev/null
    else
        die "Spark needs Java 17 or newer (found: ${major:-none}). Run:  sudo $install   or set JAVA_HOME"
    fi
fi
say "java $(java_major), $("$python" --version)"

# For the tests of `format: jdbc`, which are skipped without: a server, and its driver for Java. Nothing else needs them.
if [ "${TESTS:-1}" = 1 ] && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    wanted=()
    compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null || wanted+=(postgresql)
    [ -e /usr/share/java/postgresql.jar ] || wanted+=(libpostgresql-jdbc-java)
    if [ ${#wanted[@]} -gt 0 ]; then
        say "for the tests: ${wanted[*]}"
        # RUNLEVEL: the package would start a server of its own, and the tests start theirs.
        { apt-get update && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${wanted[@]}"; } \
            >/dev/null 2>&1 </dev/null || say "${wanted[*]} could not be installed: tests on PostgreSQL will be skipped"
    fi
fi

[ -x .venv/bin/python ] || { say "making .venv"; "$python" -m venv .venv; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
say "locked packages (requirements.lock, every one by hash)"
pip install --quiet --no-deps --require-hashes -r requirements.lock
if ! .venv/bin/python -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != "2.13.0")' 2>/dev/null; then
    say "torch 2.13.0 (by hash; the libraries that a CUDA wheel names are not hashed)"
    # Fetched, checked, then installed: with --require-hashes pip would prefer the index's CUDA wheel to a local one.
    fetched=$(mktemp -d)
    trap 'rm -rf "$fetched"' EXIT
    pip download --quiet --no-deps --only-binary=:all: ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -d "$fetched" torch==2.13.0
    digest=sha256:$(sha256sum "$fetched"/torch-*.whl | cut -d" " -f1)
    [ "$digest" = "${TORCH_HASH:-}" ] || grep -q -- "--hash=$digest" .ci/torch.txt ||
        die "torch's wheel $(basename "$fetched"/torch-*.whl) is $digest, not listed in .ci/torch.txt; if you trust it, say TORCH_HASH=$digest"
    pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$fetched"/torch-*.whl
fi

if [ -n "${GPU:-}" ]; then  # said before minutes of building
    [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] || command -v nvcc >/dev/null ||
        die "GPU=1: no nvcc in ${CUDA_HOME:-/usr/local/cuda}/bin or on the PATH; install the CUDA toolkit, or set CUDA_HOME"
    found=""
    for place in ${HOROVOD_NCCL_HOME:+"$HOROVOD_NCCL_HOME/include"} ${HOROVOD_NCCL_INCLUDE:+"$HOROVOD_NCCL_INCLUDE"} \
        "${CUDA_HOME:-/usr/local/cuda}/include" /usr/include /usr/local/include; do
        [ -e "$place/nccl.h" ] && found=$place
    done
    [ -n "$found" ] || die "GPU=1: no nccl.h found; install NCCL's headers (libnccl-dev), or set HOROVOD_NCCL_HOME"
fi

if ! command -v "${CXX:-g++}" >/dev/null; then
    say "no C++ compiler (${CXX:-g++}): going on without Horovod; the ring will be torch.distributed's (engine: torch)"
elif wheel=$(HOROVOD_GPU_OPERATIONS=${GPU:+NCCL} .ci/build_horovod.sh "$PWD/.venv/bin/python" | tail -1) && [ -n "$wheel" ]; then
    installed() { .venv/bin/python -c 'import importlib.metadata as m; m.version("horovod")' 2>/dev/null; }
    if ! installed || ! cmp -s <(echo "$wheel") .venv/.horovod; then
        say "horovod from ${wheel##*/}"
        pip install --quiet --no-deps --force-reinstall "$wheel"
        echo "$wheel" >.venv/.horovod
    fi
else
    die "Horovod did not build (its log is above); CXX=none make setup goes on without it"
fi

pip install --quiet --no-deps --no-build-isolation --editable .
say "an archive of Spark's classes, so that jobs start sooner (once for each Java and Spark)"
.venv/bin/python -m sparkring.pipelines.run.spark_classes >/dev/null 2>&1 || say "it could not be made: jobs start some seconds later"
touch .venv/.ready
say "ready: .venv/bin/sparkring --help"
