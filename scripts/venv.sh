# Sourced by the scripts. prepare_venv EXTRAS makes .venv in the root of the checkout and installs the package with
# these extras, unless that has been done since pyproject.toml last changed; dev holds all the others. Python is that of
# .venv, else $PYTHON, else the first on PATH that is new enough. Most modules that are installed are never imported: pip
# does not compile them, and Python keeps what it has compiled when it imports one.

unset PYTHONDONTWRITEBYTECODE

fail() {
    echo "error: $*" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        if new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    fail "Python 3.10 or later is needed; install one, or set PYTHON to its path."
}

require_compiler() {
    local name names=(g++ c++ clang++ gcc cc)
    if [ -n "${CXX:-}" ]; then
        names=("$CXX") # a path, with no other words
    fi
    for name in "${names[@]}"; do
        if command -v "$name" >/dev/null; then
            return
        fi
    done
    fail "no C++ compiler was found (${CXX:-g++, c++, clang++, gcc, cc}); install one (for example: apt install g++)" \
        "or set CXX to its path."
}

prepare_venv() {
    local extras=$1 python stamp wanted
    if ! [ -x .venv/bin/python ]; then
        python=$(find_python)
        "$python" -m venv .venv || {
            rm -rf .venv
            fail "$python cannot make a virtual environment; install its venv module (for example: apt install" \
                "python3-venv)."
        }
    fi
    wanted=$(cksum <pyproject.toml)
    for stamp in ".venv/installed-$extras" .venv/installed-dev; do
        if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
            return
        fi
    done
    echo "Installing into .venv: this project with [$extras]"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[$extras]"
    echo "$wanted" >".venv/installed-$extras"
}

# Make .venv/tree: the package as it is installed, by links. mypy, import-linter and mkdocstrings look there,
# since they do not read package-dir.
package_tree() {
    local tree=.venv/tree/tvm_deconv
    rm -rf "$tree"
    mkdir -p "$tree"
    ln -s "$PWD"/tvm_deconv/* "$PWD/schedules" "$PWD/tuning_logs" "$tree"
    ln -sf "$PWD/tvm_deconv_command.py" .venv/tree
}
