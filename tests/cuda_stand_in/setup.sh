#!/bin/sh
# setup.sh FOLDER: an environment in FOLDER with torch's CUDA build over the stand-in, and fxremat
# from this checkout. Run again, it only builds the stand-in again.
# PYTHON names the interpreter, TORCH torch's version (default: that of constraints.txt),
# TORCH_WHEEL a wheel of torch that is there already.
set -eu
[ $# -eq 1 ] || { sed -n 2,5p "$0"; exit 2; }
source=$(cd "$(dirname "$0")" && pwd)
checkout=$(dirname "$(dirname "$source")")
mkdir -p "$1"
folder=$(cd "$1" && pwd)
python=$folder/bin/python
version=${TORCH:-$(sed -n 's/^torch==//p' "$checkout/constraints.txt")}

is_installed() {
    [ -e "$folder/installed" ] || return 1
    [ -n "${TORCH_WHEEL:-}" ] || "$python" -c 'import importlib.metadata as m, sys
sys.exit(m.version("torch").split("+")[0] != sys.argv[1])' "$version"
}

# Torch's CUDA, by which its libraries are named, too.
cuda_major() {
    sed -n "s/^cuda.*= '\([0-9]*\)\..*/\1/p" \
        "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch/version.py"
}

if ! is_installed; then
    rm -f "$folder/installed"
    [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$folder"
    wheel=${TORCH_WHEEL:-}
    rm -f "$folder/unavailable"
    if [ -z "$wheel" ]; then
        # The registry's own wheel is the one with CUDA; a configured index may hold another.
        PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS='' "$python" -m pip download -q --no-deps \
            -d "$folder/wheel" "torch==$version" || {
            echo "the wheel of torch $version for CUDA cannot be had: nothing is tested on CUDA" |
                tee "$folder/unavailable" >&2
            [ -z "${CI:-}" ] && exit 0 || exit 3
        }
        wheel=$(ls "$folder"/wheel/torch-*.whl)
    fi
    "$python" -m pip install -q --no-deps "$wheel"
    rm -rf "$folder/wheel"
    # Of torch's own requirements those that are no libraries of CUDA: these are stood in for.
    "$python" -c 'import importlib.metadata as m
for line in m.requires("torch"):
    if "extra ==" not in line and not line.startswith(("nvidia-", "cuda-", "triton")):
        print(line)' >"$folder/requirements.txt"
    "$python" -m pip install -q -r "$folder/requirements.txt" 'setuptools>=77' \
        numpy numba ortools rich 'pytest>=8' 'pytest-xdist>=3.5' hypothesis \
        'transformers>=5' psutil pyyaml packaging safetensors huggingface-hub
    rm "$folder/requirements.txt"
    "$python" -m pip install -q --no-deps 'accelerate>=1.1' 'lightning>=2.5' pytorch-lightning \
        lightning-utilities torchmetrics 'peft>=0.17' 'liger-kernel>=0.8'
    triton=$("$python" -c 'import importlib.metadata as m
print(next(r.split(";")[0] for r in m.requires("torch") if r.startswith(("triton=", "triton~"))))')
    "$python" -m pip install -q --no-deps "$triton"
    rm -rf "$folder/cuda"
    cuda=$(cuda_major)
    "$python" -m pip install -q --no-deps --target "$folder/cuda" \
        "nvidia-cuda-runtime==$cuda.*" "nvidia-cuda-crt==$cuda.*"
    "$python" -m pip install -q --no-deps -e "$checkout"
    touch "$folder/installed"
fi

cuda=$(cuda_major)
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
torch=$site/torch
headers=$(dirname "$(find "$folder/cuda" -name cuda_runtime_api.h | head -1)")
"$python" "$source/make_stubs.py" "$torch/lib" "$headers" "$folder/stand-in"
${CXX:-g++} -O1 -std=c++20 -fPIC -shared -w "-I$source" "-I$torch/include" \
    "-I$torch/include/torch/csrc/api/include" "-I$headers" "$source/values.cpp" \
    -o "$folder/stand-in/libstandin_values.so" "-L$torch/lib" "-L$folder/stand-in" \
    -ltorch -ltorch_cpu -ltorch_cuda -lc10 -lc10_cuda "-l:libcudart.so.$cuda" \
    '-Wl,-rpath,$ORIGIN' "-Wl,-rpath,$torch/lib" "-Wl,-rpath-link,$folder/stand-in"

${CXX:-g++} -O1 -std=c++17 -w "-DSTANDIN_CUDA=$cuda" "$source/assembler.cpp" \
    -o "$folder/stand-in/ptxas"
rm -rf "$folder/inductor" "$folder/triton"  # kernels that another assembler described

# Loaded at the end of `import torch`, by an entry point.
cp "$source"/cuda_stand_in*.py "$site/"
about=$site/cuda_stand_in-1.0.dist-info
mkdir -p "$about"
printf 'Metadata-Version: 2.1\nName: cuda-stand-in\nVersion: 1.0\n' >"$about/METADATA"
printf '[torch.backends]\ncuda_stand_in = cuda_stand_in:load\n' >"$about/entry_points.txt"
