"""dense: PlainLM, the model of the paper's main experiments; in shape a Llama."""

from angular_lab.config.spec import ModelSpec
from angular_lab.models.base import LanguageModel
from angular_lab.models.layers import Attention, Block, SwiGLU, mlp_width


class Dense(LanguageModel):
    """Pre-RMSNorm, rotary positions, SwiGLU, no biases, tied head unless told otherwise.

    12 layers with vocabulary 50,280 and heads of size 64: width 512, 768, 1280 have 67M, 124M,
    308M parameters (the published configuration of Muown).
    """

    def __init__(self, spec: ModelSpec) -> None:
        inner = mlp_width(spec)
        layers = (
            Block(spec, Attention(spec), SwiGLU(spec.width, inner)) for _ in range(spec.layers)
        )
        super().__init__(spec, layers)
