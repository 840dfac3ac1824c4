# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's recurrent modules, called once for all rows of a step: their inside goes to a cache.

Such a module is token-wise but for its convolutions and its recurrence. With a `SequenceCall` among
its arguments it gets [1, T, ...]: one sequence, as far as it knows, of the rows of all requests.
What is token-wise stays as mlx-lm has it, one product a weight; `nn.Conv1d` and the function of the
recurrence go to the `SequenceCall`, which knows where each request begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta, ssm
from mlx_lm.models.activations import swiglu

from metal_kernels.sequences import RecurrenceInputs
from vllm_metal.patches.mlx_patches.replacing import spread
from vllm_metal.patches.vllm_patches.replacing import replace

RELEASES = ("mlx-lm 0.32",)
_gated_delta, _ssm = gated_delta.gated_delta_update, ssm.ssm_update

#: Modules of mlx_lm.models whose convolutions and recurrence are the only parts that are not
#: token-wise, by class.
KNOWN = frozenset(
    {
        ("bailing_moe_v3", "BailingKDA"),
        ("falcon_h1", "FalconH1Mixer"),
        ("gear", "ConvKVGatedMixer"),
        ("granitemoehybrid", "GraniteMoeHybridMamba2Mixer"),
        ("jamba", "JambaMambaMixer"),
        ("kimi_k3", "KimiK3DeltaAttention"),
        ("kimi_linear", "KimiDeltaAttention"),
        ("lfm2", "ShortConv"),
        ("lfm2_moe", "ShortConv"),
        ("mamba", "MambaBlock"),
        ("mamba2", "Mamba2Block"),
        ("nemotron_h", "NemotronHMamba2Mixer"),
        ("olmo_hybrid", "GatedDeltaNet"),
        ("plamo2", "Mamba"),
        ("qwen3_5", "GatedDeltaNet"),
        ("qwen3_next", "Qwen3NextGatedDeltaNet"),
    }
)


class SequenceCall(ABC):
    """Stands where such a module expects its cache, and computes what goes from token to token.

    A module asks for the parts of the state in their order: first those of its convolutions, then
    that of its recurrence. It gets nothing of them, and what it puts back is not looked at.
    """

    # What mlx-lm's modules look at, of batches that are padded.
    lengths = None
    left_padding = None

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[mx.Dtype]) -> None:
        """
        Args:
            shapes, dtypes: of the parts of a state, for one sequence.
        """
        self._part_forms = list(zip(shapes, dtypes, strict=True))

    def advance(self, num_tokens: int) -> None:  # noqa: B027 - positions are the step's
        """Does nothing: positions are the step's."""

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[mx.array]:
        return (self[index] for index in range(len(self._part_forms)))

    def __getitem__(self, index: int) -> mx.array:
        """Stands for a part: of a convolution [1, 0, C], so that rows come behind nothing."""
        shape, dtype = self._part_forms[index]
        return mx.zeros((1, 0, *shape[1:]), dtype)

    def __setitem__(self, index: int, value: object) -> None:  # noqa: B027 - kept elsewhere
        """Does nothing: the state is kept elsewhere."""

    @abstractmethod
    def convolve(self, inputs: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        """The module's next convolution.

        Args:
            inputs: [T, C], of this step's rows.
            weight: [C, K], of each channel the taps, the newest input's last.
            bias: [C].

        Returns:
            [T, C] of the dtype of `inputs`.
        """

    @abstractmethod
    def recur(
        self,
        queries: mx.array,
        inputs: RecurrenceInputs,
        delta: bool,
        log_rates: mx.array | None = None,
    ) -> mx.array:
        """The module's recurrence.

        Args:
            queries: [T, HK, DK], of this step's rows.
            inputs: of the same.
            delta: by the delta rule.
            log_rates: [HV, DK] float32, A where `inputs` has no decays.

        Returns:
            [T, HV, DV] of the dtype of the values: what each query reads of the state after its own
            row.
        """


_call: SequenceCall | None = None  # of the module whose call is under way


@contextmanager
def handed_to(call: SequenceCall) -> Iterator[None]:
    """Within, convolutions and recurrences of mlx-lm's modules go to `call`."""
    global _call
    before, _call = _call, call
    try:
        yield
    finally:
        _call = before


def known(module: nn.Module) -> bool:
    """Whether all of the module's inside is known that goes from token to token."""
    return any(
        (cls.__module__.removeprefix("mlx_lm.models."), cls.__name__) in KNOWN
        for cls in type(module).__mro__
    )


def hand_over(module: nn.Module) -> None:
    """Prepares calls of a known module within `handed_to`; idempotent."""
    replace(nn.Conv1d, "__call__", _convolved)
    spread("gated_delta_update", _gated_delta, _gated_delta_update)
    spread("ssm_update", _ssm, _ssm_update)
    for cls in type(module).__mro__:
        name = cls.__module__.removeprefix("mlx_lm.models."), cls.__name__
        if name == ("mamba", "MambaBlock"):
            replace(cls, "_process_sequence", _mamba)
        elif name == ("jamba", "JambaMambaMixer"):
            replace(cls, "ssm_step", _jamba)
        elif name == ("kimi_k3", "KimiK3DeltaAttention"):
            # Its decode step is compiled apart, by a graph that would keep the first call's rows.
            replace(cls, "__call__", _kimi_k3)


def _convolved(call: Callable[..., mx.array], self: Any, x: mx.array) -> mx.array:
    if _call is None:
        return call(self, x)
    channels, taps, _ = self.weight.shape
    bias = self.bias if "bias" in self else None
    return _call.convolve(x[0], self.weight.reshape(channels, taps), bias)[None]


def _gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    **options: Any,
) -> tuple[mx.array, mx.array | None]:
    """mlx-lm's function of the name, whose rates and decays are computed as there."""
    if _call is None:
        options |= {"lower_bound": lower_bound, "allow_neg_eigval": allow_neg_eigval}
        found: tuple[mx.array, mx.array] = _gated_delta(
            q, k, v, a, b, A_log, dt_bias, state, mask, **options
        )
        return found
    rates = mx.sigmoid(b)
    if allow_neg_eigval:
        rates = rates * 2.0
    if lower_bound is None:
        decays = gated_delta.compute_g(A_log, a, dt_bias)
    else:
        decays = gated_delta.compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
    inputs = RecurrenceInputs(k[0], v[0], rates[0].astype(mx.float32), decays[0])
    return _call.recur(q[0], inputs, delta=True)[None], state


def _ssm_update(
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """mlx-lm's function of the name, whose steps of time are computed as there."""
    if _call is None:
        found: tuple[mx.array, mx.array] = _ssm(
            hidden_states, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths
        )
        return found
    rates = ssm.compute_dt(dt, dt_bias, time_step_limit)
    decays = mx.exp(rates * -mx.exp(A_log.astype(mx.float32)))
    inputs = RecurrenceInputs(B[0], hidden_states[0], rates[0], decays[0])
    y = _call.recur(C[0], inputs, delta=False)[None]
    return y + hidden_states * D.reshape(1, 1, -1, 1), state


def _selective_scan(
    x: mx.array, A: mx.array, B: mx.array, C: mx.array, D: mx.array, rates: mx.array
) -> mx.array:
    """[1, T, N] of Mamba's recurrence: each of N channels has a state of S numbers.

    Args:
        x, rates: [1, T, N], channels and their steps of time.
        A: [N, S].
        B, C: [1, T, S].
        D: [N].
    """
    assert _call is not None
    inputs = RecurrenceInputs(B[0][:, None], x[0][..., None], rates[0].astype(mx.float32), None)
    y = _call.recur(C[0][:, None], inputs, delta=False, log_rates=A.astype(mx.float32))
    return y[..., 0][None] + D * x


def _mamba(
    process: Callable[..., Any], self: Any, x: mx.array, conv_cache: Any, state_cache: Any
) -> Any:
    """`MambaBlock._process_sequence`, whose loop over tokens has products with weights in it."""
    if _call is None:
        return process(self, x, conv_cache, state_cache)
    inputs, gate = mx.split(self.in_proj(x), 2, axis=-1)
    x = nn.silu(self.conv1d(inputs))
    ends = [self.time_step_rank, self.time_step_rank + self.ssm_state_size]
    steps, B, C = mx.split(self.x_proj(x), ends, axis=-1)
    if self.use_bcdt_rms:
        eps = self.args.mixer_rms_eps
        steps, B, C = (mx.fast.rms_norm(part, None, eps) for part in (steps, B, C))
    rates = nn.softplus(self.dt_proj(steps))
    y = _selective_scan(x, -mx.exp(self.A_log), B, C, self.D, rates)
    return self.out_proj(swiglu(gate, y)), (conv_cache, state_cache)


def _jamba(step: Callable[..., Any], self: Any, x: mx.array, A: mx.array, state: Any = None) -> Any:
    """`JambaMambaMixer.ssm_step`, whose loop over tokens is the recurrence alone."""
    if _call is None:
        return step(self, x, A, state)
    ends = [self.time_step_rank, self.time_step_rank + self.ssm_state_size]
    steps, B, C = mx.split(self.x_proj(x), ends, axis=-1)
    rates = nn.softplus(self.dt_proj(self.dt_layernorm(steps)))
    y = _selective_scan(x, A, self.b_layernorm(B), self.c_layernorm(C), self.D, rates)
    return y, state


def _kimi_k3(call: Callable[..., mx.array], self: Any, *args: Any, **options: Any) -> mx.array:
    if _call is not None:
        self._step = self._decode_core
    return call(self, *args, **options)
