"""The layer: projections and norms around `attention`, as a module of PyTorch. SPEC.md chapters 10 and 11."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from iha_core.checkpoint import check_tensors
from iha_core.config import describe
from iha_core.errors import ArgumentTypeError, ArgumentValueError, DTypeError
from iha_core.initialisers import Initialiser, fixed_mixing, starts
from iha_core.layer_config import MIXING, LayerConfig
from iha_core.validation import FLOAT_DTYPES, parameter_dtypes
from iha_torch.attention import attention


class HeadNorm(nn.Module):
    """Root-mean-square norm of each head ([LAY-4]), in float32 or wider and rounded once ([LAY-7]).

    `torch.nn.RMSNorm` leaves to the device where it rounds, and asks for a weight of its input's dtype, which
    it has not under autocast.

    Args:
        width: d, width of a head.
        epsilon: number that is added to the mean square.
        device, dtype: of the weight, which is left uninitialised.
    """

    def __init__(
        self,
        width: int,
        epsilon: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, heads, d) -> the same shape and dtype; equation (34)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        root = (wide.square().mean(-1, keepdim=True) + self.epsilon).sqrt()  # (B, N, heads, 1)
        return (wide / root * self.weight.to(wide.dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}"


class InterleavedHeadAttention(nn.Module):
    """A layer of interleaved heads, or of plain ones with `config.kind == "mha"`.

    `state_dict()` has exactly the names and shapes of [CKPT-1]. Mixing tensors and collapse are parameters;
    for kind "mha" they are constants that are in no state ([LAY-6]).

    Args:
        config: sizes and choices of the layer.
        initialiser: how mixing tensors and collapse start ([INIT-2] to [INIT-5]).
        device: where the parameters are.
        dtype: of the parameters: float64, float32, float16 or bfloat16; None means PyTorch's default.
        mixing_dtype: of mixing tensors and collapse: `dtype`, or float32 while that is narrower ([TYP-2]);
            None means `dtype`.

    Raises:
        ArgumentTypeError: `config` is no `LayerConfig`, or a dtype none of PyTorch's.
        ConfigError: no such initialiser, or one that the configuration does not allow.
        DTypeError: dtypes that are not allowed.

    Source: SPEC.md [LAY-1] to [LAY-7], [INIT-1].
    """

    alpha_q: Tensor
    alpha_k: Tensor
    alpha_v: Tensor
    collapse: Tensor

    def __init__(
        self,
        config: LayerConfig,
        *,
        initialiser: Initialiser = "noisy-average",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        mixing_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, LayerConfig):
            raise ArgumentTypeError("config", "", expected="a LayerConfig", found=type(config).__name__)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        mixing_dtype = dtype if mixing_dtype is None else mixing_dtype
        _check_dtypes(dtype, mixing_dtype)
        self.config = config
        self.initialiser = initialiser

        D, H, G = config.model_width, config.num_heads, config.num_kv_heads
        d, e = config.head_width, config.value_width

        def projection(inputs: int, outputs: int) -> nn.Linear:
            # Linear would draw when it is made, and a seed mean other numbers than in reset_parameters.
            linear: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
                nn.Linear,
                inputs,
                outputs,
                bias=config.bias,
                device=torch.get_default_device() if device is None else device,
                dtype=dtype,
            )
            return linear

        self.q_proj = projection(D, H * d)
        self.k_proj = projection(D, G * d)
        self.v_proj = projection(D, G * e)
        self.o_proj = projection(H * e, D)
        if config.qk_norm:
            self.q_norm = HeadNorm(d, config.qk_norm_epsilon, device=device, dtype=dtype)
            self.k_norm = HeadNorm(d, config.qk_norm_epsilon, device=device, dtype=dtype)
        shapes = config.parameter_shapes()
        fixed = fixed_mixing(config) if config.kind == "mha" else {}
        for name in MIXING:
            if config.kind == "mha":
                empty = torch.empty(fixed[name].shape, device=device, dtype=mixing_dtype)
                self.register_buffer(name, empty, persistent=False)
            else:
                empty = torch.empty(shapes[name], device=device, dtype=mixing_dtype)
                self.register_parameter(name, nn.Parameter(empty))
        self.reset_parameters()
        if config.kind == "mha":
            self.register_load_state_dict_post_hook(_set_buffers)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters anew by PyTorch's generator ([INIT-1] to [INIT-5]); also after `to_empty`."""
        for name, start in starts(self.config, self.initialiser).items():
            parameter = self.get_parameter(name)
            mean = torch.as_tensor(start.mean, dtype=parameter.dtype, device=parameter.device)
            if start.deviation:
                parameter.normal_(std=start.deviation).add_(mean)
            else:
                parameter.copy_(mean)
        self.reset_buffers()

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Set the constants of kind "mha" ([LAY-6]), which no state holds and `to_empty` loses.

        Done after each `load_state_dict`, too; where that assigned weights to a layer on meta, the constants
        go to the device of the weights.
        """
        if self.config.kind == "mha":
            for name, value in fixed_mixing(self.config).items():
                buffer = self.get_buffer(name)
                if buffer.is_meta:
                    buffer = torch.empty_like(buffer, device=self.q_proj.weight.device)
                    setattr(self, name, buffer)
                buffer.copy_(torch.as_tensor(value, dtype=buffer.dtype, device=buffer.device))

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The layer.

        Args:
            x: (B, N, D), in the dtype of the projections, or under autocast in any but float64.
            key_mask: (B, N) bool, True where a token may be attended; None for all. The rows of tokens that
                may not be are computed like others.
            segment_ids: (B, N) int; attention stays within equal ids.
            positions: (B, N) int token positions for RoPE; None means index order.

        Returns:
            (B, N, D), in x's dtype, or under autocast in that of the projections there.

        Raises:
            IHAError: bad input; also a ValueError or a TypeError (see `iha_core.errors`).

        Source: SPEC.md [LAY-2] to [LAY-5].
        """
        self._check_input(x)
        B, N, _ = x.shape
        config = self.config
        q = self.q_proj(x).view(B, N, config.num_heads, config.head_width)
        k = self.k_proj(x).view(B, N, config.num_kv_heads, config.head_width)
        v = self.v_proj(x).view(B, N, config.num_kv_heads, config.value_width)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        # [LAY-5]: M - N, as a number, since torch.export would take the difference of two sizes for one.
        output = attention(
            q,
            k,
            v,
            self.alpha_q,
            self.alpha_k,
            self.alpha_v,
            self.collapse,
            config=config.attention,
            key_mask=key_mask,
            segment_ids=segment_ids,
            positions=positions,
            query_offset=0,
        )  # (B, N, H, e)
        projected: Tensor = self.o_proj(output.reshape(B, N, config.num_heads * config.value_width))
        return projected

    def _check_input(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise ArgumentTypeError("x", "", expected="a torch.Tensor", found=type(x).__name__)
        if x.is_nested or x.layout is not torch.strided:
            found = "a nested tensor" if x.is_nested else str(x.layout)
            raise ArgumentTypeError("x", "", expected="a dense tensor", found=found)
        weight = self.q_proj.weight
        self.config.check_input(x, None if _autocasts(x, weight) else _name(weight.dtype))
        if x.device != weight.device:
            expected = f"{weight.device}, the device of the layer"
            raise ArgumentValueError("x", "device", expected=expected, found=str(x.device))

    def extra_repr(self) -> str:
        config = self.config
        sizes = (
            f"D={config.model_width}, H={config.num_heads}, G={config.num_kv_heads}, "
            f"P={config.num_pseudo_heads}, d={config.head_width}, e={config.value_width}"
        )
        return f"{config.kind}, {sizes}, collapse={config.collapse!r}, {config.attention}"


def layer_of(
    config: LayerConfig,
    tensors: Mapping[str, Tensor],
    *,
    device: torch.device | str,
    initialiser: Initialiser = "noisy-average",
) -> InterleavedHeadAttention:
    """A layer that holds copies of given parameters, on a device; draws no random number.

    Args:
        config: the layer.
        tensors: all parameters by their names in a checkpoint.
        device: where the layer is to be.
        initialiser: what `reset_parameters` of the layer is to use.

    Raises:
        IHAError: tensors that are not those of the configuration.
    """
    check_tensors(tensors, config)
    dtype = tensors["q_proj.weight"].dtype
    mixing_dtype = tensors[MIXING[0]].dtype if config.kind == "iha" else dtype
    # "random" asks nothing of the configuration, whatever the tensors have started as
    layer = InterleavedHeadAttention(
        config, initialiser="random", device="meta", dtype=dtype, mixing_dtype=mixing_dtype
    )
    layer.initialiser = initialiser
    layer.to_empty(device=device)
    layer.load_state_dict(dict(tensors))
    return layer


def _set_buffers(layer: InterleavedHeadAttention, _: object) -> None:
    """What a layer of kind "mha" does after `load_state_dict`; a function, as a layer can be pickled."""
    layer.reset_buffers()


def _autocasts(x: Tensor, weight: Tensor) -> bool:
    """Whether autocast brings an input and a weight to one dtype: it leaves float64 as it is."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return False
    return x.is_floating_point() and torch.float64 not in (x.dtype, weight.dtype)


def _check_dtypes(dtype: torch.dtype, mixing_dtype: torch.dtype) -> None:
    """Hold the dtypes of a new layer to [TYP-1] and [TYP-2]."""
    for argument, given in (("dtype", dtype), ("mixing_dtype", mixing_dtype)):
        if not isinstance(given, torch.dtype):
            expected = "a torch.dtype or None"
            raise ArgumentTypeError(argument, "", expected=expected, found=describe(given))
    storage = _name(dtype)
    if storage not in FLOAT_DTYPES:
        raise DTypeError("dtype", "", expected="one of " + ", ".join(FLOAT_DTYPES), found=storage)
    allowed = parameter_dtypes(storage)
    if _name(mixing_dtype) not in allowed:
        expected = " or ".join(allowed) + f" with dtype {storage}"
        raise DTypeError("mixing_dtype", "", expected=expected, found=_name(mixing_dtype))


def _name(dtype: torch.dtype) -> str:
    """Name of a dtype without its framework."""
    return str(dtype).removeprefix("torch.")
