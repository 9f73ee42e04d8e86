"""`angular-lab export-speedrun`: the optimizer, the model and the loop as one file to read and run.

The track wants a single script that imports torch alone. It is not typed a second time: inline.py
copies what speedrun_script.py uses from the lab's and the library's own source, and the values of
the recipe are written in as they are now.
"""

import ast
import json
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from angular_lab.export import speedrun_script
from angular_lab.export.inline import Script
from angular_muown import __version__

LEFT_OUT = "angular_muown.kernels"  # the script's stand-ins send every step down the eager path
ALLOWED = {"torch", *sys.stdlib_module_names}
HEADER = f'''"""AngularMuown on the optimization track of modded-nanogpt, in one file.

Written by `angular-lab export-speedrun` (angular-muown {__version__}, Apache-2.0). Each section is
copied from the file that it is named after; the run itself is in the last one.
"""
'''
END = 'if __name__ == "__main__":\n    main()\n'


def export_speedrun(out: Path) -> Path:
    """Write the script. The same sources give the same bytes."""
    _check_recipe()
    source = Path(speedrun_script.__file__).read_text(encoding="utf-8")
    script = Script(speedrun_script.__name__, "main", _with_values(source), LEFT_OUT)
    text = "\n\n".join([HEADER + "\n" + str(script) + "\n", END])
    _check_imports(text, out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8", newline="\n")
    return out


def _check_recipe() -> None:
    """What the script does not offer may not be asked of it silently."""
    spec = speedrun_script.RECIPE
    wanted = {"optim.name": "angular_muown", "schedule.kind": "wsd", "model.kind": "gpt_speedrun"}
    for key, value in wanted.items():
        part, name = key.split(".")
        found = getattr(getattr(spec, part), name)
        if found != value:
            raise ValueError(
                f"the recipe speedrun has {key}={found}, but the script knows {value} only: "
                "extend speedrun_script.py"
            )


def _with_values(source: str) -> str:
    """The script's source with the value in place of every RECIPE.something that a line sets."""
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            line = lines[node.lineno - 1]
            name, text = line.split()[0].rstrip(":"), ast.unparse(node.value)
            if text.startswith("RECIPE."):
                value = _literal(getattr(speedrun_script, name))
                lines[node.lineno - 1] = line.replace(text, value)
    return "".join(lines)


def _literal(value: Any) -> str:
    """A value as one would write it."""
    if is_dataclass(value) and not isinstance(value, type):
        given = (f"    {f.name}={_literal(getattr(value, f.name))},\n" for f in fields(value))
        return f"{type(value).__name__}(\n{''.join(given)})"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}" if abs(value) > 9999 else str(value)
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _check_imports(text: str, out: Path) -> None:
    compile(text, str(out), "exec")
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.split(".")[0] not in ALLOWED:
                raise ValueError(
                    f"the script would import {name}, and the track allows torch and the standard "
                    "library only: do without it, or leave it out as the kernels are"
                )
