"""The hidden matrices of some models."""

from collections.abc import Callable

Shape = tuple[int, ...]


def gpt124(layers: int = 12) -> list[Shape]:
    return [*[(768, 768)] * 4 * layers, *[(2048, 768)] * 2 * layers, *[(768, 2048)] * layers]


def small(layers: int = 8) -> list[Shape]:
    """Model S."""
    return [*[(384, 384)] * 4 * layers, *[(1024, 384)] * 2 * layers, *[(384, 1024)] * layers]


def llama(width: int, heads: int, hidden: int, layers: int) -> list[Shape]:
    """q and o, k and v (`heads` rows each), gate and up, down."""
    layer: list[Shape] = [
        *[(width, width)] * 2,
        *[(heads, width)] * 2,
        *[(hidden, width)] * 2,
        (width, hidden),
    ]
    return layer * layers


def llama1b(layers: int = 16) -> list[Shape]:
    return llama(2048, 512, 8192, layers)


def llama8b(layers: int = 32) -> list[Shape]:
    return llama(4096, 1024, 14336, layers)


def llama70b(layers: int = 80) -> list[Shape]:
    return llama(8192, 1024, 28672, layers)


def moe(layers: int = 14) -> list[Shape]:
    attention: list[Shape] = [*[(1024, 1024)] * 2, *[(256, 1024)] * 2]
    experts: list[Shape] = [*[(33, 704, 1024)] * 2, (33, 1024, 704)]
    return attention * layers + experts * (layers - 1)


SHAPES: dict[str, Callable[..., list[Shape]]] = {
    "s": small,
    "gpt124": gpt124,
    "llama1b": llama1b,
    "llama8b": llama8b,
    "llama70b": llama70b,
    "moe1.1b": moe,
}


def divided(shapes: list[Shape], by: int) -> list[Shape]:
    """Rows and columns divided; the number of experts stays."""
    return [(*shape[:-2], shape[-2] // by, shape[-1] // by) for shape in shapes]
