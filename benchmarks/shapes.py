"""The hidden matrices of three models."""

from collections.abc import Callable

Shape = tuple[int, ...]


def gpt124(layers: int = 12) -> list[Shape]:
    return [*[(768, 768)] * 4 * layers, *[(2048, 768)] * 2 * layers, *[(768, 2048)] * layers]


def llama1b(layers: int = 16) -> list[Shape]:
    layer: list[Shape] = [
        *[(2048, 2048)] * 2,
        *[(512, 2048)] * 2,
        *[(8192, 2048)] * 2,
        (2048, 8192),
    ]
    return layer * layers


def moe(layers: int = 14) -> list[Shape]:
    attention: list[Shape] = [*[(1024, 1024)] * 2, *[(256, 1024)] * 2]
    experts: list[Shape] = [*[(33, 704, 1024)] * 2, (33, 1024, 704)]
    return attention * layers + experts * (layers - 1)


SHAPES: dict[str, Callable[..., list[Shape]]] = {
    "gpt124": gpt124,
    "llama1b": llama1b,
    "moe1.1b": moe,
}


def divided(shapes: list[Shape], by: int) -> list[Shape]:
    """Rows and columns divided; the number of experts stays."""
    return [(*shape[:-2], shape[-2] // by, shape[-1] // by) for shape in shapes]
