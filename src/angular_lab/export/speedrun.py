"""`angular-lab export-speedrun`: speedrun_script.py and everything it imports, in one file.

The track asks for a single script, whose log begins with its complete source. The file holds the
modules of both packages unchanged, as strings, followed by a loader that imports them from there.
"""

import inspect
import sys
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from angular_lab.errors import UserError
from angular_lab.export import speedrun_script
from angular_muown import __version__

PACKAGES = ("angular_lab", "angular_muown")
ALLOWED = {"torch", "triton", *sys.stdlib_module_names}  # triton comes with torch, or is not used
HEADER = f'''"""AngularMuown on the optimization track of modded-nanogpt, in one file.

Written by `angular-lab export-speedrun` (angular-muown {__version__}, Apache-2.0). The modules of
the package come first, as strings; then the loader that imports them; the run itself is at the end.
"""

SOURCES = {{}}
'''
IMPORTS = """import sys
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from typing import Any
"""
INSTALL = "sys.meta_path.insert(0, EmbeddedModules(SOURCES, __file__))\n"


class EmbeddedModules(MetaPathFinder, SourceLoader):
    """Import modules from a dictionary of their sources by path.

    They appear as files below `folder`, so that tracebacks and Triton find their source.
    """

    def __init__(self, sources: dict[str, str], folder: str) -> None:
        self.sources = {f"{folder}/{path}": source for path, source in sources.items()}
        self.files: dict[str, str] = {}  # by the names of modules
        for path in sources:
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            self.files[name] = f"{folder}/{path}"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_file_location(name, loader=self) if name in self.files else None

    def get_filename(self, fullname: str) -> str:
        return self.files[fullname]

    def get_data(self, path: str) -> bytes:
        return self.sources[path].encode()


class Imports(ModuleFinder):
    """Modules of PACKAGES that a script imports, also inside functions; names of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.others: set[str] = set()

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        if path is None and name not in PACKAGES:  # a top-level name
            self.others.add(name)
            raise ImportError(name)
        return super().find_module(name, path, parent)


def export_speedrun(out: Path, overwrite: bool = False) -> Path:
    """Write the script. The same sources give the same bytes."""
    if out.is_dir():
        raise UserError(f"--out {out} is a folder: give the name of a file")
    if out.exists() and not overwrite:
        raise UserError(f"--out {out} exists already: add --overwrite to replace it")
    imports = Imports()
    imports.run_script(speedrun_script.__file__)
    if others := imports.others - ALLOWED:
        raise UserError(
            f"the script would import {', '.join(sorted(others))}, but it may need torch only: "
            "remove the import from the modules that speedrun_script.py uses"
        )
    modules = {name: m for name, m in sorted(imports.modules.items()) if name != "__main__"}
    strings = [_string(name, Path(vars(module)["__file__"])) for name, module in modules.items()]
    script = Path(speedrun_script.__file__).read_text(encoding="utf-8")
    loader = inspect.getsource(EmbeddedModules)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join([HEADER, *strings, IMPORTS, loader, INSTALL, script])
    out.write_text(text, encoding="utf-8", newline="\n")
    return out


def _string(name: str, file: Path) -> str:
    """Return the assignment of a module's source to its path in SOURCES."""
    source = file.read_text(encoding="utf-8")
    if "'''" in source:
        raise UserError(f"{file} contains three single quotes, which would end its string")
    path = name.replace(".", "/") + ("/__init__.py" if file.name == "__init__.py" else ".py")
    return f"SOURCES[{path!r}] = r'''{source}'''\n"
