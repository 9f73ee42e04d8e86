"""`python -m evidence`: results/facts.json and what documents show, from the kept results."""

import shutil

from evidence import documents, facts, headline, whole_corpus
from evidence.kept import ROOT, Kept

BUILD = ROOT / "build" / "evidence"


def main() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    kept = Kept.unpacked(BUILD)
    computed = facts.compute(kept)
    tables = facts.tables(kept)
    names: set[str] = set()
    for path in documents.DOCUMENTS:
        text = path.read_text()
        names |= documents.names(text)
        try:
            path.write_text(documents.fill(text, computed, tables))
        except ValueError as error:
            raise SystemExit(f"{path.relative_to(ROOT)}: {error}") from None
    facts.write(computed, names)
    for module, result in (
        (headline, headline.Headline(kept)),
        (whole_corpus, whole_corpus.WholeCorpus(kept)),
    ):
        (BUILD / "figures" / module.FIGURE).write_text(result.figure())
    for name in documents.figures():
        shutil.copy(BUILD / "figures" / name, documents.FIGURES / name)
    print(f"{facts.FILE}: {len(names)} facts\n{BUILD / 'index.html'}: all runs")


if __name__ == "__main__":
    main()
