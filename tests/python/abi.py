"""The binary interface that tilesparse.h declares, one fact a line: values, sizes, offsets, parameters.

    python tests/python/abi.py > tests/c/abi.txt

`tests/python/test_abi.py` compares the two. A line that goes or changes breaks programs that are built: it
takes another `TS_ABI_VERSION`. Lines that are new do not.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = Path(__file__).resolve().parents[2] / "cpp/include/tilesparse/tilesparse.h"


def printed(text: str, *values: str) -> str:
    """The statement of a C program that prints a line."""
    return f'printf("{text}\\n", {", ".join(f"(long long)({value})" for value in values)});'


def statements(header: str) -> list[str]:
    """Statements of a program that prints constants, structures and types of a header without comments."""
    enums = ",".join(re.findall(r"\benum \{(.*?)\}", header, re.S))
    names = ["TS_ABI_VERSION", *re.findall(r"\bTS_\w+", enums)]
    program = [printed(f"{name} = %lld", name) for name in names]
    for name in re.findall(r"typedef [^;{]*?\b(ts_\w+_t);", header):
        program.append(printed(f"{name}: %lld bytes", f"sizeof({name})"))
    for name, body in re.findall(r"typedef struct (ts_\w+) \{(.*?)\}", header, re.S):
        program.append(printed(f"{name}: %lld bytes", f"sizeof({name})"))
        for kind, field in re.findall(r"([\w\s]+[\s*]+)(\w+)(?:\[\w+\])?;", body):
            size, offset = f"sizeof((({name}*)0)->{field})", f"offsetof({name}, {field})"
            line = f"{name}.{field}: {' '.join(kind.split())}, %lld bytes at %lld"
            program.append(printed(line, size, offset))
    return program


def functions(header: str) -> list[str]:
    """Names with the types of results and parameters, in the order of their names."""
    found = []
    for result, name, parameters in re.findall(r"TS_API ([\w\s*]+?)\b(ts_\w+)\((.*?)\);", header, re.S):
        types = [
            re.sub(r"(?<=[\s*])\w+$", "", " ".join(part.split())).strip() for part in parameters.split(",")
        ]
        found.append(f"{name}: {' '.join(result.split())} ({', '.join(types) or 'void'})")
    return sorted(found)


def facts(header: Path) -> list[str]:
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
    body = "\n".join(statements(text))
    program = f'#include <stddef.h>\n#include <stdio.h>\n#include "{header}"\nint main(void) {{\n{body}\n}}\n'
    with tempfile.TemporaryDirectory() as folder:
        executable = Path(folder, "program")
        command = ["cc", "-std=c11", "-x", "c", "-", "-o", str(executable)]
        subprocess.run(command, input=program, text=True, check=True)
        result = subprocess.run([executable], capture_output=True, text=True, check=True)
    return result.stdout.splitlines() + functions(text)


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in facts(HEADER)))
