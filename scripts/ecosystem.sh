#!/bin/sh
# Creates or updates the virtual environment $1 for `make ecosystem`, with the Python and the torch of the environment
# $2, the libraries in tests/ecosystem/requirements.txt, and this checkout's rustloader. Called by the Makefile.
set -euf

venv=$1 like=$2
requirements=tests/ecosystem/requirements.txt
: "${TORCH:=torch}"

identity='import sys; print(sys.version, sys.base_prefix)'
if [ "$("$venv/bin/python" -c "$identity" 2>/dev/null)" != "$("$like/bin/python" -c "$identity")" ]; then
    base=$("$like/bin/python" -c 'import sys; print(sys._base_executable)')
    echo "Creating $venv with $base ..."
    rm -rf "$venv"
    "$base" -m venv "$venv"
fi
rm -f "$venv/.made-with"

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"
}
# The constraint keeps the libraries from installing another version of torch.
"$like/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$venv/constraints.txt"
echo "Installing $(cat "$venv/constraints.txt") and the libraries (large; this takes minutes the first time) ..."
pip install --upgrade pip
# shellcheck disable=SC2086 # TORCH may carry options for pip
pip install --upgrade --constraint "$venv/constraints.txt" --requirement "$requirements" $TORCH
pip check

# Installs the package in place, as `maturin develop` does in .venv.
echo "$PWD/python" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rustloader.pth"
touch "$venv/.made-with"
