"""Definitions of several modules as the text of one file.

From one definition on, every definition in use is copied from the source of the two packages,
module by module in the order in which Python would import them; the rest stays behind. A copied
text changes in three places only: imports inside the packages go, `module.name` becomes `name`,
and a name that means several things gets its module's name in front. Where a local variable of
the same name makes that doubtful, the copy stops and says so.
"""

import ast
import builtins
from collections import Counter
from importlib.util import find_spec
from itertools import accumulate, chain
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

PACKAGES = ("angular_muown", "angular_lab")
Import = ast.Import | ast.ImportFrom
Block = ast.FunctionDef | ast.ClassDef


class Symbol(NamedTuple):
    """A definition, with name "" a module. What comes from outside the two packages has its import
    statement in place of the module."""

    module: str
    name: str

    @property
    def is_foreign(self) -> bool:
        return " " in self.module


def is_own(node: ast.AST) -> bool:
    """Whether this is an import from the two packages."""
    if not isinstance(node, Import):
        return False
    origin = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
    return (origin or "").split(".")[0] in PACKAGES


def stored(node: ast.AST) -> set[str]:
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Store)}


def bound(node: ast.AST) -> set[str]:
    """Every name that is bound somewhere in a statement, in whatever scope."""
    names = stored(node)
    for n in ast.walk(node):
        if isinstance(n, ast.Global):
            raise ValueError(f"'global {n.names[0]}' cannot be exported: pass it as an argument")
        if isinstance(n, ast.arg):
            names.add(n.arg)
        elif isinstance(n, Import) and not is_own(n):
            names |= {alias.asname or alias.name.split(".")[0] for alias in n.names}
        elif not isinstance(n, ast.alias) and isinstance(own := getattr(n, "name", None), str):
            names.add(own)  # of a def, class, except or case
    return names


class Statement:
    """A definition of a module, with the comment lines above it."""

    def __init__(self, node: ast.stmt, first_line: int) -> None:
        self.node, self.first_line = node, first_line
        self.names = {node.name} if isinstance(node, Block) else stored(node)
        self.inner = bound(node) - self.names  # local variables, arguments, methods
        self.imports = [n for n in ast.walk(node) if isinstance(n, Import) and is_own(n)]


class Module:
    """A source file: what it defines, and what it imports."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source.encode()
        self.starts = [0, *accumulate(map(len, self.source.splitlines(keepends=True)))]
        self.imported: dict[str, Symbol] = {}  # by the names that they have here
        self.statements: list[Statement] = []
        tree, end = ast.parse(source), 0
        self.doc = ast.get_docstring(tree) or ""
        for node in tree.body[bool(self.doc) :]:
            if isinstance(node, Block | ast.Assign | ast.AnnAssign):
                self.statements.append(Statement(node, end + 1))
                for inner in self.statements[-1].imports:
                    self._import(inner)
            elif isinstance(node, Import):
                self._import(node)
            elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
                raise ValueError(
                    f"{name}, line {node.lineno}: only imports, functions, classes and assignments "
                    "can be exported; move this into a function"
                )
            end = node.end_lineno or end
        self.defined = set(chain.from_iterable(s.names for s in self.statements))

    def _import(self, node: Import) -> None:
        origin = node.module if isinstance(node, ast.ImportFrom) else None
        for alias in node.names:
            if alias.name == "*" or getattr(node, "level", 0):
                raise ValueError(f"{self.name}, line {node.lineno}: import by full names, not *")
            local = alias.asname or alias.name.split(".")[0]
            if is_own(node):
                self.imported[local] = Symbol(origin or alias.name, alias.name if origin else "")
            elif origin != "__future__":
                text = "import " + alias.name + (f" as {alias.asname}" if alias.asname else "")
                self.imported[local] = Symbol(f"from {origin} {text}" if origin else text, local)

    def place(self, line: int | None, column: int | None) -> int:
        return self.starts[(line or 1) - 1] + (column or 0)


class Script:
    """What the definition `entry` of the module `root` needs, on its way into one file.

    Args:
        source: the text of `root`.
        left_out: a package that is not copied: `root` defines stand-ins for what is used of it.
    """

    def __init__(self, root: str, entry: str, source: str, left_out: str) -> None:
        self.root, self.left_out = root, left_out
        self.modules = {root: Module(root, source)}
        self.names: dict[Symbol, str] = {}  # what is kept, and its name in the script
        self._keep(Symbol(root, entry))
        counts = Counter(symbol.name for symbol in self.names) + Counter(dir(builtins))
        for symbol in self.names:
            if counts[symbol.name] > 1 and not symbol.is_foreign:
                self.names[symbol] = f"{symbol.module.split('.')[-1]}_{symbol.name.lstrip('_')}"
        for name, count in (Counter(self.names.values()) + Counter(dir(builtins))).items():
            if count > 1:
                raise ValueError(f"{name} would mean two things in the script: rename one of them")

    def module(self, name: str) -> Module:
        if name not in self.modules:
            found = find_spec(name)
            if found is None or found.origin is None:
                raise ValueError(f"the source of {name} is not there: install the whole package")
            self.modules[name] = Module(name, Path(found.origin).read_text(encoding="utf-8"))
        return self.modules[name]

    def meaning(self, module: str, name: str) -> Symbol:
        """What a name of a module stands for, by way of all imports in between."""
        if f"{module}.".startswith(f"{self.left_out}."):
            if name not in self.modules[self.root].defined:
                raise ValueError(f"{module}.{name} is left out: define it in {self.root} instead")
            module = self.root
        m = self.module(module)
        if name in m.defined:
            return Symbol(module, name)
        if name not in m.imported:  # `from package import module`
            return Symbol(f"{module}.{name}", "")
        origin = m.imported[name]
        return origin if origin.is_foreign or not origin.name else self.meaning(*origin)

    def uses(self, m: Module, s: Statement) -> dict[ast.expr, Symbol]:
        """Which pieces of a statement stand for something of its module. A local variable of the
        same name counts too: as long as nothing is renamed, that changes nothing."""
        found: dict[ast.expr, Symbol] = {}
        nodes = list(ast.walk(s.node))
        owners = {n.value: n for n in nodes if isinstance(n, ast.Attribute)}
        for node in nodes:
            if not isinstance(node, ast.Name):
                continue
            if node.id in {*m.defined, *m.imported}:
                symbol, text = self.meaning(m.name, node.id), node
                if not symbol.name and node in owners:  # module.name
                    text = owners[node]
                    symbol = self.meaning(symbol.module, text.attr)
                if not symbol.name:
                    raise ValueError(f"{m.name}, line {node.lineno}: {node.id} is a whole module")
                found[text] = symbol
            elif node.id not in {*s.inner, *dir(builtins), "__file__", "__name__"}:
                raise ValueError(f"{m.name}, line {node.lineno}: {node.id} is not defined there")
        return found

    def _keep(self, symbol: Symbol) -> None:
        if symbol not in self.names:
            self.names[symbol] = symbol.name
            for m, s in self.statements(symbol):
                for other in (*self.uses(m, s).values(), *(Symbol(m.name, n) for n in s.names)):
                    self._keep(other)

    def statements(self, symbol: Symbol) -> list[tuple[Module, Statement]]:
        if symbol.is_foreign:
            return []
        m = self.module(symbol.module)
        return [(m, s) for s in m.statements if symbol.name in s.names]

    def order(self, name: str, seen: list[str]) -> list[str]:
        """Modules, each after those that it uses."""
        seen.append(name)
        pairs = (self.statements(symbol) for symbol in self.names if symbol.module == name)
        uses = (self.uses(m, s).values() for m, s in chain.from_iterable(pairs))
        wanted = sorted({u.module for u in chain.from_iterable(uses) if not u.is_foreign})
        return [*chain.from_iterable(self.order(w, seen) for w in wanted if w not in seen), name]

    def text(self, m: Module, s: Statement) -> str:
        edits = [(m.place(i.lineno, 0), m.place((i.end_lineno or 0) + 1, 0), "") for i in s.imports]
        for node, symbol in self.uses(m, s).items():
            start = m.place(node.lineno, node.col_offset)
            end = m.place(node.end_lineno, node.end_col_offset)
            old, new = m.source[start:end].decode(), self.names[symbol]
            if old != new and {new, old.split(".")[0]} & s.inner:
                raise ValueError(
                    f"{m.name}, line {node.lineno}: {old} has to become {new}, and one of the two "
                    f"is a local name in {'/'.join(s.names)} as well: rename that one"
                )
            edits.append((start, end, new))
        if isinstance(s.node, Block):
            start = m.place(s.node.lineno, 6 if isinstance(s.node, ast.ClassDef) else 4)
            edits.append((start, start + len(s.node.name), self.names[Symbol(m.name, s.node.name)]))
        text = m.source[: m.place((s.node.end_lineno or 0) + 1, 0)]
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new.encode() + text[end:]
        return text[m.place(s.first_line, 0) :].decode()

    def section(self, name: str) -> str:
        """The kept part of a module. Its docstring is a comment: a file has one docstring."""
        m = self.module(name)
        kept = [s for s in m.statements if any(Symbol(name, n) in self.names for n in s.names)]
        doc = indent(f"{name.replace('.', '/')}.py\n\n{m.doc}", "# ", lambda line: True)
        title = "#" * 100 + "\n" + "\n".join(line.rstrip() for line in doc.splitlines())
        first, *others = (self.text(m, statement) for statement in kept)
        return "".join([title, "\n\n\n", first.lstrip("\n"), *others]).rstrip("\n")

    def imports(self) -> str:
        """The standard library's, then torch's; nothing else is there to be imported."""
        lines: dict[str, list[str]] = {}
        for symbol in sorted(symbol for symbol in self.names if symbol.is_foreign):
            origin, _, name = symbol.module.rpartition("import ")
            lines.setdefault(origin or symbol.module, []).append(name)
        texts = [
            origin + f"import {', '.join(names)}" if origin.startswith("from") else origin
            for origin, names in sorted(lines.items(), key=lambda item: item[0][:4] == "from")
        ]
        theirs = [text for text in texts if text.split()[1].split(".")[0] == "torch"]
        return "\n".join([*(t for t in texts if t not in theirs), "", *theirs])

    def __str__(self) -> str:
        sections = (self.section(name) for name in self.order(self.root, []))
        return "\n\n\n".join([self.imports(), *sections])
