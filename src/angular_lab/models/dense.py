"""dense: PlainLM, the model of the paper's main experiments, with the architecture of Llama."""

from angular_lab.config.spec import ModelSpec
from angular_lab.models.base import LanguageModel
from angular_lab.models.layers import Attention, Block, SwiGLU, mlp_width


class Dense(LanguageModel):
    """Pre-RMSNorm, rotary positions, SwiGLU, no biases; the head is tied by default.

    With 12 layers, vocabulary 50,280 and heads of size 64 (the published configuration of Muown),
    widths 512, 768 and 1280 have 67M, 124M and 308M parameters.
    """

    def __init__(self, spec: ModelSpec) -> None:
        inner = mlp_width(spec)
        layers = (
            Block(spec, Attention(spec), SwiGLU(spec.width, inner)) for _ in range(spec.layers)
        )
        super().__init__(spec, layers)
