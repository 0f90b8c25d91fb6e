"""``python -m benchmarks NAME [options]`` runs a benchmark, ``python -m benchmarks`` lists them.

The same as ``python -m benchmarks.NAME [options]``. A benchmark is a file of this folder that has a ``main``; it is
listed with the first line of its docstring, and loaded only when it is run.
"""

from __future__ import annotations

import ast
import difflib
import pathlib
import runpy
import sys

__all__ = ["benchmarks", "main"]


def benchmarks() -> dict[str, str]:
    """name -> what it measures."""
    found = {}
    for path in sorted(pathlib.Path(__file__).parent.glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments name; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    known = benchmarks()
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m benchmarks NAME [options]\n")
        for name, line in known.items():
            print(f"  {name:10} {line}")
        return 0
    name, *rest = arguments
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
        print(f"python -m benchmarks: error: no benchmark {name!r}{hint}", file=sys.stderr)
        return 2
    sys.argv[1:] = rest
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
