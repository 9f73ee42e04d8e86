"""The events of MkDocs that the site handles."""

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from site_hooks.links import ROOT, SOURCE, repository_files, rewritten, source_page
from site_hooks.references import filled


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside of docs/ that a page links to."""
    for path in repository_files(ROOT):
        content = source_page(ROOT, path)
        files.append(File.generated(config, f"{SOURCE}/{path}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill in the generated tables, and lead links out of docs/ to their pages."""
    uri = page.file.src_uri
    if uri.startswith(f"{SOURCE}/"):
        here = uri.removeprefix(f"{SOURCE}/").removesuffix(".md")
        return rewritten(markdown, here, uri) if here.endswith(".md") else markdown
    return rewritten(filled(markdown), f"docs/{uri}", uri)
