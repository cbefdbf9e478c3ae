# shellcheck shell=bash
# To be sourced: python_of 3.12 prints the path of an interpreter of that version, from the path or pyenv's folder, or
# fails if there is none.
python_of() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            "$candidate" -c "import sys; print(sys.executable)"
            return
        fi
    done
    return 1
}
