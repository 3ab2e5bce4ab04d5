"""Measure the initialisers and write the tables of docs/initialisation.md.

python conformance/tools/initialisation_page.py docs/initialisation.md [--check]

All numbers are of one layer in float64 (PyTorch, on the CPU), with parameters drawn by NumPy's generator.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from pages import replace

from iha_core import PROFILES, AttentionConfig, LayerConfig
from iha_core.initialisers import INITIALISERS, Initialiser, sample
from iha_torch import InterleavedHeadAttention

BEGIN = "<!-- tables of the initialisers: made by `make initialisation`, do not edit -->"
END = "<!-- end of tables -->"

B, N, D, H, P, d = 2, 24, 32, 4, 4, 8
STEPS, RATE = 10, 1.0

CONFIGS: Mapping[str, AttentionConfig] = {
    "`paper`": PROFILES["paper"].config,
    "virtual mask, token positions": AttentionConfig(rope="token"),
    "`mha-preserving`": PROFILES["mha-preserving"].config,
    "`theory`": PROFILES["theory"].config,
}


def layer_config(attention: AttentionConfig) -> LayerConfig:
    """The layer that is measured."""
    return LayerConfig(model_width=D, num_heads=H, head_width=d, num_pseudo_heads=P, attention=attention)


def plain_config(attention: AttentionConfig) -> LayerConfig:
    """The plain multi-head attention that a layer is compared with ([INIT-6])."""
    kept = dataclasses.replace(
        attention,
        causal="none" if attention.causal == "none" else "token",
        rope="none" if attention.rope == "none" else "token",
        window_unit="token",
    )
    return LayerConfig(kind="mha", model_width=D, num_heads=H, head_width=d, attention=kept)


def layer_of(config: LayerConfig, parameters: Mapping[str, np.ndarray]) -> InterleavedHeadAttention:
    """A layer in float64 with given parameters."""
    layer = InterleavedHeadAttention(config, initialiser="random", dtype=torch.float64)
    layer.load_state_dict({name: torch.from_numpy(parameters[name].copy()) for name in layer.state_dict()})
    return layer


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """An input and a target, unit normal."""
    generator = np.random.default_rng(7)
    x, y = (torch.from_numpy(generator.standard_normal((B, N, D))) for _ in range(2))
    return x, y


def loss(layer: InterleavedHeadAttention) -> torch.Tensor:
    """Half of the mean square of the output's distance to the target."""
    x, y = data()
    return 0.5 * (layer(x) - y).square().mean()


def difference(initialiser: Initialiser, attention: AttentionConfig) -> float:
    """Largest difference of the output to that of multi-head attention, in units of its root mean square."""
    parameters = sample(layer_config(attention), initialiser, seed=1)
    x, _ = data()
    with torch.no_grad():
        found = layer_of(layer_config(attention), parameters)(x)
        plain = layer_of(plain_config(attention), parameters)(x)
    return float((found - plain).abs().max() / plain.square().mean().sqrt())


def gradients(initialiser: Initialiser, attention: AttentionConfig) -> dict[str, float]:
    """Root mean square of the gradient of every parameter at the start."""
    config = layer_config(attention)
    layer = layer_of(config, sample(config, initialiser, seed=1))
    loss(layer).backward()
    return {name: float(p.grad.square().mean().sqrt()) for name, p in layer.named_parameters()}  # type: ignore[union-attr]


def spread(initialiser: Initialiser, attention: AttentionConfig) -> float:
    """How far the pseudo-heads of alpha_k are from their mean after some steps of gradient descent."""
    config = layer_config(attention)
    layer = layer_of(config, sample(config, initialiser, seed=1))
    optimiser = torch.optim.SGD(layer.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss(layer).backward()
        optimiser.step()
    alpha = layer.alpha_k.detach()
    return float((alpha - alpha.mean(-1, keepdim=True)).abs().max())


def number(x: float) -> str:
    """Two digits, or 0 for what is below any rounding."""
    return "0" if x < 1e-12 else f"{x:.1e}"


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def tables() -> Iterator[str]:
    """All tables in Markdown."""
    yield f"B = {B}, N = {N}, D = {D}, H = {H}, P = {P}, d = {d}; unit normal input, float64."
    yield ""
    yield "Largest difference to multi-head attention at the start, in units of its root mean square:"
    yield ""
    yield row(["initialiser", *CONFIGS])
    yield row(["---"] * (1 + len(CONFIGS)))
    for name in INITIALISERS:
        yield row([f"`{name}`", *(number(difference(name, attention)) for attention in CONFIGS.values())])
    for title in ("`paper`", "`mha-preserving`"):
        attention = CONFIGS[title]
        found = {name: gradients(name, attention) for name in INITIALISERS}
        yield ""
        yield f"Root mean square of each parameter's gradient at the start, {title}:"
        yield ""
        yield row(["parameter", *(f"`{name}`" for name in INITIALISERS)])
        yield row(["---"] * (1 + len(INITIALISERS)))
        for parameter in layer_config(attention).parameter_shapes():
            cells = [number(found[name][parameter]) for name in INITIALISERS]
            yield row([f"`{parameter}`", *cells])
    yield ""
    yield f"How far the pseudo-heads of `alpha_k` are apart after {STEPS} steps of gradient descent:"
    yield ""
    yield row(["initialiser", *CONFIGS])
    yield row(["---"] * (1 + len(CONFIGS)))
    for name in INITIALISERS:
        yield row([f"`{name}`", *(number(spread(name, attention)) for attention in CONFIGS.values())])


def main() -> None:
    """Write the page, or with --check say whether it is as it would be written."""
    page, made = Path(sys.argv[1]), "\n".join(tables())
    if "--check" not in sys.argv[2:]:
        replace(page, BEGIN, END, made)
    elif made not in page.read_text(encoding="utf-8"):
        sys.exit(f"{page}: its tables have changed: run `make initialisation`")


if __name__ == "__main__":
    main()
