#!/bin/sh
# Puts faults into the lines of the pure modules that have changed since the commit $2, and lists those that no test
# notices. Rust: cargo-mutants (.cargo/mutants.toml). Python: Cosmic Ray (tests/cosmic-ray.toml), with the packages of
# the environment $1. Both change a copy of HEAD. Called by the Makefile.
set -eu

venv=$(cd "$1" && pwd) since=$(git rev-parse "$2") work=$PWD/target/mutants
command -v cargo-mutants >/dev/null || { echo 'error: cargo-mutants was not found: cargo install --locked cargo-mutants' >&2; exit 1; }
rm -rf "$work"
git clone --quiet . "$work/tree"
git -C "$work/tree" branch since "$since"
cp python/rustloader/*.so "$work/tree/python/rustloader/"
cd "$work/tree"

git diff since HEAD -- src >"$work/since.diff"
status=0
cargo mutants --in-diff "$work/since.diff" --output "$work" || status=$?
# 2: a fault was not noticed; 3: a fault made the tests hang.
case $status in 0 | 2 | 3) ;; *) exit "$status" ;; esac

"$venv/bin/python" -m venv "$work/venv"
"$work/venv/bin/pip" --disable-pip-version-check --quiet install cosmic-ray
export PATH="$venv/bin:$work/venv/bin:$PATH" PYTHONPATH="$work/tree/python"
cosmic-ray init tests/cosmic-ray.toml session.sqlite
cr-filter-git --config tests/cosmic-ray.toml session.sqlite
cosmic-ray baseline tests/cosmic-ray.toml
cosmic-ray exec tests/cosmic-ray.toml session.sqlite
cr-report --show-diff --no-show-output --surviving-only session.sqlite
