#!/bin/sh
# Creates or updates the virtual environment $1 with the Python $PYTHON and the torch $TORCH. Called by the Makefile.
# The environment is kept if its Python is the right one; otherwise, it is deleted and created again.
set -euf

venv=$1
: "${PYTHON:=python3}" "${TORCH:=torch}"

fail() {
    echo "error: $1" >&2
    shift
    for line in "$@"; do echo "       $line" >&2; done
    exit 1
}
way_out="Choose another one, by name or path: make ... PYTHON=python3.13"

# Prints an interpreter's version and prefix, which are the same for an environment and for the Python it is based on.
identity='import sys; print(sys.version, sys.base_prefix)'

wanted=$("$PYTHON" -c "$identity" 2>&1) ||
    fail "PYTHON=$PYTHON does not run: $wanted" "$way_out"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "PYTHON=$PYTHON is Python $("$PYTHON" -c 'import platform; print(platform.python_version())'); 3.11 or newer is needed." "$way_out"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "PYTHON=$PYTHON has no venv or no ensurepip." \
        "On Debian and Ubuntu they come with the package python3-venv (or python3.X-venv)." "$way_out"

found=$("$venv/bin/python" -c "$identity" 2>/dev/null) || found=
if [ "$found" != "$wanted" ] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    # $PYTHON may be the one in $venv, which is deleted now, so the base interpreter creates the environment.
    base=$("$PYTHON" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)')
    echo "Creating $venv with $base ..."
    rm -rf "$venv"
    "$base" -m venv "$venv"
fi
rm -f "$venv/.made-with" "$venv/.built"

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"
}
pip install --upgrade pip
echo "Installing $TORCH (large; this takes a few minutes the first time) ..."
# shellcheck disable=SC2086 # TORCH may carry options for pip
pip install --upgrade $TORCH

echo "Installing the requirements of the demo, the tests and the linters ..."
extras=$("$venv/bin/python" -c '
import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print("\n".join(extras["demo"] + extras["dev"]))')
printf '%s\n' "$extras" >"$venv/requirements.txt"
pip install --requirement "$venv/requirements.txt"

"$venv/bin/python" -c 'import sys, torch; print("Ready: Python", sys.version.split()[0], "with torch", torch.__version__)'
echo "PYTHON=$PYTHON TORCH=$TORCH" >"$venv/.made-with"
