"""How often a run reads its corpus."""

from dataclasses import replace

from angular_lab.config.spec import ModelSpec, Spec
from angular_lab.data.passes import corpus_tokens, describe_passes, passes
from angular_lab.data.prepare import prepare
from angular_lab.data.tokenizer import BytesTokenizer
from tests.lab.data.test_shards import random_ids, write_with_struct

SPEC = Spec(steps=30, batch=2, model=ModelSpec(sequence=100))  # 6,000 tokens


def test_passes_over_shards_without_a_manifest(tmp_path) -> None:
    for name, size in (("train_0", 1000), ("train_1", 500), ("val_0", 7)):
        write_with_struct(tmp_path / f"{name}.bin", random_ids(size, 50, 0).tolist())
    assert corpus_tokens(tmp_path) == 1500
    assert passes(SPEC, tmp_path) == 4.0
    assert describe_passes(SPEC, tmp_path) == "4.00 passes over 1,500 training tokens"
    for sequence, shown in ((8, "0.01"), (7, "<0.01")):
        few = replace(SPEC, steps=1, batch=1, model=replace(SPEC.model, sequence=sequence))
        assert describe_passes(few, tmp_path).startswith(f"{shown} passes over ")


def test_passes_over_prepared_tokens_count_the_training_split(tmp_path) -> None:
    texts = (f"document {i} {'x' * 40}" for i in range(200))
    manifest = prepare(texts, BytesTokenizer(), tmp_path / "data", val_fraction=0.2, progress=False)
    tokens = manifest.splits["train"].tokens
    assert 0 < tokens == corpus_tokens(tmp_path / "data")
    longer = replace(SPEC, steps=60)
    assert passes(longer, tmp_path / "data") == 2 * passes(SPEC, tmp_path / "data")


def test_no_training_tokens_are_infinitely_many_passes(tmp_path) -> None:
    assert passes(SPEC, tmp_path) == float("inf")
