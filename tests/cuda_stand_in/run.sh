#!/bin/sh
# run.sh FOLDER COMMAND...: runs COMMAND on the stand-in that setup.sh made in FOLDER.
set -eu
[ $# -ge 2 ] || { sed -n 2p "$0"; exit 2; }
folder=$(cd "$1" && pwd)
shift
export STAND_IN_LIB="$folder/stand-in"
export LD_LIBRARY_PATH="$folder/stand-in${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PATH="$folder/bin:$PATH"
export TRITON_PTXAS_PATH="$STAND_IN_LIB/ptxas"
# What is compiled here holds no machine code: it may not get among what a GPU's users have compiled.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$folder/inductor}"
export TRITON_HOME="${TRITON_HOME:-$folder/triton}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export MKL_CBWR="${MKL_CBWR:-COMPATIBLE}"  # the same bits wherever memory lies
export NUMBA_CACHE_DIR="${NUMBA_CACHE_DIR:-$folder/numba}"
export FXREMAT_CACHE="${FXREMAT_CACHE:-0}"
# Small models are not lost in an H100's workspaces of 32 MiB.
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:1}"
export PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
exec "$@"
