"""AdamW (decoupled decay) and Adam (L2 decay): their programs and the scalars of a step.

With ``c1 = 1-beta1``, ``c2 = 1-beta2``, ``bc = 1 - beta**step``, ``k = sqrt(bc2)``::

    g = g*f                              unscale and clip, before anything is squared
    m = m + (g - m)*c1                   g - (g - m)*b1 where beta1 is a half or less
    v = v*b2 + g*g*c2                    (not v + (g*g - v)*c2: that loses g*g where c2 is near 1)
    p = p*d - m*s/(sqrt(v) + e)          s = k*lr/bc1, e = k*eps, d = 1 - lr*weight_decay

This is torch's ``lr/bc1 * m / (sqrt(v)/k + eps)`` with ``k`` moved into two scalars: two operations fewer an
element. Thirteen operations; twelve without decay, one more with a factor. Each moment needs two products
and a sum of its own (and ``v`` the square), ``p`` a root, a sum, a quotient, a difference and its two
scalars: none can go.

Source: Kingma & Ba, "Adam", arXiv:1412.6980, section 2, last paragraph (the reordering); Loshchilov & Hutter,
"Decoupled Weight Decay Regularization", arXiv:1711.05101, Algorithm 2.
"""

from __future__ import annotations

import math

import numpy as np

from zoff_async.cpu_ops.rule import Hyper, Line, Program, Scalars, UpdateRule

_STATES = {"m": "exp_avg", "v": "exp_avg_sq"}
_FACTOR = Line("g", "g*f", unit="f")
_SECOND = Line("v", "v*b2 + g*g*c2")
#: The first moment for a long memory, and for beta1 of a half or less, where ``m + (g - m)*c1`` would lose
#: digits of g; torch's lerp turns at the same point.
_FIRST = {"": Line("m", "m + (g - m)*c1"), "_short": Line("m", "g - (g - m)*b1")}
_SCALARS = ("f", "c1", "b1", "c2", "b2", "s", "e")
_TINY = float(np.finfo(np.float32).tiny)


def _programs(name: str, before: tuple[Line, ...], last: Line, *scalars: str) -> dict[str, Program]:
    """A program for each kind of memory."""
    return {
        name + memory: Program((_FACTOR, *before, first, _SECOND, last), (*_SCALARS, *scalars))
        for memory, first in _FIRST.items()
    }


_STEP = "p - m*s/(sqrt(v) + e)"
_DECOUPLED = _programs("decoupled", (), Line("p", "p*d - m*s/(sqrt(v) + e)", unit="d", shorter=_STEP), "d")
_PLAIN = _programs("plain", (), Line("p", _STEP))
# Where decay and gradient all but cancel, a product rounded on its own would be the larger part of the sum.
_L2 = _programs("l2", (Line("g", "g + p*w", double=True),), Line("p", _STEP), "w")


def _memory(hyper: Hyper) -> str:
    return "_short" if hyper.betas[0] <= 0.5 else ""


def _shared(hyper: Hyper) -> tuple[np.float32, ...]:
    """f, c1, b1, c2, b2, s, e of one step.

    ``1 - beta`` in fp32 would be 1.3e-5 off for beta 0.999, so every difference and quotient is formed in
    fp64. A positive eps stays a normal number: the pool's threads flush subnormals, and 0/0 would make NaN
    of a zero gradient.
    """
    beta1, beta2 = hyper.betas
    root = math.sqrt(1.0 - beta2**hyper.step)
    eps = max(hyper.eps * root, _TINY) if hyper.eps > 0 else 0.0
    size = hyper.lr / (1.0 - beta1**hyper.step) * root
    values = (hyper.factor, 1.0 - beta1, beta1, 1.0 - beta2, beta2, size, eps)
    return tuple(np.float32(x) for x in values)


def _adamw_scalars(hyper: Hyper) -> Scalars:
    decay = np.float32(1.0 - hyper.lr * hyper.weight_decay)
    return Scalars("decoupled" + _memory(hyper), (*_shared(hyper), decay), hyper)


def _adam_scalars(hyper: Hyper) -> Scalars:
    if hyper.weight_decay == 0:
        return Scalars("plain" + _memory(hyper), _shared(hyper), hyper)
    return Scalars("l2" + _memory(hyper), (*_shared(hyper), np.float32(hyper.weight_decay)), hyper)


ADAMW = UpdateRule("adamw", _STATES, _DECOUPLED, _adamw_scalars, fused="_fused_adamw_")
ADAM = UpdateRule("adam", _STATES, {**_PLAIN, **_L2}, _adam_scalars, fused="_fused_adam_")
