"""The tables of the reference that the code itself knows.

A page has a line `<!-- generate: name -->`; the site has the table of this name in its place.
"""

import re
from collections.abc import Callable

MARK = re.compile(r"^<!-- generate: ([\w-]+) -->$", re.MULTILINE)
TABLES: dict[str, Callable[[], str]] = {}


def filled(markdown: str) -> str:
    """Return a page with its marks replaced by what they name."""
    return MARK.sub(lambda mark: TABLES[mark[1]](), markdown)
