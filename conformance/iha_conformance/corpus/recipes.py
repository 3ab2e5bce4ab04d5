"""How the data of a case are made: one small function a recipe.

A recipe returns q, k, v, alpha_q, alpha_k, alpha_v and a global collapse in float64. `inputs` casts
them to the case's dtype. Structured recipes use whole numbers and powers of two that every dtype
holds, so that a conforming result is exact or its error is one rounding.

Letters are those of SPEC.md; `s` is a virtual key index m*P + p'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.streams import integers, uniform

Array = NDArray[np.float64]
Tensors = dict[str, Array]
Sizes = Mapping[str, int]
Recipe = Callable[..., Tensors]


def shapes(z: Sizes) -> dict[str, tuple[int, ...]]:
    """Shapes of the seven arrays, with a global collapse."""
    return {
        "q": (z["B"], z["N"], z["H"], z["d"]),
        "k": (z["B"], z["M"], z["G"], z["d"]),
        "v": (z["B"], z["M"], z["G"], z["e"]),
        "alpha_q": (z["H"], z["H"], z["P"]),
        "alpha_k": (z["G"], z["H"], z["P"]),
        "alpha_v": (z["G"], z["H"], z["P"]),
        "collapse": (z["H"], z["H"], z["P"]),
    }


def random(
    case_id: str, z: Sizes, *, amplitude: float = 2.0, parameters: float = 1.0, fine: bool = False
) -> Tensors:
    """Everything random: q, k, v within `amplitude`, mixing and collapse within `parameters`.

    With `fine`, numbers have 48 bits instead of 24, so that float32 does not hold them.
    """
    tensors = {}
    for name, shape in shapes(z).items():
        size = amplitude if name in "qkv" else parameters
        tensors[name] = uniform(f"{case_id}/{name}", shape, size)
        if fine:
            tensors[name] += uniform(f"{case_id}/{name} fine", shape, size * 2.0**-24)
    return tensors


def probe(case_id: str, z: Sizes) -> Tensors:
    """q = k = 0: every output is the plain mean of the values that are visible."""
    tensors = random(case_id, z)
    tensors["q"] *= 0.0
    tensors["k"] *= 0.0
    return tensors


def edge(case_id: str, z: Sizes, *, pick: int = 0) -> Tensors:
    """One-hot attention on the last or first visible virtual key, whose value tells which it was.

    Logits are +64 s or -64 s (the sign alternates over heads and batch elements), so each query
    takes the largest or the smallest visible virtual index, exactly. Needs G >= 2, d = 16, the
    default scale and no RoPE. Output head i shows pseudo output (i + 1, i + pick).
    """
    tensors = {name: np.zeros(shape) for name, shape in shapes(z).items()}
    B, M, H, P = z["B"], z["M"], z["H"], z["P"]
    b, m, h, p = np.arange(B), np.arange(M), np.arange(H), np.arange(P)
    tensors["q"][:, :, 0, 0] = 16.0 * (-1.0) ** b[:, None]
    tensors["alpha_q"][0] = 16.0 * (-1.0) ** h[:, None]
    # Source head 0 carries m*P and source head 1 the unit that is mixed in p' times.
    tensors["k"][:, :, 0, 0] = m * P
    tensors["k"][:, :, 1, 0] = 1.0
    for name in ("alpha_k", "alpha_v"):
        tensors[name][0] = 1.0
        tensors[name][1] = p
    # 4 * (a permutation of 13 tokens) + p' + 1: unlike for keys less than 13 tokens apart, at most 55.
    lane = np.arange(z["e"])
    code = (m[None, :, None] * (lane + 2) + 3 * b[:, None, None] + 1) % 13
    tensors["v"][:, :, 0, :] = 4.0 * code + 1.0
    tensors["v"][:, :, 1, :] = 1.0
    tensors["collapse"] = _choose(z, pick)
    return tensors


def spread(case_id: str, z: Sizes, *, distance: float = 8.0) -> Tensors:
    """Exact logits `distance` apart, value 0 under the heavy keys.

    All that is seen of the values has weight e**-distance, so a logit that is off by x moves the
    output by the factor e**x: small errors of scale are magnified. Needs d = 16, the default scale
    and no RoPE.
    """
    tensors = _identity(z)
    heavy = np.arange(z["M"]) % 4 == 0
    tensors["q"][..., 0] = 4.0
    tensors["k"][..., 0] = np.where(heavy, distance, 0.0)[:, None]
    tensors["v"] = integers(f"{case_id}/v", tensors["v"].shape, 16, 31) * ~heavy[:, None, None]
    return tensors


def gain(case_id: str, z: Sizes) -> Tensors:
    """Many independent rows of few keys with exact random logits and identity mixing.

    The least-squares gain over all of them averages the roundings away. Logits are 16-bit fractions
    in two lanes, so that hardly two weights, and so hardly two roundings, are alike. Needs d = 16,
    the default scale and no RoPE.
    """
    tensors = _identity(z)
    tensors["q"][..., :2] = 4.0
    heads = tensors["k"].shape[:-1]
    tensors["k"][..., 0] = integers(f"{case_id}/k", heads, -127, 127) * 2.0**-6
    tensors["k"][..., 1] = integers(f"{case_id}/k fine", heads, -127, 127) * 2.0**-14
    tensors["v"] = uniform(f"{case_id}/v", tensors["v"].shape, 2.0)
    return tensors


def equal(case_id: str, z: Sizes, *, low: int = 1, high: int = 15, query: float = 0.0) -> Tensors:
    """All logits equal, values whole numbers: the output is their mean.

    `query` fills all lanes of q and k: 256 makes logits that overflow float16.
    """
    tensors = _identity(z)
    tensors["q"] += query
    tensors["k"] += query
    tensors["v"] = integers(f"{case_id}/v", tensors["v"].shape, low, high)
    return tensors


def cancel(case_id: str, z: Sizes) -> Tensors:
    """Logits whose terms are +2**16, then multiples of 256, then -2**16: exact in float32 only.

    The sum tells the keys apart by 64, so attention is one-hot; summed in 16 bits the small terms
    vanish. Needs d = 16, the default scale and no RoPE.
    """
    tensors = _identity(z)
    m = np.arange(z["M"])
    tensors["q"][..., 0], tensors["q"][..., -1] = 256.0, 256.0
    tensors["k"][..., 0], tensors["k"][..., -1] = 256.0, -256.0
    tensors["q"][..., 5] = 16.0
    tensors["k"][..., 5] = (16.0 * ((m * 3) % z["M"]))[:, None]
    tensors["v"] = integers(f"{case_id}/v", tensors["v"].shape, 1, 63)
    return tensors


def cancel_heads(case_id: str, z: Sizes, *, part: str = "mixing") -> Tensors:
    """Small whole numbers between heads of +2**15 and -2**15 that cancel: exact in float32 only.

    `part` "mixing" has them among the source heads of q, k and v, "collapse" among the virtual outputs
    of a token. Summed in 16 bits the small terms vanish. Needs H = G = 4, d = 16, the default scale, no
    RoPE and no mask.
    """
    tensors = _identity(z)
    large = np.array([1.0, 0.0, 0.0, -1.0])[:, None] * 2.0**15  # (source, 1)
    if part == "mixing":
        for name in ("alpha_q", "alpha_k", "alpha_v"):
            tensors[name][...] = 1.0
        for name in "qkv":
            tensors[name] += large * (np.arange(tensors[name].shape[-1]) == 0 if name in "qk" else 1.0)
        tensors["q"][:, :, 1, 0] = 16.0
        tensors["k"][:, :, 2, 0] = 16.0 * ((np.arange(z["M"]) * 3) % z["M"])
        tensors["v"][:, :, 1:3] = integers(f"{case_id}/v", (z["B"], z["M"], 2, z["e"]), 1, 31)
    else:
        tensors["v"] += large
        tensors["v"][:, :, 1:3] = integers(f"{case_id}/v", (z["B"], 1, 2, z["e"]), 1, 31)
        tensors["collapse"][...] = 0.0
        for i in range(z["H"]):
            tensors["collapse"][i, :, i % z["P"]] = 1.0
    return tensors


def neighbours(case_id: str, z: Sizes, *, base: float = 256.0) -> Tensors:
    """Logits `base`, `base` + 1, ...: from 256 on bfloat16, from 2048 on float16 cannot hold them apart.

    Needs d = 16, the default scale and no RoPE.
    """
    tensors = _identity(z)
    tensors["q"][..., :2] = 4.0
    tensors["k"][..., 0] = base
    tensors["k"][..., 1] = np.arange(z["M"])[:, None]
    tensors["v"] = integers(f"{case_id}/v", tensors["v"].shape, 1, 63)
    return tensors


def lanes(case_id: str, z: Sizes) -> Tensors:
    """Every lane of q and k decides alone, for some query, which key is taken.

    Query n of head h has lane n + N*h (mod d) alone, where keys hold a permutation of 0 ... M-1 of the lane's
    own, times 16: logits are 64 apart, so attention is one-hot, exactly. Needs H*N >= d = 16, M no multiple
    of 3, the default scale, no RoPE and no mask.
    """
    tensors = _identity(z)
    n, h, j, m = (np.arange(z[letter]) for letter in ("N", "H", "d", "M"))
    tensors["q"][...] = 16.0 * ((n[:, None] + z["N"] * h)[:, :, None] % z["d"] == j)
    tensors["k"][...] = 16.0 * ((m[:, None] * 3 + j) % z["M"])[:, None]
    tensors["v"] = integers(f"{case_id}/v", tensors["v"].shape, 1, 63)
    return tensors


def heads(case_id: str, z: Sizes) -> Tensors:
    """q = k = 0 and values that name their source head: which rows of alpha_v are used is visible.

    Values are 2**g in every token, mixing takes the source head (h + p) mod G, and output head i
    shows pseudo output (i, i): exact whatever is visible.
    """
    tensors = {name: np.zeros(shape) for name, shape in shapes(z).items()}
    G, H, P = z["G"], z["H"], z["P"]
    tensors["v"] += 2.0 ** np.arange(G)[:, None]
    for h in range(H):
        for p in range(P):
            tensors["alpha_v"][(h + p) % G, h, p] = 1.0 + p
            tensors["alpha_q"][(h + p) % H, h, p] = 1.0
            tensors["alpha_k"][(h + p) % G, h, p] = 1.0
    tensors["collapse"] = _choose(z, 0, shift=0)
    return tensors


def linear(case_id: str, z: Sizes) -> Tensors:
    """Small whole logits and values: exact without normalisation. Needs scale 1/4 and no RoPE."""
    tensors = _identity(z)
    tensors["q"][..., 0] = 4.0
    tensors["k"][..., 0] = integers(f"{case_id}/k", tensors["k"].shape[:-1], -2, 2)
    tensors["v"] = integers(f"{case_id}/v", tensors["v"].shape, -3, 3)
    return tensors


def fine(case_id: str, z: Sizes) -> Tensors:
    """Float32 parameters whose narrow roundings cancel: 1 + 2**-12 against -1.

    Equal sources are mixed to 2**-12 of their value, and equal pseudo outputs are collapsed so too.
    Rounded to 16 bits first, either gives zero.
    """
    tensors = _identity(z)
    tensors["v"] += 2048.0 * integers(f"{case_id}/v", (z["B"], 1, 1, z["e"]), 1, 15)
    tensors["alpha_v"][...] = 0.0
    tensors["alpha_v"][0], tensors["alpha_v"][1] = 1.0 + 2.0**-12, -1.0
    tensors["collapse"][...] = 0.0
    for i in range(z["H"]):
        tensors["collapse"][i, (i + 1) % z["H"], :2] = 1.0 + 2.0**-12, -1.0
    return tensors


def loud_tail(case_id: str, z: Sizes) -> Tensors:
    """Random, with keys and values of the later half of the tokens 64 times as large."""
    tensors = random(case_id, z)
    for name in ("k", "v"):
        tensors[name][:, z["M"] // 2 :] *= 64.0
    return tensors


def apart(case_id: str, z: Sizes, *, mixing: str = "identity", positive: bool = False) -> Tensors:
    """Queries and keys of a head in lanes of their own: every logit is 0, and yet no gradient is.

    Queries of even heads have the lanes j with j//2 even, their keys the others, odd heads the reverse; no
    rotation in either pairing brings these lanes together. Heads of one parity are mixed, so that mixing
    tensors have gradients between the parities. Weights are equal, and exact where their number is a power of
    two. With `mixing` "whole" the parameters are small whole numbers; `positive` data make values that only
    add up. Needs d a multiple of 8 and G even.
    """
    tensors = _identity(z)
    lane, low, high = np.arange(z["d"]), *((1, 3) if positive else (-3, 3))
    for name, odd in (("q", 0), ("k", 1)):
        shape = tensors[name].shape
        parity = (np.arange(shape[2]) + odd) % 2
        own = lane // 2 % 2 == parity[:, None]  # (heads, d)
        tensors[name] = integers(f"{case_id}/{name}", shape, low, high) * own
    tensors["v"] = integers(f"{case_id}/v", tensors["v"].shape, low, high)
    if mixing == "whole":
        for name in ("alpha_q", "alpha_k", "alpha_v", "collapse"):
            shape = tensors[name].shape
            whole = integers(f"{case_id}/{name}", shape, -1, 1)
            alike = np.arange(shape[0])[:, None] % 2 == np.arange(shape[1]) % 2
            tensors[name] = whole * alike[..., None] if name in ("alpha_q", "alpha_k") else whole
    return tensors


def _identity(z: Sizes) -> Tensors:
    """Zeros with identity mixing (source h mod G) and a collapse that shows pseudo (i + 1, i)."""
    tensors = {name: np.zeros(shape) for name, shape in shapes(z).items()}
    for name, sources in (("alpha_q", z["H"]), ("alpha_k", z["G"]), ("alpha_v", z["G"])):
        for h in range(z["H"]):
            tensors[name][h % sources, h] = 1.0
    tensors["collapse"] = _choose(z, 0)
    return tensors


def _choose(z: Sizes, pick: int, *, shift: int = 1) -> Array:
    """Collapse in which output head i shows pseudo output (i + shift, i + pick), signs alternating."""
    H, P = z["H"], z["P"]
    R = np.zeros((H, H, P))
    for i in range(H):
        R[i, (i + shift) % H, (i + pick) % P] = (-1.0) ** i
    return R


RECIPES: Mapping[str, Recipe] = {
    "random": random,
    "probe": probe,
    "edge": edge,
    "spread": spread,
    "gain": gain,
    "equal": equal,
    "cancel": cancel,
    "cancel_heads": cancel_heads,
    "neighbours": neighbours,
    "lanes": lanes,
    "heads": heads,
    "linear": linear,
    "fine": fine,
    "loud_tail": loud_tail,
    "apart": apart,
}
