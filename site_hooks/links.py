"""Links that work on GitHub and on the site.

Pages link to files of the repository by relative paths, as GitHub resolves them. The site has only
docs/, so a linked file outside of it becomes a page under source/, and the link leads there.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

ROOT = Path(__file__).parents[1]
SOURCE = "source"  # folder of the site with the files outside of docs/
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml", ".cff": "yaml"}

LINK = re.compile(r"(?<=\]\()([^)#\s]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$|(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`)",
    re.DOTALL | re.MULTILINE,
)


def _target(link: str, here: str) -> str | None:
    """Return the path in the repository that a relative link leads to; None for other links."""
    if re.match(r"[a-z]+:|/", link):
        return None
    return normpath((PurePosixPath(here).parent / link).as_posix())


def _links(text: str) -> list[str]:
    return [match[1] for match in LINK.finditer(CODE.sub("", text))]


def repository_files(root: Path) -> list[str]:
    """Return the files outside of docs/ that pages link to, directly or through each other."""
    found: set[str] = set()
    queue = [path.relative_to(root).as_posix() for path in sorted((root / "docs").rglob("*.md"))]
    while queue:
        here = queue.pop()
        for link in _links((root / here).read_text()):
            path = _target(link, here)
            if path and not path.startswith("docs/") and path not in found:
                if not (root / path).is_file():
                    continue  # MkDocs reports the link
                found.add(path)
                queue += [path] if path.endswith(".md") else []
    return sorted(found)


def source_page(root: Path, path: str) -> str:
    """Return the page of a file: Markdown as it is, anything else as code."""
    text = (root / path).read_text()
    head = "---\nsearch:\n  exclude: true\n---\n\n"
    if path.endswith(".md"):
        return head + text
    language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
    return f"{head}# {path}\n\n~~~~~~{language}\n{text}\n~~~~~~\n"


def rewritten(text: str, here: str, uri: str) -> str:
    """Return a page with its relative links as the site has them.

    Args:
        text: Markdown with links relative to `here`.
        here: path of the page in the repository.
        uri: path of the page in the site's tree of Markdown files.
    """

    def link(match: re.Match[str]) -> str:
        path = _target(match[1], here)
        if path is None:
            return match[0]
        inside = path.removeprefix("docs/") if path.startswith("docs/") else f"{SOURCE}/{path}.md"
        return relpath(inside, PurePosixPath(uri).parent.as_posix() or ".") + (match[2] or "")

    result, end = "", 0
    for code in CODE.finditer(text):
        result += LINK.sub(link, text[end : code.start()]) + code[0]
        end = code.end()
    return result + LINK.sub(link, text[end:])
