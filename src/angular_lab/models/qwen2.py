"""qwen2: Qwen2 (arXiv 2407.10671); `export.huggingface` converts its weights in both directions."""

from angular_lab.config.spec import ModelSpec
from angular_lab.models.base import LanguageModel
from angular_lab.models.layers import Attention, Block, SwiGLU, mlp_width


class Qwen2(LanguageModel):
    """The dense model with biases on q, k, v and grouped k, v heads.

    Qwen2-0.5B: 24 layers, width 896, 14 heads / 2 kv heads, MLP 4864, vocabulary 151,936, tied:
    494M parameters. The published weights use RoPE base 1,000,000; the paper trains with 10,000.
    """

    def __init__(self, spec: ModelSpec) -> None:
        inner = mlp_width(spec)
        layers = (
            Block(spec, Attention(spec, qkv_bias=True), SwiGLU(spec.width, inner))
            for _ in range(spec.layers)
        )
        super().__init__(spec, layers)
