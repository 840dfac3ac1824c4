# SPDX-License-Identifier: Apache-2.0
"""Calls mlx-lm's recurrent modules once for all rows of a step, with their core in a cache.

Such a module works per token except for its convolutions and its recurrence. With a `SequenceCall`
among its arguments it gets [1, T, ...], the rows of all requests as if they were one sequence.
mlx-lm's code does all per-token work, one product per weight; `nn.Conv1d` and the recurrence
function call the `SequenceCall`, which knows where each request begins.
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

#: Classes in mlx_lm.models whose convolutions and recurrence are their only parts that do not work
#: per token.
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
        ("mlx_vlm.models.glm5_next.language", "Glm5NextLinearAttention"),
        ("mlx_vlm.models.inkling.language", "InklingDecoderLayer"),
        ("mlx_vlm.models.qwen4_exp.language", "Qwen4ExpGatedDeltaNet"),
        ("mlx_vlm.models.qwen4_exp.language", "Qwen4ExpPLELayer"),
        ("nemotron_h", "NemotronHMamba2Mixer"),
        ("olmo_hybrid", "GatedDeltaNet"),
        ("plamo2", "Mamba"),
        ("qwen3_5", "GatedDeltaNet"),
        ("qwen3_next", "Qwen3NextGatedDeltaNet"),
    }
)


class KnownModule(nn.Module):
    """A module of a patch with the same property as those of KNOWN."""


class SequenceCall(ABC):
    """Replaces a module's cache, and computes everything that depends on other tokens.

    A module reads the parts of the state in order: those of its convolutions, then that of its
    recurrence. It reads empty arrays, and its writes are ignored.
    """

    # Attributes that mlx-lm's modules read for padded batches.
    lengths = None
    left_padding = None

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[mx.Dtype]) -> None:
        """shapes, dtypes: those of each part of one sequence's state."""
        self._part_forms = list(zip(shapes, dtypes, strict=True))

    def advance(self, num_tokens: int) -> None:  # noqa: B027 - positions are the step's
        """No-op: the step tracks positions."""

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[mx.array]:
        return (self[index] for index in range(len(self._part_forms)))

    def __getitem__(self, index: int) -> mx.array:
        """Returns an empty part; a convolution's is [1, 0, C], so that no rows come before."""
        shape, dtype = self._part_forms[index]
        return mx.zeros((1, 0, *shape[1:]), dtype)

    def __setitem__(self, index: int, value: object) -> None:  # noqa: B027 - kept elsewhere
        """No-op: the state is stored elsewhere."""

    @abstractmethod
    def convolve(self, inputs: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        """Runs the module's next convolution; returns [T, C] in the dtype of `inputs`.

        inputs: [T, C], of this step's rows. weight: [C, K], the newest input's tap last. bias: [C].
        """

    @abstractmethod
    def recur(
        self,
        queries: mx.array,  # [T, HK, DK], of this step's rows
        inputs: RecurrenceInputs,
        delta: bool,  # use the delta rule
        log_rates: mx.array | None = None,  # [HV, DK] float32, A if `inputs` has no decays
    ) -> mx.array:
        """Runs the module's recurrence.

        Returns [T, HV, DV] in the dtype of the values, read from the state after each query's row.
        """


_call: SequenceCall | None = None  # the running module call


@contextmanager
def handed_to(call: SequenceCall) -> Iterator[None]:
    """Routes convolutions and recurrences of mlx-lm's modules to `call` within the block."""
    global _call
    before, _call = _call, call
    try:
        yield
    finally:
        _call = before


def known(module: nn.Module) -> bool:
    """Returns whether a module's class, or one of its bases, is in KNOWN or a `KnownModule`."""
    return isinstance(module, KnownModule) or any(
        (cls.__module__.removeprefix("mlx_lm.models."), cls.__name__) in KNOWN
        for cls in type(module).__mro__
    )


def hand_over(module: nn.Module) -> None:
    """Patches the operations that a module in KNOWN calls, for `handed_to`; idempotent."""
    replace(nn.Conv1d, "__call__", _convolve)
    spread("gated_delta_update", _gated_delta, _gated_delta_update)
    spread("ssm_update", _ssm, _ssm_update)
    for cls in type(module).__mro__:
        name = cls.__module__.removeprefix("mlx_lm.models."), cls.__name__
        if name == ("mamba", "MambaBlock"):
            replace(cls, "_process_sequence", _mamba)
        elif name == ("jamba", "JambaMambaMixer"):
            replace(cls, "ssm_step", _jamba)
        elif name == ("kimi_k3", "KimiK3DeltaAttention"):
            # Its decode step is compiled separately, and would keep the first call's rows.
            replace(cls, "__call__", _kimi_k3)


def _convolve(call: Callable[..., mx.array], self: Any, x: mx.array) -> mx.array:
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
    """Replaces mlx-lm's function; computes rates and decays as it does."""
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
    """Replaces mlx-lm's function; computes time steps as it does."""
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
    """Computes Mamba's recurrence, in which each of N channels has a state of S numbers.

    x, rates: [1, T, N], channels and their time steps. A: [N, S]. B, C: [1, T, S]. D: [N]. Returns
    [1, T, N].
    """
    assert _call is not None
    inputs = RecurrenceInputs(B[0][:, None], x[0][..., None], rates[0].astype(mx.float32), None)
    y = _call.recur(C[0][:, None], inputs, delta=False, log_rates=A.astype(mx.float32))
    return y[..., 0][None] + D * x


def _mamba(
    process: Callable[..., Any], self: Any, x: mx.array, conv_cache: Any, state_cache: Any
) -> Any:
    """Replaces `MambaBlock._process_sequence`, whose loop over tokens includes weight products."""
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
    """Replaces `JambaMambaMixer.ssm_step`, whose loop over tokens is only the recurrence."""
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
