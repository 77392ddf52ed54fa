#!/bin/sh
# Creates the virtual environment $1 for `make test-ray`, with Ray and the packages of the environment $2.
# Called by the Makefile.
set -euf

venv=$1 like=$2
rm -f "$venv/.made-with"
base=$("$like/bin/python" -c 'import sys; print(sys._base_executable)')
"$base" -m venv --clear "$venv"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
# addsitedir also reads that environment's .pth files, one of which names this checkout.
echo "import site; site.addsitedir('$(cd "$like" && bin/python -c "$site")')" >"$("$venv/bin/python" -c "$site")/base.pth"
echo "Installing Ray ..."
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install 'ray>=2.40'
touch "$venv/.made-with"
