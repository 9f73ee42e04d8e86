"""Load the model of a run and generate text with it."""

from pathlib import Path

import torch

from angular_lab.data.tokenizer import Tokenizer
from angular_lab.errors import UserError
from angular_lab.models import LanguageModel, build_model
from angular_lab.models.generate import choose
from angular_lab.run_folder import RunFolder
from angular_lab.training import checkpoint
from angular_lab.training.averages import Averages
from angular_lab.training.ranks import Ranks


def check_sampling(length: int = 0, temperature: float = 0.0) -> None:
    """Raise ValueError if a setting of `generate` is not valid."""
    for name, value in (("length", length), ("temperature", temperature)):
        if not value >= 0:
            raise UserError(f"--{name} {value:g}: it must be at least 0")


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    length: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """Continue the prompt by at most `length` tokens; the same seed gives the same text."""
    check_sampling(length, temperature)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    ids = [tokenizer.end_of_text, *tokenizer.encode(prompt)]
    model.eval()
    for _ in range(length):
        window = torch.tensor([ids[-model.spec.sequence :]], device=device)
        logits = model(window)[0, -1, : tokenizer.vocabulary].float()
        choice = int(choose(logits, temperature, top_k, generator))
        if choice == tokenizer.end_of_text:
            break
        ids.append(choice)
    model.train()
    return tokenizer.decode(ids[1:])


def load_run(
    path: Path, device: str = "cpu", average: float | None = None, step: int | None = None
) -> LanguageModel:
    """Return the model of a run, with an average of its weights if `average` is a window.

    The default of `step` is the newest checkpoint.
    """
    run = RunFolder(path)
    spec = run.read_spec()
    folder = checkpoint.find(run.checkpoints, step)
    chosen = [window for window in spec.average if window == average]
    if average is not None and not chosen:
        windows = ", ".join(map(str, spec.average)) or "none"
        raise UserError(
            f"average={average:g} is not one of the averages of {path}: {windows}; they are set "
            "when a run is started"
        )
    model = build_model(spec.model).to(device)
    ranks = Ranks(0, 1, torch.device(device))
    averages = Averages(model, chosen)
    try:
        checkpoint.load(folder, model, None, ranks, [averages])
    except checkpoint.DamagedError as error:
        raise error.advise("use it with --step {}") from None
    for window in chosen:
        averages.replace_weights(window)
    return model
