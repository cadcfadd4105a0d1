"""Model-Predictive-Control gradients: block t learns from the loss read h blocks ahead."""

__version__ = "0.1.0"
