"""Products with weights of any kind, and the norms, activations and sums around them."""

from .api import Norm, embed, gated, greedy_head, linear
from .weight import Mixed, Quantised, Split, Weight

__all__ = ["Mixed", "Norm", "Quantised", "Split", "Weight", "embed", "gated", "greedy_head", "linear"]
