"""`angular-lab export-speedrun`: the optimizer, the model and the loop as one file to read and run.

The track wants a single script that imports torch alone. It is not typed a second time: from `main`
of speedrun_script.py on, every definition in use is copied from the lab's and the library's own
source, module by module in the order in which Python would import them; the rest stays behind.

A copied text changes in three places only: imports inside the two packages go, `module.name`
becomes `name`, and a name that means several things gets its module's name in front. Where a
local variable of the same name makes that doubtful, the export stops and says so.
"""

import ast
import builtins
import json
import sys
from collections import Counter
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from angular_muown import __version__

PACKAGES = ("angular_muown", "angular_lab")
ROOT, ENTRY, RECIPE = "angular_lab.speedrun_script", "main", "RECIPE"
LEFT_OUT = "angular_muown.kernels"  # ROOT has stand-ins that send every step down the eager path
HEADER = f'''"""AngularMuown on the optimization track of modded-nanogpt, in one file.

Written by `angular-lab export-speedrun` (angular-muown {__version__}, Apache-2.0). Each section is
copied from the file that it is named after; the run itself is in the last one.
"""
'''


class Symbol(NamedTuple):
    """A definition. With name "" it is a module; with module "", what a foreign import makes."""

    module: str
    name: str


class Use(NamedTuple):
    """A piece of text, as bytes from .. to, that stands for a symbol."""

    start: int
    end: int
    symbol: Symbol


def is_own(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


def stored(node: ast.AST) -> set[str]:
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Store)}


def bound(node: ast.AST) -> set[str]:
    """Every name that is bound somewhere in a piece of code, in whatever scope."""
    names = stored(node)
    for n in ast.walk(node):
        if isinstance(n, ast.Global):
            raise ValueError(f"'global {n.names[0]}' cannot be exported: pass it as an argument")
        if isinstance(n, ast.arg):
            names.add(n.arg)
        elif isinstance(n, ast.alias):
            names.add(n.asname or n.name.split(".")[0])
        elif isinstance(own := getattr(n, "name", None), str):  # def, class, except, case
            names.add(own)
    return names


class Statement:
    """A definition of a module, with the comment lines above it."""

    def __init__(self, node: ast.stmt, first_line: int) -> None:
        self.node, self.first_line = node, first_line
        is_block = isinstance(node, ast.FunctionDef | ast.ClassDef)
        self.names = {node.name} if is_block else stored(node)
        self.inner = bound(node) - self.names  # local variables, arguments, methods


class Module:
    """A source file: what it defines, and what it imports."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.own: dict[str, Symbol] = {}  # local name -> what it was imported from
        self.foreign: dict[str, str] = {}  # local name -> the import that makes it
        self.source = self._lift_imports(source).encode()
        self.starts = [0, *accumulate(map(len, self.source.splitlines(keepends=True)))]
        tree = ast.parse(self.source)
        self.doc = ast.get_docstring(tree) or ""
        self.statements: list[Statement] = []
        end = 0
        for node in tree.body[bool(self.doc) :]:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign):
                self.statements.append(Statement(node, end + 1))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
            elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
                raise ValueError(
                    f"{name}, line {node.lineno}: only imports, functions, classes and assignments "
                    "can be exported; move this into a function"
                )
            end = node.end_lineno or end
        self.defined = set[str]().union(*(s.names for s in self.statements))

    def _lift_imports(self, source: str) -> str:
        """Imports from the two packages inside functions count for the whole module here."""
        lines = source.splitlines(keepends=True)
        for top in ast.parse(source).body:
            if isinstance(top, ast.FunctionDef | ast.ClassDef):
                for node in ast.walk(top):
                    if isinstance(node, ast.ImportFrom) and is_own(node.module or ""):
                        self._import(node)
                        lines[node.lineno - 1 : node.end_lineno] = [""] * (
                            (node.end_lineno or node.lineno) - node.lineno + 1
                        )
        return "".join(lines)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        origin = node.module if isinstance(node, ast.ImportFrom) else None
        for alias in node.names:
            if alias.name == "*" or getattr(node, "level", 0):
                raise ValueError(f"{self.name}, line {node.lineno}: import by full names, not *")
            local = alias.asname or alias.name.split(".")[0]
            if is_own(origin or alias.name):
                self.own[local] = Symbol(origin or alias.name, alias.name if origin else "")
            elif origin != "__future__":
                text = "import " + alias.name + (f" as {alias.asname}" if alias.asname else "")
                self.foreign[local] = f"from {origin} {text}" if origin else text

    def place(self, line: int | None, column: int | None) -> int:
        return self.starts[(line or 1) - 1] + (column or 0)


class Script:
    """Definitions from several modules, on their way into one file."""

    def __init__(self) -> None:
        self.modules: dict[str, Module] = {}
        self.foreign: dict[str, str] = {}
        self.kept: dict[Symbol, None] = {}
        self.order: list[str] = []
        self._keep(Symbol(ROOT, ENTRY))
        counts = Counter(symbol.name for symbol in self.kept)
        taken = {*self.foreign, *dir(builtins)}
        self.names = {
            s: f"{s.module.split('.')[-1]}_{s.name.lstrip('_')}"
            if counts[s.name] > 1 or s.name in taken else s.name
            for s in self.kept
        }  # fmt: skip
        for name, count in Counter((*self.names.values(), *self.foreign)).items():
            if count > 1 or (name in self.foreign and name in dir(builtins)):
                raise ValueError(f"{name} would mean two things in the script: rename one of them")

    def module(self, name: str) -> Module:
        if name not in self.modules:
            found = find_spec(name)
            if found is None or found.origin is None:
                raise ValueError(f"the source of {name} is not there: install the whole package")
            source = Path(found.origin).read_text(encoding="utf-8")
            self.modules[name] = Module(name, with_values(source) if name == ROOT else source)
        return self.modules[name]

    def meaning(self, module: str, name: str) -> Symbol:
        """What a name of a module stands for, by way of all imports in between."""
        if f"{module}.".startswith(f"{LEFT_OUT}."):
            if name not in self.module(ROOT).defined:
                raise ValueError(f"{module}.{name} is left out: give {ROOT} a stand-in for it")
            module = ROOT
        m = self.module(module)
        if name in m.defined:
            return Symbol(module, name)
        if name in m.own:
            return self.meaning(*m.own[name]) if m.own[name].name else m.own[name]
        if name not in m.foreign:  # `from package import module`
            return Symbol(f"{module}.{name}", "")
        if self.foreign.setdefault(name, m.foreign[name]) != m.foreign[name]:
            raise ValueError(
                f"{module} has '{m.foreign[name]}', another module '{self.foreign[name]}': one of "
                "the two needs another name"
            )
        return Symbol("", name)

    def uses(self, m: Module, s: Statement) -> list[Use]:
        """Where a statement names something of its module, its own definition included. A local
        variable of the same name counts too: without a new name, that changes nothing."""
        found: list[Use] = []
        if isinstance(s.node, ast.FunctionDef | ast.ClassDef):
            at = m.source.index(s.node.name.encode(), m.place(s.node.lineno, 0))
            found.append(Use(at, at + len(s.node.name), Symbol(m.name, s.node.name)))
        nodes = list(ast.walk(s.node))
        owners = {n.value: n for n in nodes if isinstance(n, ast.Attribute)}
        for node in nodes:
            if isinstance(node, ast.Name) and node.id in {*m.defined, *m.own, *m.foreign}:
                symbol, text = self.meaning(m.name, node.id), owners.get(node, node)
                if symbol.name or node.id in s.inner:
                    text = node
                elif isinstance(text, ast.Attribute):  # module.name
                    symbol = self.meaning(symbol.module, text.attr)
                if not symbol.name:
                    raise ValueError(f"{m.name}, line {node.lineno}: {node.id} is a module, and only module.name can be exported")
                start = m.place(text.lineno, text.col_offset)
                found.append(Use(start, m.place(text.end_lineno, text.end_col_offset), symbol))
        return found

    def _keep(self, symbol: Symbol) -> None:
        if symbol in self.kept or not symbol.module:
            return
        self.kept[symbol] = None
        m = self.module(symbol.module)
        for s in m.statements:
            if symbol.name in s.names:
                for name in (*(use.symbol for use in self.uses(m, s)), *(Symbol(m.name, n) for n in s.names)):
                    self._keep(name)
